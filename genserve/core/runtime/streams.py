"""Fan-out of an engine's outputs to the iterators that wait for them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from genserve.core.errors import GenserveError
from genserve.core.types import TokenOutput


class OutputStream:
    """The outputs of one sequence, in order. One consumer, on the event loop's thread."""

    __slots__ = ("_aio", "_ended", "_error", "_items", "_waiter")

    def __init__(self) -> None:
        self._aio = asyncio.get_running_loop()
        self._items: deque[TokenOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: GenserveError | None = None
        self._ended = False

    def put(self, output: TokenOutput) -> None:
        self._items.append(output)
        self._wake()

    def fail(self, error: GenserveError) -> None:
        """End the stream with `error`, after what has already come."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> TokenOutput:
        while not self._items:
            if self._ended:
                raise StopAsyncIteration
            if self._error is not None:
                self._ended = True
                raise self._error
            self._waiter = self._aio.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output = self._items.popleft()
        self._ended = output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        """Nothing further will be read. Does not abort the sequence."""
        self._ended = True
        self._items.clear()


class StreamTable:
    """The open streams by request id."""

    def __init__(self) -> None:
        self._streams: dict[str, OutputStream] = {}
        self._fatal: GenserveError | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: str) -> OutputStream:
        if self._fatal is not None:
            raise self._fatal
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is already in use")
        stream = self._streams[request_id] = OutputStream()
        return stream

    def route(self, outputs: Iterable[TokenOutput]) -> None:
        """Hand each output to its stream; a stream is forgotten once its last output is out."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                if output.finish_reason is not None:
                    del self._streams[output.request_id]
                stream.put(output)

    def fail_all(self, error: GenserveError) -> None:
        """End every stream with `error`, and refuse new ones: the engine is gone."""
        self._fatal = error
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
