"""API keys, as ASGI middleware. `/health` stays open, for load balancers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from genserve.core.errors import Unauthorized
from genserve.core.server.http_errors import send_error

_OPEN_PATHS = frozenset({"/health"})


class ApiKeyAuth:
    """Lets a request pass when its bearer token is one of `api_keys`; without keys, every request.

    Keys are compared as digests, all of them, in time that does not depend on where they differ.
    """

    def __init__(self, app: Any, api_keys: Sequence[str] = ()) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        guarded = scope["type"] == "http" and self._digests and scope["path"] not in _OPEN_PATHS
        if guarded and not self._accepts(scope["headers"]):
            await send_error(send, Unauthorized("missing or wrong API key"))
            return
        await self._app(scope, receive, send)

    def _accepts(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = (values[0] if len(values) == 1 else b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)
