"""Float32 matrix products whose rows do not depend on each other, not even in the last bit.

A library's GEMM picks its blocking by the number of rows, so a token's result moves with its
batch-mates. Here every output is summed in one fixed order. Weights are packed once into panels of
64 outputs, `[panel, in, 64]`, which also makes the small batches of decoding faster than a GEMM that
packs anew on each call (`benchmarks/kernels.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import binding
from numba import njit

from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.kernels.vector_ir import (
    ROWS_W4,
    multiply_w2,
    multiply_w2_bf16,
    multiply_w4,
    multiply_w4_bf16,
    widen_16,
)

PANEL = 64
# Inner indices per partial sum: keeps a panel's part in cache and the rounding error low.
DEPTH = 128
# From so many blocks of rows on, a part of bfloat16 weights is made float32 once instead of in each.
_WIDEN_FROM_BLOCKS = 3
# Rows at a time over all panels.
_TILE_ROWS = 96
_BYTES = 4


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
    wide,  # whether the registers hold the larger blocks (AVX-512)
    scratch,
    tail,
    wide_part,  # float32 [DEPTH * PANEL]
):
    # Strides in bytes. Rows go in tiles, whose part of `x` stays in cache while all panels pass by, and
    # in a tile in blocks of about equal size that fit the registers. The last panel, if only `tail` of
    # its 64 outputs exist, goes through `scratch`, float32 [num_rows, 64].
    most_rows = ROWS_W4 if wide else 3
    # Scratch comes from the caller, who keeps it: numba frees its own arrays after their last use by
    # name, however long their addresses are used.
    at_wide = np.int64(wide_part.ctypes.data)
    num_tiles = (num_rows + _TILE_ROWS - 1) // _TILE_ROWS
    for tile in range(num_tiles):
        first_row = num_rows * tile // num_tiles
        tile_rows = num_rows * (tile + 1) // num_tiles - first_row
        num_blocks = (tile_rows + most_rows - 1) // most_rows
        inner = PANEL * weight_bytes
        num_shares = min(num_blocks, inner // 64)
        widen = weight_bytes == 2 and num_blocks >= _WIDEN_FROM_BLOCKS
        for panel in range(first_panel, last_panel):
            at_panel = panels + panel * num_in * PANEL * weight_bytes
            target, stride = out + panel * PANEL * _BYTES, out_stride
            if tail > 0 and panel == last_panel - 1:
                target, stride = np.int64(scratch.ctypes.data), PANEL * _BYTES
            for start in range(0, num_in, DEPTH):
                count = min(DEPTH, num_in - start)
                at_w = at_panel + start * PANEL * weight_bytes
                at_part, part_inner, part_bytes = at_w, inner, weight_bytes
                if widen:
                    at_part, part_inner, part_bytes = at_wide, PANEL * 4, 4
                    for lane in range(0, count * PANEL, 16):
                        widen_16(at_w + 2 * lane, at_wide + 4 * lane)
                row = first_row
                for block in range(num_blocks):
                    end = first_row + tile_rows * (block + 1) // num_blocks
                    at_x = x + row * x_stride + start * _BYTES
                    # While one part of a panel is multiplied the next is fetched: each block of rows
                    # asks for its share, one cache line for each inner index.
                    ahead, step = at_w, 0
                    if block < num_shares:
                        step = inner // num_shares
                        ahead = at_w + count * inner + block * count * step
                    at_out, size = target + row * stride, end - row
                    if wide and part_bytes == 4:
                        multiply_w4(
                            size, at_x, x_stride, at_part, part_inner, count, at_out, stride, ahead, step
                        )
                    elif wide:
                        multiply_w4_bf16(
                            size, at_x, x_stride, at_part, part_inner, count, at_out, stride, ahead, step
                        )
                    else:
                        for half in range(2):
                            at_half = at_part + half * part_inner // 2
                            at_sum = at_out + half * PANEL * _BYTES // 2
                            if part_bytes == 4:
                                multiply_w2(
                                    size,
                                    at_x,
                                    x_stride,
                                    at_half,
                                    part_inner,
                                    count,
                                    at_sum,
                                    stride,
                                    ahead,
                                    step,
                                )
                            else:
                                multiply_w2_bf16(
                                    size,
                                    at_x,
                                    x_stride,
                                    at_half,
                                    part_inner,
                                    count,
                                    at_sum,
                                    stride,
                                    ahead,
                                    step,
                                )
                    row = end


def registers_are_wide() -> bool:
    """Whether there are 32 registers of 16 floats (AVX-512), or fewer or shorter ones."""
    return bool(binding.get_host_cpu_features().get("avx512f", False))


class PackedLinear(torch.nn.Module):
    """`x @ weight.T + bias` for inference; takes over the weight of the layer it replaces.

    weight  float32 [out, in]. Input `[..., in]` float32 on the CPU; output `[..., out]`.

    Weights whose values are all bfloat16 (a checkpoint published so) are kept as bfloat16: half the
    memory to read, and the same float32 results bit for bit. `panels` are the packed weights.
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
        self.panels = (narrow if torch.equal(narrow.float(), panels) else panels).contiguous()
        self.bias = None if bias is None else bias.detach().clone()
        self.team = team
        self._wide = registers_are_wide()
        self._tail = self.out_features % PANEL

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_RI = x.reshape(-1, self.in_features)
        if x_RI.stride(1) != 1:
            x_RI = x_RI.contiguous()
        num_rows = x_RI.shape[0]
        if self.bias is None:
            out_RO = torch.zeros(num_rows, self.out_features)
        else:
            out_RO = self.bias.repeat(num_rows, 1)
        scratch = np.zeros((num_rows if self._tail else 1, PANEL), np.float32)
        last = self._num_panels

        def part(first_panel: int, last_panel: int) -> None:
            _multiply(
                x_RI.data_ptr(),
                x_RI.stride(0) * _BYTES,
                num_rows,
                self.panels.data_ptr(),
                self.panels.itemsize,
                self.in_features,
                out_RO.data_ptr(),
                self.out_features * _BYTES,
                first_panel,
                last_panel,
                self._wide,
                scratch,
                self._tail if last_panel == last else 0,
                np.empty(DEPTH * PANEL if self.panels.itemsize == 2 else 0, np.float32),
            )

        # Reading a weight costs as much as some multiplications: few rows are worth threads, too.
        self.team.share(part, last, max(num_rows, 16) * self.in_features * self.out_features)
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
