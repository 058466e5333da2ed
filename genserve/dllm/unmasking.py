"""Which open positions of a block a pass commits, as a pure function of rule, pass number and scores.

Owns the rules of LLaDA, Fast-dLLM, Dream and LLaDA2 and their step schedules. It knows positions and
numbers: no logits, no requests, no caches. Ranking is by score, largest first, ties by lower position.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from genserve.dllm.request import Unmasking


class Candidate(NamedTuple):
    """An open position and how sure its proposed token is; a rule reads only the scores it needs.

    confidence  probability of the token. margin: of the likeliest minus the second likeliest.
    entropy     of the position's distribution, nats.
    noise       the position's uniform draw in this pass.
    """

    position: int
    confidence: float
    margin: float = 0.0
    entropy: float = 0.0
    noise: float = 0.0


@dataclass(slots=True)
class BlockState:
    """A block under way. `num_passes_open` and `num_passes_full` count the passes that were run on it.

    length        its positions; `num_blocks` of the answer share the rule's `steps`.
    num_open_at_start  its open positions before the first pass.
    next_pass     number of the next pass, unless it would commit nothing and is skipped.
    num_passes_open, num_passes_full  passes that began with, and without, open positions.
    """

    length: int
    num_blocks: int
    num_open_at_start: int
    next_pass: int = 0
    num_passes_open: int = 0
    num_passes_full: int = 0


class Share(NamedTuple):
    """What a pass may commit by schedule: `num` positions, or each with probability `chance`."""

    num: int | None = None
    chance: float | None = None


def needs_margin(rule: Unmasking) -> bool:
    return rule.kind == "margin"


def needs_entropy(rule: Unmasking) -> bool:
    return rule.kind in ("entropy", "entropy_bound")


def needs_noise(rule: Unmasking) -> bool:
    return rule.kind == "random"


def share(rule: Unmasking, block: BlockState, pass_number: int, num_open: int) -> Share:
    """What the schedule gives this pass; an empty `Share` for rules without one.

    The last scheduled pass, and any beyond it, gets everything. For threshold with `steps` the count
    is the most positions it looks at, or the fewest it commits (`steps_bound`).
    """
    kind = rule.kind
    if kind in ("factor", "entropy_bound") or (kind == "threshold" and rule.steps is None):
        return Share()
    num_steps = _num_steps(rule, block)
    if kind == "threshold" and rule.steps_bound == "least":
        return Share(_even(block.length, num_steps, min(pass_number, num_steps - 1)))
    if kind == "random" and rule.independent:
        last = pass_number >= num_steps - 1
        return Share(chance=1.0 if last else _linear_chance(num_steps, rule.eps, pass_number))
    if pass_number >= num_steps - 1:
        return Share(num_open)
    if kind == "threshold":
        # All shares so far, less what was committed: its own share and what earlier passes left.
        base, extra = divmod(block.num_open_at_start, num_steps)
        so_far = base * (pass_number + 1) + min(extra, pass_number + 1)
        return Share(min(num_open, max(0, so_far - (block.num_open_at_start - num_open))))
    if rule.schedule == "even":
        return Share(min(num_open, _even(block.num_open_at_start, num_steps, pass_number)))
    return Share(int(_f32(num_open * _linear_chance(num_steps, rule.eps, pass_number))))


def next_pass(
    rule: Unmasking,
    block: BlockState,
    num_open: int,
    draws: Callable[[int], Sequence[float]] = lambda pass_number: (),
) -> int:
    """Number of the next pass that can commit something, from `block.next_pass` on.

    `draws(pass_number)` are the open positions' uniforms; only `independent` rules ask for them.
    """
    number = block.next_pass
    if num_open == 0:
        return number
    if rule.kind == "random" and rule.independent:
        while True:
            chance = share(rule, block, number, num_open).chance
            if chance is None or any(_f32(draw) < chance for draw in draws(number)):
                return number
            number += 1
    if rule.schedule == "linear" and rule.steps is not None and rule.kind != "threshold":
        # While fewer than one position is due nothing is: don't count through those passes.
        num_steps = _num_steps(rule, block)
        number = max(number, min(num_steps - 1, int(num_steps / (1 - rule.eps)) - num_open - 2))
    while share(rule, block, number, num_open).num == 0:
        number += 1
    return number


def choose(rule: Unmasking, due: Share, candidates: Sequence[Candidate]) -> list[int]:
    """Positions to commit, rising, of candidates in rising position order.

    With candidates and a share that is not 0 there is at least one (`independent` rules aside).
    """
    if not candidates or due.num == 0:
        return []
    kind = rule.kind
    if due.chance is not None:
        return [c.position for c in candidates if _f32(c.noise) < due.chance]
    if kind == "sequential":
        return [c.position for c in candidates[: due.num]]
    ranked = sorted(candidates, key=_SCORES[kind], reverse=True)  # stable: ties stay in position order
    if kind == "threshold":
        num = _num_sure(rule, due, ranked)
    elif kind == "factor":
        num = _num_factor(rule, ranked)
    elif kind == "entropy_bound":
        num = _num_bounded(rule, ranked)
    else:
        num = len(ranked) if due.num is None else due.num
    return sorted(c.position for c in ranked[:num])


def _confidence(candidate: Candidate) -> float:
    return candidate.confidence


def _less_entropy(candidate: Candidate) -> float:
    return -candidate.entropy


_SCORES: dict[str, Callable[[Candidate], float]] = {
    "threshold": _confidence,
    "factor": _confidence,
    "quota": _confidence,
    "random": lambda candidate: candidate.noise,
    "margin": lambda candidate: candidate.margin,
    "entropy": _less_entropy,
    "entropy_bound": _less_entropy,
}


def _num_sure(rule: Unmasking, due: Share, ranked: list[Candidate]) -> int:
    most, least = len(ranked), rule.min_commits
    if due.num is not None:
        if rule.steps_bound == "most":
            most = min(most, due.num)
        else:
            least = due.num
    num = 0
    for candidate in ranked[:most]:
        sure = candidate.confidence
        if not (sure > rule.threshold if rule.strict else sure >= rule.threshold):
            break
        num += 1
    return max(num, min(least, most))


def _num_factor(rule: Unmasking, ranked: list[Candidate]) -> int:
    for at in range(1, len(ranked)):
        if ranked[at].confidence < 1 - rule.factor / (at + 2):
            last_is_first_to_fail = at == len(ranked) - 1 and rule.factor_rule == "fast_dllm"
            return at + 1 if last_is_first_to_fail else at
    return len(ranked)


def _num_bounded(rule: Unmasking, ranked: list[Candidate]) -> int:
    total = 0.0
    for at, candidate in enumerate(ranked):
        total += candidate.entropy
        if total > rule.entropy_bound:
            return max(1, at)
    return len(ranked)


def _num_steps(rule: Unmasking, block: BlockState) -> int:
    if rule.steps is None:
        return max(1, block.num_open_at_start)
    return max(1, rule.steps // block.num_blocks)


def _even(num_positions: int, num_steps: int, pass_number: int) -> int:
    base, extra = divmod(num_positions, num_steps)
    return base + (pass_number < extra)


def _f32(value: float) -> float:
    """Rounded to float32, in which Dream computes its schedule."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _linear_time(num_steps: int, eps: float, index: int) -> float:
    """`linspace(1, eps, num_steps + 1)[index]` in float32, counted from the nearer end.

    The product is not rounded before the sum: CPUs compute the two as one fused operation.
    """
    step = _f32(_f32(_f32(eps) - 1.0) / num_steps)
    if index < (num_steps + 1) // 2:
        return _f32(1.0 + step * index)
    return _f32(_f32(eps) - step * (num_steps - index))


def _linear_chance(num_steps: int, eps: float, pass_number: int) -> float:
    now, then = (_linear_time(num_steps, eps, pass_number + after) for after in (0, 1))
    return _f32(1.0 - _f32(then / now))
