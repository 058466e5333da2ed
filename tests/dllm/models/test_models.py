"""Each architecture: against an independent dense computation, and bit for bit in any company."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from genserve.core.models.kernels.threads import ThreadTeam
from genserve.dllm.models.registry import load_diffusion_model
from genserve.dllm.models.tiny import TINY_DIFFUSION_MODELS, write_tiny
from tests.dllm.models.passes import Passes, block_ends

# Widths that are whole panels, and widths that are not.
WIDTHS = {
    "llada": {"d_model": 64, "mlp_hidden_size": 192},
    "dream": {"hidden_size": 64, "intermediate_size": 160},
    "llada2": {"hidden_size": 64, "moe_intermediate_size": 24},
    "sdar": {"hidden_size": 64, "intermediate_size": 128},
}


def canvases(loaded, lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, loaded.num_valid_tokens, (n,), generator=generator) for n in lengths]


def qwen3_logits(folder, ids, ends):
    """SDAR's layout is Qwen3's: `transformers`' own model under a mask of ours."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = {**TINY_DIFFUSION_MODELS["sdar"], "vocab_size": 320}
    kept = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    model = Qwen3ForCausalLM(Qwen3Config(**kept, attn_implementation="eager")).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    at = torch.arange(len(ids))
    hidden = at[None] >= torch.from_numpy(ends)[:, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return model(input_ids=ids[None], attention_mask=mask[None, None]).logits[0]


def test_sdar_is_qwen3_under_a_block_causal_mask(tmp_path):
    folder = write_tiny("sdar", tmp_path)
    loaded = load_diffusion_model(str(folder))
    (ids,) = canvases(loaded, [45])
    ends = block_ends(45, loaded.default_block_length)
    got = Passes(loaded).run([ids], [(0, 0, 45)], ends)
    torch.testing.assert_close(got, qwen3_logits(folder, ids, ends), atol=5e-4, rtol=0)


def run_alone(loaded, canvas, ends):
    return Passes(loaded, num_slots=3).run([canvas] * 3, [(1, 0, len(canvas))], ends)


@pytest.mark.parametrize("width", ["narrow", "panels"])
@pytest.mark.parametrize("arch", TINY_DIFFUSION_MODELS)
def test_a_row_does_not_depend_on_its_batch_bit_for_bit(arch, width, tmp_path):
    folder = write_tiny(arch, tmp_path, **(WIDTHS[arch] if width == "panels" else {}))
    loaded = load_diffusion_model(str(folder), team=ThreadTeam(2))
    lengths = [40, 61, 7]
    made = canvases(loaded, lengths)
    ends = [block_ends(n, 8) if loaded.family == "block_causal" else np.full(n, n) for n in lengths]
    together = Passes(loaded, num_slots=3).run(
        made, [(slot, 0, n) for slot, n in enumerate(lengths)], np.concatenate(ends)
    )
    for canvas, own_ends, rows in zip(made, ends, together.split(lengths), strict=True):
        assert torch.equal(run_alone(loaded, canvas, own_ends), rows)
    # A later pass over some rows of one canvas, with others between: the rows of the full pass.
    passes = Passes(loaded, num_slots=3)
    passes.run(made, [(slot, 0, n) for slot, n in enumerate(lengths)], np.concatenate(ends))
    spans = [(1, 8, 9), (0, 3, 2), (1, 30, 1)]
    again = passes.run(made, spans, np.concatenate([ends[s][at : at + n] for s, at, n in spans]))
    first = together.split(lengths)
    assert torch.equal(again, torch.cat([first[s][at : at + n] for s, at, n in spans]))


@pytest.mark.parametrize("arch", TINY_DIFFUSION_MODELS)
def test_bf16_weights_give_what_they_give_widened(arch, tmp_path):
    from safetensors.torch import save_file

    folder = write_tiny(arch, tmp_path, **WIDTHS[arch])
    weights = {name: w.bfloat16() for name, w in load_file(folder / "model.safetensors").items()}
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        save_file({n: w.to(dtype) for n, w in weights.items()}, folder / "model.safetensors")
        loaded = load_diffusion_model(str(folder))
        assert loaded.dtype is torch.float32
        (ids,) = canvases(loaded, [40])
        results.append(run_alone(loaded, ids, [40]))
    assert torch.equal(*results)


@pytest.mark.parametrize("arch", TINY_DIFFUSION_MODELS)
def test_in_bfloat16_plain_torch_gives_nearly_the_same(arch, tmp_path):
    folder = write_tiny(arch, tmp_path)
    wide = load_diffusion_model(str(folder))
    narrow = load_diffusion_model(str(folder), dtype="bfloat16")
    (ids,) = canvases(wide, [30])
    expected = run_alone(wide, ids, [30])
    got = run_alone(narrow, ids, [30])
    assert got.dtype is torch.bfloat16
    similarity = torch.nn.functional.cosine_similarity(got.float(), expected, dim=1)
    assert similarity.median() > 0.98


def test_tiny_logits_have_variety(tmp_path):
    """Open positions must not all say the same, or tests on tiny models would prove little."""
    for arch in TINY_DIFFUSION_MODELS:
        loaded = load_diffusion_model(str(write_tiny(arch, tmp_path / arch)))
        (ids,) = canvases(loaded, [60])
        ids[30:] = loaded.mask_token_id
        assert run_alone(loaded, ids, [60])[30:].argmax(-1).unique().numel() >= 8
