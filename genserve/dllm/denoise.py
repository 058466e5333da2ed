"""Logits of open positions to proposed tokens and their scores. Knows rows, not requests or canvases.

A row's result depends on its logits, its own options and its uniform: not on the rows beside it. Scores
are probabilities of the distribution the token was taken from, with the mass of ids that are never
proposed left in.

Shape suffixes: R rows, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from genserve.core.models.distribution import argmax, draw_from_candidates, top_candidates
from genserve.dllm.models.interface import DiffusionModel
from genserve.dllm.row_kernel import score_rows

# Logits that exist at one time: enough rows to fill a matrix product, little beside a model.
LOGITS_BUDGET_BYTES = 64 << 20
# Below this temperature a softmax is an argmax anyway.
_MIN_TEMPERATURE = 1e-6
# exp of it is 1e260: all the mass there is, beside a row's best allowed token, and still finite.
_MAX_EXPONENT = 600.0
_UNUSABLE = "the model's logits have no finite maximum (NaN or infinite), or no token is allowed"


@dataclass(frozen=True, slots=True)
class Proposable:
    """Ids that may be proposed: below `num_valid_tokens`, and not the mask token."""

    num_valid_tokens: int
    mask_token_id: int


class RowOptions(NamedTuple):
    """How one row's token is taken. Temperature 0 is the argmax (ties: lowest id) and reads nothing else.

    guidance  -1: the row's logits are the model's. Otherwise the row of the unconditional pass.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    uniform: float = 0.0
    guidance_row: int = -1
    guidance_scale: float = 0.0


class Proposals(NamedTuple):
    """One entry a row. Where `errors` is not None the others mean nothing."""

    token_ids: list[int]
    confidences: list[float]
    margins: list[float]
    entropies: list[float]
    errors: list[str | None]

    def rows(self, first: int, last: int) -> Proposals:
        return Proposals(
            self.token_ids[first:last],
            self.confidences[first:last],
            self.margins[first:last],
            self.entropies[first:last],
            self.errors[first:last],
        )


def guided(conditional_RV: Tensor, unconditional_RV: Tensor, scales_R: Tensor) -> Tensor:
    """Classifier-free guidance: u + (w + 1)(c - u)."""
    return unconditional_RV + (scales_R.unsqueeze(-1) + 1) * (conditional_RV - unconditional_RV)


def propose_rows(
    model: DiffusionModel,
    hidden_TH: Tensor,
    rows: Sequence[int],
    options: Sequence[RowOptions],
    allowed: Proposable,
    vocab_size: int,
    *,
    with_margin: bool = False,
    with_entropy: bool = False,
    budget_bytes: int = LOGITS_BUDGET_BYTES,
) -> Proposals:
    """Proposals for `rows` of a pass's hidden states, a bounded number of logits rows at a time."""
    parts = [
        propose(logits_RV, options[first:last], allowed, with_margin=with_margin, with_entropy=with_entropy)
        for first, last, logits_RV in logits_chunks(model, hidden_TH, rows, options, vocab_size, budget_bytes)
    ]
    return Proposals(*([entry for part in column for entry in part] for column in zip(*parts, strict=True)))


