"""A dense transformer layer around its attention, as two kernel calls over ranges of rows.

They do what its modules do one by one, in the same order and to the same bits; for small models the
calls cost as much as the work. Threads share rows here, where the modules share outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from genserve.core.models.kernels.elementwise import rms_norm_rows, silu_mul_rows
from genserve.core.models.kernels.fuse import GatedMlp, RmsNorm
from genserve.core.models.kernels.heads import norm_heads, rotate_heads
from genserve.core.models.kernels.linear import DEPTH, PANEL, PackedLinear, _multiply, registers_are_wide
from genserve.core.models.kernels.threads import ThreadTeam

# Rows at a time, so that what passes from one product to the next stays in cache.
_CHUNK_ROWS = 96
# With fewer rows for each thread, sharing the outputs of a product is the better way.
_ROWS_PER_THREAD = 12


class _Weights(NamedTuple):
    """Addresses and item sizes of a layer's packed weights, as numba takes them."""

    qkv: int
    qkv_item: int
    out: int
    out_item: int
    gate_up: int
    gate_up_item: int
    down: int
    down_item: int
    norm: int
    mlp_norm: int


class _Sizes(NamedTuple):
    hidden: int
    attended: int  # query heads * head_dim
    mlp: int
    num_queries: int
    num_rotated: int  # query and key heads
    head_dim: int


class HeadNormWeights(NamedTuple):
    """Norm weights of query and key heads, empty if there are none."""

    query: np.ndarray
    key: np.ndarray
    eps: np.float32


NO_HEAD_NORMS = HeadNormWeights(np.empty(0, np.float32), np.empty(0, np.float32), np.float32(0))


@njit(nogil=True, cache=True, boundscheck=False)
def _project_heads(
    x, qkv, first, last, weights, sizes, eps, bias, head_norms, positions, cos, sin, wide, normed, wide_part
):
    at_normed, hidden = np.int64(normed.ctypes.data), sizes.hidden
    width = qkv.shape[1]
    at_x, at_qkv = np.int64(x.ctypes.data), np.int64(qkv.ctypes.data)
    for row in range(first, last, _CHUNK_ROWS):
        num = min(_CHUNK_ROWS, last - row)
        rms_norm_rows(at_x + 4 * row * hidden, weights.norm, eps, at_normed, num, hidden)
        for other in range(row, row + num):
            if bias.shape[0]:
                qkv[other] = bias
            else:
                qkv[other] = np.float32(0)
        _multiply(
            at_normed,
            4 * hidden,
            num,
            weights.qkv,
            weights.qkv_item,
            hidden,
            at_qkv + 4 * row * width,
            4 * width,
            0,
            width // PANEL,
            wide,
            normed,
            0,
            wide_part,
        )
    rows = qkv[first:last]
    if head_norms.query.shape[0]:
        dim, queries = sizes.head_dim, sizes.num_queries
        norm_heads(rows, 0, queries, dim, head_norms.query, head_norms.eps)
        norm_heads(rows, queries, sizes.num_rotated, dim, head_norms.key, head_norms.eps)
    rotate_heads(rows, sizes.num_rotated, sizes.head_dim, positions[first:last], cos, sin)


@njit(nogil=True, cache=True, boundscheck=False)
def _finish_rows(
    x, attended, first, last, weights, sizes, eps, bias, wide, normed, gate_up, gated, wide_part
):
    hidden, width = sizes.hidden, sizes.mlp
    at_normed, at_gate_up = np.int64(normed.ctypes.data), np.int64(gate_up.ctypes.data)
    at_x, at_attended = np.int64(x.ctypes.data), np.int64(attended.ctypes.data)
    at_gated = np.int64(gated.ctypes.data)
    for row in range(first, last, _CHUNK_ROWS):
        num = min(_CHUNK_ROWS, last - row)
        for other in range(num):
            if bias.shape[0]:
                normed[other] = bias
            else:
                normed[other] = np.float32(0)
        _multiply(
            at_attended + 4 * row * sizes.attended,
            4 * sizes.attended,
            num,
            weights.out,
            weights.out_item,
            sizes.attended,
            at_normed,
            4 * hidden,
            0,
            hidden // PANEL,
            wide,
            normed,
            0,
            wide_part,
        )
        for other in range(num):
            x[row + other] += normed[other]
        rms_norm_rows(at_x + 4 * row * hidden, weights.mlp_norm, eps, at_normed, num, hidden)
        gate_up[:num] = np.float32(0)
        _multiply(
            at_normed,
            4 * hidden,
            num,
            weights.gate_up,
            weights.gate_up_item,
            hidden,
            at_gate_up,
            8 * width,
            0,
            2 * width // PANEL,
            wide,
            normed,
            0,
            wide_part,
        )
        silu_mul_rows(at_gate_up, at_gated, num, width)
        normed[:num] = np.float32(0)
        _multiply(
            at_gated,
            4 * width,
            num,
            weights.down,
            weights.down_item,
            width,
            at_normed,
            4 * hidden,
            0,
            hidden // PANEL,
            wide,
            normed,
            0,
            wide_part,
        )
        for other in range(num):
            x[row + other] += normed[other]


