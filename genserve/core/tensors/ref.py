"""What the control plane sees of a tensor: where it lies, and which tensor it was. No torch, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from genserve.core.errors import TensorError

# Where a pool's memory is. Which way a reader takes follows from where it sits (`tensors.store`).
Transport = Literal["shm", "cuda_ipc", "nccl", "nvshmem"]

DTYPE_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class StoreAddress(NamedTuple):
    """One process's store.

    name     random, so that nobody can guess it; never used twice.
    machine  stores of equal `machine` can map each other's memory.
    host, port  where it answers other machines; port 0 if it doesn't.
    """

    name: str
    machine: str
    host: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One immutable tensor in the pool of `owner`. Small, hashable, safe to send and to keep.

    transport   where the pool's memory is.
    epoch       of the owner: another epoch's references are stale.
    generation  of the slot: it moves on when the slot is reused, and the reference is stale.
    offset      of the first byte in the pool.
    nbytes      of the tensor, which is contiguous.
    dtype       a torch dtype's name without "torch.".
    """

    transport: Transport
    owner: StoreAddress
    epoch: int
    generation: int
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str

    def check(self) -> None:
        """Raise `TensorError` unless the fields agree: a reference from the wire is checked before use."""
        item = DTYPE_BYTES.get(self.dtype)
        if item is None:
            raise TensorError(f"dtype: no {self.dtype!r}; there are: {', '.join(DTYPE_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise TensorError(f"shape: {self.shape} has a negative size")
        if self.nbytes != math.prod(self.shape) * item:
            raise TensorError(f"nbytes: {self.nbytes} is not the size of {self.shape} {self.dtype}")
        for name in ("epoch", "generation", "offset", "nbytes"):
            if not 0 <= getattr(self, name) < 1 << 63:
                raise TensorError(f"{name}: {getattr(self, name)} is not within 0 to 2**63 - 1")
