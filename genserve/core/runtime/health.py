"""Whether somebody still works: limits, answers that do not come, runs that do not end, processes to kill.

Owns the rules that all watching of actors shares; must not know Ray (see `ray_actor`). A dead process shows
by itself. One that is stopped or hangs as a whole misses its heartbeat; one whose event loop lives while a
run never ends says so in its answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import Any

from genserve.core.errors import ExecutorLost

# A wait is cut in so many pieces: while this process itself stands still, one of them passes at most.
_PIECES = 4


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """When an actor counts as lost.

    heartbeat_s      how late the answer to a parked call may be.
    park_s           how long a call waits in the actor for something to tell, before it comes back without.
    step_deadline_s  how long one run of a lane may take; None for no limit.
    start_s          how long building what the actor holds may take.
    """

    heartbeat_s: float = 10.0
    park_s: float = 1.0
    step_deadline_s: float | None = 120.0
    start_s: float = 600.0

    def overdue(self, run_age_s: float) -> ExecutorLost | None:
        """The error that a run of that age means, if it does."""
        if self.step_deadline_s is None or run_age_s < self.step_deadline_s:
            return None
        return ExecutorLost(
            f"a step has not ended after {run_age_s:.1f} s (step_deadline_s: {self.step_deadline_s:g})"
        )


async def ends_within(future: asyncio.Future[Any], limit_s: float) -> bool:
    """Whether `future` is done before `limit_s` of this loop's own running time have passed.

    A loop that was blocked meanwhile looks first at what arrived.
    """
    for _ in range(_PIECES):
        await asyncio.wait({future}, timeout=limit_s / _PIECES)
        if future.done():
            return True
    return False


@dataclass(frozen=True, slots=True)
class Process:
    """One process, told apart from a later one of the same id. `started` is 0 where that cannot be known."""

    pid: int
    started: int


def this_process() -> Process:
    return Process(os.getpid(), _started(os.getpid()) or 0)


def is_alive(process: Process) -> bool:
    """Whether it still runs on this machine; one that ended and was not yet reaped does not."""
    return _started(process.pid) == process.started


def kill_process(process: Process) -> None:
    """SIGKILL, which ends a stopped process too. Nothing if it is gone."""
    if is_alive(process):
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _started(pid: int) -> int | None:
    """When it started, in ticks since boot; None if it is no running process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if os.path.isdir("/proc/self") else _started_elsewhere(pid)
    except ProcessLookupError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _started_elsewhere(pid: int) -> int | None:
    # Without /proc: ids alone.
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0
