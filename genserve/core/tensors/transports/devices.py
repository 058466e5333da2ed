"""Declared ways between devices. None is built yet: asking for one says what it needs.

Each fits the same interface: a pool allocated once (by all processes together for nvshmem), offsets in it, and
generations that are checked before and after a copy.
"""

from __future__ import annotations

import torch

from genserve.core.errors import TensorError

NEEDS = {
    "cuda_ipc": "a CUDA device that both processes see; the handle of the pool is exported once",
    "nccl": "a CUDA device on both sides and a communicator between them",
    "nvshmem": "CUDA devices of one NVSHMEM world (the extra `gpu`), whose heap all processes allocate together",
}


def require(transport: str) -> None:
    """Raise `TensorError`: unknown, without a device here, or not built yet."""
    if transport not in NEEDS:
        raise TensorError(f"transport: no {transport!r}; there are: shm, {', '.join(NEEDS)}")
    if not torch.cuda.is_available():
        raise TensorError(f"transport: {transport} needs {NEEDS[transport]}; this process has no CUDA device")
    raise TensorError(f"transport: {transport} is declared only; tensors travel by shm and tcp")
