"""Controllers and workers that tests run in actors: they double numbers, die, and hang."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from genserve.core.control import Done, Message, Run, Send
from genserve.core.runtime.executors import ThreadExecutor
from genserve.core.runtime.local_engine import LocalEngine
from genserve.core.runtime.ray_controller import RemoteParts
from genserve.core.types import EngineInfo, SamplingParams, Submit, TokenOutput

INFO = EngineInfo("tiny", "test", 100, 64, 64, 8)


@dataclass(frozen=True)
class Lost:
    error: str


@dataclass(frozen=True)
class Back:
    pass


class Doubler:
    """The worker: doubles; 13 ends the process, 14 never ends, -n takes n ms."""

    def perform(self, op, args):
        if args == (13,):
            os._exit(1)
        while args == (14,):
            time.sleep(0.05)
        if args and args[0] < 0:
            time.sleep(-args[0] / 1000)
        return tuple(2 * value for value in args)


class Remote:
    """Hands each message to its lane and tells `front` what came out."""

    def __init__(self) -> None:
        self.num_runs = 0
        self._waiting: dict[int, str] = {}
        self._effects: list = []

    def observe(self, event, now):
        if isinstance(event, Message):
            request_id, token_ids = event.body
            self.num_runs += 1
            self._waiting[self.num_runs] = request_id
            self._effects.append(Run("lane", self.num_runs, "double", token_ids))
        elif isinstance(event, Done):
            self._effects.append(Send("front", (self._waiting.pop(event.run_id), event.result)))

    def decide(self, now):
        effects, self._effects = self._effects, []
        return effects

    def stats(self):
        return {"num_runs": float(self.num_runs)}


@dataclass(frozen=True)
class Joined:
    name: str
    role: str


@dataclass(frozen=True)
class Drain:
    name: str


@dataclass(frozen=True)
class ChangeRole:
    name: str
    role: str


@dataclass(frozen=True)
class Drained:
    name: str
    role: str | None = None  # changed to, not drained


class Front:
    """The entry: sends prompts to its remotes in turn, and what they answer to the gateway.

    One that is lost takes its prompts with it.
    """

    def __init__(self, remotes) -> None:
        self.remotes = list(remotes)
        self.told: list = []
        self.num_asked = 0
        self.held: dict[str, set[str]] = {name: set() for name in remotes}
        self._leaving: dict[str, Drain | ChangeRole] = {}
        self._effects: list = []

    def observe(self, event, now):
        body = event.body
        if isinstance(body, Submit):
            self.num_asked += 1
            to = self.remotes[self.num_asked % len(self.remotes)]
            self.held[to].add(body.request_id)
            self._effects.append(Send(to, (body.request_id, body.prompt_token_ids)))
        elif isinstance(body, Joined):
            self.remotes.append(body.name)
            self.held[body.name] = set()
        elif isinstance(body, Drain | ChangeRole):
            self.remotes.remove(body.name)
            self._leaving[body.name] = body
        elif isinstance(body, Lost | Back):
            self.told.append(body)
            self.held[event.sender].clear()
        else:
            request_id, token_ids = body
            self.held[event.sender].discard(request_id)
            self._effects.append(Send("gateway", [TokenOutput(request_id, token_ids, finish_reason="stop")]))

    def decide(self, now):
        for name in [name for name in self._leaving if not self.held[name]]:
            leaving = self._leaving.pop(name)
            role = leaving.role if isinstance(leaving, ChangeRole) else None
            if role is not None:
                self.remotes.append(name)
            self._effects.append(Send("membership", Drained(name, role)))
        effects, self._effects = self._effects, []
        return effects

    def stats(self):
        return {"num_asked": float(self.num_asked)}


async def answer(engine, request_id: str, *prompt: int) -> tuple[int, ...]:
    stream = engine.submit(Submit(request_id, prompt, SamplingParams(max_tokens=1)))
    return (await anext(stream)).token_ids


async def build(kind: str = "good") -> RemoteParts:
    if kind == "bad":
        raise ValueError("cannot be built")
    return RemoteParts(Remote(), {"lane": ThreadExecutor(Doubler())})


class Direct(Remote):
    """The same controller as the entry of an engine."""

    def observe(self, event, now):
        if isinstance(event, Message):
            event = Message(event.sender, (event.body.request_id, event.body.prompt_token_ids))
        super().observe(event, now)

    def decide(self, now):
        return [
            Send("gateway", [TokenOutput(*effect.body, finish_reason="stop")])
            if isinstance(effect, Send)
            else effect
            for effect in super().decide(now)
        ]


async def build_engine() -> LocalEngine:
    return LocalEngine(INFO, Direct(), {"lane": ThreadExecutor(Doubler())})


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def until(condition, timeout_s: float = 20.0) -> float:
    """How many seconds it took."""
    begun = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
    return time.monotonic() - begun
