"""The simulated loop: the product's own controllers on a virtual clock.

Prices each `Run` with a `CostModel`, invents its result with an `OutcomeModel`, and obeys the same
dispatch rule as the live loop, so that both give the same event log for the same inputs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from typing import Any

from genserve.core.control import Controller, Done, Effect, Failed, Run, Send, Timer, WakeAt
from genserve.core.cost import CostModel, OutcomeModel
from genserve.core.dispatch import Dispatch, LogEntry

Sink = Callable[[float, Any], None]


class Simulator:
    """Runs `controllers` until nothing is due. `sinks` receive what is sent outside, with the time."""

    def __init__(
        self,
        controllers: Mapping[str, Controller],
        cost: CostModel,
        outcome: OutcomeModel,
        sinks: Mapping[str, Sink] | None = None,
        log: list[LogEntry] | None = None,
    ) -> None:
        self._dispatch = Dispatch(controllers, log)
        self._cost = cost
        self._outcome = outcome
        self._sinks = dict(sinks or {})
        self._heap: list[tuple[float, int, str, Any]] = []
        self._order = 0
        self._lane_free_s: dict[str, float] = {}
        self._timers: dict[tuple[str, str], float] = {}
        self._void: set[int] = set()
        self._gone: set[str] = set()
        self.now_s = 0.0

    @property
    def num_events(self) -> int:
        return self._dispatch.num_events

    def post(self, to: str, body: Any, at_s: float = 0.0, sender: str = "outside") -> None:
        """Have `sender` tell `to` `body` at `at_s` (never before the present)."""
        self._push(at_s, to, (sender, body))

    def remove(self, name: str) -> None:
        """The process of a controller dies: its runs never end, and nothing that is sent to it arrives."""
        self._dispatch.remove(name)
        self._gone.add(name)
        for key in [key for key in self._timers if key[0] == name]:
            del self._timers[key]
        for _, number, to, what in self._heap:
            if to == name and type(what) is Run:
                self._void.add(number)
                self._lane_free_s.pop(what.lane, None)

    def add(self, name: str, controller: Controller) -> None:
        """A new controller, or a new process in the place of one that died."""
        self._dispatch.add(name, controller)
        self._gone.discard(name)

    def run(self, before_s: float = float("inf")) -> float:
        """Advance until nothing is due before `before_s`; returns the time of the last event."""
        heap, dispatch = self._heap, self._dispatch
        while heap and heap[0][0] < before_s:
            now = self.now_s = heap[0][0]
            while heap and heap[0][0] == now:
                _, number, to, what = heapq.heappop(heap)
                if number in self._void:
                    self._void.discard(number)
                elif to not in self._gone:
                    self._arrive(to, what, now)
            while dispatch.pending:
                for name, effect in dispatch.deliver(now):
                    self._perform(name, effect, now)
        return self.now_s

    def _push(self, at_s: float, to: str, what: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), self._order, to, what))

    def _arrive(self, to: str, what: Any, now: float) -> None:
        if type(what) is tuple:
            self._dispatch.message(to, *what)
        elif type(what) is Run:
            result = self._outcome.outcome(what)
            is_event = isinstance(result, (Done, Failed))
            self._dispatch.event(to, result if is_event else Done(what.lane, what.run_id, result))
        elif self._timers.get((to, what.tag)) == now:
            del self._timers[to, what.tag]
            self._dispatch.event(to, what)

    def _perform(self, name: str, effect: Effect, now: float) -> None:
        if isinstance(effect, Run):
            price_s = self._cost.price_s(effect)
            if not price_s > 0:
                raise ValueError(f"a run must take time: {effect.op} was priced at {price_s} s")
            end_s = max(now, self._lane_free_s.get(effect.lane, 0.0)) + price_s
            self._lane_free_s[effect.lane] = end_s
            self._push(end_s, name, effect)
        elif isinstance(effect, Send):
            if effect.to in self._dispatch:
                self._dispatch.message(effect.to, name, effect.body)
            elif effect.to not in self._gone:
                sink = self._sinks.get(effect.to)
                if sink is None:
                    raise KeyError(f"{name} sent to {effect.to!r}, which is no controller and no sink")
                sink(now, effect.body)
        elif isinstance(effect, WakeAt):
            if effect.time_s == math.inf:
                self._timers.pop((name, effect.tag), None)
            elif effect.time_s <= now:
                self._timers.pop((name, effect.tag), None)
                self._dispatch.event(name, Timer(effect.tag))
            else:
                self._timers[name, effect.tag] = effect.time_s
                self._push(effect.time_s, name, Timer(effect.tag))
