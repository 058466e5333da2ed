"""Replaces common modules of `transformers` models by kernels that give the same, in fewer passes.

A module is not recognised by its name but by what it computes: it is replaced only if the kernel
gives the same on random inputs. Whatever is not recognised stays as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from genserve.core.models.kernels.elementwise import LANES, rms_norm_rows, silu_mul_rows
from genserve.core.models.kernels.linear import PackedLinear, pack_linears
from genserve.core.models.kernels.threads import ThreadTeam

_PROBE_ROWS = 3


class RmsNorm(torch.nn.Module):
    """Root mean square norm over the last dimension, float32 on the CPU."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._weight = weight.detach().clone().contiguous()
        self._eps = np.float32(eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        rms_norm_rows(
            x.data_ptr(), self._weight.data_ptr(), self._eps, out.data_ptr(), x.numel() // width, width
        )
        return out


class GatedMlp(torch.nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up as one product."""

    def __init__(
        self, gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear, team: ThreadTeam
    ) -> None:
        super().__init__()
        biases = [layer.bias for layer in (gate, up)]
        bias = None if biases[0] is None or biases[1] is None else torch.cat([b.detach() for b in biases])
        self._gate_up = PackedLinear(torch.cat([gate.weight.detach(), up.weight.detach()]), bias, team)
        self._down = PackedLinear(down.weight.detach(), down.bias, team)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self._gate_up(x)
        width = gate_up.shape[-1] // 2
        gated = torch.empty(*gate_up.shape[:-1], width)
        silu_mul_rows(gate_up.data_ptr(), gated.data_ptr(), gated.numel() // width, width)
        return self._down(gated)


def optimize_for_cpu(model: torch.nn.Module, team: ThreadTeam) -> dict[str, int]:
    """Replace what can be replaced in a float32 CPU model, in place; returns how many of each kind."""
    with torch.inference_mode():
        counts = {"norms": 0, "mlps": 0}
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                for kind, candidate in (("norms", _as_norm(child)), ("mlps", _as_mlp(child, team))):
                    if candidate is not None:
                        setattr(parent, name, candidate)
                        counts[kind] += 1
        return {**counts, "linears": pack_linears(model, team)}


def _as_norm(module: torch.nn.Module) -> torch.nn.Module | None:
    weight: Any = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not (_is_plain(weight) and weight.ndim == 1 and isinstance(eps, float)) or list(module.children()):
        return None
    width = weight.shape[0]
    if width % LANES:
        return None
    # Gemma's norms scale by 1 + weight.
    for scale in (weight, 1 + weight):
        candidate = RmsNorm(scale, eps)
        if _same(module, candidate, width):
            return candidate
    return None


def _as_mlp(module: torch.nn.Module, team: ThreadTeam) -> torch.nn.Module | None:
    layers: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(layer) is torch.nn.Linear and _is_plain(layer.weight) for layer in layers):
        return None
    gate, up, down = layers
    if (gate.bias is None) != (up.bias is None) or gate.out_features % LANES:
        return None
    candidate = GatedMlp(gate, up, down, team)
    return candidate if _same(module, candidate, gate.in_features) else None


def _is_plain(weight: object) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dtype is torch.float32 and weight.device.type == "cpu"


def _same(module: torch.nn.Module, candidate: torch.nn.Module, width: int) -> bool:
    x = torch.randn(1, _PROBE_ROWS, width, generator=torch.Generator().manual_seed(0)) * 3
    try:
        expected = module(x)
    except TypeError:  # wants more than one input
        return False
    if not isinstance(expected, torch.Tensor) or expected.shape != x.shape:
        return False
    # Relative to the largest output: sums that cancel keep the rounding of their terms.
    return bool((candidate(x) - expected).abs().max() <= 1e-5 * expected.abs().max())
