"""Ray actors as executors: a worker in an actor behind a lane, or a whole engine inside an actor.

A Ray call costs about a millisecond. Coarse work is driven over `RayExecutor`, one call a run; an
engine of short steps lives inside `RayEngine`'s actor with its own loop, and only its messages and
outputs, in batches, cross over. Ray is imported here and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from genserve.core.control import Done, Failed, Run
from genserve.core.errors import ExecutorLost, GenserveError
from genserve.core.runtime.client import EngineClient
from genserve.core.runtime.executors import Report, Worker
from genserve.core.runtime.health import HealthLimits
from genserve.core.runtime.ray_actor import ActorLost, ActorProcess, WatchedActor, cause, ensure_ray
from genserve.core.runtime.streams import StreamTable
from genserve.core.types import EngineInfo, Submit, TokenOutput

logger = logging.getLogger(__name__)

# How long closing waits for the work at hand before the actor is killed.
_CLOSE_S = 10.0
_RESTART_DELAYS_S = (0.0, 1.0, 5.0)  # before each try to start a new actor


@ray.remote(num_cpus=0, concurrency_groups={"closing": 1, "watching": 1, "control": 1})  # type: ignore[call-overload]
class WorkerActor(ActorProcess):
    """Holds one worker, built in the actor's own process."""

    def __init__(self, build: Callable[..., Worker], args: tuple[Any, ...]) -> None:
        self._build, self._args = build, args
        self._worker: Worker | None = None
        self._closing = False
        self._since_s: float | None = None  # the current run
        self._never = threading.Event()

    def start(self) -> None:
        self._worker = self._build(*self._args)

    def perform(self, op: str, args: Any) -> Any:
        if self._closing:
            return None
        assert self._worker is not None
        self._since_s = time.monotonic()
        try:
            return self._worker.perform(op, args)
        finally:
            self._since_s = None

    @ray.method(concurrency_group="control")
    def perform_aside(self, op: str, args: Any) -> Any:
        """A run of the control lane: beside the current one, one at a time."""
        if self._closing:
            return None
        assert self._worker is not None
        return self._worker.perform(op, args)

    @ray.method(concurrency_group="watching")
    def watch(self, limits: HealthLimits) -> ExecutorLost | None:
        """Parks; then what is wrong with the current run, if anything."""
        self._never.wait(limits.park_s)
        since_s = self._since_s
        return None if since_s is None else limits.overdue(time.monotonic() - since_s)

    @ray.method(concurrency_group="closing")
    def drop_rest(self) -> None:
        """Do no more than the current call. Arrives while that one runs: cancelling queued calls may not."""
        self._closing = True


_Pending = asyncio.Queue[tuple[Run, Any, Report] | None]


