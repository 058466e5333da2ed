"""Controllers decide, loops perform: the vocabulary between the two.

A controller is plain Python: no I/O, no threads, no clock, no randomness of its own. A loop
delivers every event due at one instant, in one fixed order, and then asks once for effects. Two
loops drive the same controllers: `core.runtime.loop.LiveLoop` and `core.sim.simulator.Simulator`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Message:
    """Somebody (a front end, another controller) says `body`."""

    sender: str
    body: Any


@dataclass(frozen=True, slots=True)
class Done:
    """The `Run` with this id finished on `lane` with `result`."""

    lane: str
    run_id: int
    result: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """The `Run` with this id ended without a result. `lost` says that the executor itself is gone."""

    lane: str
    run_id: int
    error: str
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Timer:
    """The time asked for by `WakeAt(tag=...)` has come."""

    tag: str


@dataclass(frozen=True, slots=True)
class Run:
    """Do `op(args)` on `lane`. A lane is FIFO, one at a time. `args` is small frozen data.

    `run_id` is the controller's own number, unique among its runs; it comes back in `Done`/`Failed`.
    """

    lane: str
    run_id: int
    op: str
    args: Any


@dataclass(frozen=True, slots=True)
class Send:
    """Tell `to` (another controller, or a sink outside such as the gateway) `body`."""

    to: str
    body: Any


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Deliver `Timer(tag)` at `time_s` on the loop's clock. Asking again for a tag replaces the time.

    An infinite time takes the wish back.
    """

    time_s: float
    tag: str


Event = Message | Done | Failed | Timer
Effect = Run | Send | WakeAt


class Controller(Protocol):
    """State plus policy. `observe` folds facts in; `decide` plans and commits. Neither may block."""

    def observe(self, event: Event, now: float) -> None: ...

    def decide(self, now: float) -> Iterable[Effect]: ...
