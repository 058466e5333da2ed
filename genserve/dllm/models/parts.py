"""Makes the layers of a transformer from a checkpoint's tensors.

In float32 on the CPU they are the kernels of `core.models.kernels`, whose rows do not depend on their
batch in any bit; elsewhere plain torch. Knows no architecture.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from genserve.core.models.kernels.elementwise import LANES
from genserve.core.models.kernels.fuse import Experts, GatedMlp, RmsNorm
from genserve.core.models.kernels.heads import route_by_groups
from genserve.core.models.kernels.linear import PackedLinear
from genserve.core.models.kernels.threads import ThreadTeam


class Parts:
    """`dtype` and `device` of all layers; `team` runs the kernels. Tensors are taken over or copied."""

    def __init__(self, dtype: torch.dtype, device: torch.device, team: ThreadTeam) -> None:
        self.dtype, self.device, self.team = dtype, device, team
        self.has_kernels = dtype is torch.float32 and device.type == "cpu"

    def tensor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype)

    def linear(self, weights: list[Tensor], biases: list[Tensor] | None = None) -> nn.Module:
        """One linear layer whose outputs are those of all `weights` [out, in], in order."""
        weight = self.tensor(torch.cat(weights) if len(weights) > 1 else weights[0])
        bias = None if biases is None else self.tensor(torch.cat(biases))
        return PackedLinear(weight, bias, self.team) if self.has_kernels else _linear(weight, bias)

    def norm(self, weight: Tensor, eps: float) -> nn.Module:
        weight = self.tensor(weight)
        if self.has_kernels and weight.shape[0] % LANES == 0:
            return RmsNorm(weight, eps)
        return PlainNorm(weight, eps)

    def gated_mlp(self, gate: Tensor, up: Tensor, down: Tensor) -> nn.Module:
        """`down(silu(gate(x)) * up(x))`, no biases."""
        gate, up, down = self._padded(self.tensor(gate), self.tensor(up), self.tensor(down))
        layers = [_linear(weight, None) for weight in (gate, up, down)]
        return GatedMlp(layers[0], layers[1], layers[2], self.team) if self.has_kernels else PlainMlp(*layers)

    def experts(self, gates: list[Tensor], ups: list[Tensor], downs: list[Tensor]) -> nn.Module:
        """One gated MLP per expert, called with (x_TH, chosen_TK, weights_TK)."""
        if self.has_kernels:
            experts = [
                self._padded(*(self.tensor(weight) for weight in each))
                for each in zip(gates, ups, downs, strict=True)
            ]
            return Experts(
                torch.stack([torch.cat([gate, up]) for gate, up, _ in experts]),
                torch.stack([down for _, _, down in experts]),
                self.team,
            )
        mlps = [self.gated_mlp(*each) for each in zip(gates, ups, downs, strict=True)]
        return PlainExperts(mlps)

    def group_router(
        self,
        weight: Tensor,
        bias: Tensor,
        num_chosen: int,
        num_groups: int,
        num_kept_groups: int,
        scale: float,
    ) -> nn.Module:
        """`GroupRouter`; its scores are float32 on any device."""
        weight, bias = weight.to(self.device, torch.float32), bias.to(self.device, torch.float32)
        scores = PackedLinear(weight, None, self.team) if self.has_kernels else _linear(weight, None)
        return GroupRouter(scores, bias, num_chosen, num_groups, num_kept_groups, scale)

    def _padded(self, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The kernels take whole vectors: silu(0) * 0 adds nothing."""
        missing = -gate.shape[0] % LANES if self.has_kernels else 0
        if not missing:
            return gate, up, down
        return F.pad(gate, (0, 0, 0, missing)), F.pad(up, (0, 0, 0, missing)), F.pad(down, (0, missing))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


class PlainNorm(nn.Module):
    """Root mean square norm over the last dimension, in float32, then rounded and weighted."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class PlainMlp(nn.Module):
    """A gated MLP in plain torch."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainExperts(nn.Module):
    """A mixture's experts in plain torch, summed expert by expert."""

    def __init__(self, mlps: list[nn.Module]) -> None:
        super().__init__()
        self._mlps = nn.ModuleList(mlps)

    def forward(self, x_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TH = torch.zeros_like(x_TH, dtype=torch.float32)
        for expert in chosen_TK.unique().tolist():
            tokens, places = torch.where(chosen_TK == expert)
            result = self._mlps[expert](x_TH[tokens]).float()
            out_TH.index_add_(0, tokens, result * weights_TK[tokens, places, None])
        return out_TH.to(x_TH.dtype)


class GroupRouter(nn.Module):
    """Chooses experts by sigmoid score plus bias within the best groups (DeepSeek-V3's routing).

    A group's score is the sum of its two best. Weights are the scores without bias, made to sum to
    `scale`. Equal scores go to the lowest id.
    """

    def __init__(
        self,
        scores: nn.Module,
        bias_E: Tensor,
        num_chosen: int,
        num_groups: int,
        num_kept_groups: int,
        scale: float,
    ) -> None:
        super().__init__()
        self._scores, self._bias_E, self._scale = scores, bias_E.contiguous(), scale
        self._num_chosen, self._num_groups, self._num_kept = num_chosen, num_groups, num_kept_groups

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and float32 weights of the chosen experts, [T, K] each."""
        logits_TE = self._scores(x_TH.float())
        if logits_TE.device.type != "cpu":
            return self._choose(logits_TE)
        shape = logits_TE.shape[0], self._num_chosen
        chosen_TK, weights_TK = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        route_by_groups(
            logits_TE.numpy(),
            self._bias_E.numpy(),
            self._num_groups,
            self._num_kept,
            np.float32(self._scale),
            chosen_TK.numpy(),
            weights_TK.numpy(),
        )
        return chosen_TK, weights_TK

    def _choose(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        scores_TE = logits_TE.sigmoid()
        ranks_TGS = (scores_TE + self._bias_E).unflatten(1, (self._num_groups, -1))
        group_ranks_TG = ranks_TGS.topk(min(2, ranks_TGS.shape[2]), dim=2).values.sum(2)
        dropped_TG = group_ranks_TG.sort(dim=1, descending=True, stable=True).indices[:, self._num_kept :]
        hidden_TG = torch.zeros_like(group_ranks_TG, dtype=torch.bool).scatter_(1, dropped_TG, True)
        ranks_TE = ranks_TGS.masked_fill(hidden_TG[:, :, None], -torch.inf).flatten(1)
        chosen_TK = ranks_TE.sort(dim=1, descending=True, stable=True).indices[:, : self._num_chosen]
        weights_TK = scores_TE.gather(1, chosen_TK)
        if self._num_chosen > 1:
            weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
        return chosen_TK, weights_TK * self._scale
