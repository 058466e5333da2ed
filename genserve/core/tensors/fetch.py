"""Copies under way, and the inputs of a task that wait for them: eager before it starts, deferred in it. (torch)

It knows nothing of transports, which make the copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from genserve.core.errors import TensorError
from genserve.core.tensors.ref import TensorRef

if TYPE_CHECKING:
    from genserve.core.tensors.store import TensorStore


class Fetch(Protocol):
    """A copy under way. Eager tasks wait before they start, deferred ones at the point of use."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise anything but `TimeoutError`, at once."""
        ...

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """The tensor: a read-only view if it is near and no `out` was given, else the filled copy.

        Raises `StaleTensor`, `TransferFailed`, or `TimeoutError` (the copy goes on; wait again).
        """
        ...

    def cancel(self) -> None:
        """Nobody will wait. When it returns, `out` is not written to any more; it may be half filled."""
        ...


class Finished:
    """A `Fetch` that was over as soon as it began."""

    def __init__(self, result: torch.Tensor | TensorError) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        if isinstance(self._result, TensorError):
            raise self._result
        return self._result

    def cancel(self) -> None:
        """Nothing is under way."""


class Inputs:
    """The tensors that one task reads, by name. Thread-safe.

    An *eager* input is fetched before the task starts: `wait_eager`, then run the task. A *deferred* one need
    not even exist by then: the task starts, and `inputs[name]` blocks where it is used, until `arrive` has named
    the tensor and it is here. Fetches of both kinds begin as soon as the reference is known.

    Near tensors come as views. Whoever can't be sure that the task's own holder kept them calls `check`
    after the work: it raises `StaleTensor` if any was released meanwhile.
    """

    def __init__(
        self,
        store: TensorStore,
        eager: Mapping[str, TensorRef],
        deferred: Mapping[str, TensorRef | None] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """`timeout_s`: how long `inputs[name]` blocks at most."""
        self._store = store
        self._timeout_s = timeout_s
        self._eager = tuple(eager)
        self._changed = threading.Condition()
        self._refs: dict[str, TensorRef | None] = {**(deferred or {}), **eager}
        self._fetches: dict[str, Fetch] = {}
        self._error: Exception | None = None
        try:
            for name, ref in self._refs.items():
                if ref is not None:
                    self._fetches[name] = store.get(ref)
        except BaseException:
            self.cancel()
            raise

    def __enter__(self) -> Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def arrive(self, name: str, ref: TensorRef) -> None:
        """The tensor of a deferred input exists now."""
        with self._changed:
            if self._refs.get(name, ref) is not None:
                raise TensorError(f"{name}: no deferred input that is still to come")
            if self._error is None:
                self._refs[name] = ref
                self._fetches[name] = self._store.get(ref)
                self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """What is still to come won't: whoever waits for it, or asks later, gets `error`."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def cancel(self) -> None:
        """End all fetches; nothing may be asked for any more."""
        self.fail(TensorError("these inputs were cancelled"))
        for fetch in tuple(self._fetches.values()):
            fetch.cancel()

    def ready(self) -> bool:
        """Whether the task may start: every eager input is here, or has failed."""
        return all(self._fetches[name].done() for name in self._eager)

    def wait_eager(self, timeout_s: float | None = None) -> None:
        """Block until every eager input is here. Raises what the fetches raise, `TimeoutError` among it."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for name in self._eager:
            self._fetches[name].wait(_left_s(deadline_s))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor, as soon as it is here. Raises KeyError for a name that isn't an input."""
        deadline_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        with self._changed:
            while self._refs[name] is None and self._error is None:
                if not self._changed.wait(_left_s(deadline_s)):
                    raise TimeoutError(f"input {name!r} didn't come within {self._timeout_s} s")
            if name not in self._fetches:
                assert self._error is not None
                raise self._error
            fetch = self._fetches[name]
        return fetch.wait(_left_s(deadline_s))

    def check(self) -> None:
        """Raise `StaleTensor` if a tensor that came as a view has been released."""
        for ref in self._refs.values():
            if ref is not None and self._store.is_near(ref):
                self._store.check(ref)


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
