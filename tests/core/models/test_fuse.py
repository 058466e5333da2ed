"""Modules are replaced only where the kernel gives the same, and models keep their function."""

import pytest
import torch

from genserve.core.models.kernels.fuse import GatedMlp, RmsNorm, optimize_for_cpu
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.tiny import make_tiny_model

# architecture: which kinds must be found
FOUND = {
    "llama": ("norms", "mlps"),
    "qwen2": ("norms", "mlps"),
    "qwen3": ("norms", "mlps"),
    "mistral": ("norms", "mlps"),
    "gemma": ("norms",),
    "gemma2": ("norms",),
    "gemma3": ("norms",),
    "mixtral": ("norms", "experts", "routers"),
    "opt": (),
    "gpt2": (),
}


@pytest.mark.parametrize("arch", FOUND)
def test_models_keep_their_function(arch):
    model = make_tiny_model(arch, 3)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = model(ids).logits
        counts = optimize_for_cpu(model, ThreadTeam())
        after = model(ids).logits
    torch.testing.assert_close(after, before, atol=2e-4, rtol=1e-4)
    for kind in ("norms", "mlps", "experts", "routers"):
        assert (counts[kind] > 0) == (kind in FOUND[arch]), counts
    assert counts["linears"] > 0


def test_a_lookalike_is_left_alone():
    class Lookalike(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(32))
            self.eps = 1e-5

        def forward(self, x):
            return x * self.weight + self.eps

    model = torch.nn.Sequential(Lookalike(), torch.nn.LayerNorm(32))
    assert optimize_for_cpu(model, ThreadTeam()) == {
        "norms": 0,
        "mlps": 0,
        "experts": 0,
        "routers": 0,
        "linears": 0,
    }


@torch.no_grad()
def test_kernels_over_extreme_values():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32, bias=False) for _ in range(3)]
    for layer in layers:
        layer.weight.copy_(torch.eye(32))
    x = torch.tensor([0.0, -1e-30, 1e-3, -88.0, 88.0, -200.0, 200.0, 1e4, -1e4]).repeat(4)[:32][None]
    expected = torch.nn.functional.silu(x) * x
    torch.testing.assert_close(GatedMlp(*layers, ThreadTeam())(x), expected, atol=1e-6, rtol=1e-5)
    norm = RmsNorm(torch.full((32,), 2.0), 1e-6)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (32,), torch.full((32,), 2.0), 1e-6))
    assert norm(torch.full((1, 32), torch.nan)).isnan().all()
