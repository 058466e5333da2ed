"""Server-sent events: the bytes on the wire, and work that ends when the client goes.

Knows nothing of what an event says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


def event(data: str, kind: str = "", number: int | None = None) -> bytes:
    """One event, with its type and id if they are given; `data` holds no line breaks (JSON has none)."""
    head = f"id: {number}\n" if number is not None else ""
    head += f"event: {kind}\n" if kind else ""
    return b"%bdata: %b\n\n" % (head.encode(), data.encode())


async def until_disconnect(receive: Any, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` until it ends or the client goes, then cancelling it. True if `work` ended by itself.

    The request's body must have been read. Errors of `work` are raised here.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
