"""A controller of a local loop that lives in a Ray actor, beside the device that it drives.

Its messages cross over in batches, both ways; its runs never leave the actor. A controller here sees no
difference: it sends to a name. If the actor dies, the others are told with a message of their own, and
again once a new actor is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from genserve.core.errors import ExecutorLost
from genserve.core.runtime.health import HealthLimits
from genserve.core.runtime.local_engine import StatsController
from genserve.core.runtime.loop import Executor, LiveLoop
from genserve.core.runtime.ray_actor import ActorLost, ActorProcess, WatchedActor, ensure_ray
from genserve.core.runtime.ray_placement import Placing, reserve

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
_RESTART_DELAYS_S = (0.0, 1.0, 5.0)  # before each further try to start a new actor, until one is up


@dataclass(frozen=True, slots=True)
class RemoteParts:
    """What an actor holds: a controller, and the executors of its lanes.

    `described` is told to the other end. `aclose` frees what else there is, once the executors have ended.
    """

    controller: StatsController
    executors: Mapping[str, Executor]
    described: Any = None
    aclose: Callable[[], Awaitable[None]] | None = None


Build = Callable[..., Awaitable[RemoteParts]]


@ray.remote(num_cpus=0, max_concurrency=1000)  # type: ignore[call-overload]
class ControllerActor(ActorProcess):
    """One controller on this actor's event loop. What it sends to `reply_to` waits here for a poll."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it, on the actor's loop
        self, name: str, reply_to: Sequence[str], build: Build, args: tuple[Any, ...], limits: HealthLimits
    ) -> None:
        self._name, self._reply_to, self._limits = name, reply_to, limits
        self._build, self._args = build, args
        self._loop: LiveLoop | None = None
        self._parts: RemoteParts | None = None
        self._outbox: list[tuple[str, Any]] = []
        self._failure: str | None = None  # of the controller
        self._wake = asyncio.Event()
        self._num_batches = 0
        self._early: dict[int, list[Any]] = {}

    async def start(self) -> Any:
        parts = self._parts = await self._build(*self._args)
        sinks = {to: self._sink(to) for to in self._reply_to}
        self._loop = LiveLoop({self._name: parts.controller}, parts.executors, sinks, on_fatal=self._on_fatal)
        return parts.described

    def _sink(self, to: str) -> Callable[[Any], None]:
        def put(body: Any) -> None:
            self._outbox.append((to, body))
            self._wake.set()

        return put

    def _on_fatal(self, error: BaseException) -> None:
        logger.error("controller %s failed", self._name, exc_info=error)
        self._failure = f"{type(error).__name__}: {error}"
        self._wake.set()

    async def post(self, number: int, bodies: list[Any]) -> None:
        """Batch `number`. Large arguments travel slower, so batches may arrive out of order; they count in it."""
        assert self._loop is not None
        self._early[number] = bodies
        while self._num_batches in self._early:
            for body in self._early.pop(self._num_batches):
                if self._failure is None:
                    self._loop.post(self._name, body, "remote")
            self._num_batches += 1

    async def poll(self) -> tuple[list[tuple[str, Any]], str | None]:
        """What was sent since the last poll, and why the controller or its lanes do no more, if so."""
        if not self._outbox and self._ended() is None:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._limits.park_s)
        outbox, self._outbox = self._outbox, []
        return outbox, self._ended()

    def _ended(self) -> str | None:
        assert self._loop is not None
        if self._failure is not None:
            return self._failure
        overdue = self._limits.overdue(self._loop.run_age_s())
        return None if overdue is None else str(overdue)

    async def stats(self) -> dict[str, float]:
        return {} if self._parts is None else self._parts.controller.stats()

    async def close(self) -> None:
        if self._loop is not None:
            await self._loop.aclose()
        if self._parts is not None and self._parts.aclose is not None:
            await self._parts.aclose()


