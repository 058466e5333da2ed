"""Draws and selections over rows of logits that depend on the row alone. Knows tensors, not requests.

Two rules make a result a function of its own row and uniform, and of nothing else in the batch:
- Tokens are ordered *canonically*: by value, largest first, ties by lowest id. Library sorts leave
  ties open, so selection runs on integer keys that encode value and id together.
- A draw inverts the cumulative distribution at one uniform, which is a pure function of
  (seed, output index). There is no generator whose state a batch-mate could move.

Shape suffixes: R rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LOW32 = 0xFFFFFFFF
_DRAW_CHUNK = 256


def _mix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def uniform(seed: int, index: int) -> float:
    """The uniform in [0, 1) of output `index` in the stream `seed` (any integers; taken modulo 2**64).

    It is output `index` of SplitMix64 started at the mixed seed, cut to 53 bits. Mixing the seed
    first keeps the streams of neighbouring seeds apart.
    """
    state = (_mix64((seed + _GOLDEN) & _MASK64) + (index + 1) * _GOLDEN) & _MASK64
    return (_mix64(state) >> 11) * 2.0**-53


def uniforms(seed: int, indices: np.ndarray) -> np.ndarray:
    """`uniform(seed, index)` of each of the int64 indices, as float64 of the same shape."""
    state = np.uint64(_mix64((seed + _GOLDEN) & _MASK64)) + (
        indices.astype(np.uint64) + np.uint64(1)
    ) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((state ^ (state >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


def argmax(logits_RV: Tensor) -> Tensor:
    """The canonical first token of each row (int64, R); a row's first NaN if it has one."""
    if logits_RV.device.type == "cpu":
        # Ten times faster than torch's argmax on CPU, with the same tie rule.
        return torch.from_numpy(logits_RV.numpy().argmax(-1))
    return logits_RV.argmax(-1)


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 keys whose descending order is the canonical order. `values` fp32 without NaN."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (_LOW32 - ids)


def _largest(keys: Tensor, k: int) -> Tensor:
    """The k largest keys of each row, in descending order."""
    if keys.device.type == "cpu":
        # numpy's vectorised selection is several times faster than torch's here.
        array = keys.numpy()
        if k < array.shape[-1]:
            split = array.shape[-1] - k
            array = np.partition(array, split, axis=-1)[..., split:]
        return torch.from_numpy(np.sort(array, axis=-1)[..., ::-1].copy())
    return keys.topk(k, dim=-1).values


def top_candidates(logits_RV: Tensor, k: int) -> Tensor:
    """Ids (int64, R x min(k, V)) of the k canonically first tokens of each fp32 row without NaN.

    Works in two stages when k is small: a row's top k tokens lie in the k chunks with the
    canonically first maxima, because each of those chunks holds a token ahead of any token outside.
    """
    vocab_size = logits_RV.shape[-1]
    k = min(k, vocab_size)
    chunk = 32 if k <= 128 else 16
    num_chunks = -(-vocab_size // chunk)
    device = logits_RV.device
    if k * 4 > num_chunks:
        ids = torch.arange(vocab_size, device=device)
        return _LOW32 - (_largest(_keys(logits_RV, ids), k) & _LOW32)
    whole = vocab_size // chunk
    maxima = logits_RV[:, : whole * chunk].unflatten(-1, (whole, chunk)).amax(-1)
    if whole < num_chunks:
        maxima = torch.cat((maxima, logits_RV[:, whole * chunk :].amax(-1, keepdim=True)), dim=-1)
    chunk_keys = _largest(_keys(maxima, torch.arange(num_chunks, device=device)), k)
    chunks = _LOW32 - (chunk_keys & _LOW32)
    ids = (chunks.unsqueeze(-1) * chunk + torch.arange(chunk, device=device)).flatten(1)
    values = logits_RV.gather(-1, ids.clamp_max(vocab_size - 1))
    if whole < num_chunks:
        values = values.masked_fill_(ids >= vocab_size, float("-inf"))
    return _LOW32 - (_largest(_keys(values, ids), k) & _LOW32)


def invert(weights: Tensor, uniforms_R: Tensor) -> Tensor:
    """Index (int64, R) at which the running sum of each row's weights (>= 0, fp64) passes uniform x total."""
    running = weights.cumsum(-1)
    total = running[:, -1:].contiguous()
    index = torch.searchsorted(running, uniforms_R.unsqueeze(-1) * total, right=True)
    # Rounding may put the target at the total itself: then the last token with weight is meant.
    last = torch.searchsorted(running, total, right=False)
    return torch.minimum(index, last).squeeze(-1)


def draw_over_vocabulary(probs_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """Ids drawn in id order from non-negative fp32 weights: first the chunk, then the token in it."""
    vocab_size = probs_RV.shape[-1]
    whole = vocab_size // _DRAW_CHUNK
    sums = probs_RV[:, : whole * _DRAW_CHUNK].unflatten(-1, (whole, _DRAW_CHUNK)).sum(-1)
    if whole * _DRAW_CHUNK < vocab_size:
        sums = torch.cat((sums, probs_RV[:, whole * _DRAW_CHUNK :].sum(-1, keepdim=True)), dim=-1)
    sums = sums.double()
    chunk = invert(sums, uniforms_R)
    at = chunk.unsqueeze(-1)
    before = sums.cumsum(-1).gather(-1, at).squeeze(-1) - sums.gather(-1, at).squeeze(-1)
    left = (uniforms_R * sums.sum(-1) - before) / sums.gather(-1, at).squeeze(-1)
    ids = at * _DRAW_CHUNK + torch.arange(_DRAW_CHUNK, device=probs_RV.device)
    weights = probs_RV.gather(-1, ids.clamp_max(vocab_size - 1)).double()
    if whole * _DRAW_CHUNK < vocab_size:
        weights = weights.masked_fill_(ids >= vocab_size, 0.0)
    inside = invert(weights, left.clamp(0.0, 1.0))
    return chunk * _DRAW_CHUNK + inside


def draw_from_candidates(
    probs_RK: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniforms_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw among candidates in canonical order (fp64 probabilities, descending), after top-p and min-p.

    Returns the drawn column (int64, R) and the candidates' total mass (fp64, R). A row's draw is
    final only if `top_p` is off or its mass reaches `top_p`: else the nucleus goes beyond K.
    """
    running = probs_RK.cumsum(-1)
    keep = (running - probs_RK < top_p_R.unsqueeze(-1)) & (
        probs_RK >= min_p_R.unsqueeze(-1) * probs_RK[:, :1]
    )
    keep[:, 0] = True
    return invert(probs_RK * keep, uniforms_R), running[:, -1]
