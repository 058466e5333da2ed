"""An asyncio loop on a virtual clock: timers fire in order, at once, and time is what they say.

For running the live loop against the simulator. Nothing that waits on the outside world (threads,
sockets) may be used on it: with no timer due it stops with an error instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Jumps to the next timer whenever nothing else is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._jump(0.0)

    def time(self) -> float:
        return self._now_s

    def _jump(self, now_s: float) -> None:
        self._now_s = now_s
        # asyncio rings what is due before `time() + resolution`: exactly the timers of this instant.
        self._clock_resolution = math.ulp(now_s)

    def _run_once(self) -> None:
        scheduled: Any = self._scheduled  # type: ignore[attr-defined]
        if not self._ready:  # type: ignore[attr-defined]
            while scheduled and scheduled[0].cancelled():
                heapq.heappop(scheduled)._scheduled = False
                self._timer_cancelled_count -= 1  # type: ignore[attr-defined]
            if scheduled:
                self._jump(max(self._now_s, scheduled[0].when()))
            elif not self._stopping:  # type: ignore[attr-defined]
                raise RuntimeError("the virtual loop has nothing left to do, but was asked to go on")
        super()._run_once()  # type: ignore[misc]
