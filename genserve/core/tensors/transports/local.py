"""Tensors of this process: its pool, its slots, and the lock over them. (torch)"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from genserve.core.errors import StaleTensor, TensorError
from genserve.core.tensors.fetch import Fetch
from genserve.core.tensors.pool_file import OwnedPool, PeerPool
from genserve.core.tensors.ref import TensorRef
from genserve.core.tensors.slots import Slot, Slots
from genserve.core.tensors.transports.shm import fetch_near


class Local:
    """What this process owns. Views are mapped a second time, for reading only, like any other process's."""

    def __init__(self, pool: OwnedPool) -> None:
        self.pool = pool
        self._slots = Slots(pool.pool_bytes, pool.generations)
        self._lock = threading.Lock()
        self._readable = PeerPool(pool.path)
        self._unusable = ""

    def allocate(self, nbytes: int, holders: Iterable[str]) -> Slot:
        with self._lock:
            self.ensure_usable()
            return self._slots.allocate(nbytes, holders)

    def seal(self, slot: Slot) -> int:
        with self._lock:
            self.ensure_usable()
            return self._slots.seal(slot)

    def abandon(self, slot: Slot) -> None:
        with self._lock:
            self._slots.abandon(slot)

    def release(self, ref: TensorRef, holder: str) -> None:
        if ref.owner.name == self.pool.name and ref.epoch == self.pool.epoch:
            with self._lock:
                self._slots.release(ref.offset, ref.generation, holder)

    def drop_holder(self, holder: str) -> None:
        with self._lock:
            self._slots.drop_holder(holder)

    def stats(self) -> dict[str, float]:
        with self._lock:
            return self._slots.stats()

    def writable(self, slot: Slot, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return self.pool.memory.tensor_at(slot.offset, shape, dtype)

    def read(self, name: str, epoch: int, generation: int, offset: int, nbytes: int) -> memoryview:
        """The bytes of a sealed tensor, for the server. Raises `StaleTensor`."""
        self._ensure_there(name, epoch, generation, offset, nbytes)
        return self.pool.bytes[offset : offset + nbytes]

    def check(self, ref: TensorRef) -> None:
        self._ensure_there(ref.owner.name, ref.epoch, ref.generation, ref.offset, ref.nbytes)

    def view(self, ref: TensorRef) -> torch.Tensor:
        self.check(ref)
        return self._readable.memory.tensor_at(ref.offset, ref.shape, ref.dtype)

    def get(self, ref: TensorRef, out: torch.Tensor | None) -> Fetch:
        return fetch_near(self, ref, out)

    def ensure_usable(self) -> None:
        """Raise `TensorError` once the store is closed, or here in a forked child."""
        if self._unusable:
            raise TensorError(self._unusable)

    def disable(self, reason: str) -> None:
        """Whatever is asked from now on raises `TensorError`; releases are still taken."""
        self._unusable = self._unusable or reason

    def disown(self) -> None:
        """In a forked child: this copy is of no use, and the lock may have been held by a thread that isn't here."""
        self._lock = threading.Lock()
        self.disable("this store was opened before a fork: open one in each process")
        self.pool.forget()

    def close(self) -> None:
        with self._lock:
            self.disable("this store is closed")
            self.pool.close()

    def _ensure_there(self, name: str, epoch: int, generation: int, offset: int, nbytes: int) -> None:
        with self._lock:
            self.ensure_usable()
            if name != self.pool.name or epoch != self.pool.epoch:
                raise StaleTensor("the tensor's owner has gone; another store answers in its place")
            self._slots.find(offset, generation, nbytes)
