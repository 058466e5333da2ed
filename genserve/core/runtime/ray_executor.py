"""Ray actors as executors: a worker in an actor behind a lane, or a whole engine inside an actor.

A Ray call costs about a millisecond. Coarse work is driven over `RayExecutor`, one call a run; an
engine of short steps lives inside `RayEngine`'s actor with its own loop, and only its messages and
outputs, in batches, cross over. Ray is imported here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from genserve.core.control import Done, Failed, Run
from genserve.core.errors import ConfigError, ExecutorLost, GenserveError
from genserve.core.runtime.client import EngineClient
from genserve.core.runtime.executors import Report, Worker
from genserve.core.runtime.streams import StreamTable
from genserve.core.types import EngineInfo, Submit, TokenOutput

logger = logging.getLogger(__name__)

# How long an idle poll of an engine actor parks before it is renewed.
_POLL_S = 10.0


def ensure_ray(address: str | None = None, num_cpus: int | None = None) -> None:
    """Connect to a Ray cluster, or start one in this process if there is none."""
    if not ray.is_initialized():
        ray.init(
            address=address,
            num_cpus=num_cpus if address is None else None,
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.WARNING,
            namespace="genserve",
        )


@ray.remote(num_cpus=0)
class WorkerActor:
    """Holds one worker, built in the actor's own process."""

    def __init__(self, build: Callable[..., Worker], args: tuple[Any, ...]) -> None:
        self._worker = build(*args)

    def perform(self, op: str, args: Any) -> Any:
        return self._worker.perform(op, args)

    def ready(self) -> bool:
        return True


class RayExecutor:
    """One lane on one actor, which performs its calls one at a time, in order."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._pending: asyncio.Queue[tuple[Run, Any, Report]] = asyncio.Queue()
        self._reporter = asyncio.get_running_loop().create_task(self._report_in_order())

    @classmethod
    async def start(
        cls, build: Callable[..., Worker], *args: Any, options: dict[str, Any] | None = None
    ) -> RayExecutor:
        """Start an actor whose worker is `build(*args)`, and wait until it is built."""
        ensure_ray()
        actor = WorkerActor.options(**(options or {})).remote(build, args)  # type: ignore[attr-defined]
        await _built(actor.ready.remote())
        return cls(actor)

    def submit(self, run: Run, report: Report) -> None:
        self._pending.put_nowait((run, self._actor.perform.remote(run.op, run.args), report))

    async def _report_in_order(self) -> None:
        # Results may become known out of order (an exception travels slower than a value).
        while True:
            run, result, report = await self._pending.get()
            report(await _ended(run, result))

    async def aclose(self) -> None:
        self._reporter.cancel()
        ray.kill(self._actor)


async def _ended(run: Run, result: Any) -> Done | Failed:
    try:
        return Done(run.lane, run.run_id, await result)
    except RayTaskError as error:
        return Failed(run.lane, run.run_id, _cause(error))
    except RayActorError as error:
        return Failed(run.lane, run.run_id, f"executor lost: {error}", lost=True)
    except Exception as error:  # whatever else Ray may raise: the controller waits for an answer
        return Failed(run.lane, run.run_id, f"{type(error).__name__}: {error}")


@ray.remote(num_cpus=0, max_concurrency=1000)  # type: ignore[call-overload]
class EngineActor:
    """A whole engine on this actor's event loop. The driver posts batches and polls for batches."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it, on the actor's loop
        self, build: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self._build, self._args = build, args
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
        """Batch `number`. Large arguments travel slower, so batches may arrive out of order; they count in it."""
        self._early[number] = (submits, aborts)
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
            self._engine.abort(request_id)

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

    async def poll(self) -> tuple[list[TokenOutput], list[tuple[str, str]]]:
        """Whatever has come since the last poll; parks while there is nothing."""
        if not self._outputs and not self._failures:
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), _POLL_S)
            except TimeoutError:
                return [], []
        outputs, self._outputs = self._outputs, []
        failures, self._failures = self._failures, []
        return outputs, failures

    async def stats(self) -> dict[str, float]:
        assert self._engine is not None
        return await self._engine.stats()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.aclose()


class RayEngine:
    """`EngineClient` over an `EngineActor`. If the actor dies, every open stream raises `ExecutorLost`."""

    def __init__(self, actor: Any, info: EngineInfo) -> None:
        self._actor = actor
        self._info = info
        self._streams = StreamTable()
        self._aio = asyncio.get_running_loop()
        self._submits: list[Submit] = []
        self._aborts: list[str] = []
        self._num_batches = 0
        self._failure: GenserveError | None = None
        self._pump = self._aio.create_task(self._poll_forever())

    @classmethod
    async def start(
        cls, build: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None
    ) -> RayEngine:
        """Start an actor whose engine is `await build(*args)`, and wait until it is built."""
        ensure_ray()
        actor = EngineActor.options(**(options or {})).remote(build, args)  # type: ignore[attr-defined]
        return cls(actor, await _built(actor.start.remote()))

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
        self._aborts.append(request_id)
        self._ask_flush()

    def _ask_flush(self) -> None:
        if len(self._submits) + len(self._aborts) == 1:
            self._aio.call_soon(self._flush)

    def _flush(self) -> None:
        submits, self._submits = self._submits, []
        aborts, self._aborts = self._aborts, []
        self._actor.post.remote(self._num_batches, submits, aborts)
        self._num_batches += 1

    async def _poll_forever(self) -> None:
        try:
            while True:
                outputs, failures = await self._actor.poll.remote()
                self._streams.route(outputs)
                self._streams.route(
                    TokenOutput(request_id, finish_reason="error", error=error)
                    for request_id, error in failures
                )
        except RayActorError as error:
            logger.error("engine actor of %s lost: %s", self._info.model, error)
            self._fail(ExecutorLost(f"the engine's process is gone: {error}"))
        except RayTaskError as error:
            logger.error("engine actor of %s failed: %s", self._info.model, error)
            self._fail(ExecutorLost(f"the engine's process failed: {_cause(error)}"))
        except Exception as error:  # whatever else Ray may raise: nobody may wait for ever
            logger.exception("engine actor of %s cannot be reached", self._info.model)
            self._fail(ExecutorLost(f"the engine's process cannot be reached: {error}"))

    def _fail(self, error: GenserveError) -> None:
        self._failure = error
        self._streams.fail_all(error)

    async def stats(self) -> dict[str, float]:
        try:
            return {**await self._actor.stats.remote(), "num_streams": len(self._streams)}
        except RayActorError as error:
            raise ExecutorLost(f"the engine's process is gone: {error}") from error

    async def aclose(self) -> None:
        self._pump.cancel()
        try:
            await self._actor.close.remote()
        except RayActorError:
            logger.info("engine actor of %s was gone before it was closed", self._info.model)
        ray.kill(self._actor)
        self._streams.fail_all(ExecutorLost("the engine was closed"))


async def _built(reference: Any) -> Any:
    try:
        return await reference
    except RayTaskError as error:
        raise ConfigError(f"the worker could not be built: {_cause(error)}") from error
    except RayActorError as error:
        raise ConfigError(f"the worker's process died while it was built: {error}") from error


def _cause(error: RayTaskError) -> str:
    cause = error.cause
    return f"{type(cause).__name__}: {cause}"
