"""An asyncio loop on a virtual clock: timers fire in order, at once, and time is what they say.

For running the live loop against the simulator. Nothing that waits on the outside world (threads,
sockets) may be used on it: with no timer due it stops with an error instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0. Jumps to the next timer whenever nothing else is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        # Only timers of exactly the same time are due together.
        self._clock_resolution = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        scheduled: Any = self._scheduled  # type: ignore[attr-defined]
        if not ready:
            live = [timer.when() for timer in scheduled if not timer.cancelled()]
            if live:
                self._now_s = max(self._now_s, min(live))
            elif not self._stopping:  # type: ignore[attr-defined]
                raise RuntimeError("the virtual loop has nothing left to do, but was asked to go on")
        super()._run_once()  # type: ignore[misc]
