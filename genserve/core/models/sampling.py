"""The batched sampler of a worker: logits in, one chosen token a row out.

Owns the order in which a request's sampling options act: logit bias, penalties, grammar mask,
temperature, top-k, top-p, min-p, draw. A row's result depends on its logits, its own state and
(seed, output index) alone: not on batch-mates, their order, preemption or the worker. It knows
nothing of scheduling, tokens' text or stopping.

Shape suffixes: R rows of the batch, V vocabulary, E rows with extras, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from genserve.core.models.distribution import (
    argmax,
    draw_from_candidates,
    draw_over_vocabulary,
    top_candidates,
    uniform,
)
from genserve.core.models.sampler_state import SamplerState
from genserve.core.types import SamplingParams, TokenLogprobs

# Below this temperature a softmax in fp32 is an argmax anyway. With it and this bound on a row's
# maximum, scaling by 1 / temperature cannot overflow.
_MIN_TEMPERATURE = 1e-6
_MAX_LOGIT = 1e30
# The nucleus is looked for among this many candidates, then the next, at last in a full sort.
_NUCLEUS_CANDIDATES = (64, 512, 4096)
# Rows at a time in passes over the whole vocabulary. Temporaries of a few MB are reused by the
# allocator; larger ones are given back and faulted in again at every step.
_BLOCK_ROWS = 32


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's result. With `error` set the row could not be sampled and `token_id` is -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def sample(
    logits_RV: Tensor,
    states: Sequence[SamplerState],
    positions: Sequence[int] | None = None,
    *,
    num_valid_tokens: int | None = None,
) -> list[SampledToken]:
    """Choose one token for each row of raw fp32 logits (left untouched).

    `positions` are the output indices of the tokens being chosen (default: each state's number of
    output tokens). Ids from `num_valid_tokens` on are never chosen (padding rows of the embedding).
    A row that cannot be sampled (NaN, nothing allowed) gets an `error`; the others go on.
    """
    if positions is None:
        positions = [state.num_output_tokens for state in states]
    valid_RV = logits_RV if num_valid_tokens is None else logits_RV[:, :num_valid_tokens]
    chosen, errors = _choose(logits_RV, valid_RV, states, positions)
    result = [SampledToken(token_id) for token_id in chosen]
    for row, error in errors.items():
        result[row] = SampledToken(-1, error=error)

    wanted = [
        row for row, state in enumerate(states) if state.params.logprobs is not None and row not in errors
    ]
    if wanted:
        index = torch.tensor(wanted, device=logits_RV.device)
        ids = [chosen[row] for row in wanted]
        nums_top = [states[row].params.logprobs or 0 for row in wanted]
        rows = token_logprobs(logits_RV[index], ids, nums_top, num_valid_tokens=num_valid_tokens)
        for row, logprobs in zip(wanted, rows, strict=True):
            result[row] = SampledToken(chosen[row], logprobs)
    return result


def token_logprobs(
    logits_RV: Tensor,
    token_ids: Sequence[int],
    nums_top: Sequence[int],
    *,
    num_valid_tokens: int | None = None,
) -> list[TokenLogprobs]:
    """Log-softmax of raw fp32 logits at `token_ids`, and the `nums_top[row]` likeliest of each row."""
    logsumexp_R = logits_RV.logsumexp(-1, keepdim=True)
    ids = torch.tensor(token_ids, device=logits_RV.device).unsqueeze(-1)
    own = (logits_RV.gather(-1, ids) - logsumexp_R).squeeze(-1).tolist()
    num_top = max(nums_top, default=0)
    if num_top == 0:
        return [TokenLogprobs(i, value) for i, value in zip(token_ids, own, strict=True)]
    valid_RV = logits_RV if num_valid_tokens is None else logits_RV[:, :num_valid_tokens]
    top_ids = top_candidates(valid_RV, num_top)
    top_values = (valid_RV.gather(-1, top_ids) - logsumexp_R).tolist()
    tops = [tuple(zip(i, v, strict=True)) for i, v in zip(top_ids.tolist(), top_values, strict=True)]
    return [
        TokenLogprobs(i, value, top[:num])
        for i, value, top, num in zip(token_ids, own, tops, nums_top, strict=True)
    ]


def _choose(
    logits_RV: Tensor, valid_RV: Tensor, states: Sequence[SamplerState], positions: Sequence[int]
) -> tuple[list[int], dict[int, str]]:
    """Token ids and, by row, errors."""
    device = valid_RV.device
    best = argmax(valid_RV)
    best_values = valid_RV.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    finite = (best_values.abs() < _MAX_LOGIT).tolist()
    chosen: list[int] = best.tolist()
    errors = {
        row: "the model's logits have no finite maximum (NaN or infinite)"
        for row, ok in enumerate(finite)
        if not ok
    }

    by_method: dict[str, list[int]] = {}
    for row, state in enumerate(states):
        if not state.bias_fits(logits_RV.shape[-1]):
            errors.setdefault(row, f"logit_bias: a token id outside the model's {logits_RV.shape[-1]} tokens")
    extras = [row for row, state in enumerate(states) if state.has_extras and row not in errors]
    edited: dict[int, Tensor] = {}
    if extras:
        edited_EV = logits_RV[torch.tensor(extras, device=device)]
        for at, row in enumerate(extras):
            states[row].apply_extras(edited_EV[at])
        edited_EV = edited_EV[:, : valid_RV.shape[-1]]
        best_E = argmax(edited_EV)
        values = edited_EV.gather(-1, best_E.unsqueeze(-1)).squeeze(-1)
        for at, (row, token_id, ok) in enumerate(
            zip(extras, best_E.tolist(), (values.abs() < _MAX_LOGIT).tolist(), strict=True)
        ):
            edited[row] = edited_EV[at]
            chosen[row] = token_id
            if not ok:
                errors[row] = "no token is allowed here (grammar, or bias and penalties out of range)"

    for row, state in enumerate(states):
        if state.params.temperature > 0 and row not in errors:
            by_method.setdefault(_method(state.params, valid_RV.shape[-1]), []).append(row)
    for method, rows in by_method.items():
        for start in range(0, len(rows), _BLOCK_ROWS):
            block = rows[start : start + _BLOCK_ROWS]
            logits = _gather_rows(valid_RV, edited, block)
            ids = _draw(method, logits, [states[row] for row in block], [positions[row] for row in block])
            for row, token_id in zip(block, ids, strict=True):
                chosen[row] = token_id
    return chosen, errors


def _gather_rows(valid_RV: Tensor, edited: dict[int, Tensor], rows: list[int]) -> Tensor:
    if not any(row in edited for row in rows):
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return valid_RV[rows[0] : rows[0] + len(rows)]
        return valid_RV[torch.tensor(rows, device=valid_RV.device)]
    return torch.stack([edited.get(row, valid_RV[row]) for row in rows])


def _method(params: SamplingParams, vocab_size: int) -> str:
    """How a row is drawn: a function of its own options alone, as its result must be."""
    if 0 < params.top_k < vocab_size:
        # Rows of similar k share a selection; the bucket does not change the result.
        return f"top_k:{max(64, 1 << (params.top_k - 1).bit_length())}"
    if params.top_p < 1:
        return "top_p"
    return "vocabulary"


def _draw(method: str, logits_RV: Tensor, states: list[SamplerState], positions: list[int]) -> list[int]:
    device = logits_RV.device
    options = [state.params for state in states]
    uniforms = [uniform(p.seed or 0, position) for p, position in zip(options, positions, strict=True)]
    columns = [
        uniforms,
        [p.top_p for p in options],
        [p.min_p for p in options],
        [max(p.temperature, _MIN_TEMPERATURE) for p in options],
    ]
    u_R, top_p_R, min_p_R, temperature_R = torch.tensor(columns, dtype=torch.float64).to(device)
    if method.startswith("top_k:"):
        num_candidates = min(int(method.removeprefix("top_k:")), logits_RV.shape[-1])
        ids_RK = top_candidates(logits_RV, num_candidates)
        values = logits_RV.gather(-1, ids_RK).double()
        top_k_R = torch.tensor([p.top_k for p in options], device=device)
        outside = torch.arange(num_candidates, device=device) >= top_k_R.unsqueeze(-1)
        scaled = ((values - values[:, :1]) / temperature_R.unsqueeze(-1)).masked_fill_(outside, float("-inf"))
        column, _ = draw_from_candidates(scaled.softmax(-1), top_p_R, min_p_R, u_R)
        return ids_RK.gather(-1, column.unsqueeze(-1)).squeeze(-1).tolist()

    probs_RV = _probabilities(logits_RV, temperature_R)
    if method == "vocabulary":
        if any(p.min_p for p in options):
            _drop_below(probs_RV, min_p_R)
        return draw_over_vocabulary(probs_RV, u_R).tolist()
    return _draw_nucleus(logits_RV, probs_RV, top_p_R, min_p_R, u_R)


def _probabilities(logits_RV: Tensor, temperature_R: Tensor) -> Tensor:
    if bool((temperature_R == 1.0).all()):
        return logits_RV.softmax(-1)
    scaled = logits_RV * temperature_R.reciprocal().float().unsqueeze(-1)
    return torch.softmax(scaled, -1, out=scaled)


def _drop_below(probs_RV: Tensor, min_p_R: Tensor) -> None:
    """Set weights under `min_p` times the row's largest to zero, in place."""
    floor_R = min_p_R.float() * probs_RV.amax(-1)
    just_below_R = torch.nextafter(floor_R, torch.zeros_like(floor_R))
    for probs_V, just_below in zip(probs_RV, just_below_R.tolist(), strict=True):
        # Row by row because this is the one vectorised comparison, and it takes a scalar.
        torch.threshold_(probs_V, just_below, 0.0)


