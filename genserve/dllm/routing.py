"""Which engine a request or a block's prefill goes to. Pure; sees engines only as the dispatcher's ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Routing = Literal["least_outstanding", "round_robin", "sticky"]


class EngineView(NamedTuple):
    """One engine as the dispatcher knows it.

    has_room     memory and a slot are free for the request at hand.
    may_wait     without room, it may still wait there.
    outstanding_tokens  prefill tokens assigned and not yet run.
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
