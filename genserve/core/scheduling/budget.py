"""Token budget batching: how many prompt tokens ride along with the decodes of one step.

Decodes come first and are never displaced; what the budget leaves goes to prefills in order
(Sarathi-Serve's stall-free batching). A *divisible* prefill (autoregressive, chunked) takes what is
left; an *indivisible* one (a diffusion model's) runs whole or waits. Pure: asking twice gives the
same plan, and only as much of the queue is looked at as the budget admits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillNeed:
    """A prefill that could run: `num_tokens` still to compute. `key` is the caller's own handle."""

    key: object
    num_tokens: int
    divisible: bool = True


@dataclass(frozen=True, slots=True)
class PrefillGrant:
    """`num_tokens` of the prefill `key` run in this step."""

    key: object
    num_tokens: int


def plan_prefills(
    budget_tokens: int,
    decode_tokens: int,
    needs: Iterable[PrefillNeed],
    has_room: Callable[[PrefillNeed], bool] = lambda need: True,
) -> tuple[PrefillGrant, ...]:
    """Share out what `decode_tokens` leave of `budget_tokens` among `needs`, first come first served.

    `has_room(need)` says whether memory admits the prefill besides those granted before it: it is asked
    once for each, in order, and may count what it has admitted. The first that finds no room, or that is
    indivisible and larger than what is left, ends the plan: nobody overtakes it. Idle rule: an indivisible
    prefill that nothing else would run beside is admitted whatever its size, or it would wait for ever.
    """
    left = budget_tokens - decode_tokens
    grants: list[PrefillGrant] = []
    if left <= 0 and decode_tokens > 0:
        return ()
    for need in needs:
        take = need.num_tokens if not need.divisible else min(need.num_tokens, left)
        idle = decode_tokens == 0 and not grants
        if (take > left and not idle) or take <= 0 or not has_room(need):
            break
        grants.append(PrefillGrant(need.key, take))
        left -= take
        if left <= 0:
            break
    return tuple(grants)
