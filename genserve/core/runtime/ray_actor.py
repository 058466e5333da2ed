"""One Ray actor as its driver sees it: started, watched, killed. And the cluster that it runs on.

Owns how the death or silence of an actor becomes an `ActorLost`; what that means is for its users,
`ray_executor` and `ray_controller`, to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from genserve.core.errors import ConfigError
from genserve.core.runtime.health import (
    HealthLimits,
    Process,
    ends_within,
    is_alive,
    kill_process,
    this_process,
)
from genserve.core.runtime.orphans import descendant_pids, guard_new

logger = logging.getLogger(__name__)


class ActorLost(Exception):
    """An actor is gone, or was killed for its silence; the message says how that showed."""


def ensure_ray(address: str | None = None, num_cpus: int | None = None) -> None:
    """Connect to a Ray cluster (also that of RAY_ADDRESS), or start one that ends with this process."""
    if ray.is_initialized():
        return
    before = descendant_pids()
    try:
        ray.init(
            address=address,
            num_cpus=num_cpus if address is None else None,
            include_dashboard=False,
            log_to_driver=True,
            logging_level=logging.WARNING,
            namespace="genserve",
        )
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"ray_address: cannot connect to {address or 'Ray'}: {error}") from error
    guard_new(before)


def num_nodes() -> int:
    """Live machines of the cluster."""
    return sum(bool(node["Alive"]) for node in ray.nodes())


def node_ip() -> str:
    """Where the cluster's other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


class ActorProcess:
    """What each actor class begins with: which process it is. A mixin for classes that Ray makes actors of."""

    def process(self) -> tuple[str, Process]:
        """The node's id, and the process on it."""
        return ray.get_runtime_context().get_node_id(), this_process()


class WatchedActor:
    """A started actor. `described` is what its `start` gave back."""

    def __init__(self, handle: Any, limits: HealthLimits) -> None:
        self.handle = handle
        self.limits = limits
        self.described: Any = None
        self._near = False  # on this machine
        self._process: Process | None = None

    @classmethod
    async def start(
        cls, actor_class: Any, args: tuple[Any, ...], options: Mapping[str, Any], limits: HealthLimits
    ) -> WatchedActor:
        """Start an actor and have it build what it holds; `ConfigError` if that fails or takes too long."""
        actor = cls(actor_class.options(**options).remote(*args), limits)
        try:
            async with asyncio.timeout(limits.start_s):
                node, actor._process = await _built(actor.handle.process.remote())
                actor._near = node == ray.get_runtime_context().get_node_id()
                actor.described = await _built(actor.handle.start.remote())
        except TimeoutError as error:
            actor.kill()
            await actor.gone()
            raise ConfigError(f"the worker was not built within {limits.start_s:g} s") from error
        except BaseException:
            actor.kill()
            await actor.gone()
            raise
        return actor

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def answer(self, reply: Any) -> Any:
        """What a parked call gives back; `ActorLost` if it fails, or is later than the heartbeat allows.

        In that case the actor is killed.
        """
        waiting = asyncio.ensure_future(reply)
        try:
            limit_s = self.limits.park_s + self.limits.heartbeat_s
            if not await ends_within(waiting, limit_s):
                self.kill()
                raise ActorLost(
                    f"its process gave no sign of life for {limit_s:.1f} s (heartbeat_s: {self.limits.heartbeat_s:g})"
                )
            return waiting.result()
        except RayTaskError as error:
            raise ActorLost(cause(error)) from error
        except RayActorError as error:
            logger.debug("actor of process %s: %s", self.pid, error)
            raise ActorLost(
                f"its process ({self.pid}) is gone: {str(error).partition(chr(10))[0]}"
            ) from error
        except RayError as error:  # whatever else Ray may raise: nobody may wait for ever
            raise ActorLost(f"{type(error).__name__}: {error}") from error
        finally:
            waiting.cancel()

    async def gone(self, timeout_s: float = 1.0) -> None:
        """Wait a little until a killed process of this machine has ended."""
        end_s = time.monotonic() + timeout_s
        while self._process is not None and self._near and is_alive(self._process):
            if time.monotonic() > end_s:
                return
            await asyncio.sleep(0.005)

    def dismiss(self) -> None:
        """End an actor that works and has nothing left to do."""
        ray.kill(self.handle)

    def kill(self) -> None:
        """End its process at once, also one that is stopped. Raises nothing: Ray itself may have ended."""
        try:
            ray.kill(self.handle)
        except Exception as error:
            logger.warning("Ray could not end the actor of process %s: %s", self.pid, error)
        # Ray takes five seconds over a stopped process, and kills it then on whatever machine it is.
        if self._process is not None and self._near:
            kill_process(self._process)


async def _built(reference: Any) -> Any:
    try:
        return await reference
    except RayTaskError as error:
        raise ConfigError(f"the worker could not be built: {cause(error)}") from error
    except RayActorError as error:
        raise ConfigError(f"the worker's process died while it was built: {error}") from error


def cause(error: RayTaskError) -> str:
    """What was raised in the actor, as text."""
    cause = error.cause
    return f"{type(cause).__name__}: {cause}"
