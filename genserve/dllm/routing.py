"""Which engine a request or a block's prefill goes to. Pure; sees engines only as the dispatcher's ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

Routing = Literal["least_outstanding", "round_robin", "sticky"]


class EngineView(NamedTuple):
    """One engine as the dispatcher knows it.

    has_room     memory (and where it would run, a slot) is free for the request at hand.
    may_wait     without room, it may still wait there.
    outstanding_tokens  prefill tokens assigned and not yet run (Sangam's o_w).
    """

    has_room: bool
    may_wait: bool
    outstanding_tokens: int
    num_requests: int


def choose(routing: Routing, engines: Sequence[EngineView], last: int) -> int | None:
    """The number of the engine to take, or None if the request must wait at the dispatcher.

    `last` is the choice before this one. Engines with room come first. `sticky` chooses like
    `least_outstanding`; that a request stays is the dispatcher's business. Ties go to the engine with
    fewer requests, then to the next in turn.
    """
    fit = [index for index, view in enumerate(engines) if view.has_room]
    fit = fit or [index for index, view in enumerate(engines) if view.may_wait]
    if not fit:
        return None
    turn = len(engines)
    if routing == "round_robin":
        return min(fit, key=lambda index: (index - last - 1) % turn)
    return min(
        fit,
        key=lambda index: (
            engines[index].outstanding_tokens,
            engines[index].num_requests,
            (index - last - 1) % turn,
        ),
    )


def least_loaded(engines: Sequence[EngineView], last: int, overload_tokens: float = math.inf) -> int | None:
    """Of the engines with room and less than `overload_tokens` outstanding, the one with the least.

    Sangam's LeastLoaded (Algorithm 2), for prefill workers and for overflow onto colocated ones.
    """
    open_to = [
        view._replace(has_room=view.has_room and view.outstanding_tokens < overload_tokens, may_wait=False)
        for view in engines
    ]
    return choose("least_outstanding", open_to, last)


def least_busy(engines: Sequence[EngineView], last: int) -> int | None:
    """Of the engines with room, the one with the fewest requests: where a prefilled request decodes."""
    fit = [index for index, view in enumerate(engines) if view.has_room]
    turn = len(engines)
    return min(
        fit,
        key=lambda index: (
            engines[index].num_requests,
            engines[index].outstanding_tokens,
            (index - last - 1) % turn,
        ),
        default=None,
    )
