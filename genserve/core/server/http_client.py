"""A small HTTP/1.1 client for measuring: bodies are handed on in the very callback that received them.

Owns connections and framing (httptools parses); it must not know what the bodies mean. It exists
because a load generator shares its machine with the server it measures: a general client spends
several times as much per streamed event, and its queues blur the arrival times.
No proxies, redirects, compression or HTTP/2.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools

from genserve.core.errors import ConfigError

# Called with (status, piece of the body) as pieces arrive.
OnBody = Callable[[int, bytes], None]


class Disconnected(ConnectionError):
    """The server closed the connection before the response was complete."""


class BadResponse(ConnectionError):
    """What the server sent is not HTTP."""


class HttpClient:
    """Keeps idle connections to one origin. Use as an async context manager, within one event loop.

    `base_url` is the server's address, with or without a path; paths of requests come after it.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        url = urlsplit(base_url)
        try:
            port = url.port
        except ValueError:
            port = -1
        if url.scheme not in ("http", "https") or not url.hostname or port == -1 or url.query:
            raise ConfigError(f"base_url: expected http://host:port, got {base_url!r}")
        if any("\n" in text or "\r" in text for item in (headers or {}).items() for text in item):
            raise ConfigError("headers: must not contain line breaks")
        self._host = url.hostname
        self._port = port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._root = url.path.rstrip("/")
        lines = {"host": url.netloc.rpartition("@")[2], "accept-encoding": "identity", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Drop every connection, idle or not, and wait until they are gone."""
        connections = list(self._all)
        for connection in connections:
            connection.abort()
        await asyncio.gather(*(connection.closed.wait() for connection in connections))

    async def request(self, method: str, path: str, body: bytes, on_body: OnBody) -> int:
        """Send a request and hand on its body as it arrives; returns the status at the end.

        A cancelled or failed request drops its connection. An idle connection that the server
        closed at the same moment is replaced once. Raises OSError if it cannot connect,
        Disconnected, or BadResponse.
        """
        data = (
            f"{method} {self._root}{path} HTTP/1.1\r\n{self._head}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode("latin-1") + body
        while self._idle:
            connection = self._idle.pop()
            if connection.closed.is_set():
                continue
            try:
                return await self._exchange(connection, data, on_body)
            except Disconnected:
                if connection.got_bytes:
                    raise
                break
        return await self._exchange(await self._connect(), data, on_body)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self._all), self._host, self._port, ssl=self._tls
        )
        return connection

    async def _exchange(self, connection: _Connection, data: bytes, on_body: OnBody) -> int:
        try:
            status = await connection.exchange(data, on_body)
        except BaseException:
            connection.abort()
            raise
        if connection.keep_alive:
            self._idle.append(connection)
        else:
            connection.abort()
        return status


class _Connection(asyncio.Protocol):
    def __init__(self, registry: set[_Connection]) -> None:
        self._registry = registry
        self._transport: Any = None
        self._done: asyncio.Future[int] | None = None
        self._on_body: OnBody | None = None
        self._parser: Any = None
        self._status = 0
        self._framed = False
        self.closed = asyncio.Event()
        self.keep_alive = False
        self.got_bytes = False

    async def exchange(self, data: bytes, on_body: OnBody) -> int:
        self._done = asyncio.get_running_loop().create_future()
        self._on_body = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._status, self._framed = 0, False
        self.keep_alive = self.got_bytes = False
        if self.closed.is_set():
            raise Disconnected("the server closed the connection")
        self._transport.write(data)
        return await self._done

    def abort(self) -> None:
        if self._transport is not None and not self.closed.is_set():
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._registry.add(self)

    def data_received(self, data: bytes) -> None:
        self.got_bytes = True
        if self._done is None or self._done.done():
            # Bytes that nobody asked for: this connection cannot be trusted with another request.
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BadResponse(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.discard(self)
        self.closed.set()
        if self._status and not self._framed and exc is None:
            self._finish()  # a body without length or chunks ends with the connection
        self._fail(Disconnected("the server closed the connection before the response was complete"))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._on_body is not None:
            self._on_body(self._status, body)

    def on_message_complete(self) -> None:
        self.keep_alive = self._framed and self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._status)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
