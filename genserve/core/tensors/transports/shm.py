"""Tensors of other processes of this machine: their pools, mapped for reading. (torch)"""

from __future__ import annotations

import threading

import torch

from genserve.core.errors import StaleTensor, TensorError
from genserve.core.tensors.allocator import ALIGNMENT
from genserve.core.tensors.fetch import Fetch, Finished
from genserve.core.tensors.pool_file import Directories, PeerPool, copy_bytes, is_plain
from genserve.core.tensors.ref import TensorRef
from genserve.core.tensors.slots import units_of
from genserve.core.tensors.transports import Transport


def fetch_near(transport: Transport, ref: TensorRef, out: torch.Tensor | None) -> Fetch:
    """A view, or the copy into `out`, which is made here and now, between two checks."""
    try:
        tensor = transport.view(ref)
        if out is None:
            return Finished(tensor)
        if is_plain(out):
            copy_bytes(out.data_ptr(), tensor.data_ptr(), ref.nbytes)
        else:
            with torch.no_grad():
                out.copy_(tensor)
        transport.check(ref)
        return Finished(out)
    except TensorError as error:
        return Finished(error)


class SharedMemory:
    """Pools stay mapped until their owner is found dead; the memory goes with the last view of them."""

    def __init__(self, directories: Directories) -> None:
        self._directories = directories
        self._peers: dict[str, PeerPool] = {}
        self._lock = threading.Lock()

    def check(self, ref: TensorRef) -> None:
        self._checked(ref)

    def view(self, ref: TensorRef) -> torch.Tensor:
        return self._checked(ref).memory.tensor_at(ref.offset, ref.shape, ref.dtype)

    def get(self, ref: TensorRef, out: torch.Tensor | None) -> Fetch:
        return fetch_near(self, ref, out)

    def close(self) -> None:
        with self._lock:
            self._peers.clear()

    def _checked(self, ref: TensorRef) -> PeerPool:
        name = ref.owner.name
        pool = self._peers.get(name) or self._mapped(name)
        if pool.epoch != ref.epoch or not pool.is_alive():
            with self._lock:
                self._peers.pop(name, None)
            raise StaleTensor("the tensor's owner is gone")
        first, last = units_of(ref.offset, ref.nbytes)
        if (
            ref.offset % ALIGNMENT
            or ref.offset + ref.nbytes > pool.pool_bytes
            or last >= len(pool.generations)
        ):
            raise TensorError(f"offset: {ref.offset} and {ref.nbytes} bytes are no slot of the owner's pool")
        if not pool.generations[first] == pool.generations[last] == ref.generation != 0:
            raise StaleTensor("the tensor was released, and its memory may have been reused")
        return pool

    def _mapped(self, name: str) -> PeerPool:
        with self._lock:
            if (pool := self._peers.get(name)) is not None:
                return pool
            # A new owner often takes the place of one that died: its memory is ours to let go.
            self._peers = {name: pool for name, pool in self._peers.items() if pool.is_alive()}
            try:
                path = self._directories.find(name)
                if path is None:
                    raise StaleTensor("the tensor's owner is gone")
                pool = self._peers[name] = PeerPool(path)
            except FileNotFoundError:
                raise StaleTensor("the tensor's owner is gone") from None
            except OSError as error:  # no descriptors left, a link in the pool's place
                raise TensorError(f"owner: its pool cannot be opened: {error}") from error
            return pool
