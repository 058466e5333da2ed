"""Which bytes of a pool are taken: best fit over offsets, with neighbours joined again. No torch, no memory.

It knows offsets only, so a pool may be a file, a device's memory, or a symmetric heap whose processes all
allocate alike (the same calls give the same offsets).
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT = 256
"""Bytes. Every offset is a multiple, and every size is rounded up to one."""

_SHIFT = 48  # a hole is one integer, size << 48 | offset in units: sorted by size, then by address


class Allocator:
    """Not thread-safe. Sizes and offsets in bytes; zero bytes take one unit, so that offsets are unique."""

    def __init__(self, num_bytes: int) -> None:
        self._num_units = num_bytes // ALIGNMENT
        self._used_units = 0
        self._taken: dict[int, int] = {}  # first unit -> units
        self._holes: list[int] = []
        self._hole_at: dict[int, int] = {}  # first unit -> units
        self._hole_before: dict[int, int] = {}  # the unit after the last -> units
        if self._num_units:
            self._add_hole(0, self._num_units)

    @property
    def num_bytes(self) -> int:
        return self._num_units * ALIGNMENT

    @property
    def used_bytes(self) -> int:
        return self._used_units * ALIGNMENT

    @property
    def largest_free_bytes(self) -> int:
        return (self._holes[-1] >> _SHIFT) * ALIGNMENT if self._holes else 0

    def allocate(self, num_bytes: int) -> int | None:
        """The offset of `num_bytes`, or None if no hole is that large."""
        units = -(-num_bytes // ALIGNMENT) or 1
        index = bisect_left(self._holes, units << _SHIFT)
        if index == len(self._holes):
            return None
        hole = self._holes.pop(index)
        first, size = hole & ((1 << _SHIFT) - 1), hole >> _SHIFT
        del self._hole_at[first], self._hole_before[first + size]
        if size > units:
            self._add_hole(first + units, size - units)
        self._taken[first] = units
        self._used_units += units
        return first * ALIGNMENT

    def free(self, offset: int) -> None:
        """Give back what `allocate` returned. Raises KeyError for any other offset."""
        first = offset // ALIGNMENT
        units = self._taken.pop(first)
        self._used_units -= units
        before = self._hole_before.get(first)
        if before is not None:
            self._remove_hole(first - before, before)
            first, units = first - before, units + before
        after = self._hole_at.get(first + units)
        if after is not None:
            self._remove_hole(first + units, after)
            units += after
        self._add_hole(first, units)

    def _add_hole(self, first: int, units: int) -> None:
        insort(self._holes, units << _SHIFT | first)
        self._hole_at[first] = units
        self._hole_before[first + units] = units

    def _remove_hole(self, first: int, units: int) -> None:
        del self._holes[bisect_left(self._holes, units << _SHIFT | first)]
        del self._hole_at[first], self._hole_before[first + units]
