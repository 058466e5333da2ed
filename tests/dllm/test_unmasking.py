"""Unmasking rules and schedules; the rules on reference data are in `test_golden`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genserve.dllm.request import Unmasking
from genserve.dllm.unmasking import BlockState, Candidate, Share, choose, next_pass, share

KINDS = ("threshold", "factor", "quota", "random", "sequential", "margin", "entropy", "entropy_bound")


def candidates(*confidences: float, **scores: list[float]) -> list[Candidate]:
    return [
        Candidate(10 + i, confidence, **{name: values[i] for name, values in scores.items()})
        for i, confidence in enumerate(confidences)
    ]


def run(rule: Unmasking, block: BlockState, score: float = 0.5) -> list[tuple[int, int]]:
    """(pass number, positions committed) until nothing is open."""
    open_positions, trace = list(range(block.num_open_at_start)), []
    while open_positions:
        draws = lambda number: [((p * 7 + number * 13) % 29) / 29 for p in open_positions]  # noqa: E731, B023
        block.next_pass = next_pass(rule, block, len(open_positions), draws)
        noise = draws(block.next_pass)
        found = [Candidate(p, score, score, score, n) for p, n in zip(open_positions, noise, strict=True)]
        chosen = choose(rule, share(rule, block, block.next_pass, len(found)), found)
        trace.append((block.next_pass, len(chosen)))
        open_positions = [p for p in open_positions if p not in chosen]
        block.next_pass += 1
    return trace


def test_equal_scores_go_to_the_lower_position() -> None:
    tied = candidates(0.5, 0.7, 0.7, 0.7, margin=[0.1] * 4, noise=[0.2] * 4, entropy=[1.0] * 4)
    assert choose(Unmasking("quota"), Share(2), tied) == [11, 12]
    for kind in ("margin", "random", "entropy", "sequential"):
        assert choose(Unmasking(kind), Share(2), tied) == [10, 11]
    assert choose(Unmasking("threshold", threshold=0.8), Share(), tied) == [11]


def test_threshold_counts_equality_unless_strict_and_commits_a_minimum() -> None:
    found = candidates(0.5, 0.4, 0.6, 0.3)
    assert choose(Unmasking(threshold=0.5), Share(), found) == [10, 12]
    assert choose(Unmasking(threshold=0.5, strict=True), Share(), found) == [12]
    assert choose(Unmasking(threshold=0.5, strict=True, min_commits=3), Share(), found) == [10, 11, 12]
    assert choose(Unmasking(threshold=0.9, min_commits=9), Share(), found) == [10, 11, 12, 13]


def test_the_released_factor_rule_never_leaves_a_single_last_position() -> None:
    found = candidates(0.9, 0.2)
    assert choose(Unmasking("factor", factor=1.0), Share(), found) == [10]
    assert choose(Unmasking("factor", factor=1.0, factor_rule="fast_dllm"), Share(), found) == [10, 11]
    more = candidates(0.9, 0.2, 0.1)
    assert choose(Unmasking("factor", factor=1.0, factor_rule="fast_dllm"), Share(), more) == [10]


def test_entropy_bound_takes_the_surest_up_to_the_bound_and_at_least_one() -> None:
    found = candidates(0.1, 0.1, 0.1, entropy=[0.06, 0.5, 0.03])
    assert choose(Unmasking("entropy_bound", entropy_bound=0.1), Share(), found) == [10, 12]
    assert choose(Unmasking("entropy_bound", entropy_bound=0.01), Share(), found) == [12]
    assert choose(Unmasking("entropy_bound", entropy_bound=9), Share(), found) == [10, 11, 12]


def test_even_shares_give_their_remainder_to_the_first_passes() -> None:
    assert run(Unmasking("quota", steps=12), BlockState(16, 2, 16)) == [
        (0, 3), (1, 3), (2, 3), (3, 3), (4, 2), (5, 2)
    ]  # fmt: skip
    assert run(Unmasking("sequential"), BlockState(3, 4, 3)) == [(0, 1), (1, 1), (2, 1)]


def test_passes_whose_share_is_nothing_are_skipped() -> None:
    trace = run(Unmasking("quota", steps=64, schedule="linear"), BlockState(64, 1, 64))
    assert trace[0] == (1, 1)
    assert trace[-1] == (63, 2)
    assert len(trace) == 63
    sparse = run(Unmasking("quota", steps=10**6, schedule="linear"), BlockState(4, 1, 4))
    assert [count for _, count in sparse] == [1, 1, 1, 1] or sum(count for _, count in sparse) == 4


def test_independent_draws_run_only_passes_that_commit() -> None:
    rule = Unmasking("random", steps=16, schedule="linear", independent=True)
    trace = run(rule, BlockState(32, 1, 32))
    assert sum(count for _, count in trace) == 32
    assert all(count for _, count in trace)
    assert trace[-1][0] <= 15


def test_what_a_bounded_threshold_leaves_is_looked_at_in_the_next_pass() -> None:
    rule, block = Unmasking(threshold=0.7, steps=4), BlockState(8, 1, 8)
    assert share(rule, block, 0, 8).num == 2
    assert share(rule, block, 1, 7).num == 3
    assert share(rule, block, 3, 5).num == 5
    assert run(rule, BlockState(8, 1, 8), score=0.9) == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert run(rule, BlockState(8, 1, 8), score=0.1) == [(i, 1) for i in range(8)]


@pytest.mark.parametrize("eps", [1e-3, 1e-2])
def test_linear_shares_are_those_of_a_float32_time_grid(eps: float) -> None:
    for steps in (3, 9, 16, 20, 63, 64):
        grid = torch.linspace(1, eps, steps + 1)
        rule = Unmasking("entropy", steps=steps, schedule="linear", eps=eps)
        for number in range(steps - 1):
            for num_open in (1, 7, 16, 33, 34, 45, 51, 64):
                want = int(torch.tensor(float(num_open)) * (1 - grid[number + 1] / grid[number]))
                assert share(rule, BlockState(64, 1, 64), number, num_open).num == want


@given(
    kind=st.sampled_from(KINDS),
    steps=st.none() | st.integers(1, 80),
    schedule=st.sampled_from(("even", "linear")),
    bound=st.sampled_from(("most", "least")),
    independent=st.booleans(),
    num_blocks=st.integers(1, 4),
    num_open=st.integers(1, 32),
    score=st.floats(0, 1),
)
def test_every_rule_ends_and_no_pass_is_run_for_nothing(
    kind, steps, schedule, bound, independent, num_blocks, num_open, score
) -> None:
    rule = Unmasking(
        kind, steps=steps, schedule=schedule, steps_bound=bound, independent=independent, entropy_bound=0.3
    )
    trace = run(rule, BlockState(32, num_blocks, num_open), score)
    assert all(count >= 1 for _, count in trace)
    assert sum(count for _, count in trace) == num_open
    assert [number for number, _ in trace] == sorted({number for number, _ in trace})


def test_nothing_open_commits_nothing() -> None:
    for kind in KINDS:
        assert choose(Unmasking(kind), Share(0), []) == []
        assert next_pass(Unmasking(kind), BlockState(8, 1, 0), 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_nothing_commits_nothing(kind) -> None:
    assert choose(Unmasking(kind), Share(0), candidates(0.99, 0.9)) == []
