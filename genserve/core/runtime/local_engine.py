"""An engine in this process: its controller on a `LiveLoop`, its lanes on threads or Ray actors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from genserve.core.control import Controller
from genserve.core.dispatch import LogEntry
from genserve.core.errors import ExecutionFailed, GenserveError
from genserve.core.runtime.loop import Executor, LiveLoop
from genserve.core.runtime.streams import StreamTable
from genserve.core.types import Abort, EngineInfo, Submit, TokenOutput

ENGINE = "engine"
GATEWAY = "gateway"


class EngineController(Controller, Protocol):
    """A controller that answers `Submit` and `Abort` with tuples of `TokenOutput` to the gateway."""

    def stats(self) -> dict[str, float]: ...


class LocalEngine:
    """`EngineClient` over a controller in this event loop. Build it inside a running loop."""

    def __init__(
        self,
        info: EngineInfo,
        controller: EngineController,
        executors: Mapping[str, Executor],
        log: list[LogEntry] | None = None,
    ) -> None:
        self._info = info
        self._controller = controller
        self._streams = StreamTable()
        self._failure: GenserveError | None = None
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
        self._loop.post(ENGINE, request)
        return stream

    def abort(self, request_id: str) -> None:
        if self._loop.fatal is None:
            self._loop.post(ENGINE, Abort(request_id))

    async def stats(self) -> dict[str, float]:
        return {**self._controller.stats(), "num_streams": len(self._streams)}

    async def aclose(self) -> None:
        await self._loop.aclose()
        self._streams.fail_all(ExecutionFailed("the engine was closed"))

    def _on_fatal(self, error: BaseException) -> None:
        if not isinstance(error, GenserveError):
            error = ExecutionFailed(f"the engine's controller failed: {type(error).__name__}: {error}")
        self._failure = error
        self._streams.fail_all(error)
