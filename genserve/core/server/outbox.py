"""The body of a streamed response on its way to a client that may not read it.

What makes the stream does not wait for its reader: the engine's work ends, and is given back, when
it is done. What the reader has not taken is held here, up to a limit.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

MAX_HELD_BYTES = 4 << 20  # of one stream, beyond what transport and socket hold


class Outbox:
    """Sends over ASGI's `send`, at once while the client reads; else later, in order.

    Without a connection that can tell whether the client reads (`HttpConnection`), `write` waits as
    `send` does. A client that falls `max_held_bytes` behind is dropped.
    """

    def __init__(self, scope: Any, send: Any, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._send = send
        self._max_held_bytes = max_held_bytes
        self._connection = scope.get("extensions", {}).get("genserve.connection")
        self._held: list[bytes] = []
        self._num_held_bytes = 0
        self._flushing: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> None:
        """Part of the body; more follows."""
        if self._flushing is None and (self._connection is None or not self._connection.is_write_paused):
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            return
        self._held.append(data)
        self._num_held_bytes += len(data)
        if self._num_held_bytes > self._max_held_bytes:
            self._held.clear()
            self._connection.reset()
            await asyncio.get_running_loop().create_future()  # until the disconnect ends this task
        if self._flushing is None:
            self._flushing = asyncio.ensure_future(self._flush())

    async def finish(self, data: bytes) -> None:
        """The last part of the body; returns when the client's connection has taken all."""
        if self._flushing is not None:
            await self._flushing
        await self._send({"type": "http.response.body", "body": data})

    async def _flush(self) -> None:
        while self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._num_held_bytes = 0
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._flushing = None

    async def __aenter__(self) -> Outbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
