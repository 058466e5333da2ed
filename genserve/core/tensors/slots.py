"""Who still needs which part of a pool: holders, generations, the byte budget. No torch, no memory, no lock.

A slot is free again when its set of holders is empty. Its generation stands in a table that readers in other
processes see: at the slot's first and last unit while the tensor is there, 0 otherwise. Generations are never
used twice, so a reference to an earlier tensor, or of a wrong size, never matches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from genserve.core.errors import StaleTensor, StoreFull, TensorError
from genserve.core.tensors.allocator import ALIGNMENT, Allocator


def units_of(offset: int, nbytes: int) -> tuple[int, int]:
    """The first and the last entry of a slot in the table of generations."""
    first = offset // ALIGNMENT
    return first, first + max(nbytes - 1, 0) // ALIGNMENT


@dataclass(slots=True)
class Slot:
    """`generation` is 0 until the slot is sealed."""

    offset: int
    nbytes: int
    holders: set[str]
    generation: int = 0


class Slots:
    """The slots of one pool. `table` has one entry for each `ALIGNMENT` bytes of it."""

    def __init__(self, num_bytes: int, table: memoryview[int] | list[int]) -> None:
        self._allocator = Allocator(num_bytes)
        self._table = table
        self._slots: dict[int, Slot] = {}  # by offset
        self._held: dict[str, set[int]] = {}  # holder -> offsets
        self._generation = 0

    def allocate(self, nbytes: int, holders: Iterable[str]) -> Slot:
        """Raises `StoreFull`; `TensorError` without a holder, since nobody could ever release it, and for less
        than no bytes."""
        if nbytes < 0:
            raise TensorError(f"nbytes: {nbytes} is negative")
        names = {holders} if isinstance(holders, str) else set(holders)
        if not names:
            raise TensorError("holders: a tensor needs at least one")
        pool = self._allocator
        offset = pool.allocate(nbytes)
        if offset is None:
            if nbytes > pool.num_bytes:
                raise StoreFull(
                    f"{nbytes:,} bytes can never fit: the pool has {pool.num_bytes:,} (pool_bytes)"
                )
            raise StoreFull(
                f"{nbytes:,} bytes do not fit now: of {pool.num_bytes:,} (pool_bytes) "
                f"{pool.num_bytes - pool.used_bytes:,} are free, {pool.largest_free_bytes:,} of them in one piece"
            )
        slot = self._slots[offset] = Slot(offset, nbytes, names)
        for name in names:
            self._held.setdefault(name, set()).add(offset)
        return slot

    def seal(self, slot: Slot) -> int:
        """The tensor is complete; from now on it has a generation. With no holder left it is gone at once."""
        if slot.generation or self._slots.get(slot.offset) is not slot:
            raise TensorError("this draft has been sealed or abandoned")
        self._generation += 1
        slot.generation = self._generation
        first, last = units_of(slot.offset, slot.nbytes)
        self._table[first] = self._table[last] = slot.generation
        if not slot.holders:
            self._free(slot)
        return slot.generation

    def abandon(self, slot: Slot) -> None:
        """Give up a slot that was not sealed; afterwards, nothing."""
        if not slot.generation and self._slots.get(slot.offset) is slot:
            self._free(slot)

    def find(self, offset: int, generation: int, nbytes: int) -> Slot:
        """Raises `StaleTensor`."""
        slot = self._slots.get(offset)
        if slot is None or slot.generation != generation or not generation or slot.nbytes != nbytes:
            raise StaleTensor("the tensor was released, and its memory may have been reused")
        return slot

    def release(self, offset: int, generation: int, holder: str) -> None:
        """Ignored if the slot or the holder is not known (any more)."""
        slot = self._slots.get(offset)
        if slot is not None and slot.generation == generation and holder in slot.holders:
            self._let_go(slot, holder)

    def drop_holder(self, holder: str) -> None:
        for offset in tuple(self._held.get(holder, ())):
            self._let_go(self._slots[offset], holder)

    def stats(self) -> dict[str, float]:
        pool = self._allocator
        return {
            "pool_bytes": pool.num_bytes,
            "used_bytes": pool.used_bytes,
            "free_bytes": pool.num_bytes - pool.used_bytes,
            "largest_free_bytes": pool.largest_free_bytes,
            "num_tensors": len(self._slots),
            "num_holders": len(self._held),
        }

    def _let_go(self, slot: Slot, holder: str) -> None:
        slot.holders.discard(holder)
        self._forget(holder, slot.offset)
        # A draft is being written: its memory is given back when it is sealed or abandoned.
        if not slot.holders and slot.generation:
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        for holder in slot.holders:
            self._forget(holder, slot.offset)
        del self._slots[slot.offset]
        first, last = units_of(slot.offset, slot.nbytes)
        self._table[first] = self._table[last] = 0
        self._allocator.free(slot.offset)

    def _forget(self, holder: str, offset: int) -> None:
        held = self._held[holder]
        held.discard(offset)
        if not held:
            del self._held[holder]