class RayExecutor:
    """One lane on one actor, which performs its calls one at a time, in order.

    Runs of `control_lane`, if there is one, are performed beside those, one at a time too.
    """

    def __init__(self, actor: WatchedActor, control_lane: str | None = None) -> None:
        self._actor = actor
        self._closed = False
        self._control_lane = control_lane
        self._pending: tuple[_Pending, _Pending] = asyncio.Queue(), asyncio.Queue()
        aio = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = aio.create_future()
        self._watcher = aio.create_task(self._watch())
        self._reporters = [aio.create_task(self._report_in_order(pending)) for pending in self._pending]

    @property
    def pid(self) -> int | None:
        """The actor's process."""
        return self._actor.pid

    @classmethod
    async def start(
        cls,
        build: Callable[..., Worker],
        *args: Any,
        options: dict[str, Any] | None = None,
        limits: HealthLimits | None = None,
        control_lane: str | None = None,
    ) -> RayExecutor:
        """Start an actor whose worker is `build(*args)`, and wait until it is built."""
        ensure_ray()
        actor = await WatchedActor.start(WorkerActor, (build, args), options or {}, limits or HealthLimits())
        return cls(actor, control_lane)

    def submit(self, run: Run, report: Report) -> None:
        if self._closed:
            return
        handle, aside = self._actor.handle, run.lane == self._control_lane
        method = handle.perform_aside if aside else handle.perform
        self._pending[aside].put_nowait((run, method.remote(run.op, run.args), report))

    async def _watch(self) -> None:
        """Until the actor is lost, also by a run that does not end: then every run fails."""
        try:
            while (
                stuck := await self._actor.answer(self._actor.handle.watch.remote(self._actor.limits))
            ) is None:
                pass
            self._actor.kill()
            lost = str(stuck)
        except ActorLost as error:
            lost = str(error)
        except Exception as error:  # nobody may wait for ever
            logger.exception("a worker cannot be watched")
            lost = f"{type(error).__name__}: {error}"
            self._actor.kill()
        logger.error("a worker is lost: %s", lost)
        self.lost.set_result(lost)

    async def _report_in_order(self, pending: _Pending) -> None:
        # Results may become known out of order (an exception travels slower than a value).
        while (item := await pending.get()) is not None:
            run, result, report = item
            report(await self._ended(run, result))

    async def _ended(self, run: Run, result: Any) -> Done | Failed:
        ending = asyncio.ensure_future(_outcome(run, result))
        either: set[asyncio.Future[Any]] = {ending, self.lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            return ending.result()
        ending.cancel()
        return Failed(run.lane, run.run_id, f"executor lost: {self.lost.result()}", lost=True)

    async def aclose(self, timeout_s: float = _CLOSE_S) -> None:
        """Let the current run end, for `timeout_s` at most, drop the rest, and kill the actor."""
        if self._closed:
            return
        self._closed = True
        self._watcher.cancel()
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._dropped()), *self._reporters]
        for pending in self._pending:
            while not pending.empty():
                run, result, _ = pending.get_nowait()  # type: ignore[misc]
                waiting.append(asyncio.ensure_future(self._ended(run, result)))
            pending.put_nowait(None)
        _, late = await asyncio.wait(waiting, timeout=timeout_s)
        if late:
            logger.warning("a run did not end within %g s; its actor is killed", timeout_s)
            for task in late:
                task.cancel()
        self._actor.kill()

    async def bury(self) -> None:
        """Once the actor is lost: wait until every run was reported."""
        self._closed = True
        self._actor.kill()
        for pending in self._pending:
            pending.put_nowait(None)
        await asyncio.gather(*self._reporters)
        await self._actor.gone()

    async def _dropped(self) -> None:
        with contextlib.suppress(RayActorError):
            await self._actor.handle.drop_rest.remote()


class LastingExecutor:
    """A `RayExecutor` that a new one follows when its actor is lost.

    Every run of a lost actor has failed (`lost`) before `on_lost` is called; `on_back` says that a new one is up, and
    empty; `on_gone` that none could be started. Meanwhile runs fail at once. `swept` removes what the dead process
    may have left behind; it runs in a thread.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[RayExecutor]],
        executor: RayExecutor,
        on_lost: Callable[[str], None],
        on_back: Callable[[], None],
        on_gone: Callable[[], None],
        swept: Callable[[], Any] | None,
    ) -> None:
        self._start, self._executor = start, executor
        self._on_lost, self._on_back, self._on_gone, self._swept = on_lost, on_back, on_gone, swept
        self._up = True
        self._closed = False
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    @classmethod
    async def start(
        cls,
        build: Callable[..., Worker],
        *args: Any,
        on_lost: Callable[[str], None],
        on_back: Callable[[], None],
        on_gone: Callable[[], None],
        swept: Callable[[], Any] | None = None,
        **options: Any,
    ) -> LastingExecutor:
        """`build`, `args` and `options` as for `RayExecutor.start`."""
        start = partial(RayExecutor.start, build, *args, **options)
        return cls(start, await start(), on_lost, on_back, on_gone, swept)

    @property
    def pid(self) -> int | None:
        """The present actor's process; None while there is none."""
        return self._executor.pid if self._up else None

    def submit(self, run: Run, report: Report) -> None:
        if self._up:
            self._executor.submit(run, report)
        else:
            failed = Failed(run.lane, run.run_id, "executor lost: it has not been replaced yet", lost=True)
            asyncio.get_running_loop().call_soon(report, failed)

    async def _keep(self) -> None:
        while True:
            reason = await asyncio.shield(self._executor.lost)
            self._up = False
            await self._executor.bury()
            self._on_lost(reason)
            if self._swept is not None:
                await asyncio.to_thread(self._swept)
            if not await self._restarted():
                self._on_gone()
                return
            self._up = True
            self._on_back()

    async def _restarted(self) -> bool:
        for delay_s in _RESTART_DELAYS_S:
            await asyncio.sleep(delay_s)
            try:
                self._executor = await self._start()
            except Exception as error:
                logger.error("a worker could not be started again: %s", error)
            else:
                return True
        return False

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        await self._executor.aclose()


