"""Paged attention on a CPU, for blocks of query vectors that share a sequence and a KV head.

Each query's sums run over its own tokens in a fixed order, whatever block it is in. So its result
depends on itself and its KV alone: not on its batch-mates, nor on how its prompt was cut into chunks. Keys are stored transposed inside a page, `[page, kv_head, dim, 16]`,
so that the scores of a page's 16 tokens are one vector; values as `[page, kv_head, 16, dim]`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from genserve.core.models.kernels.vector_ir import (
    ROWS_W1,
    ROWS_W4,
    exp2_16,
    max_16,
    move_2,
    move_4,
    multiply_w1,
    multiply_w1_bf16,
    multiply_w4,
    multiply_w4_bf16,
    scale_16,
)

_LOG2E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-3e38)
PAGE = 16
MOST_QUERIES = ROWS_W1


@njit(nogil=True, cache=True, boundscheck=False)
def write_pages(
    source,  # address of [token, head, dim], elements `item_bytes` wide
    token_stride_bytes,
    head_stride_bytes,
    target,  # address of the layer's keys or values
    num_heads,
    num_dims,
    dim_stride_bytes,  # inside a page
    slot_stride_bytes,  # from one token of a page to the next
    head_bytes,  # one head of one page
    page_table,  # int32 [slot, page]
    token_slots,  # int64 [token]
    positions,  # int64 [token]
    item_bytes,
):
    for token in range(token_slots.shape[0]):
        position = positions[token]
        page = np.int64(page_table[token_slots[token], position // PAGE])
        for head in range(num_heads):
            src = source + token * token_stride_bytes + head * head_stride_bytes
            dst = target + (page * num_heads + head) * head_bytes + (position % PAGE) * slot_stride_bytes
            if item_bytes == 4:
                for dim in range(num_dims):
                    move_4(src + 4 * dim, dst + dim * dim_stride_bytes)
            else:
                for dim in range(num_dims):
                    move_2(src + 2 * dim, dst + dim * dim_stride_bytes)


@njit(nogil=True, cache=True, boundscheck=False)
def _score_pages(queries, num, keys, scores, row_floats, pages, first_page, last_page, shape):
    """scores[query][16 page + t] = queries[query] . key of token t, for a block of `num` queries."""
    num_kv_heads, kv_head, num_dims, _, bf16 = shape
    item = 2 if bf16 else 4
    head_bytes = num_dims * PAGE * item
    stride = 4 * row_floats
    for page in range(first_page, last_page):
        at_keys = keys + (np.int64(pages[page]) * num_kv_heads + kv_head) * head_bytes
        following = np.int64(pages[min(page + 1, last_page - 1)])
        ahead = keys + (following * num_kv_heads + kv_head) * head_bytes
        at_out = scores + 64 * page
        step = PAGE * item
        if bf16:
            multiply_w1_bf16(num, queries, 4 * num_dims, at_keys, step, num_dims, at_out, stride, ahead, step)
        else:
            multiply_w1(num, queries, 4 * num_dims, at_keys, step, num_dims, at_out, stride, ahead, step)


@njit(nogil=True, cache=True, boundscheck=False)
def _softmax(scores, at_scores, begin, end, first_page, last_page, scale, softcap, lanes):
    """Unnormalised weights of one query over tokens [begin, end), zero elsewhere; returns their sum."""
    factor = scale
    if softcap > 0:
        for token in range(begin, end):
            scores[token] = softcap * math.tanh(scores[token] * scale / softcap)
        factor = np.float32(1)
    own_first, own_last = begin // PAGE, (end + PAGE - 1) // PAGE
    for token in range(own_first * PAGE, begin):
        scores[token] = _LOWEST
    for token in range(end, own_last * PAGE):
        scores[token] = _LOWEST
    for lane in range(PAGE):
        lanes[lane] = _LOWEST
        lanes[PAGE + lane] = np.float32(0)
    at_max = np.int64(lanes.ctypes.data)
    for page in range(own_first, own_last):
        max_16(at_scores + 64 * page, at_max)
    highest = lanes[0]
    for lane in range(1, PAGE):
        highest = max(highest, lanes[lane])
    factor *= _LOG2E
    for page in range(own_first, own_last):
        exp2_16(at_scores + 64 * page, factor, highest * factor, at_max + 64)
    # Pages and tokens of the block that are not this query's: exactly nothing.
    for token in range(first_page * PAGE, begin):
        scores[token] = np.float32(0)
    for token in range(end, last_page * PAGE):
        scores[token] = np.float32(0)
    total = np.float32(0)
    for lane in range(PAGE):
        total += lanes[PAGE + lane]
    return total


@njit(nogil=True, cache=True, boundscheck=False)
def _sum_values(weights, num, row_floats, values, out, pages, first_page, end, shape, wide):
    """out[query] = sum over tokens of weights[query][token] * value[token], for a block of queries."""
    num_kv_heads, kv_head, _, num_dims, bf16 = shape
    item = 2 if bf16 else 4
    row_bytes = num_dims * item
    stride = 4 * row_floats
    last_page = (end + PAGE - 1) // PAGE
    for page in range(first_page, last_page):
        at_page = values + (np.int64(pages[page]) * num_kv_heads + kv_head) * PAGE * row_bytes
        following = np.int64(pages[min(page + 1, last_page - 1)])
        ahead = values + (following * num_kv_heads + kv_head) * PAGE * row_bytes
        # Slots beyond the sequence may hold another's leftovers, NaN included: they are not read.
        count = min(PAGE, end - page * PAGE)
        at_weights = weights + 64 * page
        dim = 0
        while wide and dim + 64 <= num_dims:
            row = 0
            while row < num:
                size = min(ROWS_W4, num - row)
                at_w, at_v = at_weights + row * stride, at_page + dim * item
                at_out = out + 4 * (row * num_dims + dim)
                if bf16:
                    multiply_w4_bf16(
                        size, at_w, stride, at_v, row_bytes, count, at_out, 4 * num_dims, ahead, 128
                    )
                else:
                    multiply_w4(size, at_w, stride, at_v, row_bytes, count, at_out, 4 * num_dims, ahead, 256)
                row += size
            dim += 64
        while dim < num_dims:
            at_v, at_out = at_page + dim * item, out + 4 * dim
            if bf16:
                multiply_w1_bf16(
                    num, at_weights, stride, at_v, row_bytes, count, at_out, 4 * num_dims, ahead, 64
                )
            else:
                multiply_w1(num, at_weights, stride, at_v, row_bytes, count, at_out, 4 * num_dims, ahead, 64)
            dim += PAGE


@njit(nogil=True, cache=True, boundscheck=False)
def attend_rows(
    query,  # address of float32 [token, head, dim]
    token_stride,  # in elements
    head_stride,
    keys,  # address of [page, kv_head, dim, 16]
    values,  # address of [page, kv_head, 16, padded dim]
    num_kv_heads,
    group,  # query heads per KV head
    num_dims,
    num_padded_dims,
    bf16,
    page_table,  # int32 [slot, page]
    token_slots,  # int64 [token]
    ends,  # int64 [token]: sees [0, end)
    anchors,  # int64 [token]: its window is counted back from here
    scale,
    window,  # 0: none
    softcap,  # 0: none
    out,  # address of float32 [token, head, padded dim]
    first_row,
    last_row,
    wide,  # whether the registers hold the larger blocks (AVX-512)
    queries,  # float32 [MOST_QUERIES * dim]: scratch, as are the sums
    sums,  # float32 [MOST_QUERIES * padded dim]
):
    # Scratch that is used by address comes from the caller, who keeps it: numba frees its own arrays
    # after their last use by name, however long their addresses are used.
    longest = 0
    for row in range(first_row, last_row):
        longest = max(longest, ends[row])
    row_floats = (longest + PAGE - 1) // PAGE * PAGE
    most = ROWS_W1 if wide else 4
    scores = np.empty(most * row_floats, np.float32)
    inverses = np.empty(most, np.float32)
    lanes = np.empty(2 * PAGE, np.float32)
    # Addresses as signed numbers: numba turns sums of signed and unsigned into floats.
    at_scores, at_queries = np.int64(scores.ctypes.data), np.int64(queries.ctypes.data)
    at_sums = np.int64(sums.ctypes.data)
    heads_together = min(group, most)
    num_heads = num_kv_heads * group
    row = first_row
    while row < last_row:
        # Neighbouring tokens of one sequence, so that a key or value is loaded once for several.
        slot = token_slots[row]
        num_rows = 1
        while (
            row + num_rows < last_row
            and token_slots[row + num_rows] == slot
            and (num_rows + 1) * heads_together <= most
        ):
            num_rows += 1
        pages = page_table[slot]
        end, first_page = ends[row], 0
        for other in range(row + 1, row + num_rows):
            end = max(end, ends[other])
        last_page = (end + PAGE - 1) // PAGE
        if window > 0:
            lowest = anchors[row]
            for other in range(row + 1, row + num_rows):
                lowest = min(lowest, anchors[other])
            first_page = max(0, lowest + 1 - window) // PAGE
        for kv_head in range(num_kv_heads):
            shape = (num_kv_heads, kv_head, num_dims, num_padded_dims, bf16)
            for first_head in range(kv_head * group, (kv_head + 1) * group, heads_together):
                num_heads_here = min(heads_together, (kv_head + 1) * group - first_head)
                num = num_rows * num_heads_here
                for item in range(num):
                    token, head = row + item // num_heads_here, first_head + item % num_heads_here
                    source = query + 4 * (token * token_stride + head * head_stride)
                    at_copy = at_queries + 4 * item * num_dims
                    dim = 0
                    while dim + PAGE <= num_dims:
                        scale_16(source + 4 * dim, np.float32(1), at_copy + 4 * dim)
                        dim += PAGE
                    while dim < num_dims:
                        move_4(source + 4 * dim, at_copy + 4 * dim)
                        dim += 1
                for item in range(num):
                    scores[item * row_floats + first_page * PAGE : item * row_floats + last_page * PAGE] = 0
                _score_pages(
                    at_queries, num, keys, at_scores, row_floats, pages, first_page, last_page, shape
                )
                sums[: num * num_padded_dims] = np.float32(0)
                for item in range(num):
                    token = row + item // num_heads_here
                    own_end = ends[token]
                    own_begin = max(0, anchors[token] + 1 - window) if window > 0 else 0
                    at_own = at_scores + 4 * item * row_floats
                    own = scores[item * row_floats : (item + 1) * row_floats]
                    total = _softmax(
                        own, at_own, own_begin, own_end, first_page, last_page, scale, softcap, lanes
                    )
                    inverses[item] = np.float32(1) / total
                _sum_values(at_scores, num, row_floats, values, at_sums, pages, first_page, end, shape, wide)
                for item in range(num):
                    token, head = row + item // num_heads_here, first_head + item % num_heads_here
                    at_out = out + 4 * (token * num_heads + head) * num_padded_dims
                    at_sum = at_sums + 4 * item * num_padded_dims
                    for dim in range(0, num_padded_dims, PAGE):
                        scale_16(at_sum + 4 * dim, inverses[item], at_out + 4 * dim)
        row += num_rows
