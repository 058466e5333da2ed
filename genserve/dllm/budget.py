"""How many prefill tokens ride along with the decodes of an iteration, when prefills cannot be cut.

Owns the carry from one iteration to the next. Policies behind one interface, all pure: `plan`
takes the state of the iteration before and returns the next one.

`PaperBudget` is Sangam's Algorithm 1 as published. `SignedBudget`, the default, differs in four points.
Deviation: the balance is signed. Flooring the carry at zero forgives every iteration whose decodes
    exceed the budget, so that the paper's own bound on admitted tokens fails.
Deviation: a head that has waited long accrues a share of its own, or decodes that fill the budget
    starve prefills for ever.
Deviation: a head that waits for memory banks nothing, or the prefills then admitted come in a burst.
Deviation: an idle device is credited the iterations that it could have run empty, instead of admitting
    an oversized head for nothing.

With W iterations since prefills began to wait (credited empty ones included), D the decode tokens of each
and P the prefill tokens admitted so far, `SignedBudget` keeps, at every admission within the budget,
`P <= W * tau - sum(D) + aged`, where `aged`, the tokens admitted by the aging share, is at most
`W * share * tau`; and memory apart a head waits at most `patience + ceil(n / (share * tau))` iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

from genserve.core.scheduling.budget import PrefillGrant, PrefillNeed, plan_prefills

# Of shares that are no binary fractions, in tokens.
_ROUNDING = 1e-6

HasRoom = Callable[[PrefillNeed], bool]


class BudgetState(NamedTuple):
    """What one iteration leaves to the next.

    balance      tokens in hand; below zero is a debt.
    num_waited   iterations since a prefill was last admitted, with one waiting and room for it.
    """

    balance: float = 0.0
    num_waited: int = 0


class BudgetPlan(NamedTuple):
    """The prefills to run. `num_iterations` counts this one and the empty ones credited before it."""

    grants: tuple[PrefillGrant, ...]
    state: BudgetState
    num_iterations: int = 1
    num_aged_tokens: int = 0


class BudgetPolicy(Protocol):
    """Decides which of the waiting prefills join the decodes of an iteration."""

    def plan(
        self, state: BudgetState, decode_tokens: int, needs: Iterable[PrefillNeed], has_room: HasRoom
    ) -> BudgetPlan:
        """Prefills in order from the head of `needs`, all indivisible, each admitted only if it `has_room`."""
        ...


def _always(need: PrefillNeed) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class PaperBudget:
    """Algorithm 1: what is left of `budget_tokens` is carried on, never a debt."""

    budget_tokens: int

    def plan(
        self,
        state: BudgetState,
        decode_tokens: int,
        needs: Iterable[PrefillNeed],
        has_room: HasRoom = _always,
    ) -> BudgetPlan:
        waiting = iter(needs)
        head = next(waiting, None)
        if head is None:
            return BudgetPlan((), BudgetState())
        budget = self.budget_tokens + int(state.balance)
        grants = plan_prefills(budget, decode_tokens, chain((head,), waiting), has_room)
        left = budget - decode_tokens - sum([grant.num_tokens for grant in grants])
        return BudgetPlan(grants, BudgetState(max(left, 0)))


@dataclass(frozen=True, slots=True)
class CapBudget:
    """Prefill workers (Sangam §4.2): what `cap_tokens` hold, the first prefill in any case. Nothing is carried."""

    cap_tokens: int

    def plan(
        self,
        state: BudgetState,
        decode_tokens: int,
        needs: Iterable[PrefillNeed],
        has_room: HasRoom = _always,
    ) -> BudgetPlan:
        return BudgetPlan(plan_prefills(self.cap_tokens, 0, needs, has_room), BudgetState())


@dataclass(frozen=True, slots=True)
class SignedBudget:
    """A signed balance, and for a head that waited `patience` iterations a `share` of the budget.

    When no prefill waits, credit is cleared and a debt repaid by what decodes leave of the budget.
    """

    budget_tokens: int
    patience: int = 16
    share: float = 0.25

    def plan(
        self,
        state: BudgetState,
        decode_tokens: int,
        needs: Iterable[PrefillNeed],
        has_room: HasRoom = _always,
    ) -> BudgetPlan:
        waiting = iter(needs)
        head = next(waiting, None)
        fresh = self.budget_tokens - decode_tokens
        if head is None:
            return BudgetPlan((), BudgetState(min(0.0, state.balance + max(0, fresh))))
        balance = state.balance + fresh
        num_iterations, size = 1, head.num_tokens
        if decode_tokens == 0 and size > balance:
            missing = -(-(size - balance) // self.budget_tokens)
            balance += missing * self.budget_tokens
            num_iterations += int(missing)
        num_waited = state.num_waited + 1
        share_tokens = self.share * (num_waited - self.patience) * self.budget_tokens
        blocked = False

        def room(need: PrefillNeed) -> bool:
            nonlocal blocked
            blocked = not has_room(need)
            return not blocked

        grants: tuple[PrefillGrant, ...] = ()
        num_aged = 0
        if size <= balance:
            grants = plan_prefills(int(balance) + decode_tokens, decode_tokens, chain((head,), waiting), room)
        elif size <= share_tokens + _ROUNDING and room(head):
            grants, num_aged = (PrefillGrant(head.key, size),), size
        balance -= sum([grant.num_tokens for grant in grants])
        if blocked:
            balance = min(state.balance, balance)
        if grants:
            num_waited = 0
        elif blocked:
            num_waited = state.num_waited
        num_iterations = num_iterations if grants else 1
        return BudgetPlan(grants, BudgetState(balance, num_waited), num_iterations, num_aged)
