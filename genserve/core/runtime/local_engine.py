"""An engine in this process: its controllers on a `LiveLoop`, or some of them in actors; lanes on threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from genserve.core.control import Controller
from genserve.core.dispatch import LogEntry
from genserve.core.errors import ExecutionFailed, ExecutorLost, GenserveError
from genserve.core.runtime.loop import Executor, LiveLoop
from genserve.core.runtime.streams import StreamTable
from genserve.core.types import Abort, EngineInfo, FinishReason, Submit, TokenOutput

if TYPE_CHECKING:
    from genserve.core.runtime.membership import Membership

ENGINE = "engine"
GATEWAY = "gateway"
MEMBERSHIP = "membership"


class StatsController(Controller, Protocol):
    """A controller that tells its gauges and counters."""

    def stats(self) -> dict[str, float]: ...


class Remote(Protocol):
    """A controller that runs elsewhere (`core.runtime.ray_controller`)."""

    def connect(self, post: Callable[[str, Any], None], on_given_up: Callable[[], None]) -> None: ...

    def send(self, body: Any) -> None: ...

    @property
    def failure(self) -> GenserveError | None: ...

    async def stats(self) -> dict[str, float]: ...

    async def aclose(self) -> None: ...


class LocalEngine:
    """`EngineClient` over controllers in this event loop. Build it inside a running loop.

    `controller`, called `entry` by the others, answers `Submit` and `Abort` with tuples of `TokenOutput`
    to the gateway. `others` are further controllers that it speaks with, by name; `remotes` those of them
    that run elsewhere; with a `membership` those are its members, which come and go. `figures` puts the
    engine's figures together from theirs; by default they are added up and stand behind the entry's own.
    `closed` frees what else there is once the executors have ended.
    `prepare` is slow work that a request with a grammar needs before any step may see it. It blocks,
    on a thread of its own, and the controller gets the request afterwards; other requests go on. What
    it raises ends that request with an error.
    """

    def __init__(
        self,
        info: EngineInfo,
        controller: StatsController,
        executors: Mapping[str, Executor],
        log: list[LogEntry] | None = None,
        prepare: Callable[[Submit], None] | None = None,
        *,
        entry: str = ENGINE,
        others: Mapping[str, StatsController] | None = None,
        remotes: Mapping[str, Remote] | None = None,
        membership: Membership | None = None,
        figures: Callable[[Sequence[Mapping[str, float]]], dict[str, float]] | None = None,
        closed: Callable[[], None] | None = None,
    ) -> None:
        self._info = info
        self._controller = controller
        self._entry = entry
        self._figures = figures or self._added_up
        self._closed = closed
        self._others = dict(others or {})
        self._remotes: dict[str, Remote] = {}
        self._membership = membership
        self._streams = StreamTable()
        self._failure: GenserveError | None = None
        self._prepare = prepare
        # One thread: the choices of a request must reach the controller in their order.
        self._preparer = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._loop = LiveLoop(
            {entry: controller, **self._others},
            executors,
            {GATEWAY: self._streams.route},
            log,
            on_fatal=self._on_fatal,
        )
        for name, remote in (remotes or {}).items():
            self.add_remote(name, remote)
        if membership is not None:
            self._loop.set_sink(MEMBERSHIP, membership.take)
            membership.lead(self)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def failure(self) -> GenserveError | None:
        return self._failure

    @property
    def membership(self) -> Membership | None:
        """Who may add, drain and change the workers while serving."""
        return self._membership

    def add_remote(self, name: str, remote: Remote) -> None:
        """Begin to carry messages between the controllers here and `remote`, called `name`."""
        self._remotes[name] = remote
        self._loop.set_sink(name, remote.send)
        remote.connect(partial(self._from_remote, name), self._on_given_up)

    def remove_remote(self, name: str) -> Remote:
        """Carry nothing more to or from `name`; what is still sent to it is dropped. The caller closes it."""
        self._loop.set_sink(name, lambda body: None)
        remote = self._remotes.pop(name)
        self._on_given_up()  # those that are left may be gone for good
        return remote

    def tell(self, body: Any) -> None:
        """Have the membership tell the entry `body`; raises why the engine can serve no more, if so."""
        if self._failure is not None:
            raise self._failure
        self._loop.post(self._entry, body, MEMBERSHIP)

    def run_age_s(self) -> float:
        """For how long the oldest run at hand on this loop has been running; 0 if there is none."""
        return self._loop.run_age_s()

    def submit(self, request: Submit) -> AsyncIterator[TokenOutput]:
        if self._failure is not None:
            raise self._failure
        stream = self._streams.open(request.request_id)
        if self._prepare is None or request.sampling.grammar is None:
            self._loop.post(self._entry, request)
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
                self._loop.post(self._entry, request)
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
            self._loop.post(self._entry, Abort(request_id))

    async def stats(self) -> dict[str, float]:
        parts = [other.stats() for other in self._others.values()]
        parts += await asyncio.gather(*(remote.stats() for remote in self._remotes.values()))
        return {**self._figures(parts), "num_streams": len(self._streams)}

    def _added_up(self, parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for part in parts for name in part)
        sums = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
        return {**sums, **self._controller.stats()}

    def _from_remote(self, name: str, to: str, body: Any) -> None:
        if self._loop.fatal is None and name in self._remotes:
            self._loop.post(to, body, name)

    def _on_given_up(self) -> None:
        """Some remote will not come back: with the last one goes the engine."""
        failures = [remote.failure for remote in self._remotes.values()]
        if all(failures):
            self._on_fatal(next(filter(None, failures), ExecutorLost("the engine's processes are gone")))

    async def aclose(self) -> None:
        for request_id in list(self._preparing):
            self.abort(request_id)
        self._preparer.shutdown(wait=False, cancel_futures=True)
        if self._membership is not None:
            await self._membership.aclose()
        await self._loop.aclose()
        await asyncio.gather(*(remote.aclose() for remote in self._remotes.values()))
        self._streams.fail_all(ExecutionFailed("the engine was closed"))
        if self._closed is not None:
            self._closed()

    def _on_fatal(self, error: BaseException) -> None:
        if not isinstance(error, GenserveError):
            error = ExecutionFailed(f"the engine's controller failed: {type(error).__name__}: {error}")
        self._failure = error
        self._streams.fail_all(error)
        if self._membership is not None:
            self._membership.fail(error)
