"""Where the tensors of all requests lie, who still needs them, and which executors hold which models.

Owns the coordinator's books; decides nothing. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from genserve.t2i.instance import Task, Value
from genserve.t2i.messages import Key


class Ledger:
    """Values by space. A value without uses is released: its keys wait here to be told to the space."""

    def __init__(self) -> None:
        self._in_space: dict[str, dict[Value, None]] = {}
        self._released: dict[str, list[Key]] = {}

    def place(self, value: Value, space: str, key: Key, refs: Any, nbytes: int) -> None:
        """The value lies in `space` under `key`; with `refs` other spaces can fetch it."""
        old = value.places.get(space)
        if old is not None and old[0] != key:
            self.release_key(space, old[0])
        value.places[space] = key, refs
        value.nbytes = nbytes
        self._in_space.setdefault(space, {})[value] = None

    def release(self, value: Value) -> None:
        """Nobody needs the tensors any more."""
        for space, (key, _) in value.places.items():
            self._in_space[space].pop(value, None)
            self.release_key(space, key)
        value.places.clear()

    def release_key(self, space: str, key: Key) -> None:
        self._released.setdefault(space, []).append(key)

    def forget_place(self, value: Value, space: str) -> None:
        """It isn't in `space` after all."""
        if value.places.pop(space, None) is not None:
            self._in_space[space].pop(value, None)

    def lose(self, space: str) -> list[Value]:
        """All of `space` is gone; what was there."""
        self._released.pop(space, None)
        values = list(self._in_space.pop(space, ()))
        for value in values:
            value.places.pop(space, None)
        return values

    def take_released(self, space: str) -> tuple[Key, ...]:
        """Keys to be told to `space` now."""
        return tuple(self._released.pop(space, ()))

    def spaces_to_tell(self) -> list[str]:
        return list(self._released)

    @property
    def num_values(self) -> int:
        return sum(len(values) for values in self._in_space.values())


@dataclass(slots=True)
class Flight:
    """One dispatched run of a task.

    reads   where each key was to be found: the space, or "" for what the lane's earlier runs were to make.
    awaits  deferred values that didn't exist yet.
    """

    run_id: int
    executor: ExecutorState
    aside: bool
    reads: dict[Key, tuple[Value, str]] = field(default_factory=dict)
    fetched: list[tuple[Value, Key]] = field(default_factory=list)
    awaits: dict[Value, Key] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    given_up: bool = False


class ExecutorState:
    """One executor: whether it is up, what it runs, which models it holds (the least recently used first)."""

    def __init__(self, name: str, space: str, budget_bytes: int | None) -> None:
        self.name, self.space, self.budget_bytes = name, space, budget_bytes
        self.up = True
        self.models: dict[str, int] = {}
        self.known: set[str] = set()  # models whose code it has
        self.flying: dict[int, Task | None] = {}  # of its lane, in order; None: something else than a task
        self.doomed: int | None = None  # the run during which it was lost
        self.num_losses = 0

    @property
    def num_tasks(self) -> int:
        return sum(task is not None for task in self.flying.values())

    @property
    def io_lane(self) -> str:
        return f"{self.name}/io"

    def use(self, model: str, num_bytes: int) -> tuple[str, ...]:
        """A run with `model` comes: which others have to go before it."""
        if not num_bytes:
            return ()
        self.models.pop(model, None)
        gone = []
        if self.budget_bytes is not None:
            held = sum(self.models.values())
            while self.models and held + num_bytes > self.budget_bytes:
                oldest = next(iter(self.models))
                held -= self.models.pop(oldest)
                gone.append(oldest)
        self.models[model] = num_bytes
        return tuple(gone)

    def lost(self) -> None:
        """Its process is gone, with everything."""
        self.doomed = next((run_id for run_id, task in self.flying.items() if task is not None), None)
        self.up = False
        self.num_losses += 1
        self.models.clear()
        self.known.clear()


def reachable(value: Value, home: str) -> bool:
    """Whether any executor can get at the tensors."""
    return any(refs is not None or space == home for space, (_, refs) in value.places.items())


def input_bytes(values: Iterable[Value]) -> dict[str, int]:
    """By space."""
    found: dict[str, int] = {}
    for value in values:
        for space in value.places:
            found[space] = found.get(space, 0) + value.nbytes + 1
    return found