def _draw_nucleus(
    logits_RV: Tensor, probs_RV: Tensor, top_p_R: Tensor, min_p_R: Tensor, u_R: Tensor
) -> list[int]:
    """top-p without top-k: ever wider canonical candidates until they hold the nucleus.

    The running sum over candidates is a prefix of the one over the full sort, so where it stops
    makes no difference.
    """
    vocab_size = logits_RV.shape[-1]
    chosen: list[int] = [-1] * logits_RV.shape[0]
    open_rows = list(range(logits_RV.shape[0]))
    for num_candidates in (*_NUCLEUS_CANDIDATES, vocab_size):
        ids_RK = top_candidates(logits_RV, num_candidates)
        probs_RK = probs_RV.gather(-1, ids_RK).double()
        column, mass = draw_from_candidates(probs_RK, top_p_R, min_p_R, u_R)
        final = ((mass >= top_p_R) | (ids_RK.shape[-1] == vocab_size)).tolist()
        ids = ids_RK.gather(-1, column.unsqueeze(-1)).squeeze(-1).tolist()
        for row, token_id, done in zip(open_rows, ids, final, strict=True):
            if done:
                chosen[row] = token_id
        if all(final):
            break
        left = [at for at, done in enumerate(final) if not done]
        open_rows = [open_rows[at] for at in left]
        index = torch.tensor(left, device=logits_RV.device)
        logits_RV, probs_RV = logits_RV[index], probs_RV[index]
        top_p_R, min_p_R, u_R = top_p_R[index], min_p_R[index], u_R[index]
    return chosen
