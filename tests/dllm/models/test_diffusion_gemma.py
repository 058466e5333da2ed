"""DiffusionGemma packed and paged, against its own classes; and its way from a folder."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from genserve.core.errors import ConfigError
from genserve.core.models.attention.backend import PagedContext
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.kernels.fuse import Experts, RmsNorm
from genserve.core.models.kernels.linear import PackedLinear
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.dllm.models.diffusion_gemma import take_over
from genserve.dllm.models.interface import NO_MASK, CanvasDefaults
from genserve.dllm.models.registry import load_diffusion_model
from genserve.dllm.models.tiny_canvas import (
    CANVAS_TOKENS,
    make_tiny_diffusion_gemma,
    write_tiny_diffusion_gemma,
)
from tests.dllm.canvas_oracle import oracle, served

PROMPTS = (5, 20, 1, 33)  # within the window of 12, and beyond it


def cases():
    generator = torch.Generator().manual_seed(1)
    for num_prompt in PROMPTS:
        ids = torch.randint(3, 299, (num_prompt + CANVAS_TOKENS,), generator=generator)
        yield ids[:num_prompt], ids[num_prompt:], torch.randn(CANVAS_TOKENS, 300, generator=generator)


def packed(model, chosen, chunk=None):
    """Logits and softened ones of the chosen cases in one pass; with `chunk`, prompts go ahead in chunks."""
    all_cases = list(cases())
    backend = CpuAttention(model.layer_specs, 40, torch.float32)
    table = np.arange(40, dtype=np.int32).reshape(4, 10)

    def run(spans):
        batch = PagedBatch.pack(
            [(slot, start, len(ids)) for slot, start, ids, _ in spans],
            table,
            np.concatenate(
                [
                    np.arange(start, start + len(ids)) + 1
                    if soft is None
                    else np.full(len(ids), start + len(ids))
                    for _, start, ids, soft in spans
                ]
            ),
            np.concatenate(
                [
                    np.arange(start, start + len(ids)) if soft is None else np.full(len(ids), start)
                    for _, start, ids, soft in spans
                ]
            ),
        )
        is_canvas = torch.cat([torch.full((len(ids),), soft is not None) for _, _, ids, soft in spans])
        softs = [soft for *_, soft in spans if soft is not None] or [torch.zeros(0, model.hidden_size)]
        return model.hidden(
            torch.cat([ids for _, _, ids, _ in spans]),
            batch.position_ids("cpu")[0],
            is_canvas.nonzero()[:, 0],
            torch.cat(softs),
            PagedContext(backend, batch),
        )

    with torch.inference_mode():
        spans = []
        for slot in chosen:
            prompt, canvas, before = all_cases[slot]
            first = 0
            while chunk and first + chunk < len(prompt):
                run([(slot, first, prompt[first : first + chunk], None)])
                first += chunk
            spans.append((slot, first, prompt[first:], None))
            spans.append((slot, len(prompt), canvas, model.soften(before)))
        logits = model.logits(run(spans))
        return list(zip(logits.split(CANVAS_TOKENS), model.soften(logits).split(CANVAS_TOKENS), strict=True))


@torch.inference_mode()
def expected(case):
    prompt, canvas, before = case
    return (
        oracle()(
            input_ids=prompt[None],
            decoder_input_ids=canvas[None],
            self_conditioning_logits=before[None],
        ).logits[0],
    )


@pytest.mark.parametrize("chunk", [None, 7])
def test_logits_are_those_of_the_model(chunk):
    assert served().model.layer_specs[0].sliding_window < CANVAS_TOKENS
    got = packed(served().model, range(len(PROMPTS)), chunk)
    for case, (logits, _) in zip(cases(), got, strict=True):
        torch.testing.assert_close(logits, expected(case)[0], atol=2e-4, rtol=2e-4)


def test_a_canvas_does_not_depend_on_its_batch_bit_for_bit():
    model = served().model
    together = packed(model, range(len(PROMPTS)))
    for chosen in ([0], [3], [2, 1], [3, 0, 2]):
        for slot, (logits, soft) in zip(chosen, packed(model, chosen), strict=True):
            assert torch.equal(logits, together[slot][0]) and torch.equal(soft, together[slot][1])


def test_every_layer_runs_on_kernels():
    decoder = served().model.decoder
    linears = [module for module in served().model.modules() if isinstance(module, torch.nn.Linear)]
    assert not linears
    for layer in decoder.layers:
        attention = layer.self_attn
        assert isinstance(layer.experts, Experts) and isinstance(layer.router.proj, PackedLinear)
        norms = (attention.q_norm, attention.v_norm, layer.router.norm, layer.input_layernorm)
        assert all(isinstance(norm, RmsNorm) for norm in norms)


def test_encoder_and_decoder_scale_their_own_rows():
    """Taken for each other, the layers' only unshared weights would change the logits."""
    model = make_tiny_diffusion_gemma()
    for encode, decode in zip(
        model.model.encoder.language_model.layers, model.model.decoder.layers, strict=True
    ):
        encode.layer_scalar.copy_(decode.layer_scalar)
    other = take_over(model, "tiny", ThreadTeam()).model
    assert (packed(other, [1])[0][0] - expected(list(cases())[1])[0]).abs().max() > 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_diffusion_gemma(tmp_path_factory.mktemp("gemma"))


def test_an_ordinary_folder_is_loaded(folder):
    loaded = load_diffusion_model(str(folder))
    assert (loaded.family, loaded.shift, loaded.mask_token_id) == ("canvas", 0, NO_MASK)
    assert (loaded.default_block_length, loaded.max_context_tokens) == (CANVAS_TOKENS, 512)
    assert (loaded.vocab_size, loaded.num_valid_tokens, loaded.eos_token_ids) == (300, 300, (2,))
    assert loaded.canvas == CanvasDefaults(16, 0.5, 0.8, 0.2, 1, 0.6)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello")) == "hello"
    assert torch.equal(packed(loaded.model, [1])[0][0], packed(served().model, [1])[0][0])


def test_without_settings_of_its_own_it_has_those_of_generate(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    loaded = load_diffusion_model(str(tmp_path))
    assert loaded.canvas == CanvasDefaults()
    assert loaded.tokenizer is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"sliding_window": 1}, "sliding_window must be at least 2"),
        (
            {"intermediate_size": 32},
            r"down_proj.weight' has shape \[64, 96\]; the config asks for \[64, 32\]",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(folder, tmp_path, changes, complaint):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=complaint):
        load_diffusion_model(str(tmp_path))


def test_a_folder_that_lacks_tensors_or_has_others_is_refused(folder, tmp_path):
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.decoder.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no tensor '.*norm\.weight'"):
        load_diffusion_model(str(tmp_path))
    tensors |= {"model.decoder.norm.weight": norm, "model.decoder.other": norm.clone()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"no place for tensor 'model\.decoder\.other'"):
        load_diffusion_model(str(tmp_path))
