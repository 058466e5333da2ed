"""One row of logits to one proposed token and its scores, in float64, without a float64 copy of the row.

Compiled by Numba. A row's sums run in a fixed order over its own columns, so its result depends on
nothing else in the batch.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_COLUMNS = 512
_LANES = 8
_LOG2E = 1.4426950408889634
# ln 2 in two parts, the first with trailing zeros so that a small integer times it is exact.
_LN2_HIGH = 0.6931471803691238
_LN2_LOW = 1.9082149292705877e-10
# Adding it rounds to an integer, which then stands in the low bits of the sum.
_ROUND = 6755399441055744.0
_LOWEST = -700.0  # exp of it is 1e-304: nothing beside the row's maximum, whose weight is 1


@intrinsic
def _bits(typing_context, value):
    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), codegen


@intrinsic
def _from_bits(typing_context, value):
    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@njit(inline="always")
def _exp(y):
    """exp(y) for -700 <= y <= 0 to about one unit in the last place; branch-free, so loops vectorise."""
    shifted = y * _LOG2E + _ROUND
    whole = shifted - _ROUND
    r = (y - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * _from_bits((_bits(shifted) + 1023) << 52)


@njit(nogil=True, cache=True, boundscheck=False, error_model="numpy")
def _weigh(row, first, num, top, inverse_temperature, exponents, weights):
    """weights = exp((row[first:first + num] - top) / temperature), and their exponents."""
    part = row[first : first + num]
    for column in range(num):
        exponent = (np.float64(part[column]) - top) * inverse_temperature
        exponents[column] = exponent if exponent >= _LOWEST else _LOWEST
    for column in range(num):
        weights[column] = _exp(exponents[column])


@njit(nogil=True, cache=True, boundscheck=False)
def _sum(values, num, lanes):
    for lane in range(_LANES):
        lanes[lane] = 0.0
    whole = num // _LANES * _LANES
    for column in range(0, whole, _LANES):
        for lane in range(_LANES):
            lanes[lane] += values[column + lane]
    total = 0.0
    for column in range(whole, num):
        total += values[column]
    for lane in range(_LANES):
        total += lanes[lane]
    return total


@njit(nogil=True, cache=True, boundscheck=False)
def _best_allowed(row, num_valid, mask_id, excluded):
    """The lowest id with the largest logit among those that may be proposed, -1 if there is none."""
    best, value = -1, -np.inf
    for column in range(num_valid):
        if row[column] > value and column != mask_id and column != excluded:
            best, value = column, row[column]
    return best


@njit(nogil=True, cache=True, boundscheck=False)
def score_rows(
    logits_RV,  # float32
    tops_R,  # int64: where each row's maximum is (its first NaN if it has one)
    temperatures_R,  # float64; 0 is greedy
    uniforms_R,  # float64 in [0, 1): what a row with a temperature draws with
    num_valid,  # ids from here on, and `mask_id`, are never proposed
    mask_id,
    with_margin,
    with_entropy,
    tokens_R,  # int64 out; -1 for a row that cannot be used
    scores_R3,  # float64 out: confidence, margin, entropy
):
    """Confidences and margins are probabilities of a softmax over all ids; entropy is in nats."""
    num_rows, vocab_size = logits_RV.shape
    exponents, weights = np.empty(_COLUMNS, np.float64), np.empty(_COLUMNS, np.float64)
    lanes = np.empty(_LANES, np.float64)
    num_blocks = (vocab_size + _COLUMNS - 1) // _COLUMNS
    block_sums = np.empty(num_blocks, np.float64)
    for r in range(num_rows):
        row = logits_RV[r]
        tokens_R[r] = -1
        top = np.float64(row[tops_R[r]])
        if not math.isfinite(top):
            continue
        best = tops_R[r]
        if best >= num_valid or best == mask_id:
            best = _best_allowed(row, num_valid, mask_id, -1)
            if best < 0:
                continue
        draws = temperatures_R[r] > 0
        inverse = 1.0 / temperatures_R[r] if draws else 1.0
        inside, outside, weighted = 0.0, 0.0, 0.0
        for block in range(num_blocks):
            first = block * _COLUMNS
            num = min(_COLUMNS, vocab_size - first)
            _weigh(row, first, num, top, inverse, exponents, weights)
            if with_entropy:
                for column in range(num):
                    exponents[column] *= weights[column]
                weighted += _sum(exponents, num, lanes)
            if first <= mask_id < first + num:
                outside += weights[mask_id - first]
                weights[mask_id - first] = 0.0
            for column in range(max(num_valid - first, 0), num):
                outside += weights[column]
                weights[column] = 0.0
            block_sums[block] = _sum(weights, num, lanes)
            inside += block_sums[block]
        total = inside + outside
        token = best
        if draws:
            target = uniforms_R[r] * inside
            block, running = 0, 0.0
            while block < num_blocks - 1 and running + block_sums[block] <= target:
                running += block_sums[block]
                block += 1
            first = block * _COLUMNS
            num = min(_COLUMNS, vocab_size - first)
            _weigh(row, first, num, top, inverse, exponents, weights)
            for column in range(num):
                drawn = first + column
                if drawn >= num_valid or drawn == mask_id or exponents[column] <= _LOWEST:
                    continue
                # Rounding may leave the target unreached: then the last token with weight is meant.
                token = drawn
                running += weights[column]
                if running > target:
                    break
        tokens_R[r] = token
        scores_R3[r, 0] = _exp(max((np.float64(row[token]) - top) * inverse, _LOWEST)) / total
        if with_margin:
            second = _best_allowed(row, num_valid, mask_id, best)
            margin = _exp(max((np.float64(row[best]) - top) * inverse, _LOWEST))
            if second >= 0:
                margin -= _exp(max((np.float64(row[second]) - top) * inverse, _LOWEST))
            scores_R3[r, 1] = margin / total
        if with_entropy:
            scores_R3[r, 2] = math.log(total) - weighted / total
