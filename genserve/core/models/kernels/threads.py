"""A few threads that share one kernel call at a time (kernels release the interpreter's lock)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

# Multiply-adds under which a second thread costs more than it brings.
_MIN_WORK_PER_THREAD = 2_000_000


class ThreadTeam:
    """`num_threads` threads, the caller's among them."""

    def __init__(self, num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self.num_threads = num_threads
        self._others = ThreadPoolExecutor(num_threads - 1) if num_threads > 1 else None

    def num_parts(self, work: int) -> int:
        """How many threads `work` multiply-adds are worth."""
        return max(1, min(self.num_threads, work // _MIN_WORK_PER_THREAD))

    def share(self, part: Callable[[int, int], None], num_items: int, work: int) -> None:
        """Call `part(first, last)` over `num_items` in equal ranges, at once."""
        num_parts = min(self.num_parts(work), num_items)
        cuts = [num_items * i // num_parts for i in range(num_parts + 1)]
        self.run(part, cuts)

    def run(self, part: Callable[[int, int], None], cuts: list[int]) -> None:
        """Call `part` on each of the ranges between `cuts`, at once."""
        if len(cuts) == 2 or self._others is None:
            part(cuts[0], cuts[-1])
            return
        others = [self._others.submit(part, *cut) for cut in pairwise(cuts[1:])]
        part(cuts[0], cuts[1])
        for other in others:
            other.result()
