"""Workers in actors that do as files say: the next prefill, decode or fetch of any of them dies, hangs or fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from genserve.core.errors import TransferFailed
from genserve.core.runtime.ray_controller import RemoteParts
from genserve.dllm.config import DllmConfig
from genserve.dllm.serve_ray import build_remote
from genserve.dllm.step import FETCH, STEP


def folder_of(config: DllmConfig) -> Path:
    """Where the faults of a deployment are: beside its model."""
    return Path(config.model).parent / "faults"


class Faults:
    """The driver's end. Each fault is taken once, by whoever comes first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._num = 0

    def arm(self, kind: str, action: str, times: int = 1) -> None:
        for _ in range(times):
            self._num += 1
            path = self._folder / f"{kind}.{self._num:04}"
            path.with_suffix(".new").write_text(action)
            path.with_suffix(".new").rename(path)

    def wait_until_taken(self, timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while any(self._folder.iterdir()):
            assert time.monotonic() < end, f"nobody took {list(self._folder.iterdir())}"
            time.sleep(0.005)


class FaultyWorker:
    def __init__(self, worker: Any, folder: Path) -> None:
        self._worker, self._folder = worker, folder

    def perform(self, op: str, args: Any) -> Any:
        kinds = []
        if op == FETCH:
            kinds.append("fetch")
        elif op == STEP:
            kinds += ["prefill"] if any(one.hand_over for one in args.passes) else []
            kinds += ["decode"] if any(not one.is_start for one in args.passes) else []
        for kind in kinds:
            for path in sorted(self._folder.glob(f"{kind}.[0-9]*")):
                try:
                    action = path.read_text()
                    path.unlink()
                except FileNotFoundError:  # another worker took it
                    continue
                self._act(action)
                break
        return self._worker.perform(op, args)

    def _act(self, action: str) -> None:
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "slow":
            time.sleep(0.5)
        elif action == "fail":
            raise TransferFailed("made to fail")
        else:
            raise ValueError(action)


async def build_faulty(config: DllmConfig, name: str, token: str | None) -> RemoteParts:
    parts = await build_remote(config, name, token)
    for executor in parts.executors.values():
        executor._worker = FaultyWorker(executor._worker, folder_of(config))  # type: ignore[attr-defined]
    return parts
