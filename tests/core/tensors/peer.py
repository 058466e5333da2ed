"""A second process with a store of its own, driven from the test: `peer.put("float32", (3, 4))`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from typing import Any

import torch

from genserve.core.tensors.ref import TensorRef
from genserve.core.tensors.store import TensorStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.core.tensors.peer"])


def sample(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Equal in every process. Random bytes, but for `bool`, whose other bytes aren't values."""
    random = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if kind == torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    last = (*shape, kind.itemsize)
    return torch.randint(0, 256, last, generator=random, dtype=torch.uint8).view(kind).view(shape)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """NaNs too."""
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and torch.equal(
            left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
        )
    )


class Owner:
    """What the other process does."""

    def __init__(self) -> None:
        self.store: TensorStore | None = None

    def open(self, **options: Any) -> Any:
        self.store = TensorStore.open(**options)
        return self.store.address

    def put(self, dtype: str, shape: tuple[int, ...], seed: int = 0, holders=("reader",)) -> TensorRef:
        return self.store.put(sample(dtype, shape, seed), holders)

    def release(self, ref: TensorRef, holder: str = "reader") -> None:
        self.store.release(ref, holder)

    def drop_holder(self, holder: str) -> None:
        self.store.drop_holder(holder)

    def fetched_equals(self, ref: TensorRef, dtype: str, shape: tuple[int, ...], seed: int = 0) -> bool:
        return same_bytes(self.store.get(ref).wait(5), sample(dtype, shape, seed))

    def scribble(self, ref: TensorRef) -> None:
        self.store.view(ref).fill_(1)

    def fork_sleeper(self) -> int:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        return child

    def stats(self) -> dict[str, float]:
        return self.store.stats()

    def path(self) -> str:
        return str(self.store._local.pool.path)

    def close(self) -> None:
        self.store.close()


def _serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    owner = Owner()
    while True:
        try:
            name, args, options = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, getattr(owner, name)(*args, **options)))
        except Exception as error:
            pipe.send((False, error))


class Peer:
    """Any method of `Owner`, called over there."""

    def __init__(self) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def __getattr__(self, name: str):
        def call(*args: Any, **options: Any) -> Any:
            self._pipe.send((name, args, options))
            if not self._pipe.poll(20):
                raise TimeoutError(name)
            ok, result = self._pipe.recv()
            if not ok:
                raise result
            return result

        return call

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        """Frozen, as a hung machine is."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        self._pipe.close()
        self.process.join(5)
        with contextlib.suppress(Exception):
            self.process.kill()
