"""Members in this very process, with everything that remote ones have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from genserve.core.errors import ConfigError, ExecutorLost
from genserve.core.runtime.local_engine import LocalEngine
from genserve.core.runtime.loop import LiveLoop
from genserve.core.runtime.membership import Membership, Wording
from genserve.core.types import EngineInfo

from .doubling import INFO, ChangeRole, Drain, Front, Joined, Lost, build

WORDING = Wording(Joined, Drain, ChangeRole, lambda body: (body.name, body.role))
ROLES = ("full", "half")


def missing(roles: Any) -> str | None:
    return None if "full" in roles else "a full worker is needed"


class Nearby:
    """A remote in this very process, with everything that a real one has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid: int | None = 1
        self.failure: ExecutorLost | None = None
        self.described = None
        self.retired = self.closed = False
        self.post: Callable[[str, Any], None] = lambda to, body: None
        self.on_given_up: Callable[[], None] = lambda: None

    async def started(self) -> Nearby:
        parts = await build()
        self._parts = parts
        self._loop = LiveLoop(
            {self.name: parts.controller}, parts.executors, {"front": lambda body: self.post("front", body)}
        )
        return self

    def connect(self, post, on_given_up):
        self.post, self.on_given_up = post, on_given_up

    def send(self, body):
        self._loop.post(self.name, body)

    def retire(self):
        self.described = None
        self.retired = True

    async def stats(self):
        return self._parts.controller.stats()

    async def aclose(self):
        self.closed = True
        await self._loop.aclose()

    def give_up(self) -> None:
        """As if its process had died for good."""
        self.pid, self.failure = None, ExecutorLost(f"{self.name} is gone")
        self.post("front", Lost("gone"))
        self.on_given_up()


async def start_nearby(members):
    if any(name == "engine-3" for name, _ in members):
        raise ConfigError("no room for a fourth")
    return [await Nearby(name).started() for name, _ in members]


async def engine_with(roles, start=start_nearby, info: EngineInfo = INFO) -> tuple[LocalEngine, Front]:
    membership = Membership(start, WORDING, ROLES, missing)
    await membership.start(roles)
    front = Front([worker.name for worker in membership.workers()])
    return LocalEngine(info, front, {}, entry="front", membership=membership), front
