"""Limits on request bodies, as ASGI middleware: their place in the server, their size, their pace.

A request with a body is admitted before the first byte of it is read.
"""

from __future__ import annotations

import asyncio
from typing import Any

from genserve.core.errors import GenserveError, PayloadTooLarge, RequestTimeout
from genserve.core.server.gateway import Gateway
from genserve.core.server.http_errors import send_error

# A body that keeps coming may take so many times the timeout of one that stopped.
_WHOLE_BODY_TIMEOUTS = 10
_PICTURE_PATHS = ("/v1/images/", "/v1/workflows/")


class Admission:
    """Gives each POST a place in `gateway` (`scope["genserve.lease"]`), or answers why there is none."""

    def __init__(self, app: Any, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            lease = self._gateway.enter()
        except GenserveError as error:
            await send_error(send, error)
            return
        with lease:
            scope["genserve.lease"] = lease
            await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies over `max_body_bytes` with `PayloadTooLarge`, chunked ones as soon as they pass it.

    Paths that take pictures have a limit of their own. A body of which nothing arrives for `timeout_s` is a
    `RequestTimeout`.
    """

    def __init__(self, app: Any, max_body_bytes: int, max_image_body_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._max_image_body_bytes = max_image_body_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        takes_pictures = scope["path"].startswith(_PICTURE_PATHS)
        limit = self._max_image_body_bytes if takes_pictures else self._max_body_bytes
        error = PayloadTooLarge(f"the request body is over the limit of {limit} bytes")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
                await send_error(send, error)
                return
        received = 0
        more = True
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _WHOLE_BODY_TIMEOUTS * self._timeout_s

        async def limited_receive() -> Any:
            nonlocal received, more
            if not more:
                return await receive()
            try:
                async with asyncio.timeout(min(self._timeout_s, deadline_s - loop.time())):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout(
                    f"the request body stopped after {received} bytes (limit: {self._timeout_s:g} s)"
                ) from None
            more = message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > limit:
                raise error
            return message

        await self._app(scope, limited_receive, send)
