"""Paged attention on a CPU: one row (a query token) at a time, in a fixed order of pages.

So a row's result depends on its query and its KV alone: not on its batch-mates, nor on how its
prompt was cut into chunks. Keys are stored transposed inside a page, `[page, kv_head, dim, 16]`,
so that the scores of a page's 16 tokens are one vector; values as `[page, kv_head, 16, dim]`.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from genserve.core.models.kernels.vector_ir import (
    exp2_16,
    max_16,
    move_2,
    move_4,
    scale_16,
    scores_1,
    scores_1_bf16,
    scores_16,
    scores_16_bf16,
    value_16,
    value_16_bf16,
    values_16,
    values_16_bf16,
    values_64,
    values_64_bf16,
)

_LOG2E = np.float32(1.4426950408889634)
_LOWEST = np.float32(-3e38)
PAGE = 16


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
    positions,  # int64 [token]
    scale,
    window,  # 0: none
    softcap,  # 0: none
    out,  # address of float32 [token, head, padded dim], zeros
    first_row,
    last_row,
):
    item = 2 if bf16 else 4
    key_head_bytes = num_dims * PAGE * item
    value_head_bytes = num_padded_dims * PAGE * item
    value_row_bytes = num_padded_dims * item
    num_heads = num_kv_heads * group
    longest = 0
    for row in range(first_row, last_row):
        longest = max(longest, positions[row] + 1)
    scores = np.empty(((longest + PAGE - 1) // PAGE) * PAGE, np.float32)
    at_scores = np.int64(scores.ctypes.data)  # unsigned would turn sums into floats
    lanes = np.empty(2 * PAGE, np.float32)
    at_max = np.int64(lanes.ctypes.data)
    at_total = at_max + 64
    for row in range(first_row, last_row):
        end = positions[row] + 1
        begin = max(0, end - window) if window > 0 else 0
        first_page = begin // PAGE
        last_page = (end + PAGE - 1) // PAGE
        full_page = end // PAGE
        slot = token_slots[row]
        for head in range(num_heads):
            kv_head = head // group
            at_query = query + 4 * (row * token_stride + head * head_stride)
            scores[first_page * PAGE : last_page * PAGE] = np.float32(0)
            for page in range(first_page, last_page):
                number = np.int64(page_table[slot, page])
                at_keys = keys + (number * num_kv_heads + kv_head) * key_head_bytes
                at_page = at_scores + 64 * page
                dim = 0
                if bf16:
                    while dim + 16 <= num_dims:
                        scores_16_bf16(at_query + 4 * dim, at_keys + 32 * dim, at_page)
                        dim += 16
                    while dim < num_dims:
                        scores_1_bf16(at_query + 4 * dim, at_keys + 32 * dim, at_page)
                        dim += 1
                else:
                    while dim + 16 <= num_dims:
                        scores_16(at_query + 4 * dim, at_keys + 64 * dim, at_page)
                        dim += 16
                    while dim < num_dims:
                        scores_1(at_query + 4 * dim, at_keys + 64 * dim, at_page)
                        dim += 1
            factor = scale
            if softcap > 0:
                for token in range(begin, end):
                    scores[token] = softcap * math.tanh(scores[token] * scale / softcap)
                factor = np.float32(1)
            for token in range(first_page * PAGE, begin):
                scores[token] = _LOWEST
            for token in range(end, last_page * PAGE):
                scores[token] = _LOWEST
            for lane in range(PAGE):
                lanes[lane] = _LOWEST
                lanes[PAGE + lane] = np.float32(0)
            for page in range(first_page, last_page):
                max_16(at_scores + 64 * page, at_max)
            highest = lanes[0]
            for lane in range(1, PAGE):
                highest = max(highest, lanes[lane])
            factor *= _LOG2E
            for page in range(first_page, last_page):
                exp2_16(at_scores + 64 * page, factor, highest * factor, at_total)
            total = np.float32(0)
            for lane in range(PAGE):
                total += lanes[PAGE + lane]
            at_out = out + 4 * (row * num_heads + head) * num_padded_dims
            for page in range(first_page, last_page):
                number = np.int64(page_table[slot, page])
                at_values = values + (number * num_kv_heads + kv_head) * value_head_bytes
                begin_token = max(begin - page * PAGE, 0)
                if page < full_page and begin_token == 0:
                    at_weights = at_scores + 64 * page
                    dim = 0
                    while dim + 64 <= num_padded_dims:
                        if bf16:
                            values_64_bf16(at_weights, at_values + 2 * dim, at_out + 4 * dim, value_row_bytes)
                        else:
                            values_64(at_weights, at_values + 4 * dim, at_out + 4 * dim, value_row_bytes)
                        dim += 64
                    while dim < num_padded_dims:
                        if bf16:
                            values_16_bf16(at_weights, at_values + 2 * dim, at_out + 4 * dim, value_row_bytes)
                        else:
                            values_16(at_weights, at_values + 4 * dim, at_out + 4 * dim, value_row_bytes)
                        dim += 16
                else:
                    # Slots beyond the sequence may hold another's leftovers, NaN included: skip them.
                    for token in range(begin_token, min(end - page * PAGE, PAGE)):
                        at_weight = at_scores + 64 * page + 4 * token
                        at_row = at_values + token * value_row_bytes
                        for dim in range(0, num_padded_dims, 16):
                            if bf16:
                                value_16_bf16(at_weight, at_row + 2 * dim, at_out + 4 * dim, 0)
                            else:
                                value_16(at_weight, at_row + 4 * dim, at_out + 4 * dim, 0)
            inverse = np.float32(1) / total
            for dim in range(0, num_padded_dims, 16):
                scale_16(at_out + 4 * dim, inverse)
