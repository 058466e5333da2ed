"""Which workers an engine has while it serves: start them, add one, drain one, give one another role.

Owns the members by name and what operators ask of them. The controller that leads them decides what happens
to their requests; the two speak in the front end's own messages, which `Wording` makes and reads. Must not
know a front end, nor where a worker runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from genserve.core.errors import ConfigError, ExecutorLost, GenserveError, InvalidRequest, UnknownWorker
from genserve.core.runtime.local_engine import Remote

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

State = Literal["starting", "running", "draining", "lost"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as operators see it. draining: also while its role changes. lost: until it is started again."""

    name: str
    role: str
    state: State
    pid: int | None


class MemberRemote(Remote, Protocol):
    """A `Remote` whose process can be told, and that can be let go."""

    @property
    def described(self) -> Any:
        """What it told of itself when it was built."""
        ...

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        ...

    def retire(self) -> None:
        """Start no new process once this one is gone."""
        ...


# Starts workers of the given (name, role)s together; all or none.
Start = Callable[[Sequence[tuple[str, str]]], Awaitable[Sequence[MemberRemote]]]


@dataclass(frozen=True, slots=True)
class Wording:
    """How membership and leading controller tell each other, in messages of the front end.

    answered  from a message to the membership: whom it is about, and its new role; None if it is drained.
    """

    joined: Callable[[str, str], Any]
    drain: Callable[[str], Any]
    change_role: Callable[[str, str], Any]
    answered: Callable[[Any], tuple[str, str | None]]


class Host(Protocol):
    """The engine whose remotes the members are."""

    def add_remote(self, name: str, remote: Remote) -> None: ...

    def remove_remote(self, name: str) -> Remote: ...

    def tell(self, body: Any) -> None: ...


class _Member:
    def __init__(self, name: str, role: str) -> None:
        self.name, self.role = name, role
        self.remote: MemberRemote | None = None
        self.answer: asyncio.Future[str | None] | None = None  # of the leading controller, while asked

    @property
    def state(self) -> State:
        if self.remote is None:
            return "starting"
        if self.answer is not None:
            return "draining"
        return "lost" if self.remote.pid is None else "running"


