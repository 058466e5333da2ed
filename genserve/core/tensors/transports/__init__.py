"""Ways to a tensor's bytes, one contract: which one is taken follows from where the two ends sit. (torch)

way        the tensor's owner                          what `get` without `out` gives
local      is this process                             a view
shm        is another process of this machine          a view
tcp        is on another machine, and listens          a copy
cuda_ipc, nccl, nvshmem   declared, see `devices`
"""

from __future__ import annotations

from typing import Protocol

import torch

from genserve.core.errors import TensorError
from genserve.core.tensors.fetch import Fetch
from genserve.core.tensors.ref import StoreAddress, TensorRef


class Transport(Protocol):
    """Thread-safe; references have passed `TensorRef.check`."""

    def view(self, ref: TensorRef) -> torch.Tensor: ...

    def check(self, ref: TensorRef) -> None: ...

    def get(self, ref: TensorRef, out: torch.Tensor | None) -> Fetch:
        """`out` has the tensor's shape and dtype. Whatever fails is raised by the fetch."""
        ...

    def close(self) -> None: ...


def way_to(ref: TensorRef, here: StoreAddress) -> str:
    """Which transport brings `ref` to the store at `here`. Raises `TensorError` where none does."""
    if ref.transport != "shm":
        return ref.transport
    if ref.owner.name == here.name:
        return "local"
    if ref.owner.machine == here.machine:
        return "shm"
    if ref.owner.port:
        return "tcp"
    raise TensorError(
        "no way to the tensor: its owner is on another machine (or uses another directory) and doesn't listen"
    )
