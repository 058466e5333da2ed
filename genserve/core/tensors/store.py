"""The tensors of one process: a pool allocated once, what lies in it, and copies from other pools. (torch)

It owns the choice of transport and the life of the parts. Control planes see references only.
"""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from genserve.core.errors import ConfigError, TensorError
from genserve.core.tensors.fetch import Fetch
from genserve.core.tensors.pool_file import (
    DTYPES,
    Directories,
    OwnedPool,
    copy_bytes,
    is_plain,
    remove_leftovers,
)
from genserve.core.tensors.ref import StoreAddress, TensorRef, check_shape
from genserve.core.tensors.slots import Slot
from genserve.core.tensors.transports import Transport, devices, way_to
from genserve.core.tensors.transports.local import Local
from genserve.core.tensors.transports.shm import SharedMemory
from genserve.core.tensors.transports.tcp import Tcp
from genserve.core.tensors.transports.tcp_server import TcpServer

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

__all__ = ["Draft", "Fetch", "TensorStore", "remove_leftovers"]


class Draft:
    """A slot being filled: write into `tensor`, then `seal`; until then no reference to it exists.

    As a context manager it is abandoned when the block ends without `seal`. `tensor` must not be touched after
    either: the memory may be another tensor's.
    """

    __slots__ = ("_dtype", "_shape", "_slot", "_store", "tensor")

    def __init__(self, store: TensorStore, slot: Slot, shape: tuple[int, ...], dtype: str) -> None:
        self._store, self._slot, self._shape, self._dtype = store, slot, shape, dtype
        self.tensor = store._local.writable(slot, shape, dtype)

    def seal(self) -> TensorRef:
        """The tensor is complete and immutable. If all holders were dropped meanwhile, it is stale already."""
        return self._store._seal(self._slot, self._shape, self._dtype)

    def abandon(self) -> None:
        self._store._local.abandon(self._slot)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