async def _outcome(run: Run, result: Any) -> Done | Failed:
    try:
        return Done(run.lane, run.run_id, await result)
    except RayTaskError as error:
        return Failed(run.lane, run.run_id, cause(error))
    except RayActorError as error:
        return Failed(run.lane, run.run_id, f"executor lost: {error}", lost=True)
    except Exception as error:  # whatever else Ray may raise: the controller waits for an answer
        return Failed(run.lane, run.run_id, f"{type(error).__name__}: {error}")


@ray.remote(num_cpus=0, max_concurrency=1000)  # type: ignore[call-overload]
class EngineActor(ActorProcess):
    """A whole engine on this actor's event loop. The driver posts batches and polls for batches.

    In a posted `Submit`, `deadline_s` is the time left: clocks of two processes have nothing in common.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it, on the actor's loop
        self, build: Callable[..., Any], args: tuple[Any, ...], limits: HealthLimits
    ) -> None:
        self._build, self._args, self._limits = build, args, limits
        self._engine: EngineClient | None = None
        self._outputs: list[TokenOutput] = []
        self._failures: list[tuple[str, str]] = []
        self._wake = asyncio.Event()
        self._readers: set[asyncio.Task[None]] = set()
        self._num_batches = 0
        self._early: dict[int, tuple[list[Submit], list[str]]] = {}

    async def start(self) -> EngineInfo:
        engine: EngineClient = await self._build(*self._args)
        self._engine = engine
        return engine.info

    async def post(self, number: int, submits: list[Submit], aborts: list[str]) -> None:
        """Batch `number`. Large arguments travel slower, so batches may arrive out of order; they count in it.

        A batch posted again is taken once.
        """
        if number < self._num_batches:
            return
        now = asyncio.get_running_loop().time()
        self._early[number] = ([_rebased(submit, now) for submit in submits], aborts)
        while self._num_batches in self._early:
            submits, aborts = self._early.pop(self._num_batches)
            self._num_batches += 1
            self._take(submits, aborts)

    def _take(self, submits: list[Submit], aborts: list[str]) -> None:
        assert self._engine is not None
        for submit in submits:
            try:
                stream = self._engine.submit(submit)
            except Exception as error:
                self._fail(submit.request_id, error)
                continue
            task = asyncio.create_task(self._read(submit.request_id, stream))
            self._readers.add(task)
            task.add_done_callback(self._readers.discard)
        for request_id in aborts:
            try:
                self._engine.abort(request_id)
            except Exception as error:
                self._fail(request_id, error)

    async def _read(self, request_id: str, stream: AsyncIterator[TokenOutput]) -> None:
        try:
            async for output in stream:
                self._outputs.append(output)
                self._wake.set()
        except Exception as error:
            self._fail(request_id, error)

    def _fail(self, request_id: str, error: Exception) -> None:
        self._failures.append((request_id, f"{type(error).__name__}: {error}"))
        self._wake.set()

    async def poll(self) -> tuple[list[TokenOutput], list[tuple[str, str]], GenserveError | None]:
        """Whatever has come since the last poll, and why the engine can serve no more, if so.

        Parks while there is nothing.
        """
        if not self._outputs and not self._failures and self._ended() is None:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._limits.park_s)
        outputs, self._outputs = self._outputs, []
        failures, self._failures = self._failures, []
        return outputs, failures, self._ended()

    def _ended(self) -> GenserveError | None:
        assert self._engine is not None
        return self._engine.failure or self._limits.overdue(self._engine.run_age_s())

    async def stats(self) -> dict[str, float]:
        assert self._engine is not None
        return await self._engine.stats()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.aclose()


class RayEngine:
    """`EngineClient` over an `EngineActor`.

    If the actor dies, every open stream raises `ExecutorLost`; if the engine in it fails, its `failure`.
    """

    def __init__(self, actor: WatchedActor) -> None:
        self._actor = actor
        self._info: EngineInfo = actor.described
        self._streams = StreamTable()
        self._aio = asyncio.get_running_loop()
        self._submits: list[Submit] = []
        self._aborts: list[str] = []
        self._num_batches = 0
        self._posts: set[asyncio.Task[None]] = set()
        self._failure: GenserveError | None = None
        self._pump = self._aio.create_task(self._poll_forever())

    @classmethod
    async def start(
        cls,
        build: Callable[..., Any],
        *args: Any,
        options: dict[str, Any] | None = None,
        limits: HealthLimits | None = None,
    ) -> RayEngine:
        """Start an actor whose engine is `await build(*args)`, and wait until it is built."""
        ensure_ray()
        limits = limits or HealthLimits()
        return cls(await WatchedActor.start(EngineActor, (build, args, limits), options or {}, limits))

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
        self._submits.append(request)
        self._ask_flush()
        return stream

    def abort(self, request_id: str) -> None:
        if self._failure is None:
            self._aborts.append(request_id)
            self._ask_flush()

    def _ask_flush(self) -> None:
        if len(self._submits) + len(self._aborts) == 1:
            self._aio.call_soon(self._flush)

    def _flush(self) -> None:
        submits, self._submits = self._submits, []
        aborts, self._aborts = self._aborts, []
        now = self._aio.time()
        submits = [_time_left(submit, now) for submit in submits]
        try:
            self._post(submits, aborts)
        except Exception:  # something in it cannot be sent: each on its own, so that it fails alone
            for submit in submits:
                try:
                    self._post([submit], [])
                except Exception as error:
                    self._fail_streams([submit.request_id], f"{type(error).__name__}: {error}")
            self._post([], aborts)

    def _post(self, submits: list[Submit], aborts: list[str]) -> None:
        posted = self._actor.handle.post.remote(self._num_batches, submits, aborts)
        request_ids = [submit.request_id for submit in submits]
        task = self._aio.create_task(self._posted(posted, self._num_batches, request_ids, aborts))
        self._num_batches += 1
        self._posts.add(task)
        task.add_done_callback(self._posts.discard)

    async def _posted(self, posted: Any, number: int, request_ids: list[str], aborts: list[str]) -> None:
        try:
            await posted
        except RayActorError:
            return  # the poll finds out too, and ends every stream
        except Exception as error:
            what = cause(error) if isinstance(error, RayTaskError) else f"{type(error).__name__}: {error}"
            logger.error("a batch for the engine of %s was lost: %s", self._info.model, what)
            self._fail_streams(request_ids, what)
            # Those after it wait for its number. What may have got there all the same is aborted.
            self._actor.handle.post.remote(number, [], [])
            for request_id in (*request_ids, *aborts):
                self.abort(request_id)

    def _fail_streams(self, request_ids: Iterable[str], error: str) -> None:
        self._streams.route(
            TokenOutput(request_id, finish_reason="error", error=error) for request_id in request_ids
        )

    async def _poll_forever(self) -> None:
        try:
            while self._failure is None:
                outputs, failures, failure = await self._actor.answer(self._actor.handle.poll.remote())
                self._streams.route(outputs)
                for request_id, error in failures if failure is None else ():
                    self._fail_streams([request_id], error)
                if failure is not None:
                    logger.error("the engine of %s failed: %s", self._info.model, failure)
                    self._fail(failure)
                if isinstance(failure, ExecutorLost):
                    self._actor.kill()
        except ActorLost as error:
            logger.error("engine actor of %s lost: %s", self._info.model, error)
            self._fail(ExecutorLost(f"the engine's process is gone: {error}"))
        except Exception as error:  # nobody may wait for ever
            logger.exception("the outputs of %s cannot be taken", self._info.model)
            self._fail(ExecutorLost(f"the engine's process cannot be reached: {error}"))

    def _fail(self, error: GenserveError) -> None:
        self._failure = error
        self._streams.fail_all(error)

    def run_age_s(self) -> float:
        """0: the actor itself looks at its runs."""
        return 0.0

    async def stats(self) -> dict[str, float]:
        try:
            return {**await self._actor.handle.stats.remote(), "num_streams": len(self._streams)}
        except RayActorError as error:
            raise ExecutorLost(f"the engine's process is gone: {error}") from error

    async def aclose(self, timeout_s: float = _CLOSE_S) -> None:
        """Let the engine close itself, for `timeout_s` at most, and kill the actor."""
        self._pump.cancel()
        try:
            async with asyncio.timeout(timeout_s):
                await self._actor.handle.close.remote()
        except RayActorError:
            logger.info("engine actor of %s was gone before it was closed", self._info.model)
        except TimeoutError:
            logger.warning(
                "the engine of %s did not close within %g s; it is killed", self._info.model, timeout_s
            )
        finally:
            self._actor.kill()
            for task in self._posts:
                task.cancel()
            self._failure = self._failure or ExecutorLost("the engine was closed")
            self._streams.fail_all(self._failure)


def _time_left(submit: Submit, now: float) -> Submit:
    return submit if submit.deadline_s is None else replace(submit, deadline_s=submit.deadline_s - now)


def _rebased(submit: Submit, now: float) -> Submit:
    return submit if submit.deadline_s is None else replace(submit, deadline_s=submit.deadline_s + now)
