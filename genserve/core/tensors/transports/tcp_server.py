"""Serves the tensors of one store to other machines, to peers that know the cluster's token."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable

from genserve.core.errors import ConfigError, StaleTensor, TensorError
from genserve.core.tensors.transports import wire

logger = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 32
"""Peers that haven't shown the token yet; another one takes the place of the oldest."""

IDLE_S = 60.0
STALL_S = 20.0
"""A peer that takes no byte for so long is given up."""

# Name, epoch, generation, offset and size to the bytes, or `StaleTensor`.
Read = Callable[[str, int, int, int, int], memoryview]


class TcpServer:
    """A thread for each of at most `max_connections` peers that have shown the token, and for a few that haven't.

    A further peer takes the place of the one that has been idle longest; if all are busy, it is told to come
    again later.
    """

    def __init__(self, listen: tuple[str, int], token: str, read: Read, max_connections: int = 64) -> None:
        host, port = listen
        if host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"listen: {host!r} is no address that other machines could be told to reach")
        self._token = token.encode()
        self._read = read
        self._max_connections = max_connections
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._connections: set[socket.socket] = set()
        self._idle: dict[socket.socket, None] = {}  # of these; the longest idle first
        self._lock = threading.Lock()
        self._closed = False
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(f"listen: {host}:{port}: {error}") from error
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="tensors accept", daemon=True).start()

    def num_connections(self) -> int:
        """Of peers that have shown the token."""
        return len(self._connections)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            open_ones = [*self._strangers, *self._connections]
        for connection in open_ones:
            _end(connection)
        _end(self._listener)
        self._listener.close()

    def disown(self) -> None:
        """In a forked child, whose copies would keep the connections open after the parent's death."""
        for connection in (self._listener, *self._strangers, *self._connections):
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning("tensors: accepting failed: %s", error)  # as when descriptors run out
                time.sleep(0.1)
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                if len(self._strangers) >= MAX_HANDSHAKES:
                    self._drop_oldest(self._strangers)
                self._strangers[connection] = None
            threading.Thread(
                target=self._converse, args=(connection,), name="tensors serve", daemon=True
            ).start()

    def _drop_oldest(self, among: dict[socket.socket, None]) -> None:
        oldest = next(iter(among))
        del among[oldest]
        self._connections.discard(oldest)
        _end(oldest)

    def _admit(self, connection: socket.socket) -> bool:
        """Its peer has shown the token; False if there is no place for it."""
        with self._lock:
            if self._closed or connection not in self._strangers:
                return False
            if len(self._connections) >= self._max_connections:
                if not self._idle:
                    return False
                self._drop_oldest(self._idle)
            del self._strangers[connection]
            self._connections.add(connection)
            return True

    def _converse(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._welcome(connection):
                    while self._answer(connection):
                        pass
        except (OSError, wire.BadFrame) as error:
            logger.info("tensors: connection ended: %s", error)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._connections.discard(connection)
                self._idle.pop(connection, None)

    def _welcome(self, connection: socket.socket) -> bool:
        deadline_s = time.monotonic() + HANDSHAKE_S
        connection.settimeout(HANDSHAKE_S)
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        connection.sendall(wire.GREETING.pack(wire.MAGIC, wire.OK, nonce))
        theirs, proof = wire.PROOF.unpack(wire.receive(connection, wire.PROOF.size, deadline_s))
        if not hmac.compare_digest(proof, wire.prove(self._token, b"client", theirs, nonce)):
            logger.warning("tensors: refused a peer without the cluster's token")
            connection.sendall(wire.WELCOME.pack(wire.REFUSED, bytes(32)))
            return False
        if not self._admit(connection):
            connection.sendall(wire.WELCOME.pack(wire.BUSY, bytes(32)))
            return False
        connection.sendall(wire.WELCOME.pack(wire.OK, wire.prove(self._token, b"server", nonce, theirs)))
        return True

    def _answer(self, connection: socket.socket) -> bool:
        """One request; False at the end."""
        connection.settimeout(IDLE_S)
        with self._lock:
            self._idle[connection] = None
        first = connection.recv(1)
        with self._lock:
            if connection not in self._idle:  # its place was given to another
                return False
            del self._idle[connection]
        if not first:
            return False
        deadline_s = time.monotonic() + HANDSHAKE_S
        rest = wire.receive(connection, wire.REQUEST_BYTES - 1, deadline_s)
        connection.settimeout(STALL_S)
        request = wire.Request.unpack(first + rest)
        try:
            self._find(request)
        except TensorError as error:
            status = wire.STALE if isinstance(error, StaleTensor) else wire.BAD
            connection.sendall(wire.REPLY.pack(status, 0))
            return True
        connection.sendall(wire.REPLY.pack(wire.OK, request.nbytes - request.start))
        for start in range(request.start, request.nbytes, wire.CHUNK_BYTES):
            # Asked again for every chunk: the slot may be another tensor's by now.
            try:
                chunk = self._find(request)[start : start + wire.CHUNK_BYTES]
            except TensorError:
                break
            header = wire.CHUNK.pack(len(chunk), zlib.crc32(chunk))
            if len(chunk) < 4096:
                connection.sendall(header + chunk)
            else:
                connection.sendall(header)
                connection.sendall(chunk)
        try:
            self._find(request)
            connection.sendall(wire.CHUNK.pack(0, wire.OK))
        except TensorError:
            connection.sendall(wire.CHUNK.pack(0, wire.STALE))
        return True

    def _find(self, request: wire.Request) -> memoryview:
        return self._read(request.name, request.epoch, request.generation, request.offset, request.nbytes)


def _end(connection: socket.socket) -> None:
    """Wakes the thread that waits in it, which closing alone wouldn't."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
