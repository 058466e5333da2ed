"""A controller in an actor: messages in order both ways, figures, its death told and its return."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ray.exceptions import ObjectLostError, RaySystemError

from genserve.core.errors import ConfigError, ExecutorLost
from genserve.core.runtime.health import HealthLimits
from genserve.core.runtime.local_engine import LocalEngine
from genserve.core.runtime.ray_actor import WatchedActor
from genserve.core.runtime.ray_controller import RemoteController, RemoteSpec, start_remotes
from genserve.core.runtime.ray_placement import Placing
from genserve.core.types import SamplingParams, Submit

from .doubling import INFO, Back, Front, Lost, answer, build, is_running, until

pytestmark = pytest.mark.ray


async def start(name: str, *args: str) -> RemoteController:
    return await RemoteController.start(name, build, *args, reply_to=("front",), lost=Lost, back=Back)


async def started(num_remotes: int) -> tuple[LocalEngine, Front]:
    names = [f"remote-{index}" for index in range(num_remotes)]
    front = Front(names)
    remotes = {
        name: remote for name, remote in zip(names, await asyncio.gather(*map(start, names)), strict=True)
    }
    return LocalEngine(INFO, front, {}, entry="front", remotes=remotes), front


def test_messages_cross_in_order_and_figures_add_up(ray_session):
    async def main() -> None:
        engine, front = await started(2)
        asked = [answer(engine, f"r{i}", i, *range(i)) for i in range(13)]
        assert await asyncio.gather(*asked) == [tuple(2 * v for v in (i, *range(i))) for i in range(13)]
        assert await engine.stats() == {"num_asked": 13.0, "num_runs": 13.0, "num_streams": 0}
        assert front.told == [] and engine.failure is None
        await engine.aclose()

    asyncio.run(main())


def test_a_death_is_told_and_a_new_actor_takes_over(ray_session):
    async def main() -> None:
        engine, front = await started(1)
        engine.submit(Submit("r13", (13,), SamplingParams(max_tokens=1)))
        async with asyncio.timeout(30):
            while len(front.told) < 2:
                await asyncio.sleep(0.02)
        assert isinstance(front.told[0], Lost) and front.told[1] == Back()
        assert await answer(engine, "r1", 4) == (8,)
        assert (await engine.stats())["num_runs"] == 1.0
        await engine.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("error", [RaySystemError("no raylet"), ObjectLostError("0" * 56, None, "here")])
def test_whatever_ends_the_polls_is_a_loss(ray_session, error):
    class Broken:
        """In the place of an actor: Ray itself fails."""

        poll = stats = property(lambda self: self)

        async def remote(self):
            raise error

    async def main() -> None:
        remote = RemoteController("remote-0", ("front",), build, (), Lost, Back, {})
        remote._actor = actor = WatchedActor(Broken(), HealthLimits())
        assert type(error).__name__ in await remote._poll_until_lost(actor, lambda to, body: None)
        assert await remote.stats() == {}

    asyncio.run(main())


def test_what_cannot_be_taken_is_a_loss(ray_session):
    async def main() -> None:
        front = Front(["remote-0"])
        remote = await start("remote-0")
        engine = LocalEngine(INFO, front, {}, entry="front", remotes={})
        post, refused = engine._loop.post, []

        def once(to, body):
            if not refused:
                refused.append(body)
                raise ValueError("not now")
            post(to, body, "remote-0")

        engine._from_remote = lambda name, to, body: once(to, body)
        engine.add_remote("remote-0", remote)
        engine.submit(Submit("r1", (1,), SamplingParams(max_tokens=1)))
        await until(lambda: len(front.told) == 2)
        assert "not now" in front.told[0].error and front.told[1] == Back()
        assert await answer(engine, "r2", 4) == (8,)
        await engine.aclose()

    asyncio.run(main())


def test_when_nothing_can_be_told_the_engine_is_lost(ray_session):
    async def main() -> None:
        remote = await start("remote-0")
        pid = remote.pid
        given_up = asyncio.Event()

        def post(to, body):
            raise ValueError("never")

        remote.connect(post, given_up.set)
        remote.send(("r1", (1,)))
        await asyncio.wait_for(given_up.wait(), 10)
        assert isinstance(remote.failure, ExecutorLost)
        await until(lambda: not is_running(pid))
        await remote.aclose()

    asyncio.run(main())


def test_when_ray_cannot_kill_a_lost_actor_it_is_told_all_the_same(ray_session, monkeypatch):
    async def main() -> None:
        engine, front = await started(1)
        (remote,) = engine._remotes.values()
        pid = remote.pid

        def refuse(handle):
            raise RaySystemError("Ray was shut down")

        with monkeypatch.context() as patch:
            patch.setattr("ray.kill", refuse)
            engine.submit(Submit("r13", (13,), SamplingParams(max_tokens=1)))
            await until(lambda: len(front.told) == 2)
        assert remote.pid != pid and not is_running(pid)
        await engine.aclose()

    asyncio.run(main())


def test_when_no_actor_comes_back_the_engine_is_lost(ray_session, monkeypatch):
    async def main() -> None:
        engine, _ = await started(1)
        (remote,) = engine._remotes.values()
        remote._args = ("bad",)
        monkeypatch.setattr("genserve.core.runtime.ray_controller._RESTART_DELAYS_S", (0.0,))
        with pytest.raises(ExecutorLost, match="remote-0 is gone"):
            await asyncio.wait_for(answer(engine, "r13", 13), 30)
        assert isinstance(engine.failure, ExecutorLost)
        with pytest.raises(ExecutorLost):
            engine.submit(Submit("r1", (1,), SamplingParams(max_tokens=1)))
        await engine.aclose()

    asyncio.run(main())


def test_what_cannot_be_built_is_a_configuration_error(ray_session):
    with pytest.raises(ConfigError, match="cannot be built"):
        asyncio.run(start("remote", "bad"))


def test_what_is_left_is_swept_after_each_has_closed_and_beside_the_loop(ray_session):
    async def main() -> None:
        threads: list[threading.Thread] = []
        remotes = await start_remotes(
            [RemoteSpec("remote-0", (), Lost, Back)],
            build,
            Placing({"CPU": 0.1}),
            reply_to=("front",),
            swept=lambda: threads.append(threading.current_thread()),
        )
        assert threads == []
        await remotes[0].aclose()
        assert len(threads) == 1 and threads[0] is not threading.main_thread()

    asyncio.run(main())
