from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from genserve.core.tensors.ref import TensorRef
from genserve.core.tensors.store import TensorStore
from tests.core.tensors.peer import Owner, Peer

POOL_BYTES = 4 << 20
TOKEN = "the cluster's secret"


class Ends:
    """An owner and a reader, connected by one way."""

    def __init__(self, way: str, directory: Path, owner: Owner | Peer, reader: TensorStore) -> None:
        self.way, self.directory, self.owner, self.reader = way, directory, owner, reader

    def put(self, dtype: str = "float32", shape: tuple[int, ...] = (64,), **options) -> TensorRef:
        return self.as_seen(self.owner.put(dtype, shape, **options))

    def as_seen(self, ref: TensorRef) -> TensorRef:
        """As a reference looks to a reader on another machine."""
        if self.way != "tcp":
            return ref
        return dataclasses.replace(ref, owner=ref.owner._replace(machine="elsewhere"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def open_store(directory: Path) -> Iterator[Callable[..., TensorStore]]:
    stores = []

    def opened(pool_bytes: int = POOL_BYTES, **options) -> TensorStore:
        stores.append(TensorStore.open(pool_bytes=pool_bytes, directory=directory, **options))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture
def new_peer() -> Iterator[Callable[[], Peer]]:
    peers = []

    def started() -> Peer:
        peers.append(Peer())
        return peers[-1]

    yield started
    for peer in peers:
        peer.end()


@pytest.fixture
def connect(directory: Path, open_store, new_peer) -> Callable[[str], Ends]:
    def connected(way: str) -> Ends:
        reader = open_store(token=TOKEN)
        if way == "local":
            owner = Owner()
            owner.store = reader
            return Ends(way, directory, owner, reader)
        peer = new_peer()
        listen = ("127.0.0.1", 0) if way == "tcp" else None
        peer.open(pool_bytes=POOL_BYTES, directory=directory, listen=listen, token=TOKEN)
        return Ends(way, directory, peer, reader)

    return connected


@pytest.fixture(params=["local", "shm", "tcp"])
def ends(request: pytest.FixtureRequest, connect) -> Ends:
    return connect(request.param)


@pytest.fixture(params=["shm", "tcp"])
def apart(request: pytest.FixtureRequest, connect) -> Ends:
    """Two processes."""
    return connect(request.param)
