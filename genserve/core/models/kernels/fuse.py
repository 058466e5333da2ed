"""Replaces common modules of `transformers` models by kernels that give the same, in fewer passes.

A module is not recognised by its name but by what it computes: it is replaced only if the kernel
gives the same on random inputs. Whatever is not recognised stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

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
        self.weight = weight.detach().clone().contiguous()
        self.eps = np.float32(eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        rms_norm_rows(
            x.data_ptr(), self.weight.data_ptr(), self.eps, out.data_ptr(), x.numel() // width, width
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
        self.gate_up = PackedLinear(torch.cat([gate.weight.detach(), up.weight.detach()]), bias, team)
        self.down = PackedLinear(down.weight.detach(), down.bias, team)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(_silu_mul(self.gate_up(x)))


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    width = gate_up.shape[-1] // 2
    gated = torch.empty(*gate_up.shape[:-1], width)
    silu_mul_rows(gate_up.data_ptr(), gated.data_ptr(), gated.numel() // width, width)
    return gated


class Experts(torch.nn.Module):
    """A mixture's experts, each a gated MLP whose gate and up come as one weight.

    gate_up_EOH, down_EHI  float32 weights of all experts.
    activation             of the gate; None is silu.
    """

    def __init__(
        self,
        gate_up_EOH: torch.Tensor,
        down_EHI: torch.Tensor,
        team: ThreadTeam,
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._activation = activation
        self._gate_up = [PackedLinear(weight, None, team) for weight in gate_up_EOH.detach()]
        self._down = [PackedLinear(weight, None, team) for weight in down_EHI.detach()]

    def forward(self, x_TH: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        out_TH = torch.zeros_like(x_TH)
        # Expert by expert, so that each token sums its experts in the same order in any batch.
        for expert in chosen_TK.unique().tolist():
            tokens, places = torch.where(chosen_TK == expert)
            gate_up = self._gate_up[expert](x_TH[tokens])
            if self._activation is None:
                gated = _silu_mul(gate_up)
            else:
                gate, up = gate_up.chunk(2, dim=-1)
                gated = self._activation(gate) * up
            out_TH.index_add_(0, tokens, self._down[expert](gated) * weights_TK[tokens, places, None])
        return out_TH


class Router(torch.nn.Module):
    """Softmax over the experts' scores, then the `num_chosen` best, their weights made to sum to one."""

    def __init__(self, weight_EH: torch.Tensor, num_chosen: int, team: ThreadTeam) -> None:
        super().__init__()
        self._scores = PackedLinear(weight_EH.detach(), None, team)
        self._num_chosen = num_chosen

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self._scores(x.reshape(-1, self._scores.in_features))
        weights, chosen = logits.softmax(-1).topk(self._num_chosen, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


def optimize_for_cpu(model: torch.nn.Module, team: ThreadTeam) -> dict[str, int]:
    """Replace what can be replaced in a float32 CPU model, in place; returns how many of each kind."""
    with torch.inference_mode():
        counts = {"norms": 0, "mlps": 0, "experts": 0, "routers": 0}
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                for kind, candidate in (
                    ("norms", _as_norm(child)),
                    ("mlps", _as_mlp(child, team)),
                    ("experts", _as_experts(child, team)),
                    ("routers", _as_router(child, team)),
                ):
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


def _as_experts(module: torch.nn.Module, team: ThreadTeam) -> torch.nn.Module | None:
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not (_is_plain(gate_up) and _is_plain(down) and gate_up.ndim == down.ndim == 3):
        return None
    num_experts, width, num_in = gate_up.shape
    if tuple(down.shape) != (num_experts, num_in, width // 2) or (width // 2) % LANES:
        return None
    x = _probe_input(num_in)[0]
    chosen = torch.arange(2 * _PROBE_ROWS).view(_PROBE_ROWS, 2) % num_experts
    weights = torch.linspace(0.1, 0.9, 2 * _PROBE_ROWS).view(_PROBE_ROWS, 2)
    candidate = Experts(gate_up, down, team)
    activation: Any = getattr(module, "act_fn", None)
    if not _agree(module, candidate, x, chosen, weights) and activation is not None:
        candidate = Experts(gate_up, down, team, activation)
    return candidate if _agree(module, candidate, x, chosen, weights) else None


def _as_router(module: torch.nn.Module, team: ThreadTeam) -> torch.nn.Module | None:
    weight, num_chosen = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not (_is_plain(weight) and weight.ndim == 2 and isinstance(num_chosen, int)):
        return None
    candidate = Router(weight, num_chosen, team)
    return candidate if _agree(module, candidate, _probe_input(weight.shape[1])[0]) else None


def _is_plain(weight: object) -> TypeGuard[torch.Tensor]:
    return isinstance(weight, torch.Tensor) and weight.dtype is torch.float32 and weight.device.type == "cpu"


def _probe_input(width: int) -> torch.Tensor:
    return torch.randn(1, _PROBE_ROWS, width, generator=torch.Generator().manual_seed(0)) * 3


def _same(module: torch.nn.Module, candidate: torch.nn.Module, width: int) -> bool:
    return _agree(module, candidate, _probe_input(width))


def _agree(module: torch.nn.Module, candidate: torch.nn.Module, *inputs: torch.Tensor) -> bool:
    """Whether both give the same tensors, or tuples of tensors."""
    try:
        expected = module(*inputs)
    except TypeError:  # wants other inputs
        return False
    got = candidate(*inputs)
    if isinstance(expected, torch.Tensor):
        expected, got = (expected,), (got,)
    return (
        isinstance(expected, tuple)
        and len(expected) == len(got)
        and all(
            isinstance(e, torch.Tensor) and e.shape == g.shape and _close(e, g)
            for e, g in zip(expected, got, strict=True)
        )
    )


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Relative to the largest output: sums that cancel keep the rounding of their terms.
    return bool((a - b).abs().max() <= 1e-5 * b.abs().max())