class DenseLayer:
    """The two halves of one float32 CPU layer, before and after its attention.

    Made of the layer's own modules, whose weights it shares; `of` gives None if they are not all such
    as the kernels take (packed, outputs a multiple of 64).
    """

    def __init__(
        self,
        modules: tuple[RmsNorm, PackedLinear, PackedLinear, RmsNorm, GatedMlp],
        heads: tuple[int, int, int],
        head_norms: HeadNormWeights,
        team: ThreadTeam,
    ) -> None:
        norm, qkv, out, mlp_norm, mlp = modules
        num_heads, num_kv_heads, head_dim = heads
        self._modules = modules  # keeps the memory that the addresses point to
        linears = (qkv, out, mlp.gate_up, mlp.down)
        at: list[int] = []
        for linear in linears:
            at += [linear.panels.data_ptr(), linear.panels.itemsize]
        self._weights = _Weights(*at, norm.weight.data_ptr(), mlp_norm.weight.data_ptr())
        self._sizes = _Sizes(
            qkv.in_features,
            out.in_features,
            mlp.down.in_features,
            num_heads,
            num_heads + num_kv_heads,
            head_dim,
        )
        self._eps = norm.eps, mlp_norm.eps
        none = np.empty(0, np.float32)
        self._qkv_bias = none if qkv.bias is None else qkv.bias.numpy()
        self._out_bias = none if out.bias is None else out.bias.numpy()
        self._head_norms, self._team, self._wide = head_norms, team, registers_are_wide()
        self._qkv_size = qkv.out_features
        self._has_narrow = any(linear.panels.itemsize == 2 for linear in linears)

    @classmethod
    def of(
        cls,
        norm: torch.nn.Module,
        qkv: torch.nn.Module,
        out: torch.nn.Module,
        mlp_norm: torch.nn.Module,
        mlp: torch.nn.Module,
        heads: tuple[int, int, int],
        head_norms: HeadNormWeights,
    ) -> DenseLayer | None:
        """`heads` is (query heads, KV heads, head dims)."""
        if not (isinstance(norm, RmsNorm) and isinstance(mlp_norm, RmsNorm) and isinstance(mlp, GatedMlp)):
            return None
        if not (isinstance(qkv, PackedLinear) and isinstance(out, PackedLinear)):
            return None
        linears = (qkv, out, mlp.gate_up, mlp.down)
        if any(linear.out_features % PANEL for linear in linears) or mlp.gate_up.bias is not None:
            return None
        if mlp.down.bias is not None:
            return None
        return cls((norm, qkv, out, mlp_norm, mlp), heads, head_norms, qkv.team)

    def suits(self, num_rows: int) -> bool:
        """Whether so many rows are worth sharing among the threads as rows."""
        return self._team.num_threads == 1 or num_rows >= _ROWS_PER_THREAD * self._team.num_threads

    def project_heads(
        self, x_TH: torch.Tensor, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray
    ) -> torch.Tensor:
        """Query, key and value heads [T, heads * dim] of normed rows, normed and rotated."""
        num_rows = len(x_TH)
        qkv = torch.empty(num_rows, self._qkv_size)
        x_rows, qkv_rows, sizes = x_TH.numpy(), qkv.numpy(), self._sizes

        def part(first: int, last: int) -> None:
            _project_heads(
                x_rows,
                qkv_rows,
                first,
                last,
                self._weights,
                sizes,
                self._eps[0],
                self._qkv_bias,
                self._head_norms,
                positions,
                cos,
                sin,
                self._wide,
                np.empty((min(_CHUNK_ROWS, last - first), sizes.hidden), np.float32),
                self._wide_part(),
            )

        self._team.share(part, num_rows, num_rows * sizes.hidden * self._qkv_size)
        return qkv

    def finish(self, x_TH: torch.Tensor, attended: torch.Tensor) -> None:
        """Add the attention's projection and then the MLP to `x_TH`, in place. attended [T, ...], contiguous."""
        num_rows, sizes = len(x_TH), self._sizes
        x_rows, attended_rows = x_TH.numpy(), attended.numpy()

        def part(first: int, last: int) -> None:
            chunk = min(_CHUNK_ROWS, last - first)
            _finish_rows(
                x_rows,
                attended_rows,
                first,
                last,
                self._weights,
                sizes,
                self._eps[1],
                self._out_bias,
                self._wide,
                np.empty((chunk, sizes.hidden), np.float32),
                np.empty((chunk, 2 * sizes.mlp), np.float32),
                np.empty((chunk, sizes.mlp), np.float32),
                self._wide_part(),
            )

        self._team.share(part, num_rows, num_rows * sizes.hidden * (sizes.attended + 3 * sizes.mlp))

    def _wide_part(self) -> np.ndarray:
        return np.empty(DEPTH * PANEL if self._has_narrow else 0, np.float32)
