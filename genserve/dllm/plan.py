"""Advice on a deployment: how many workers only prefill, which budget, from where prefills overflow.

Owns the candidates and the order among them; must not know how a run is simulated (`dllm.simulate` does)
or shown. All candidates serve the same requests with the same passes. They are halved successively: short
runs for all, longer ones for the better, the full workload for the last few. The best of each mode
(colocated, disaggregated, hybrid) stays to the end, so that the advice can be weighed against the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from genserve.core.errors import ConfigError
from genserve.core.metrics.summary import SLO, Summary, summarize
from genserve.core.workload.workload import Workload
from genserve.dllm.scenario import Scenario
from genserve.dllm.simulate import simulate

Objective = Literal["mean", "p99", "goodput"]
Mode = Literal["colocated", "disaggregated", "hybrid"]

# With each round a third stays and runs three times as long, up to `_NUM_LAST` candidates on all requests.
_SHRINK = 3
_NUM_LAST = 6
_MIN_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class Candidate:
    """One deployment. `overflow_tokens` is None where prefills never overflow, or there is no prefill worker."""

    num_prefill_workers: int
    budget_tokens: int
    overflow_tokens: int | None = None

    @property
    def mode(self) -> Mode:
        if not self.num_prefill_workers:
            return "colocated"
        return "disaggregated" if self.overflow_tokens is None else "hybrid"


@dataclass(frozen=True, slots=True)
class Scored:
    """What a candidate did in its longest run."""

    candidate: Candidate
    summary: Summary


@dataclass(frozen=True, slots=True)
class Plan:
    """The candidates, best first: by the number of requests they were tried with, then by the objective."""

    objective: Objective
    num_workers: int
    ranked: tuple[Scored, ...]

    @property
    def best(self) -> Candidate:
        return self.ranked[0].candidate

    @property
    def config(self) -> dict[str, int | str]:
        """The keys of `DllmConfig` that the advice sets."""
        best = self.best
        keys: dict[str, int | str] = {
            "num_workers": self.num_workers,
            "num_prefill_workers": best.num_prefill_workers,
            "budget_tokens": best.budget_tokens,
        }
        if best.num_prefill_workers:
            keys["overflow_tokens"] = "never" if best.overflow_tokens is None else best.overflow_tokens
        return keys


# Told before each run: its number, how many there will be, the candidate, its requests.
OnRun = Callable[[int, int, Candidate, int], None]


def candidates(
    num_workers: int, splits: Iterable[int], budgets: Sequence[int], overflows: Sequence[int | None]
) -> tuple[Candidate, ...]:
    """Every combination that differs: colocated ones have no overflow, disaggregated ones no use for a budget."""
    found: dict[Candidate, None] = {}
    for num_prefill in splits:
        if not 0 <= num_prefill < num_workers:
            raise ConfigError(
                f"num_prefill_workers: {num_prefill} of {num_workers} workers; 0 to {num_workers - 1} are possible"
            )
        for overflow in overflows if num_prefill else (None,):
            for budget in budgets[:1] if num_prefill and overflow is None else budgets:
                found[Candidate(num_prefill, budget, overflow)] = None
    return tuple(found)


def rounds(num_candidates: int, num_requests: int) -> list[tuple[int, int]]:
    """(candidates kept, requests each) of every round; the last one has all requests."""
    found = [(min(num_candidates, _NUM_LAST), num_requests)]
    while found[0][0] < num_candidates:
        kept, length = found[0]
        shorter = max(_MIN_REQUESTS, length // _SHRINK)
        if 2 * shorter > length:  # a round that would save little
            found[0] = (num_candidates, length)
        else:
            found.insert(0, (min(num_candidates, kept * _SHRINK), shorter))
    return found


def plan(
    scenario: Scenario,
    tried: Sequence[Candidate],
    rate_per_s: float,
    num_workers: int,
    objective: Objective = "p99",
    slo: SLO | None = None,
    on_run: OnRun | None = None,
) -> Plan:
    """Simulate `tried` at `rate_per_s` and rank them; `slo` is what "goodput" counts.

    Raises `ConfigError` for nothing to try, and for goodput without an SLO.
    """
    if not tried:
        raise ConfigError("num_prefill_workers, budget_tokens: there is no candidate to try")
    if objective == "goodput" and slo is None:
        raise ConfigError("objective: goodput needs an slo, e.g. e2e=20")
    offered = scenario.workload.at_rate(rate_per_s)
    schedule = rounds(len(tried), len(offered.requests))
    num_runs = sum([kept for kept, _ in schedule])
    left, ranked, run = list(tried), list[Scored](), 0
    for kept, num_requests in schedule:
        left = _survivors(left, kept)
        scored = []
        for candidate in left:
            run += 1
            if on_run is not None:
                on_run(run, max(num_runs, run), candidate, num_requests)
            scored.append(_run(scenario, offered.first(num_requests), candidate, num_workers, slo))
        scored.sort(key=lambda each: _order(each, objective))
        left = [each.candidate for each in scored]
        ranked = scored + [each for each in ranked if each.candidate not in left]
    return Plan(objective, num_workers, tuple(ranked))


def _survivors(ordered: list[Candidate], num: int) -> list[Candidate]:
    """The first `num`, and the first of each mode."""
    firsts: dict[Mode, Candidate] = {}
    for candidate in ordered:
        firsts.setdefault(candidate.mode, candidate)
    return [each for index, each in enumerate(ordered) if index < num or firsts[each.mode] is each]


def _run(
    scenario: Scenario, workload: Workload, candidate: Candidate, num_workers: int, slo: SLO | None
) -> Scored:
    result = simulate(
        workload,
        replace(scenario.limits, budget_tokens=candidate.budget_tokens),
        scenario.cost,
        num_workers,
        params=scenario.params,
        num_masks=scenario.num_masks,
        denoising=scenario.denoising,
        num_prefill_workers=candidate.num_prefill_workers,
        overflow_tokens=candidate.overflow_tokens,
    )
    return Scored(candidate, summarize(result.timelines, duration_s=result.duration_s, slo=slo))


def _order(scored: Scored, objective: Objective) -> tuple[float, ...]:
    """Sorts best first; equals are settled by the tail, then by the fewer prefill workers and the smaller budget."""
    candidate, e2e_s = scored.candidate, scored.summary.e2e_s
    first = {
        "mean": e2e_s.mean,
        "p99": e2e_s.p99,
        "goodput": -(scored.summary.slo_attainment or 0.0),
    }[objective]
    overflow = math.inf if candidate.overflow_tokens is None else candidate.overflow_tokens
    return (first, e2e_s.p99, candidate.num_prefill_workers, candidate.budget_tokens, overflow)