def logits_chunks(
    model: DiffusionModel,
    hidden_TH: Tensor,
    rows: Sequence[int],
    options: Sequence[RowOptions],
    vocab_size: int,
    budget_bytes: int = LOGITS_BUDGET_BYTES,
) -> Iterator[tuple[int, int, Tensor]]:
    """(first, last, fp32 logits of rows[first:last]), guidance applied."""
    guides = any(option.guidance_row >= 0 for option in options)
    num_rows = max(1, budget_bytes // (4 * vocab_size * (3 if guides else 1)))
    for first in range(0, len(rows), num_rows):
        last = min(first + num_rows, len(rows))
        logits_RV = model.logits(_gather(hidden_TH, rows[first:last])).float()
        at = [r for r in range(first, last) if options[r].guidance_row >= 0] if guides else []
        if at:
            inside = torch.tensor([r - first for r in at], device=logits_RV.device)
            bare = model.logits(_gather(hidden_TH, [options[r].guidance_row for r in at])).float()
            scales = torch.tensor([options[r].guidance_scale for r in at], device=logits_RV.device)
            logits_RV[inside] = guided(logits_RV[inside], bare, scales)
        yield first, last, logits_RV


def _gather(hidden_TH: Tensor, rows: Sequence[int]) -> Tensor:
    if rows[-1] - rows[0] == len(rows) - 1:
        return hidden_TH[rows[0] : rows[-1] + 1]
    return hidden_TH[torch.tensor(rows, device=hidden_TH.device)]


def propose(
    logits_RV: Tensor,
    options: Sequence[RowOptions],
    allowed: Proposable,
    *,
    with_margin: bool = False,
    with_entropy: bool = False,
) -> Proposals:
    """Token and scores of each row of fp32 logits, which are left untouched."""
    logits_RV = logits_RV.contiguous()
    if logits_RV.device.type == "cpu":
        tokens, scores = _propose_on_cpu(logits_RV, options, allowed, with_margin, with_entropy)
    else:
        tokens, scores = _propose_in_torch(logits_RV, options, allowed)
    for row, option in enumerate(options):
        if _is_filtered(option, logits_RV.shape[-1]) and tokens[row] >= 0:
            tokens[row], scores[row] = _propose_filtered(logits_RV[row].cpu(), option, allowed)
    usable = np.isfinite(scores).all(-1) & (tokens >= 0)
    confidences, margins, entropies = scores.T.tolist()
    errors = [None if ok else _UNUSABLE for ok in usable.tolist()]
    return Proposals(tokens.tolist(), confidences, margins, entropies, errors)


def _is_filtered(option: RowOptions, vocab_size: int) -> bool:
    return option.temperature > 0 and (option.top_p < 1 or 0 < option.top_k < vocab_size)


def _temperature(option: RowOptions) -> float:
    return max(option.temperature, _MIN_TEMPERATURE) if option.temperature > 0 else 0.0


def _propose_on_cpu(
    logits_RV: Tensor,
    options: Sequence[RowOptions],
    allowed: Proposable,
    with_margin: bool,
    with_entropy: bool,
) -> tuple[np.ndarray, np.ndarray]:
    rows = logits_RV.numpy()
    tokens, scores = np.empty(len(rows), np.int64), np.zeros((len(rows), 3))
    temperatures = np.array([_temperature(option) for option in options])
    uniforms = np.array([option.uniform for option in options])
    score_rows(
        rows,
        rows.argmax(-1),
        temperatures,
        uniforms,
        allowed.num_valid_tokens,
        allowed.mask_token_id,
        with_margin,
        with_entropy,
        tokens,
        scores,
    )
    return tokens, scores


def _propose_in_torch(
    logits_RV: Tensor, options: Sequence[RowOptions], allowed: Proposable
) -> tuple[np.ndarray, np.ndarray]:
    """Any device: all rows at once, in float64, so that a sum's order hardly matters."""
    device = logits_RV.device
    temperatures = [_temperature(option) for option in options]
    divisors_R = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64, device=device)
    tops_R = logits_RV.max(-1, keepdim=True).values
    exponents_RV = (logits_RV.double() - tops_R) / divisors_R.unsqueeze(-1)
    probs_RV = exponents_RV.clamp_min_(-_MAX_EXPONENT).exp_()
    probs_RV /= probs_RV.sum(-1, keepdim=True)
    entropies_R = -torch.special.xlogy(probs_RV, probs_RV).sum(-1)
    never = torch.zeros(logits_RV.shape[-1], dtype=torch.bool, device=device)
    never[allowed.num_valid_tokens :] = True
    never[allowed.mask_token_id] = True
    tokens_R = argmax(logits_RV.masked_fill(never, float("-inf")))
    inside_RV = probs_RV.masked_fill(never, 0.0)
    best_R2 = inside_RV.topk(2).values
    drawn = [row for row, temperature in enumerate(temperatures) if temperature]
    if drawn:
        at = torch.tensor(drawn, device=device)
        uniforms = torch.tensor([options[row].uniform for row in drawn], dtype=torch.float64, device=device)
        running = inside_RV[at].cumsum(-1)
        found = torch.searchsorted(running, uniforms.unsqueeze(-1) * running[:, -1:], right=True).squeeze(-1)
        tokens_R[at] = found.clamp_max(allowed.num_valid_tokens - 1)
    confidences_R = probs_RV.gather(-1, tokens_R.unsqueeze(-1)).squeeze(-1)
    scores_R3 = torch.stack((confidences_R, best_R2[:, 0] - best_R2[:, 1], entropies_R), -1)
    return tokens_R.cpu().numpy(), scores_R3.cpu().numpy()


def _propose_filtered(
    logits_V: Tensor, option: RowOptions, allowed: Proposable
) -> tuple[int, tuple[float, float, float]]:
    """One row with top-k or top-p: the token is drawn, and scored, among those that they keep."""
    valid_V = logits_V[: allowed.num_valid_tokens].clone()
    if allowed.mask_token_id < len(valid_V):
        valid_V[allowed.mask_token_id] = float("-inf")
    num = min(option.top_k, len(valid_V)) if option.top_k > 0 else len(valid_V)
    ids_K = top_candidates(valid_V.unsqueeze(0), num)[0]
    temperature = _temperature(option)
    top = valid_V[ids_K[0]].double()
    weights_K = ((valid_V[ids_K].double() - top) / temperature).exp()
    probs_K = weights_K / weights_K.sum()
    column, _ = draw_from_candidates(
        probs_K.unsqueeze(0),
        torch.tensor([option.top_p], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([option.uniform], dtype=torch.float64),
    )
    before_K = probs_K.cumsum(0) - probs_K
    keep_K = before_K < option.top_p
    keep_K[0] = True
    never_V = torch.cat((logits_V[allowed.num_valid_tokens :], logits_V[allowed.mask_token_id].unsqueeze(0)))
    if allowed.mask_token_id >= allowed.num_valid_tokens:
        never_V = never_V[:-1]
    never = ((never_V.double() - top) / temperature).clamp_max(_MAX_EXPONENT).exp()
    weights = torch.cat((weights_K * keep_K, never))
    probs = weights / weights.sum()
    second = float(probs[1]) if num > 1 else 0.0
    entropy = -float(torch.special.xlogy(probs, probs).sum())
    return int(ids_K[column[0]]), (float(probs[column[0]]), float(probs[0]) - second, entropy)
