"""The live loop: the same controllers on an asyncio loop, their runs handed to executors.

Owns the wiring between controllers, lanes and the outside; must not know any front end. Everything
that becomes due before the loop gets its turn counts as one instant (see `core.dispatch`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from genserve.core.control import Controller, Done, Effect, Failed, Run, Send, Timer, WakeAt
from genserve.core.dispatch import Dispatch, LogEntry

Sink = Callable[[Any], None]


class Executor(Protocol):
    """Performs the runs of one or more lanes, each lane first in first out, one at a time."""

    def submit(self, run: Run, report: Callable[[Done | Failed], None]) -> None:
        """Queue `run`; call `report` once, on the event loop's thread, with how it ended."""
        ...

    async def aclose(self) -> None:
        """Let the current run end (an actor is killed if it takes too long), drop the rest, and free
        threads or actors."""
        ...


class LiveLoop:
    """Drives `controllers`; `executors` are keyed by lane, `sinks` by the name sent to.

    All methods belong to the thread of the asyncio loop. `on_fatal` is told when a controller
    raises: that is a bug, the loop stops, and nobody must wait for it any longer.
    """

    def __init__(
        self,
        controllers: Mapping[str, Controller],
        executors: Mapping[str, Executor],
        sinks: Mapping[str, Sink] | None = None,
        log: list[LogEntry] | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._dispatch = Dispatch(controllers, log)
        self._executors = dict(executors)
        self._sinks = dict(sinks or {})
        self._on_fatal = on_fatal
        self._aio = asyncio.get_running_loop()
        self._timers: dict[tuple[str, str], asyncio.TimerHandle] = {}
        self._lanes: dict[str, tuple[int, float]] = {}  # runs on it, and since when the first of them runs
        self._flush_asked = False
        self.fatal: BaseException | None = None
        self._closed = False

    def post(self, to: str, body: Any, sender: str = "outside") -> None:
        """Have `sender` tell `to` `body`, as soon as the loop gets its turn."""
        if self.fatal is not None:
            raise self.fatal
        self._dispatch.message(to, sender, body)
        self._ask_flush()

    def set_sink(self, name: str, sink: Sink) -> None:
        """Have what is sent to `name` taken by `sink` from now on."""
        self._sinks[name] = sink

    def run_age_s(self) -> float:
        """For how long the oldest run at hand has been running; 0 if there is none."""
        now = self._aio.time()
        return max((now - since_s for _, since_s in self._lanes.values()), default=0.0)

    async def aclose(self) -> None:
        """Stop timers and executors. Controllers hear nothing further."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for executor in set(self._executors.values()):
            await executor.aclose()

    def _ask_flush(self) -> None:
        if not self._flush_asked and not self._closed:
            self._flush_asked = True
            self._aio.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_asked = False
        if self._closed or self.fatal is not None:
            return
        now = self._aio.time()
        try:
            while self._dispatch.pending:
                for name, effect in self._dispatch.deliver(now):
                    self._perform(name, effect, now)
        except Exception as error:
            self.fatal = error
            if self._on_fatal is None:
                raise
            self._on_fatal(error)

    def _perform(self, name: str, effect: Effect, now: float) -> None:
        if isinstance(effect, Run):
            executor = self._executors.get(effect.lane)
            if executor is None:
                raise KeyError(f"{name} asked for lane {effect.lane!r}, which no executor serves")
            num_runs, since_s = self._lanes.get(effect.lane, (0, now))
            self._lanes[effect.lane] = (num_runs + 1, since_s)
            executor.submit(effect, lambda event: self._report(name, event))
        elif isinstance(effect, Send):
            if effect.to in self._dispatch:
                self._dispatch.message(effect.to, name, effect.body)
            else:
                sink = self._sinks.get(effect.to)
                if sink is None:
                    raise KeyError(f"{name} sent to {effect.to!r}, which is no controller and no sink")
                sink(effect.body)
        elif isinstance(effect, WakeAt):
            pending = self._timers.pop((name, effect.tag), None)
            if pending is not None:
                pending.cancel()
            if effect.time_s == math.inf:
                return
            if effect.time_s <= now:
                self._dispatch.event(name, Timer(effect.tag))
            else:
                self._timers[name, effect.tag] = self._aio.call_at(
                    effect.time_s, self._ring, name, effect.tag
                )

    def _report(self, name: str, event: Done | Failed) -> None:
        num_runs, _ = self._lanes.pop(event.lane)
        if num_runs > 1:
            self._lanes[event.lane] = (num_runs - 1, self._aio.time())
        if not self._closed and self.fatal is None:
            self._dispatch.event(name, event)
            self._ask_flush()

    def _ring(self, name: str, tag: str) -> None:
        del self._timers[name, tag]
        self._dispatch.event(name, Timer(tag))
        self._ask_flush()
