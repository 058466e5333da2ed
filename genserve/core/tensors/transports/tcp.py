"""Tensors of other machines: copied over TCP, going on where a broken connection stopped. (torch)"""

from __future__ import annotations

import contextlib
import hmac
import queue
import secrets
import socket
import threading
import time
import zlib

import torch

from genserve.core.errors import StaleTensor, TensorError, TransferFailed
from genserve.core.tensors.fetch import Fetch
from genserve.core.tensors.pool_file import DTYPES
from genserve.core.tensors.ref import TensorRef
from genserve.core.tensors.transports import wire

CONNECT_S = 5.0
STALL_S = 10.0
"""A connection on which nothing comes for so long is taken as broken."""

PAUSES_S = (0.0, 0.05, 0.2, 0.8)
"""Before each attempt that follows one without progress; then the transfer has failed."""

NUM_THREADS = 8
MAX_IDLE_CONNECTIONS = 4
"""Kept for each peer."""


class _Refused(Exception):
    """Trying again is of no use."""


class Tcp:
    """Copies run on up to `NUM_THREADS` threads, which are started as they are needed."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._waiting: queue.SimpleQueue[Pull | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_busy = 0
        self._pulls: set[Pull] = set()
        self._idle: dict[tuple[str, int], list[socket.socket]] = {}
        self._closed = False

    def view(self, ref: TensorRef) -> torch.Tensor:
        raise TensorError("the tensor is on another machine: `get` copies it")

    def check(self, ref: TensorRef) -> None:
        self.view(ref)

    def get(self, ref: TensorRef, out: torch.Tensor | None) -> Fetch:
        if not self._token:
            raise TensorError("token: reading from another machine needs the cluster's token")
        pull = Pull(self, ref, out)
        with self._lock:
            if self._closed:
                raise TensorError("this store is closed")
            self._pulls.add(pull)
            self._num_busy += 1
            if self._num_busy > self._num_threads < NUM_THREADS:
                self._num_threads += 1
                threading.Thread(target=self._work, name="tensors fetch", daemon=True).start()
        self._waiting.put(pull)
        return pull

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pulls, threads = tuple(self._pulls), self._num_threads
            idle = [connection for kept in self._idle.values() for connection in kept]
            self._idle.clear()
        for pull in pulls:
            pull.cancel()
        for _ in range(threads):
            self._waiting.put(None)
        for connection in idle:
            connection.close()

    def _work(self) -> None:
        while (pull := self._waiting.get()) is not None:
            pull.run()
            with self._lock:
                self._num_busy -= 1
                self._pulls.discard(pull)

    def take_connection(self, host: str, port: int) -> socket.socket:
        """An idle one, or a new one after the handshake. Raises OSError, `wire.BadFrame` or `_Refused`."""
        with self._lock:
            if kept := self._idle.get((host, port)):
                return kept.pop()
        connection = socket.create_connection((host, port), timeout=CONNECT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._introduce(connection)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(STALL_S)
        return connection

    def keep_connection(self, host: str, port: int, connection: socket.socket) -> None:
        with self._lock:
            kept = self._idle.setdefault((host, port), [])
            if not self._closed and len(kept) < MAX_IDLE_CONNECTIONS:
                kept.append(connection)
                return
        connection.close()

    def forget_connections(self, host: str, port: int) -> None:
        """One of them broke: the others are no better."""
        with self._lock:
            broken = self._idle.pop((host, port), [])
        for connection in broken:
            connection.close()

    def _introduce(self, connection: socket.socket) -> None:
        deadline_s = time.monotonic() + CONNECT_S
        greeting = wire.receive(connection, wire.GREETING.size, deadline_s)
        magic, status, theirs = wire.GREETING.unpack(greeting)
        if magic != wire.MAGIC:
            raise _Refused("what answers there is no tensor store")
        if status != wire.OK:
            raise _Refused(f"the owner greets with status {status}")
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        connection.sendall(wire.PROOF.pack(nonce, wire.prove(self._token, b"client", nonce, theirs)))
        status, proof = wire.WELCOME.unpack(wire.receive(connection, wire.WELCOME.size, deadline_s))
        if status == wire.BUSY:
            raise ConnectionError("the owner has too many connections")
        if status != wire.OK:
            raise _Refused("the owner refused this store's token")
        if not hmac.compare_digest(proof, wire.prove(self._token, b"server", theirs, nonce)):
            raise _Refused("what answers there doesn't know the cluster's token")


class Pull:
    """One copy under way: a `Fetch`."""

    def __init__(self, tcp: Tcp, ref: TensorRef, out: torch.Tensor | None) -> None:
        self._tcp, self._ref, self._out = tcp, ref, out
        self._over = threading.Event()
        self._result: torch.Tensor | TensorError | None = None
        self._writing = threading.Lock()
        self._cancelled = False
        self._connection: socket.socket | None = None
        self._bytes: memoryview | None = None  # where the bytes go, once the owner has said that it has them
        self._target: torch.Tensor | None = None
        self._received = 0  # bytes, all of them checked

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> torch.Tensor:
        if not self._over.wait(timeout_s):
            raise TimeoutError(f"the tensor didn't come within {timeout_s} s")
        if isinstance(self._result, TensorError):
            raise self._result
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        self._cancelled = True
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._writing:  # whoever takes it from now on sees that it is cancelled
            if self._result is None:
                self._finish(TransferFailed("the fetch was cancelled"))

    def run(self) -> None:
        try:
            result: torch.Tensor | TensorError = self._pull()
        except TensorError as error:
            result = error
        except Exception as error:  # whoever waits must hear of it
            result = TransferFailed(f"{type(error).__name__}: {error}")
            result.__cause__ = error
        with self._writing:
            if self._result is None:
                self._finish(result)

    def _finish(self, result: torch.Tensor | TensorError) -> None:
        self._result = result
        self._over.set()

    def _pull(self) -> torch.Tensor:
        owner = self._ref.owner
        pauses = iter(PAUSES_S)
        while True:
            self._stop_if_cancelled()
            before = self._received
            try:
                connection = self._connection = self._tcp.take_connection(owner.host, owner.port)
                try:
                    self._stop_if_cancelled()  # while there was no connection to break
                    self._transfer(connection)
                except BaseException:
                    connection.close()
                    raise
                self._connection = None
                self._tcp.keep_connection(owner.host, owner.port, connection)
                return self._delivered()
            except _Refused as error:
                raise TransferFailed(f"{owner.host}:{owner.port}: {error}") from error
            except (OSError, wire.BadFrame) as error:
                self._stop_if_cancelled()
                self._tcp.forget_connections(owner.host, owner.port)
                if self._received > before:
                    pauses = iter(PAUSES_S)
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise TransferFailed(
                        f"{owner.host}:{owner.port}: {error}, after {self._received:,} of "
                        f"{self._ref.nbytes:,} bytes and {len(PAUSES_S)} attempts"
                    ) from error
                if self._over.wait(pause_s):
                    self._stop_if_cancelled()

    def _transfer(self, connection: socket.socket) -> None:
        """From `_received` to the end."""
        ref = self._ref
        connection.settimeout(STALL_S)
        request = wire.Request(
            ref.owner.name, ref.epoch, ref.generation, ref.offset, ref.nbytes, self._received
        )
        connection.sendall(request.pack())
        status, remaining = wire.REPLY.unpack(wire.receive(connection, wire.REPLY.size))
        self._stop_unless_there(status)
        if remaining != ref.nbytes - self._received:
            raise _Refused(f"the owner means to send {remaining:,} bytes, not the rest of the tensor")
        if self._bytes is None:
            self._prepare()
        assert self._bytes is not None
        while True:
            length, check = wire.CHUNK.unpack(wire.receive(connection, wire.CHUNK.size))
            if not length:
                self._stop_unless_there(check)
                if self._received < ref.nbytes:
                    raise _Refused("the owner ended before the tensor's end")
                return
            if length > min(wire.CHUNK_BYTES, ref.nbytes - self._received):
                raise _Refused(f"a chunk of {length:,} bytes is longer than any may be here")
            chunk = self._bytes[self._received : self._received + length]
            with self._writing:
                self._stop_if_cancelled()
                wire.receive_into(connection, chunk)
            if zlib.crc32(chunk) != check:
                raise wire.BadFrame("a chunk's checksum is wrong")
            self._received += length

    def _prepare(self) -> None:
        ref, out = self._ref, self._out
        direct = out is not None and out.device.type == "cpu" and out.is_contiguous()
        self._target = (
            out.detach() if out is not None and direct else torch.empty(ref.shape, dtype=DTYPES[ref.dtype])
        )
        self._bytes = self._target.reshape(-1).view(torch.uint8).numpy().data

    def _delivered(self) -> torch.Tensor:
        assert self._target is not None
        if self._out is None:
            return self._target
        if self._out.data_ptr() != self._target.data_ptr():
            with self._writing, torch.no_grad():
                self._stop_if_cancelled()
                self._out.copy_(self._target)
        return self._out

    def _stop_if_cancelled(self) -> None:
        if self._cancelled:
            raise TransferFailed("the fetch was cancelled")

    def _stop_unless_there(self, status: int) -> None:
        if status == wire.STALE:
            raise StaleTensor("the tensor was released, or its owner is gone")
        if status != wire.OK:
            raise _Refused(f"the owner can't serve this request (status {status})")