class TensorStore:
    """Thread-safe; not usable in a forked child. All sizes in bytes.

        here = TensorStore.open(pool_bytes=64 << 20)          # one process
        ref = here.put(tensor, holders=["reader"])            # pickle `ref`, send it as you like
        there = TensorStore.open(pool_bytes=1 << 20)          # another process
        copy = there.get(ref).wait(timeout_s=5).clone()       # then tell the first one, which says
        here.release(ref, "reader")

    A holder is any name: of a request, a task, a process. Only the owner releases, because a reader that
    died could not; readers tell it over whatever control plane they share.

    A tensor is immutable once it is put, and stays until no holder is left. Views are mapped read-only, which
    torch doesn't know of: writing to one ends the process with a segmentation fault rather than change what
    others read.
    """

    def __init__(
        self, local: Local, address: StoreAddress, others: dict[str, Transport], server: TcpServer | None
    ) -> None:
        """Use `open`."""
        self._local = local
        self.epoch = local.pool.epoch
        self._address = address
        self._transports: dict[str, Transport] = {"local": local, **others}
        self._server = server
        parts = [part for part in (server, *others.values(), local) if part is not None]
        self._close = weakref.finalize(self, _close_all, os.getpid(), parts)
        _OPEN.add(self)

    @staticmethod
    def open(
        *,
        pool_bytes: int,
        directory: str | Path | None = None,
        listen: tuple[str, int] | None = None,
        token: str = "",
    ) -> TensorStore:
        """Reserve the pool, and remove those that dead processes left behind.

        pool_bytes  all of it is allocated now (on tmpfs that means real memory, though pages are zeroed only
                    when they are first touched), so that a full `/dev/shm` is a `ConfigError` here and never a
                    bus error later. Generations take another 3 %.
        directory   for the pool; by default `/dev/shm`, and with a warning the temporary folder where that
                    has no room. Stores see each other's memory if they were opened with the same.
        listen      host and port (0: any) at which other machines reach this store. Needs `token`.
        token       the cluster's secret, the same everywhere; also needed to read from other machines.
        """
        if listen is not None and not token:
            raise ConfigError("token: a store that listens needs the cluster's token")
        remove_leftovers(directory)
        directories = Directories.of(directory)
        local = Local(OwnedPool.create(pool_bytes, directory))
        address = StoreAddress(local.pool.name, directories.machine())
        server = None
        if listen is not None:
            try:
                server = TcpServer(listen, token, local.read)
            except ConfigError:
                local.close()
                raise
            address = address._replace(host=listen[0], port=server.port)
        return TensorStore(local, address, {"shm": SharedMemory(directories), "tcp": Tcp(token)}, server)

    @property
    def address(self) -> StoreAddress:
        return self._address

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, holders: Iterable[str]) -> Draft:
        """Room for a tensor, to be written in place. Raises `StoreFull`, or `TensorError` naming what cannot be."""
        name = _name_of(dtype)
        shape = tuple(shape)
        check_shape(shape)
        slot = self._local.allocate(math.prod(shape) * dtype.itemsize, holders)
        try:
            return Draft(self, slot, shape, name)
        except BaseException:
            self._local.abandon(slot)
            raise

    def put(self, tensor: torch.Tensor, holders: Iterable[str]) -> TensorRef:
        """Copy `tensor` into the pool. It is immutable from now on, and stays until no holder is left.

        Any strides and any device; with gradients, the values only.
        """
        plain = is_plain(tensor)
        if not plain and (tensor.layout is not torch.strided or tensor.is_meta):
            raise TensorError("tensor: it has no plain memory (sparse, or on the meta device)")
        name, shape, local = _name_of(tensor.dtype), tuple(tensor.shape), self._local
        slot = local.allocate(tensor.nbytes, holders)
        try:
            if plain:
                copy_bytes(local.pool.memory.start + slot.offset, tensor.data_ptr(), slot.nbytes)
            else:
                local.writable(slot, shape, name).copy_(tensor.detach())
            return self._seal(slot, shape, name)
        except BaseException:
            local.abandon(slot)
            raise

    def view(self, ref: TensorRef) -> torch.Tensor:
        """Zero-copy and read-only, of this process or this machine. Not to be used after the last
        `release`: whoever copies out of it calls `check` afterwards. Raises `StaleTensor`."""
        return self._transport(ref).view(ref)

    def check(self, ref: TensorRef) -> None:
        """Raise `StaleTensor` if `ref`'s slot has been reused or its owner is gone."""
        self._transport(ref).check(ref)

    def is_near(self, ref: TensorRef) -> bool:
        """Whether `view` works: the tensor is in memory that this process can map."""
        return way_to(ref, self._address) in ("local", "shm")

    def get(self, ref: TensorRef, out: torch.Tensor | None = None) -> Fetch:
        """Begin to fetch `ref`, into `out` if given (same shape and dtype; any device or strides).

        Near tensors are there when it returns. Raises `TensorError` for a reference or an `out` that cannot
        be; what goes wrong on the way is raised by the fetch.
        """
        transport = self._transport(ref)
        if out is not None and (out.shape != ref.shape or out.dtype != DTYPES[ref.dtype]):
            raise TensorError(
                f"out: {tuple(out.shape)} {out.dtype} is not the tensor's {ref.shape} {ref.dtype}"
            )
        return transport.get(ref, out)

    def release(self, ref: TensorRef, holder: str) -> None:
        """`holder` needs the tensor no longer. For the owner only; stale references are ignored."""
        self._local.release(ref, holder)

    def drop_holder(self, holder: str) -> None:
        """Release everything that `holder` holds here."""
        self._local.drop_holder(holder)

    def stats(self) -> dict[str, float]:
        """Bytes of the pool, used and free, the largest free piece; tensors (drafts too) and holders."""
        return self._local.stats()

    def close(self) -> None:
        """Remove the pool; references to it are stale everywhere. Views that are in use stay readable."""
        self._close()

    def _seal(self, slot: Slot, shape: tuple[int, ...], dtype: str) -> TensorRef:
        generation = self._local.seal(slot)
        return TensorRef("shm", self._address, self.epoch, generation, slot.offset, slot.nbytes, shape, dtype)

    def _transport(self, ref: TensorRef) -> Transport:
        self._local.ensure_usable()
        ref.check()
        way = way_to(ref, self._address)
        if way not in self._transports:
            devices.require(way)
        return self._transports[way]

    def _disown(self) -> None:
        self._close.detach()
        self._local.disown()
        if self._server is not None:
            self._server.disown()


def _name_of(dtype: torch.dtype) -> str:
    name = _NAMES.get(dtype)
    if name is None:
        raise TensorError(f"dtype: no tensors of {dtype}; there are: {', '.join(DTYPES)}")
    return name


def _close_all(pid: int, parts: Iterable[Transport | TcpServer]) -> None:
    if os.getpid() == pid:
        for part in parts:
            part.close()


_OPEN: weakref.WeakSet[TensorStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in tuple(_OPEN):
        with contextlib.suppress(OSError):
            store._disown()


os.register_at_fork(after_in_child=_after_fork)