class RemoteController:
    """The local end of a `ControllerActor`, for `LocalEngine`'s `remotes`.

    lost, back  make the message that says that the actor is gone (with the reason), and that a new one
                is up and empty; both go to the first of `reply_to`.
    released    awaited once the actor's place is free.
    """

    def __init__(
        self,
        name: str,
        reply_to: Sequence[str],
        build: Build,
        args: tuple[Any, ...],
        lost: Callable[[str], Any],
        back: Callable[[], Any],
        options: Mapping[str, Any],
        limits: HealthLimits | None = None,
        released: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self._reply_to = tuple(reply_to)
        self._build, self._args = build, args
        self._lost, self._back = lost, back
        self._options = dict(options)
        self._limits = limits or HealthLimits()
        self._released = released
        self._aio = asyncio.get_running_loop()
        self._actor: WatchedActor | None = None
        self._before: WatchedActor | None = None  # killed; its process may not have ended yet
        self._retired = False
        self._bodies: list[Any] = []
        self._num_batches = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._pump: asyncio.Task[None] | None = None
        self.failure: ExecutorLost | None = None
        self.described: Any = None

    @property
    def pid(self) -> int | None:
        """The actor's process; None while there is none."""
        return None if self._actor is None else self._actor.pid

    def retire(self) -> None:
        """Start no new actor once this one is gone."""
        self._retired = True

    @classmethod
    async def start(
        cls,
        name: str,
        build: Build,
        *args: Any,
        reply_to: Sequence[str],
        lost: Callable[[str], Any],
        back: Callable[[], Any],
        options: Mapping[str, Any] | None = None,
        limits: HealthLimits | None = None,
        released: Callable[[], Awaitable[None]] | None = None,
    ) -> RemoteController:
        """Start an actor that holds `await build(*args)`, and wait until it is built (else `ConfigError`)."""
        ensure_ray()
        remote = cls(name, reply_to, build, args, lost, back, options or {}, limits, released)
        remote._actor = await remote._started()
        return remote

    async def _started(self) -> WatchedActor:
        args = (self.name, self._reply_to, self._build, self._args, self._limits)
        actor = await WatchedActor.start(ControllerActor, args, self._options, self._limits)
        self.described = actor.described
        return actor

    def connect(self, post: Callable[[str, Any], None], on_given_up: Callable[[], None]) -> None:
        """Begin to hand over what the controller sends; `on_given_up` is told if no new actor will come."""
        self._pump = self._aio.create_task(self._run(post, on_given_up))

    def send(self, body: Any) -> None:
        """Tell the controller `body`. Lost with the actor if there is none just now."""
        if self._actor is None:
            return
        self._bodies.append(body)
        if len(self._bodies) == 1:
            self._aio.call_soon(self._flush)

    def _flush(self) -> None:
        bodies, self._bodies = self._bodies, []
        if self._actor is None or not bodies:
            return
        try:
            posted = self._actor.handle.post.remote(self._num_batches, bodies)
        except Exception:  # something in it cannot be sent
            logger.exception("messages for %s could not be sent", self.name)
            self._actor.kill()
            return
        self._num_batches += 1
        task = self._aio.create_task(self._posted(posted, self._actor))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _posted(self, posted: Any, actor: WatchedActor) -> None:
        try:
            await posted
        except RayActorError:
            return  # the poll finds out too
        except Exception as error:
            # A batch is missing, and with it the order: only a new actor has a known state.
            logger.error("a batch for %s was lost: %s", self.name, error)
            actor.kill()

    async def _run(self, post: Callable[[str, Any], None], on_given_up: Callable[[], None]) -> None:
        try:
            await self._carry(post, on_given_up)
        except Exception as error:  # nobody may wait for ever
            logger.exception("nothing more can be carried to and from %s", self.name)
            self.failure = ExecutorLost(f"{self.name} cannot be reached: {type(error).__name__}: {error}")
            actor, self._actor = self._actor, None
            if actor is not None:
                self._before = actor
                actor.kill()
            on_given_up()

    async def _carry(self, post: Callable[[str, Any], None], on_given_up: Callable[[], None]) -> None:
        while self._actor is not None:
            error = await self._poll_until_lost(self._actor, post)
            logger.error("%s is lost: %s", self.name, error)
            self._actor.kill()
            self._before, self._actor = self._actor, None
            self._bodies.clear()
            self._num_batches = 0
            post(self._reply_to[0], self._lost(error))
            self._actor = await self._restarted()
            if self._actor is None:
                self.failure = ExecutorLost(f"the process of {self.name} is gone: {error}")
                if not self._retired:
                    on_given_up()
                return
            post(self._reply_to[0], self._back())

    async def _poll_until_lost(self, actor: WatchedActor, post: Callable[[str, Any], None]) -> str:
        try:
            while True:
                outbox, failure = await actor.answer(actor.handle.poll.remote())
                for to, body in outbox:
                    post(to, body)
                if failure is not None:
                    return str(failure)
        except ActorLost as error:
            return str(error)
        except Exception as error:
            logger.exception("what %s sent cannot be taken", self.name)
            return f"{type(error).__name__}: {error}"

    async def _restarted(self) -> WatchedActor | None:
        for delay_s in _RESTART_DELAYS_S:
            await asyncio.sleep(delay_s)
            if self._retired:
                return None
            try:
                return await self._started()
            except Exception as error:
                logger.error("%s could not be started again: %s", self.name, error)
        return None

    async def stats(self) -> dict[str, float]:
        """The controller's figures; none while its actor is gone."""
        try:
            return {} if self._actor is None else await self._actor.handle.stats.remote()
        except RayError:
            return {}

    async def aclose(self, timeout_s: float = _CLOSE_S) -> None:
        """Let the controller's executors end, for `timeout_s` at most, and kill the actor."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        actor, self._actor = self._actor, None
        end = WatchedActor.kill
        try:
            if actor is not None:
                async with asyncio.timeout(timeout_s):
                    await actor.handle.close.remote()
                end = WatchedActor.dismiss
        except (RayError, TimeoutError) as error:
            logger.warning("%s did not close by itself: %s", self.name, error or "too slow")
        finally:
            if actor is not None:
                end(actor)
            for task in self._tasks:
                task.cancel()
            try:
                for dying in filter(None, (self._before, actor)):
                    await dying.gone()
            finally:
                if self._released is not None:
                    await self._released()


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    """One of several controllers to be started together; see `RemoteController`."""

    name: str
    args: tuple[Any, ...]
    lost: Callable[[str], Any]
    back: Callable[[], Any]


async def start_remotes(
    specs: Sequence[RemoteSpec],
    build: Build,
    placing: Placing,
    *,
    reply_to: Sequence[str],
    limits: HealthLimits | None = None,
    swept: Callable[[], None] | None = None,
) -> list[RemoteController]:
    """Start all of `specs` at once, in a placement group of their own, or none: `ConfigError` says why.

    `swept` removes what the processes of this machine may have left behind; it runs in a thread, after
    each has closed.
    """
    ensure_ray()
    reservation = await reserve(len(specs), placing)

    async def released(index: int) -> None:
        reservation.release(index)
        if swept is not None:
            await asyncio.to_thread(swept)

    starting = [
        asyncio.ensure_future(
            RemoteController.start(
                spec.name,
                build,
                *spec.args,
                reply_to=reply_to,
                lost=spec.lost,
                back=spec.back,
                options=reservation.options(index),
                limits=limits,
                released=partial(released, index),
            )
        )
        for index, spec in enumerate(specs)
    ]
    try:
        return list(await asyncio.gather(*starting))
    except BaseException:
        for task in starting:
            task.cancel()
        ended = await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(found.aclose() for found in ended if isinstance(found, RemoteController)))
        reservation.release_all()
        raise
