"""Raw logits against reference results: full passes, cached passes through KV pages, a long input."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from genserve.core.models.kernels.threads import ThreadTeam
from genserve.dllm.models.registry import load_diffusion_model
from tests.dllm.models.passes import Passes, block_ends

GOLDEN = Path(__file__).parents[2] / "golden" / "dllm"


def load(name, mask_token_id=None):
    loaded = load_diffusion_model(
        str(GOLDEN / "checkpoints" / name), mask_token_id=mask_token_id, team=ThreadTeam(2)
    )
    return loaded, load_file(GOLDEN / "logits" / f"{name}.safetensors")


def assert_near(got, expected, atol=5e-4):
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("name", ["llada-a", "dream-a"])
@pytest.mark.parametrize("kind", ["cpu", "reference"])
def test_bidirectional_passes(name, kind):
    loaded, golden = load(name)
    assert loaded.family == "bidirectional"
    assert loaded.shift == (1 if name.startswith("dream") else 0)
    start, end, length = int(golden["start"]), int(golden["end"]), len(golden["ids"])
    passes = Passes(loaded, kind=kind)
    for cache, last in (("dual", end), ("prefix", length)):
        assert_near(passes.run([golden["ids"]], [(0, 0, length)], [length]), golden["logits"])
        for index in (1, 2):
            got = passes.run([golden[f"ids{index}"]], [(0, start, last - start)], [length])
            assert_near(got, golden[f"{cache}{index}_logits"])
    got = passes.run([golden["long_ids"]], [(0, 0, 900)], [900])
    assert_near(got[golden["long_rows"]], golden["long_logits"], atol=2e-3)


@pytest.mark.parametrize("kind", ["cpu", "reference"])
def test_block_causal_passes(kind):
    loaded, golden = load("llada2-a", mask_token_id=500)
    assert (loaded.family, loaded.shift, loaded.mask_token_id) == ("block_causal", 0, 500)
    length, block = len(golden["ids"]), int(golden["block_length"])
    ends = block_ends(length, block)
    assert_near(Passes(loaded, kind=kind).run([golden["ids"]], [(0, 0, length)], ends), golden["logits"])
    passes = Passes(loaded, kind=kind)
    for start in range(0, length, block):  # a block at a time: what came before is final
        end = min(start + block, length)
        got = passes.run([golden["ids"]], [(0, start, end - start)], [end])
        assert_near(got, golden["logits"][start:end])
