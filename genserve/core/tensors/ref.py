"""What the control plane sees of a tensor: where it lies, and which tensor it was. No torch, no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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


def check_shape(shape: tuple[int, ...]) -> None:
    """Raise `TensorError` unless `shape` is a tuple of whole numbers that memory can be laid out for."""
    if type(shape) is not tuple or any(type(size) is not int for size in shape):
        raise TensorError(f"shape: {shape!r} is no tuple of whole numbers")
    if shape and min(shape) < 0:
        raise TensorError(f"shape: {shape} has a negative size")
    # Zeros left out: strides are computed without them.
    if math.prod(filter(None, shape)) >= 1 << 63:
        raise TensorError(f"shape: {shape} is too large")


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

    def __reduce__(self) -> tuple[Callable[..., TensorRef], tuple[object, ...]]:
        # A third of what a dataclass with slots costs by itself, in time and bytes: references travel a lot.
        return _restored, (
            self.transport,
            *self.owner,
            self.epoch,
            self.generation,
            self.offset,
            self.nbytes,
            self.shape,
            self.dtype,
        )

    def check(self) -> None:
        """Raise `TensorError` unless the fields agree: a reference from the wire is checked before use.

        Their types too, exactly: what equals a whole number need not be one further on.
        """
        if type(self.transport) is not str:
            raise TensorError(f"transport: {self.transport!r} is no name")
        if type(self.owner) is not StoreAddress or [type(part) for part in self.owner] != [
            str,
            str,
            str,
            int,
        ]:
            raise TensorError(f"owner: {self.owner!r} is no store's address")
        for field in ("epoch", "generation", "offset", "nbytes"):
            number = getattr(self, field)
            if type(number) is not int or not 0 <= number < 1 << 63:
                raise TensorError(f"{field}: {number!r} is no whole number from 0 to 2**63 - 1")
        item = DTYPE_BYTES.get(self.dtype) if type(self.dtype) is str else None
        if item is None:
            raise TensorError(f"dtype: no {self.dtype!r}; there are: {', '.join(DTYPE_BYTES)}")
        check_shape(self.shape)
        if self.nbytes != math.prod(self.shape) * item:
            raise TensorError(f"nbytes: {self.nbytes} is not the size of {self.shape} {self.dtype}")


def _restored(transport: Transport, name: str, machine: str, host: str, port: int, *rest: Any) -> TensorRef:
    return TensorRef(transport, StoreAddress(name, machine, host, port), *rest)
