"""The values of one process by key: what executors in it made, and what they fetched from others. (torch)

Tensors stay as they are, on their device; where other processes may want them, a tensor store has a copy that they
can fetch. Knows nothing of tasks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from genserve.core.errors import StaleTensor, TensorError
from genserve.core.tensors.ref import TensorRef
from genserve.core.tensors.store import TensorStore
from genserve.t2i.messages import Key, Stored

# Fetched tensors beyond this size stay where their owner put them.
_COPY_BYTES = 32 << 20


class Space:
    """Thread-safe. Without a `store` nobody else can fetch from here."""

    def __init__(self, store: TensorStore | None = None) -> None:
        self.store = store
        self.values: dict[Key, Any] = {}
        self._published: dict[Key, str] = {}
        self._changed = threading.Condition()
        self._num_waiting = 0

    def put(self, key: Key, value: Any) -> Any:
        """Keep a value; what to tell others of it: a `Stored` if there are tensors in it, else the value itself."""
        refs = None
        nbytes = _bytes_of(value)
        if nbytes is not None and self.store is not None:
            holder = f"{key[0]}/{key[1]}"
            self._published[key] = holder
            try:
                refs = _publish(value, self.store, holder)
            except BaseException:
                self.store.drop_holder(holder)
                raise
        self.add(key, value)
        return value if nbytes is None else Stored(nbytes, refs)

    def add(self, key: Key, value: Any) -> None:
        """Keep a value that others have already, and wake whoever waits for it."""
        self.values[key] = value
        if self._num_waiting:
            with self._changed:
                self._changed.notify_all()

    def get(self, key: Key) -> Any:
        """Raises `KeyError`."""
        return self.values[key]

    def __contains__(self, key: Key) -> bool:
        return key in self.values

    def fetch(self, key: Key, refs: Any, device: str) -> Any:
        """Get a value of another space, and keep it. Raises `TensorError`."""
        if self.store is None or refs is None:
            raise StaleTensor(f"{key}: it can't be fetched from another process")
        value = _fetched(refs, self.store, device)
        self.add(key, value)
        return value

    def release(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self.values.pop(key, None)
            holder = self._published.pop(key, None)
            if holder is not None and self.store is not None:
                self.store.drop_holder(holder)

    def wait(self, key: Key, given_up: Callable[[], Exception | None], timeout_s: float) -> Any:
        """The value, as soon as it is here; or raise what `given_up` says (asked again after `interrupt`)."""
        if key in self.values:
            return self.values[key]
        end_s = time.monotonic() + timeout_s
        with self._changed:
            self._num_waiting += 1
            try:
                while key not in self.values:
                    error = given_up()
                    if error is not None:
                        raise error
                    left_s = end_s - time.monotonic()
                    if left_s <= 0:
                        raise TensorError(f"input {key} didn't come within {timeout_s:g} s")
                    self._changed.wait(left_s)
                return self.values[key]
            finally:
                self._num_waiting -= 1

    def interrupt(self) -> None:
        """Have all who wait look whether they should."""
        with self._changed:
            self._changed.notify_all()

    def stats(self) -> dict[str, float]:
        stats = {"num_values": float(len(self.values))}
        if self.store is not None:
            stats.update(self.store.stats())
        return stats

    def close(self) -> None:
        self.values.clear()
        if self.store is not None:
            self.store.close()


def _bytes_of(value: Any) -> int | None:
    """Of all tensors in `value`; None if there are none."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list | tuple):
        sizes = [_bytes_of(item) for item in value]
    elif isinstance(value, dict):
        sizes = [_bytes_of(item) for item in value.values()]
    else:
        return None
    found = [size for size in sizes if size is not None]
    return sum(found) if found else None


def _publish(value: Any, store: TensorStore, holder: str) -> Any:
    if isinstance(value, torch.Tensor):
        return store.put(value, (holder,))
    if isinstance(value, list | tuple):
        return tuple(_publish(item, store, holder) for item in value)
    if isinstance(value, dict):
        return {name: _publish(item, store, holder) for name, item in value.items()}
    return value


def _fetched(refs: Any, store: TensorStore, device: str) -> Any:
    if isinstance(refs, TensorRef):
        tensor = store.get(refs).wait(timeout_s=60)
        if device != "cpu":
            tensor = tensor.to(device)
        elif refs.nbytes <= _COPY_BYTES:
            tensor = tensor.clone()
        if store.is_near(refs):
            store.check(refs)
        return tensor
    if isinstance(refs, tuple):
        return tuple(_fetched(item, store, device) for item in refs)
    if isinstance(refs, dict):
        return {name: _fetched(item, store, device) for name, item in refs.items()}
    return refs
