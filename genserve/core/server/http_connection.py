"""One HTTP/1.1 connection: uvicorn's own on httptools, with bounds that uvicorn does not have.

Owns the limits on what a client may send before it is anybody (the head of a request, in bytes and
seconds) and on how long it may not read what it is sent. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import http
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0


class _HeadTooLarge(Exception):
    pass


class HttpConnection(HttpToolsProtocol):
    """Answers 431 to heads (or trailers) over `MAX_HEAD_BYTES`, closes the connection when one takes
    longer than `HEAD_TIMEOUT_S`, and resets it when its client takes nothing for `write_timeout_s`.

    An application finds it as `scope["extensions"]["genserve.connection"]`.
    """

    write_timeout_s = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_unread = 0  # bytes since the parser last came to something other than a head
        self._num_head = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._await_head()

    @property
    def is_write_paused(self) -> bool:
        """Whether the client has so much to read that sending more would wait."""
        return self.flow.write_paused

    def reset(self) -> None:
        """Drop the connection and whatever the client has not read."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_unread += len(data)
        super().data_received(data)
        if self._num_unread > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        if self._num_head > MAX_HEAD_BYTES:  # how an error in a parser callback comes out
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {"genserve.connection": self}  # type: ignore[dict-item]
        self._num_head = 0
        if self._head_timer is None:
            self._await_head()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_unread = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unread = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _count_head(self, num_bytes: int) -> None:
        self._num_head += num_bytes
        if self._num_head > MAX_HEAD_BYTES:
            raise _HeadTooLarge

    def _refuse_head(self) -> None:
        status = http.HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        body = b"The head of the request is over the limit of %d bytes" % MAX_HEAD_BYTES
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status, status.phrase.encode(), len(body), body)
        )
        self.transport.close()

    def _watch_writing(self, num_before: int | None) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        if num_before is not None and num_bytes >= num_before:
            self.reset()
            return
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._watch_writing, num_bytes)


def connection_type(write_timeout_s: float) -> type[Any]:
    """`HttpConnection` with that write timeout: uvicorn makes connections of a class."""
    return type("HttpConnection", (HttpConnection,), {"write_timeout_s": write_timeout_s})
