"""A network between two stores that can cut, garble and stop what the owner sends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Proxy:
    """Passes bytes on. `tamper(connection number, byte position, data)` sees what the owner sends and gives what
    goes on: None cuts the connection."""

    def __init__(self, port: int, tamper: Callable[[int, int, bytes], bytes | None]) -> None:
        self._port, self._tamper = port, tamper
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_connections = 0
        self.bytes_from_owner = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for connection in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                owner = socket.create_connection(("127.0.0.1", self._port))
                self._open += [reader, owner]
                number, self.num_connections = self.num_connections, self.num_connections + 1
                threading.Thread(target=self._pass, args=(reader, owner, None), daemon=True).start()
                threading.Thread(target=self._pass, args=(owner, reader, number), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, number: int | None) -> None:
        position = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if number is not None:
                    start, position = position, position + len(data)
                    self.bytes_from_owner += len(data)
                    passed = self._tamper(number, start, data)
                    if passed is None:
                        break
                    data = passed
                target.sendall(data)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
