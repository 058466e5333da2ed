"""Ends the processes that this one started, should it die before it could.

Ray's own agents outlive a driver that was killed by minutes. A small guard process looks whether its parent
lives, and kills what is left if not. Run as a file: it needs the standard library alone. Linux only, as it
reads /proc; elsewhere there is no guard.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Container

_LOOK_S = 0.5
_GRACE_S = 1.0  # for those that end by themselves


def guard_new(before: Container[int]) -> None:
    """Start a guard over Ray's processes below this one, those in `before` aside. It ends with them."""
    found = [(pid, at) for pid, at in _descendants(os.getpid()) if pid not in before and _is_rays(pid)]
    if found:
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *(f"{pid}:{at}" for pid, at in found)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def descendant_pids() -> set[int]:
    return {pid for pid, _ in _descendants(os.getpid())}


def _is_rays(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"ray" in file.read()
    except OSError:
        return False


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and start time of a running process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def _descendants(root: int) -> list[tuple[int, int]]:
    """(pid, start time) of all below `root`."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
    stats = {pid: stat for pid in pids if (stat := _stat(pid)) is not None}
    below: set[int] = {root}
    while more := {pid for pid, (parent, _) in stats.items() if parent in below} - below:
        below |= more
    return [(pid, stats[pid][1]) for pid in sorted(below - {root})]


def _guard(parent: int, processes: dict[int, int]) -> None:
    def alive() -> list[int]:
        return [pid for pid, started in processes.items() if (stat := _stat(pid)) and stat[1] == started]

    while os.getppid() == parent:
        if not alive():
            return
        time.sleep(_LOOK_S)
    time.sleep(_GRACE_S)
    for pid in alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), {int(pid): int(at) for pid, at in (text.split(":") for text in sys.argv[2:])})
