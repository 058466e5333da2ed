"""Float32 matrix products whose rows do not depend on each other, not even in the last bit.

A library's GEMM picks its blocking by the number of rows, so a token's result moves with its
batch-mates. Here every output is summed in one fixed order. Weights are packed once into panels of
32 outputs, `[panel, in, 32]`, which also makes the small batches of decoding faster than a GEMM that
packs anew on each call (`benchmarks/kernels.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import binding
from numba import njit

from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.kernels.vector_ir import (
    linear_1,
    linear_1_bf16,
    linear_2,
    linear_2_bf16,
    linear_3,
    linear_3_bf16,
    linear_4,
    linear_4_bf16,
    linear_5,
    linear_5_bf16,
    linear_6,
    linear_6_bf16,
    linear_7,
    linear_7_bf16,
    linear_8,
    linear_8_bf16,
    linear_9,
    linear_9_bf16,
    linear_10,
    linear_10_bf16,
    linear_11,
    linear_11_bf16,
    linear_12,
    linear_12_bf16,
)

PANEL = 32
# Inner indices per partial sum: keeps a panel's part in cache and the rounding error low.
_DEPTH = 256
# Rows at a time over all panels.
_TILE_ROWS = 96
_BYTES = 4


@njit(nogil=True, cache=True, boundscheck=False)
def _block(num_rows, x, x_stride, panel, count, out, out_stride, ahead, step):
    if num_rows == 1:
        linear_1(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 2:
        linear_2(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 3:
        linear_3(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 4:
        linear_4(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 5:
        linear_5(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 6:
        linear_6(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 7:
        linear_7(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 8:
        linear_8(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 9:
        linear_9(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 10:
        linear_10(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 11:
        linear_11(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 12:
        linear_12(x, x_stride, panel, count, out, out_stride, ahead, step)


@njit(nogil=True, cache=True, boundscheck=False)
def _block_bf16(num_rows, x, x_stride, panel, count, out, out_stride, ahead, step):
    if num_rows == 1:
        linear_1_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 2:
        linear_2_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 3:
        linear_3_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 4:
        linear_4_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 5:
        linear_5_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 6:
        linear_6_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 7:
        linear_7_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 8:
        linear_8_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 9:
        linear_9_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 10:
        linear_10_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 11:
        linear_11_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)
    elif num_rows == 12:
        linear_12_bf16(x, x_stride, panel, count, out, out_stride, ahead, step)


@njit(nogil=True, cache=True, boundscheck=False)
def _multiply(
    x,
    x_stride,
    num_rows,
    panels,
    weight_bytes,  # 4: float32, 2: bfloat16
    num_in,
    out,
    out_stride,
    first_panel,
    last_panel,
    most_rows,
    scratch,
    tail,
):
    # Strides in bytes. Rows go in tiles, whose part of `x` stays in cache while all panels pass by, and
    # in a tile in blocks of about equal size, `most_rows` at most: what fits the registers. The last
    # panel, if only `tail` of its 32 outputs exist, goes through `scratch`, float32 [num_rows, 32].
    num_tiles = (num_rows + _TILE_ROWS - 1) // _TILE_ROWS
    for tile in range(num_tiles):
        first_row = num_rows * tile // num_tiles
        tile_rows = num_rows * (tile + 1) // num_tiles - first_row
        num_blocks = (tile_rows + most_rows - 1) // most_rows
        for panel in range(first_panel, last_panel):
            at_panel = panels + panel * num_in * PANEL * weight_bytes
            target, stride = out + panel * PANEL * _BYTES, out_stride
            if tail > 0 and panel == last_panel - 1:
                target, stride = np.int64(scratch.ctypes.data), PANEL * _BYTES
            for start in range(0, num_in, _DEPTH):
                count = min(_DEPTH, num_in - start)
                at_w = at_panel + start * PANEL * weight_bytes
                row = first_row
                for block in range(num_blocks):
                    end = first_row + tile_rows * (block + 1) // num_blocks
                    at_x = x + row * x_stride + start * _BYTES
                    # While one part of a panel is multiplied the next is fetched: by one block of rows
                    # all of it, by two a half each.
                    step = PANEL * weight_bytes // (1 if num_blocks == 1 else 2)
                    ahead = at_w + count * PANEL * weight_bytes + min(block, 1) * count * step
                    at_out, size = target + row * stride, end - row
                    if weight_bytes == 4:
                        _block(size, at_x, x_stride, at_w, count, at_out, stride, ahead, step)
                    else:
                        _block_bf16(size, at_x, x_stride, at_w, count, at_out, stride, ahead, step)
                    row = end


def _most_rows() -> int:
    """Rows of sums that fit the vector registers: 32 of 16 floats with AVX-512, else fewer or shorter."""
    return 12 if binding.get_host_cpu_features().get("avx512f", False) else 3


class PackedLinear(torch.nn.Module):
    """`x @ weight.T + bias` for inference; takes over the weight of the layer it replaces.

    weight  float32 [out, in]. Input `[..., in]` float32 on the CPU; output `[..., out]`.

    Weights whose values are all bfloat16 (a checkpoint published so) are kept as bfloat16: half the
    memory to read, and the same float32 results bit for bit.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, team: ThreadTeam) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._num_panels = -(-self.out_features // PANEL)
        padded = self._num_panels * PANEL
        if padded != self.out_features:
            weight = torch.nn.functional.pad(weight, (0, 0, 0, padded - self.out_features))
        panels = weight.view(self._num_panels, PANEL, self.in_features).permute(0, 2, 1)
        narrow = panels.bfloat16()
        self._panels = (narrow if torch.equal(narrow.float(), panels) else panels).contiguous()
        self._bias = None if bias is None else bias.detach().clone()
        self._team = team
        self._most_rows = _most_rows()
        self._tail = self.out_features % PANEL

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_RI = x.reshape(-1, self.in_features)
        if x_RI.stride(1) != 1:
            x_RI = x_RI.contiguous()
        num_rows = x_RI.shape[0]
        if self._bias is None:
            out_RO = torch.zeros(num_rows, self.out_features)
        else:
            out_RO = self._bias.repeat(num_rows, 1)
        scratch = np.zeros((num_rows if self._tail else 1, PANEL), np.float32)
        last = self._num_panels

        def part(first_panel: int, last_panel: int) -> None:
            _multiply(
                x_RI.data_ptr(),
                x_RI.stride(0) * _BYTES,
                num_rows,
                self._panels.data_ptr(),
                self._panels.itemsize,
                self.in_features,
                out_RO.data_ptr(),
                self.out_features * _BYTES,
                first_panel,
                last_panel,
                self._most_rows,
                scratch,
                self._tail if last_panel == last else 0,
            )

        # Reading a weight costs as much as some multiplications: few rows are worth threads, too.
        self._team.share(part, last, max(num_rows, 16) * self.in_features * self.out_features)
        if self._tail:
            out_RO[:, -self._tail :] += torch.from_numpy(scratch[:, : self._tail])
        return out_RO.view(*x.shape[:-1], self.out_features)


def pack_linears(model: torch.nn.Module, team: ThreadTeam) -> int:
    """Replace the float32 CPU linear layers of `model` in place; returns how many.

    Also the transposed `Conv1D` of GPT-2. A weight tied to an embedding is copied, not taken over.
    """
    from transformers.pytorch_utils import Conv1D

    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                weight = child.weight
            elif type(child) is Conv1D:
                weight = child.weight.t()
            else:
                continue
            if weight.dtype is torch.float32 and weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(weight.detach(), child.bias, team))
                num_packed += 1
    return num_packed
