"""The deficit budget over many iterations: its bound, its clearing rules, and that nobody starves."""

from __future__ import annotations

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from genserve.core.scheduling.budget import PrefillNeed
from genserve.dllm.budget import BudgetState, PaperBudget, SignedBudget

TAUS = st.integers(1, 200)
SIZES = st.lists(st.integers(1, 900), min_size=1, max_size=30)
# Long stretches of one load, and single iterations.
DECODES = st.lists(
    st.tuples(st.sampled_from([0, 0, 30, 90, 150, 400]), st.integers(1, 12)), min_size=1, max_size=15
).map(lambda runs: [tokens for tokens, count in runs for _ in range(count)])


@st.composite
def policies(draw):
    share = draw(st.sampled_from([0.1, 0.25, 1.0]))
    return SignedBudget(draw(TAUS), patience=draw(st.integers(0, 20)), share=share)


patient = settings(max_examples=60, deadline=None)


class Run:
    """Iterations with prefills that wait from the first to the last (`sizes` repeats for ever)."""

    def __init__(self, policy, sizes):
        self.policy, self.sizes = policy, sizes
        self.state = BudgetState()
        self.num_iterations = self.num_admitted = self.admitted = self.aged = self.decoded = 0

    def queue(self):
        number = self.num_admitted
        while True:
            yield PrefillNeed(number, self.sizes[number % len(self.sizes)], False)
            number += 1

    def iterate(self, decode_tokens, has_room=lambda need: True):
        plan = self.policy.plan(self.state, decode_tokens, self.queue(), has_room)
        assert [grant.key for grant in plan.grants] == list(
            range(self.num_admitted, self.num_admitted + len(plan.grants))
        )
        self.state = plan.state
        self.num_iterations += plan.num_iterations if isinstance(self.policy, SignedBudget) else 1
        self.num_admitted += len(plan.grants)
        self.admitted += sum(grant.num_tokens for grant in plan.grants)
        self.aged += plan.num_aged_tokens
        self.decoded += decode_tokens
        return plan

    @property
    def bound(self):
        return self.num_iterations * self.policy.budget_tokens - self.decoded


@patient
@given(policies(), SIZES, DECODES)
def test_amortised_bound(policy, sizes, decodes):
    """P <= W tau - sum(D) + aged at every admission within the budget; aged <= W share tau at any time."""
    run = Run(policy, sizes)
    for decode_tokens in decodes:
        plan = run.iterate(decode_tokens)
        if plan.grants and not plan.num_aged_tokens:
            assert run.admitted <= run.bound + run.aged + 1e-6
        assert run.aged <= run.num_iterations * policy.share * policy.budget_tokens + 1e-6
        # The balance is the bound's slack, nothing is forgiven or invented.
        assert run.state.balance == pytest.approx(run.bound - run.admitted)


@patient
@given(policies(), SIZES, DECODES)
def test_beside_decodes_nothing_is_admitted_beyond_the_budget(policy, sizes, decodes):
    run = Run(policy, sizes)
    for decode_tokens in decodes:
        before = run.state.balance
        plan = run.iterate(decode_tokens)
        granted = sum(grant.num_tokens for grant in plan.grants)
        if decode_tokens and plan.grants and not plan.num_aged_tokens:
            assert granted <= before + policy.budget_tokens - decode_tokens
        if decode_tokens == 0:
            assert plan.grants, "an idle device waits for nothing"


@patient
@given(policies(), st.integers(1, 400), st.integers(0, 100_000))
def test_no_head_waits_longer_than_its_share_takes(policy, size, decode_tokens):
    run = Run(policy, [size])
    most = policy.patience + math.ceil(size / (policy.share * policy.budget_tokens) - 1e-9)
    for _ in range(3):
        assert any(run.iterate(decode_tokens).grants for _ in range(most)), "still waiting"


@patient
@given(policies(), SIZES, DECODES)
def test_a_head_without_memory_banks_nothing(policy, sizes, decodes):
    run = Run(policy, sizes)
    for decode_tokens in decodes:
        run.iterate(decode_tokens)
    head = sizes[run.num_admitted % len(sizes)]
    # Once the budget covers the head, or it has aged, only memory keeps it.
    states = [run.state]
    for decode_tokens in decodes:
        run.iterate(decode_tokens, lambda need: False)
        states.append(run.state)
    assert all(after.balance <= max(before.balance, head) for before, after in pairwise(states))
    for _ in range(200):
        run.iterate(0, lambda need: False)
    settled = run.state
    run.iterate(0, lambda need: False)
    assert run.state == settled


@patient
@given(policies(), SIZES, DECODES, DECODES)
def test_credit_is_cleared_and_debt_repaid_when_nothing_waits(policy, sizes, decodes, quiet):
    run = Run(policy, sizes)
    for decode_tokens in decodes:
        run.iterate(decode_tokens)
    state = run.state
    for decode_tokens in quiet:
        before = state
        state = policy.plan(state, decode_tokens, (), lambda need: True).state
        repaid = max(0, policy.budget_tokens - decode_tokens)
        assert state == BudgetState(min(0, before.balance + repaid))


@patient
@given(st.one_of(policies(), TAUS.map(PaperBudget)), SIZES, DECODES, st.integers(0, 5))
def test_asking_twice_gives_the_same_plan(policy, sizes, decodes, num_with_room):
    run = Run(policy, sizes)
    for decode_tokens in decodes:
        before = run.state
        room = lambda need, first=run.num_admitted: need.key < first + num_with_room  # noqa: E731
        again = policy.plan(before, decode_tokens, run.queue(), room)
        assert run.iterate(decode_tokens, room) == again


@patient
@given(TAUS, SIZES, DECODES)
def test_the_paper_s_rule_is_algorithm_1(tau, sizes, decodes):
    run = Run(PaperBudget(tau), sizes)
    deficit = 0
    for decode_tokens in decodes:
        waiting = run.queue()
        budget, count, head = tau - decode_tokens + deficit, 0, next(waiting)
        while head.num_tokens <= budget or (decode_tokens == 0 and count == 0):
            budget -= head.num_tokens
            count += 1
            head = next(waiting)
        deficit = max(budget, 0)
        assert len(run.iterate(decode_tokens).grants) == count
        assert run.state == BudgetState(deficit)
    assert run.policy.plan(run.state, 10, (), lambda need: True).state == BudgetState()


def test_the_paper_s_rule_admits_far_more_than_its_bound():
    """Decodes of 64 and 1,952 tokens in turn: what the second exceeds the budget by is forgiven."""
    paper, ours = Run(PaperBudget(1024), [900]), Run(SignedBudget(1024, share=0.0), [900])
    for iteration in range(200):
        for run in (paper, ours):
            run.iterate((64, 1952)[iteration % 2])
    assert paper.bound == ours.bound == 3_200
    assert paper.admitted == 90_000
    assert 2_700 <= ours.admitted <= 3_200 + 900  # what stood at the last admission, not after it


def test_the_paper_s_rule_starves_prefills_where_ours_does_not():
    """32 requests decode 32 positions each: exactly the budget."""
    paper, ours = Run(PaperBudget(1024), [1900]), Run(SignedBudget(1024), [1900])
    for _ in range(20_000):
        paper.iterate(32 * 32)
    assert paper.admitted == 0
    for _ in range(16 + math.ceil(1900 / 256)):
        ours.iterate(32 * 32)
    assert ours.admitted == 1900
