"""An engine in this process: its controller on a `LiveLoop`, its lanes on threads or Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from genserve.core.control import Controller
from genserve.core.dispatch import LogEntry
from genserve.core.errors import ExecutionFailed, GenserveError
from genserve.core.runtime.loop import Executor, LiveLoop
from genserve.core.runtime.streams import StreamTable
from genserve.core.types import Abort, EngineInfo, FinishReason, Submit, TokenOutput

ENGINE = "engine"
GATEWAY = "gateway"


class EngineController(Controller, Protocol):
    """A controller that answers `Submit` and `Abort` with tuples of `TokenOutput` to the gateway."""

    def stats(self) -> dict[str, float]: ...


class LocalEngine:
    """`EngineClient` over a controller in this event loop. Build it inside a running loop.

    `prepare` is slow work that a request with a grammar needs before any step may see it. It blocks,
    on a thread of its own, and the controller gets the request afterwards; other requests go on. What
    it raises ends that request with an error.
    """

    def __init__(
        self,
        info: EngineInfo,
        controller: EngineController,
        executors: Mapping[str, Executor],
        log: list[LogEntry] | None = None,
        prepare: Callable[[Submit], None] | None = None,
    ) -> None:
        self._info = info
        self._controller = controller
        self._streams = StreamTable()
        self._failure: GenserveError | None = None
        self._prepare = prepare
        # One thread: the choices of a request must reach the controller in their order.
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._loop = LiveLoop(
            {ENGINE: controller},
            executors,
            {GATEWAY: self._streams.route},
            log,
            on_fatal=self._on_fatal,
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def failure(self) -> GenserveError | None:
        return self._failure

    def submit(self, request: Submit) -> AsyncIterator[TokenOutput]:
        if self._failure is not None:
            raise self._failure
        stream = self._streams.open(request.request_id)
        if self._prepare is None or request.sampling.grammar is None:
            self._loop.post(ENGINE, request)
        else:
            task = asyncio.get_running_loop().create_task(self._post_prepared(request, self._prepare))
            self._preparing[request.request_id] = task
        return stream

    async def _post_prepared(self, request: Submit, prepare: Callable[[Submit], None]) -> None:
        aio = asyncio.get_running_loop()
        try:
            await aio.run_in_executor(self._preparer, prepare, request)
        except Exception as error:
            self._end(request.request_id, "error", f"grammar: {error}")
        else:
            if self._loop.fatal is None:
                self._loop.post(ENGINE, request)
        finally:
            if self._preparing.get(request.request_id) is asyncio.current_task():
                del self._preparing[request.request_id]

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        self._streams.route([TokenOutput(request_id, finish_reason=reason, error=error)])

    def abort(self, request_id: str) -> None:
        task = self._preparing.pop(request_id, None)
        if task is not None and not task.done():
            task.cancel()
            self._end(request_id, "abort")
            return
        if self._loop.fatal is None:
            self._loop.post(ENGINE, Abort(request_id))

    async def stats(self) -> dict[str, float]:
        return {**self._controller.stats(), "num_streams": len(self._streams)}

    async def aclose(self) -> None:
        for request_id in list(self._preparing):
            self.abort(request_id)
        self._preparer.shutdown(wait=False, cancel_futures=True)
        await self._loop.aclose()
        self._streams.fail_all(ExecutionFailed("the engine was closed"))

    def _on_fatal(self, error: BaseException) -> None:
        if not isinstance(error, GenserveError):
            error = ExecutionFailed(f"the engine's controller failed: {type(error).__name__}: {error}")
        self._failure = error
        self._streams.fail_all(error)
