"""Float32 row-wise kernels that do in one pass what takes a model's own modules several."""

from __future__ import annotations

import numpy as np
from numba import njit

from genserve.core.models.kernels.vector_ir import scaled_product_16, silu_mul_16, square_sum_16

LANES = 16


@njit(nogil=True, cache=True, boundscheck=False)
def rms_norm_rows(x, weight, eps, out, num_rows, width):
    """out = x / sqrt(mean(x ** 2) + eps) * weight, row by row. Addresses; `width` a multiple of 16."""
    lanes = np.empty(LANES, np.float32)
    at_lanes = np.int64(lanes.ctypes.data)
    for row in range(num_rows):
        at_x, at_out = x + 4 * row * width, out + 4 * row * width
        for lane in range(LANES):
            lanes[lane] = np.float32(0)
        for column in range(0, width, LANES):
            square_sum_16(at_x + 4 * column, at_lanes)
        total = np.float32(0)
        for lane in range(LANES):
            total += lanes[lane]
        factor = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for column in range(0, width, LANES):
            scaled_product_16(at_x + 4 * column, factor, weight + 4 * column, at_out + 4 * column)


@njit(nogil=True, cache=True, boundscheck=False)
def silu_mul_rows(gate_up, out, num_rows, width):
    """out[row] = silu(gate_up[row, :width]) * gate_up[row, width:]. `width` a multiple of 16."""
    for row in range(num_rows):
        at_gate = gate_up + 8 * row * width
        at_out = out + 4 * row * width
        for column in range(0, width, LANES):
            at = at_gate + 4 * column
            silu_mul_16(at, at + 4 * width, at_out + 4 * column)
