"""Float32 kernels over the heads of a fused query-key-value row: norms, rotation, choice of experts.

Each row is computed by itself in one fixed order, so its bits do not depend on its batch.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit


@njit(nogil=True, cache=True, boundscheck=False)
def norm_heads(rows, first_head, last_head, head_dim, weight, eps):
    """Root mean square norm of heads `[first, last)` of each row, in place. rows [T, heads * dim]."""
    for row in range(rows.shape[0]):
        for head in range(first_head, last_head):
            at = head * head_dim
            total = np.float32(0)
            for dim in range(head_dim):
                total += rows[row, at + dim] * rows[row, at + dim]
            factor = np.float32(1) / np.sqrt(total / np.float32(head_dim) + eps)
            for dim in range(head_dim):
                rows[row, at + dim] = rows[row, at + dim] * factor * weight[dim]


@njit(nogil=True, cache=True, boundscheck=False)
def rotate_heads(rows, num_heads, head_dim, positions, cos, sin):
    """Rotary embedding of the first `num_heads` heads of each row, in place.

    Pairs are (j, j + half) inside the first 2 * half dims of a head; cos, sin [position, half].
    """
    half = cos.shape[1]
    for row in range(rows.shape[0]):
        position = positions[row]
        for head in range(num_heads):
            at = head * head_dim
            for j in range(half):
                a, b = rows[row, at + j], rows[row, at + half + j]
                c, s = cos[position, j], sin[position, j]
                rows[row, at + j] = a * c - b * s
                rows[row, at + half + j] = b * c + a * s


@njit(nogil=True, cache=True, boundscheck=False)
def route_by_groups(
    logits,  # float32 [T, E]
    bias,  # float32 [E]
    num_groups,
    num_kept_groups,
    scale,
    chosen,  # int64 [T, K], out
    weights,  # float32 [T, K], out
):
    """Experts of each row by sigmoid score plus bias, in the groups whose two best are highest.

    Weights are the scores without bias, made to sum to `scale`. Equal scores: the lowest id.
    """
    num_experts, num_chosen = logits.shape[1], chosen.shape[1]
    size = num_experts // num_groups
    lowest = np.float32(-np.inf)
    scores = np.empty(num_experts, np.float32)
    ranks = np.empty(num_experts, np.float32)
    group_ranks = np.empty(num_groups, np.float32)
    is_kept = np.empty(num_groups, np.bool_)
    for row in range(logits.shape[0]):
        for expert in range(num_experts):
            scores[expert] = np.float32(1) / (np.float32(1) + math.exp(-logits[row, expert]))
            ranks[expert] = scores[expert] + bias[expert]
        for group in range(num_groups):
            best, second = lowest, lowest
            for expert in range(group * size, (group + 1) * size):
                rank = ranks[expert]
                if rank > best:
                    best, second = rank, best
                elif rank > second:
                    second = rank
            group_ranks[group] = best + second if size > 1 else best
            is_kept[group] = False
        for _ in range(num_kept_groups):
            at = -1
            for group in range(num_groups):
                if not is_kept[group] and (at < 0 or group_ranks[group] > group_ranks[at]):
                    at = group
            is_kept[at] = True
        for expert in range(num_experts):
            if not is_kept[expert // size]:
                ranks[expert] = lowest
        total = np.float32(0)
        for place in range(num_chosen):
            at = 0
            for expert in range(1, num_experts):
                if ranks[expert] > ranks[at]:
                    at = expert
            ranks[at] = lowest
            chosen[row, place] = at
            weights[row, place] = scores[at]
            total += scores[at]
        if num_chosen > 1:
            for place in range(num_chosen):
                weights[row, place] /= total + np.float32(1e-20)
        for place in range(num_chosen):
            weights[row, place] *= scale
