"""A limit on request bodies, as ASGI middleware: by declared length, and by what really arrives."""

from __future__ import annotations

from typing import Any

from genserve.core.errors import PayloadTooLarge
from genserve.core.server.http_errors import send_error


class BodyLimit:
    """Refuses bodies over `max_body_bytes` with `PayloadTooLarge`, chunked ones as soon as they pass it."""

    def __init__(self, app: Any, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = PayloadTooLarge(f"the request body is over the limit of {self._max_body_bytes} bytes")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > self._max_body_bytes:
                await send_error(send, error)
                return
        received = 0

        async def limited_receive() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise error
            return message

        await self._app(scope, limited_receive, send)