class Membership:
    """The workers of one engine. Give it to a `LocalEngine`, which closes it.

    `roles` are those that a worker may have; `missing` says what the workers of the given roles lack to
    serve anything (None: nothing), and keeps operators from taking that away.
    """

    def __init__(
        self,
        start: Start,
        wording: Wording,
        roles: Sequence[str],
        missing: Callable[[Sequence[str]], str | None],
        prefix: str = "engine",
    ) -> None:
        self._start = start
        self._wording = wording
        self._roles = tuple(roles)
        self._missing = missing
        self._prefix = prefix
        self._num_named = 0
        self._members: dict[str, _Member] = {}
        self._host: Host | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, roles: Sequence[str]) -> Sequence[MemberRemote]:
        """Start the first workers, one for each role, in one go. `ConfigError` if any cannot be."""
        members = [self._new_member(role) for role in roles]
        remotes = await self._start([(member.name, member.role) for member in members])
        for member, remote in zip(members, remotes, strict=True):
            member.remote = remote
        return remotes

    def lead(self, host: Host) -> None:
        """Connect the workers so far to the engine that they are of."""
        self._host = host
        for member in self._members.values():
            if member.remote is not None:
                host.add_remote(member.name, member.remote)

    def take(self, body: Any) -> None:
        """A message of the leading controller."""
        name, role = self._wording.answered(body)
        member = self._members.get(name)
        if member is None or member.answer is None or member.answer.done():
            logger.warning("an answer about %s that nobody waits for", name)
            return
        member.answer.set_result(role)

    # -- what operators ask ---------------------------------------------------------------------------

    def workers(self) -> list[WorkerInfo]:
        return [
            WorkerInfo(
                member.name, member.role, member.state, None if member.remote is None else member.remote.pid
            )
            for member in self._members.values()
        ]

    async def add_worker(self, role: str) -> str:
        """Start one more worker and have it serve; its name. `InvalidRequest` if it cannot be had."""
        self._check_role(role)
        return await self._shielded(self._add(role))

    async def drain_worker(self, name: str) -> None:
        """Give it nothing more, wait until its requests are done or elsewhere, and end its process.

        `InvalidRequest` if the others could not serve alone. Goes on if the caller stops waiting.
        """
        member = self._settled(name)
        self._check_rest(member, "name", "be drained")
        self._ask(member)
        await self._shielded(self._drain(member))

    async def change_role(self, name: str, role: str) -> None:
        """Drain the worker, give it `role` and go on with it; waits until it serves in it."""
        self._check_role(role)
        member = self._settled(name)
        if member.role != role:
            self._check_rest(member, "role", f"become {role}")
            self._ask(member)
            await self._shielded(self._change(member, role))

    # -- how -------------------------------------------------------------------------------------------

    def _new_member(self, role: str) -> _Member:
        member = _Member(f"{self._prefix}-{self._num_named}", role)
        self._num_named += 1
        self._members[member.name] = member
        return member

    async def _shielded(self, work: Coroutine[Any, Any, _T]) -> _T:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("the workers could not be changed: %s", error)

    async def _add(self, role: str) -> str:
        member = self._new_member(role)
        try:
            (remote,) = await self._start([(member.name, role)])
        except ConfigError as error:
            del self._members[member.name]
            raise InvalidRequest("role", f"no {role} worker could be added: {error}") from error
        except BaseException:
            del self._members[member.name]
            raise
        member.remote = remote
        self._led.add_remote(member.name, remote)
        self._led.tell(self._wording.joined(member.name, role))
        return member.name

    async def _drain(self, member: _Member) -> None:
        assert member.remote is not None
        member.remote.retire()
        await self._asked(member, self._wording.drain(member.name))
        await self._led.remove_remote(member.name).aclose()
        del self._members[member.name]

    async def _change(self, member: _Member, role: str) -> None:
        changed = await self._asked(member, self._wording.change_role(member.name, role))
        member.role = role if changed is None else changed
        member.answer = None

    def _ask(self, member: _Member) -> None:
        # At once, so that nobody else begins with it before the task has its turn.
        member.answer = asyncio.get_running_loop().create_future()

    async def _asked(self, member: _Member, body: Any) -> str | None:
        assert member.answer is not None
        self._led.tell(body)
        return await member.answer

    @property
    def _led(self) -> Host:
        if self._host is None:
            raise ExecutorLost("the engine is not up yet")
        return self._host

    def _check_role(self, role: str) -> None:
        if role not in self._roles:
            raise InvalidRequest("role", f"must be one of {', '.join(self._roles)}, not {role[:100]!r}")

    def _settled(self, name: str) -> _Member:
        member = self._members.get(name)
        if member is None:
            known = ", ".join(self._members) or "none"
            raise UnknownWorker("name", f"no worker {name[:100]!r} (there is: {known})")
        if member.state in ("starting", "draining"):
            raise InvalidRequest("name", f"{name} is {member.state} already")
        return member

    def _check_rest(self, leaving: _Member, field: str, what: str) -> None:
        missing = self._missing(self._serving(without=leaving))
        if missing is not None:
            raise InvalidRequest(field, f"{leaving.name} cannot {what}: {missing}")

    def _serving(self, without: _Member) -> list[str]:
        return [
            member.role
            for member in self._members.values()
            if member is not without
            and member.state in ("running", "lost")
            and member.remote is not None
            and member.remote.failure is None
        ]

    def fail(self, error: GenserveError) -> None:
        """The engine can serve no more: nobody waits any longer."""
        for member in self._members.values():
            if member.answer is not None and not member.answer.done():
                member.answer.set_exception(error)

    async def aclose(self) -> None:
        """End what is under way. The workers are the engine's to close."""
        self.fail(ExecutorLost("the engine was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
