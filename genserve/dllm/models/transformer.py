"""The decoder that the models of this package have in common: pre-norm, rotary, grouped-query attention.

It takes packed tokens and leaves to the batch who sees whom. A model file says where the weights are.

Shape suffixes: T tokens, R rows, H hidden size, V vocabulary, Q query heads, K KV heads, D head dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from genserve.core.models.attention.backend import AttentionRule, PagedContext
from genserve.core.models.kernels.dense import NO_HEAD_NORMS, DenseLayer, HeadNormWeights
from genserve.core.models.kernels.heads import norm_heads, rotate_heads
from genserve.core.models.layers import LayerSpec

_TABLE_ROWS = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. `rotary_dims` of each head's dims are rotated, with base `rope_theta`."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dims: int

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def layer_spec(self) -> LayerSpec:
        return LayerSpec(self.num_heads, self.num_kv_heads, self.head_dim, None, None, self.head_dim**-0.5)


class Rotary:
    """Cosine and sine of position * theta ** (-2j / dims), j < dims / 2; angles are float32 products."""

    def __init__(self, dims: int, theta: float, device: torch.device) -> None:
        self._inverse = 1.0 / theta ** (torch.arange(0, dims, 2).float() / dims)
        self._device = device
        self.cos = self.sin = torch.empty(0, dims // 2, device=device)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Both tables of a CPU."""
        return self.cos.numpy(), self.sin.numpy()

    def reserve(self, num_positions: int) -> None:
        """Make rows for at least so many positions; those that exist stay as they are."""
        while len(self.cos) < num_positions:
            start = len(self.cos)
            positions = torch.arange(start, max(2 * start, _TABLE_ROWS)).float()
            angles = (positions[:, None] * self._inverse).double()
            self.cos = torch.cat([self.cos, angles.cos().float().to(self._device)])
            self.sin = torch.cat([self.sin, angles.sin().float().to(self._device)])


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Weights [D] of the norms of each query and key head."""

    query: Tensor
    key: Tensor
    eps: float


class Attention(nn.Module):
    """Attention of one layer. `qkv` gives all query heads, then K heads, then V heads."""

    def __init__(
        self,
        index: int,
        shape: Shape,
        qkv: nn.Module,
        out: nn.Module,
        rotary: Rotary,
        norms: HeadNorms | None = None,
    ) -> None:
        super().__init__()
        self._index, self._norms, self.rotary = index, norms, rotary
        self.spec = shape.layer_spec
        self._rule = AttentionRule(self.spec.scaling)
        self.qkv, self.out = qkv, out
        self.head_norms = NO_HEAD_NORMS
        if norms is not None and norms.query.dtype is torch.float32 and norms.query.device.type == "cpu":
            self.head_norms = HeadNormWeights(norms.query.numpy(), norms.key.numpy(), np.float32(norms.eps))

    def forward(self, x_TH: Tensor, positions_T: Tensor, paged: PagedContext) -> Tensor:
        qkv = self.qkv(x_TH)
        if qkv.dtype is torch.float32 and qkv.device.type == "cpu":
            self._place_in_place(qkv.numpy(), positions_T.numpy())
        else:
            qkv = self._placed(qkv, positions_T)
        return self.out(self.attend(qkv, paged))

    def attend(self, qkv: Tensor, paged: PagedContext) -> Tensor:
        """Write the KV of rows whose heads are normed and rotated, and attend: [T, Q * D], contiguous."""
        num_rows, spec = len(qkv), self.spec
        queries, rotated = spec.num_heads, spec.num_heads + spec.num_kv_heads
        heads = qkv.view(num_rows, rotated + spec.num_kv_heads, spec.head_dim)
        paged.backend.write(self._index, heads[:, queries:rotated], heads[:, rotated:], paged.batch)
        return paged.backend.attend(self._index, heads[:, :queries], paged.batch, self._rule).reshape(
            num_rows, -1
        )

    def _place_in_place(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Norm and rotate the query and key heads of float32 rows."""
        spec, norms = self.spec, self.head_norms
        queries, rotated, dim = spec.num_heads, spec.num_heads + spec.num_kv_heads, spec.head_dim
        if norms is not NO_HEAD_NORMS:
            norm_heads(rows, 0, queries, dim, norms.query, norms.eps)
            norm_heads(rows, queries, rotated, dim, norms.key, norms.eps)
        rotate_heads(rows, rotated, dim, positions, *self.rotary.arrays())

    def _placed(self, qkv: Tensor, positions_T: Tensor) -> Tensor:
        """The same in torch, for other types and devices; float32 inside."""
        spec = self.spec
        rotated = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        heads = qkv[:, :rotated].unflatten(1, (-1, spec.head_dim))
        wide = heads.float()
        if self._norms is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._norms.eps)
            weight = torch.cat(
                [
                    self._norms.query.expand(spec.num_heads, -1),
                    self._norms.key.expand(spec.num_kv_heads, -1),
                ]
            )
            wide = (wide.to(heads.dtype) * weight).float()
        cos, sin = self.rotary.cos[positions_T, None], self.rotary.sin[positions_T, None]
        half = cos.shape[-1]
        a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        placed = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(heads.dtype)
        return torch.cat([placed.flatten(1), qkv[:, rotated:]], 1)


class MixtureMlp(nn.Module):
    """Experts that a router chooses, and experts that all tokens share."""

    def __init__(self, router: nn.Module, experts: nn.Module, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x_TH: Tensor) -> Tensor:
        out_TH = self.experts(x_TH, *self.router(x_TH))
        return out_TH if self.shared is None else out_TH + self.shared(x_TH)


class Layer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, norm: nn.Module, attention: Attention, mlp_norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp_norm, self.mlp = norm, attention, mlp_norm, mlp
        spec = attention.spec
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._dense = DenseLayer.of(
            norm, attention.qkv, attention.out, mlp_norm, mlp, heads, attention.head_norms
        )

    def forward(self, x_TH: Tensor, positions_T: Tensor, paged: PagedContext) -> Tensor:
        """The layer's output; `x_TH` may be overwritten by it."""
        attention, dense = self.attention, self._dense
        if dense is not None and dense.suits(len(x_TH)):
            qkv = dense.project_heads(x_TH, positions_T.numpy(), *attention.rotary.arrays())
            dense.finish(x_TH, attention.attend(qkv, paged))
            return x_TH
        x_TH = x_TH + attention(self.norm(x_TH), positions_T, paged)
        return x_TH + self.mlp(self.mlp_norm(x_TH))


class Transformer(nn.Module):
    """A `DiffusionModel`. `embedding_VH` may be narrower than the layers' dtype: rows widen as they are read."""

    def __init__(
        self,
        embedding_VH: Tensor,
        layers: Sequence[Layer],
        norm: nn.Module,
        head: nn.Module,
        shape: Shape,
        rotary: Rotary,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._embedding_VH, self._rotary, self._dtype = embedding_VH, rotary, dtype
        self.layers, self.norm, self.head = nn.ModuleList(layers), norm, head
        self.layer_specs = (shape.layer_spec,) * shape.num_layers
        self.eval()

    def hidden(self, ids_T: Tensor, positions_T: Tensor, paged: PagedContext) -> Tensor:
        """Final-normed hidden states [T, H]; see `DiffusionModel`."""
        self._rotary.reserve(int(paged.batch.positions_T.max()) + 1)
        x_TH = self._embedding_VH[ids_T].to(self._dtype)
        for layer in self.layers:
            x_TH = layer(x_TH, positions_T, paged)
        return self.norm(x_TH)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Raw logits [R, V]."""
        return self.head(hidden_RH)
