"""The order in which controllers hear of events: one rule, shared by both loops.

All events due at one instant are delivered to their controller in a fixed total order (timers,
then results by lane and run id, then messages by sender and number), and then the controller
decides once. What controllers send each other at that instant is delivered in a further round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from genserve.core.control import Controller, Done, Effect, Event, Failed, Message, Timer


class LogEntry(NamedTuple):
    """One fact heard (`direction` "in") or effect asked for ("out") by `controller` at `time_s`."""

    time_s: float
    controller: str
    direction: str
    what: Event | Effect


def _key(event: Event, number: int) -> tuple[int, str, int]:
    if isinstance(event, (Done, Failed)):
        return (1, event.lane, event.run_id)
    if isinstance(event, Timer):
        return (0, event.tag, 0)
    return (2, event.sender, number)


class Dispatch:
    """The inboxes of the controllers. `deliver` runs one round; the loop performs what it returns."""

    def __init__(self, controllers: Mapping[str, Controller], log: list[LogEntry] | None = None) -> None:
        self._controllers = dict(controllers)
        self._inbox: dict[str, list[tuple[tuple[int, str, int], Event]]] = {}
        self._num_sent: dict[str, int] = {}
        self._log = log
        self.num_events = 0

    def add(self, name: str, controller: Controller) -> None:
        """A further controller, or another one in the place of a removed one."""
        self._controllers[name] = controller

    def remove(self, name: str) -> None:
        """The controller is gone, with what it has not heard yet."""
        del self._controllers[name]
        self._inbox.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._controllers

    @property
    def pending(self) -> bool:
        return bool(self._inbox)

    def message(self, to: str, sender: str, body: Any) -> None:
        """Queue a message; messages of one sender keep their order."""
        number = self._num_sent.get(sender, 0)
        self._num_sent[sender] = number + 1
        self._put(to, Message(sender, body), number)

    def event(self, to: str, event: Event) -> None:
        """Queue a result or timer."""
        self._put(to, event, 0)

    def _put(self, to: str, event: Event, number: int) -> None:
        if to not in self._controllers:
            raise KeyError(f"no controller named {to!r}")
        self._inbox.setdefault(to, []).append((_key(event, number), event))

    def deliver(self, now: float) -> list[tuple[str, Effect]]:
        """One round: every queued event is observed, each controller concerned decides once."""
        inbox, self._inbox = self._inbox, {}
        effects: list[tuple[str, Effect]] = []
        for name in sorted(inbox) if len(inbox) > 1 else inbox:
            controller, events = self._controllers[name], inbox[name]
            if len(events) > 1:
                events.sort(key=_first)
            for _, event in events:
                if self._log is not None:
                    self._log.append(LogEntry(now, name, "in", event))
                controller.observe(event, now)
            self.num_events += len(events)
            for effect in controller.decide(now):
                if self._log is not None:
                    self._log.append(LogEntry(now, name, "out", effect))
                effects.append((name, effect))
        return effects


def _first(item: tuple[tuple[int, str, int], Event]) -> tuple[int, str, int]:
    return item[0]
