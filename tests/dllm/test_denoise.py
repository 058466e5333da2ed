"""Proposals: what is never proposed, what a score is, and that a row depends on itself alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from genserve.dllm.denoise import Proposable, RowOptions, guided, propose, propose_rows

VOCAB, MASK, VALID = 1500, 700, 1490
ALLOWED = Proposable(VALID, MASK)
GREEDY = RowOptions()


def logits(num_rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_scores_are_the_float64_softmax_of_all_ids() -> None:
    rows = logits(5)
    got = propose(rows, [GREEDY] * 5, ALLOWED, with_margin=True, with_entropy=True)
    probs = rows.double().softmax(-1)
    inside = probs.clone()
    inside[:, VALID:] = 0
    inside[:, MASK] = 0
    best = inside.topk(2)
    assert got.token_ids == best.indices[:, 0].tolist()
    assert got.confidences == pytest.approx(best.values[:, 0].tolist(), abs=1e-14)
    assert got.margins == pytest.approx((best.values[:, 0] - best.values[:, 1]).tolist(), abs=1e-14)
    assert got.entropies == pytest.approx((-(probs * probs.log()).sum(-1)).tolist(), abs=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 0.7, 50.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.8}, {"top_k": 3}, {"top_k": 5, "top_p": 0.5}])
def test_mask_and_padding_ids_never_win_and_keep_their_mass(temperature: float, filters: dict) -> None:
    rows = torch.zeros(40, VOCAB)
    rows[:, MASK] = 20.0
    rows[:, VALID + 2] = 19.0
    rows[:, 3] = 18.0
    options = [RowOptions(temperature, uniform=(row + 0.5) / 40, **filters) for row in range(40)]
    got = propose(rows, options, ALLOWED)
    assert not {MASK, *range(VALID, VOCAB)} & set(got.token_ids)
    assert all(0 < confidence < 0.5 for confidence in got.confidences)
    if temperature < 1:
        assert set(got.token_ids) == {3}
    if temperature == 0:
        whole = torch.tensor([20.0, 19.0, 18.0] + [0.0] * (VOCAB - 3)).double().softmax(-1)
        assert got.confidences == pytest.approx([float(whole[2])] * 40)


def test_ties_take_the_lowest_id() -> None:
    rows = torch.full((2, VOCAB), -5.0)
    rows[0, [40, 11, 900]] = 2.0
    rows[1, [MASK, 800, 799]] = 2.0
    got = propose(rows, [GREEDY] * 2, ALLOWED, with_margin=True)
    assert got.token_ids == [11, 799]
    assert got.margins == [0.0, 0.0]


def test_draws_follow_the_tempered_distribution() -> None:
    num = 4000
    row = logits(1, seed=3, scale=2.0)
    options = [RowOptions(1.3, uniform=(i + 0.5) / num) for i in range(num)]
    got = propose(row.expand(num, -1), options, ALLOWED)
    weights = (row[0].double() / 1.3).softmax(-1)
    drawn = np.bincount(got.token_ids, minlength=VOCAB) / num
    inside = weights.clone()
    inside[VALID:] = 0
    inside[MASK] = 0
    assert np.abs(drawn - (inside / inside.sum()).numpy()).max() <= 1 / num + 1e-9
    assert got.confidences[0] == pytest.approx(float(weights[got.token_ids[0]]))


def test_filters_keep_the_nucleus_and_score_inside_it() -> None:
    row = torch.full((1, VOCAB), -60.0)
    row[0, :4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    options = [RowOptions(1.0, top_p=0.7, uniform=(i + 0.5) / 100) for i in range(100)]
    got = propose(row.expand(100, -1), options, ALLOWED, with_entropy=True, with_margin=True)
    assert set(got.token_ids) == {0, 1}
    assert got.confidences[0] == pytest.approx(0.5 / 0.8)
    assert got.margins[0] == pytest.approx(0.2 / 0.8)
    assert got.entropies[0] == pytest.approx(-(0.625 * math.log(0.625) + 0.375 * math.log(0.375)))
    top = propose(row, [RowOptions(1.0, top_k=1, uniform=0.99)], ALLOWED)
    assert (top.token_ids, top.confidences) == ([0], pytest.approx([1.0]))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("option", [GREEDY, RowOptions(1.0, uniform=0.4), RowOptions(1.0, top_p=0.5)])
def test_a_row_that_cannot_be_used_fails_alone(poison: float, option: RowOptions) -> None:
    rows = logits(4)
    lone = propose(rows, [option] * 4, ALLOWED)
    rows[1, 77] = poison
    rows[2] = -math.inf
    got = propose(rows, [option] * 4, ALLOWED)
    assert [error is None for error in got.errors] == [True, False, False, True]
    assert [got.token_ids[row] for row in (0, 3)] == [lone.token_ids[row] for row in (0, 3)]


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    rows = logits(24, seed=5)
    options = [
        RowOptions([0.0, 0.6, 1.0][i % 3], [1.0, 0.9][i % 2], [0, 0, 7][i // 8], (i + 0.5) / 24)
        for i in range(24)
    ]
    together = propose(rows, options, ALLOWED, with_entropy=True)
    for i in range(24):
        alone = propose(rows[i : i + 1].clone(), [options[i]], ALLOWED, with_entropy=True)
        assert tuple(column[0] for column in alone) == tuple(column[i] for column in together)


class Head:
    """A language-model head and the sizes of what it was asked for."""

    def __init__(self) -> None:
        self.weight = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(1))
        self.num_rows: list[int] = []

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        self.num_rows.append(len(hidden_RH))
        return (hidden_RH[:, None, :] * self.weight).sum(-1)


def test_chunked_logits_give_equal_results_within_the_budget() -> None:
    head, hidden = Head(), torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    rows = [0, 1, 2, 5, 9, 10, 11, 12, 30, 31]
    options = [GREEDY] * 8 + [RowOptions(guidance_row=20 + i, guidance_scale=0.5) for i in range(2)]
    whole = propose_rows(head, hidden, rows, options, ALLOWED, VOCAB)  # type: ignore[arg-type]
    head.num_rows.clear()
    budget = 3 * 4 * VOCAB * 3
    chunked = propose_rows(head, hidden, rows, options, ALLOWED, VOCAB, budget_bytes=budget)  # type: ignore[arg-type]
    assert chunked == whole
    assert max(head.num_rows) == 3 and sum(head.num_rows) == 12


def test_guidance_moves_away_from_the_unconditional_logits() -> None:
    conditional, unconditional = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 3.0]])
    assert guided(conditional, unconditional, torch.tensor([0.5])).tolist() == [[2.5, 0.0]]
    assert guided(conditional, unconditional, torch.tensor([0.0])).tolist() == conditional.tolist()


def test_the_path_of_other_devices_agrees_with_the_kernel() -> None:
    from genserve.dllm.denoise import _propose_in_torch, _propose_on_cpu

    rows = logits(12, seed=9)
    options = [RowOptions([0.0, 0.8][i % 2], uniform=(i + 0.5) / 12) for i in range(12)]
    tokens, scores = _propose_on_cpu(rows, options, ALLOWED, True, True)
    torch_tokens, torch_scores = _propose_in_torch(rows, options, ALLOWED)
    assert tokens.tolist() == torch_tokens.tolist()
    np.testing.assert_allclose(torch_scores, scores, atol=1e-10)
