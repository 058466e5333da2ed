"""The tensors of one process: a pool allocated once, what lies in it, and copies from other pools. (torch)

Contract only; see `TensorStore`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from genserve.core.tensors.ref import StoreAddress, TensorRef


class Fetch(Protocol):
    """A copy under way. Eager tasks wait before they start, deferred ones at the point of use."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        """The tensor: a read-only view if it is near and no `out` was given, else the filled copy.

        Raises `StaleTensor`, `TransferFailed`, or `TimeoutError` (the copy goes on; wait again).
        """
        ...

    def cancel(self) -> None:
        """Nobody will wait: stop as soon as may be. `out` may be half filled."""
        ...


class Draft(Protocol):
    """A slot being filled: write into `tensor`, then `seal`; until then no reference to it exists."""

    tensor: torch.Tensor

    def seal(self) -> TensorRef: ...

    def abandon(self) -> None: ...


class Store(Protocol):
    """Thread-safe. All sizes in bytes."""

    @property
    def address(self) -> StoreAddress: ...

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, holders: Iterable[str]) -> Draft:
        """Room for a tensor, to be written in place. Raises `StoreFull`."""
        ...

    def put(self, tensor: torch.Tensor, holders: Iterable[str]) -> TensorRef:
        """Copy `tensor` into the pool. It is immutable from now on, and stays until no holder is left."""
        ...

    def view(self, ref: TensorRef) -> torch.Tensor:
        """Zero-copy and read-only, of this process or this machine. Not to be used after the last
        `release`: whoever copies out of it calls `check` afterwards. Raises `StaleTensor`."""
        ...

    def check(self, ref: TensorRef) -> None:
        """Raise `StaleTensor` if `ref`'s slot has been reused or its owner is gone."""
        ...

    def get(self, ref: TensorRef, out: torch.Tensor | None = None) -> Fetch: ...

    def release(self, ref: TensorRef, holder: str) -> None:
        """`holder` needs the tensor no longer. For the owner only; stale references are ignored."""
        ...

    def drop_holder(self, holder: str) -> None:
        """Release everything that `holder` holds here."""
        ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...
