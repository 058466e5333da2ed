"""Workers that join, leave and change their role while requests run: controllers in this process, and in actors."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from genserve.core.errors import ConfigError, ExecutorLost, InvalidRequest, UnknownWorker
from genserve.core.runtime.membership import WorkerInfo

from .doubling import Back, Drained, Lost, answer, build, is_running, until
from .nearby import engine_with, start_nearby


def with_engine(body, roles=("full", "half"), start=start_nearby) -> None:
    async def main() -> None:
        engine, front = await engine_with(roles, start)
        try:
            async with asyncio.timeout(30):
                await body(engine, engine.membership, front)
        finally:
            await engine.aclose()

    asyncio.run(main())


def states(membership) -> list[tuple[str, str, str]]:
    return [(worker.name, worker.role, worker.state) for worker in membership.workers()]


def test_a_worker_joins_and_takes_requests():
    async def body(engine, membership, front):
        assert membership.workers() == [
            WorkerInfo("engine-0", "full", "running", 1),
            WorkerInfo("engine-1", "half", "running", 1),
        ]
        assert await membership.add_worker("full") == "engine-2"
        assert states(membership)[2] == ("engine-2", "full", "running")
        answers = await asyncio.gather(*(answer(engine, f"r{i}", i) for i in range(6)))
        assert answers == [(2 * i,) for i in range(6)]
        assert engine._remotes["engine-2"]._parts.controller.num_runs == 2

    with_engine(body)


def test_a_worker_is_drained_once_its_requests_are_done_and_no_request_is_lost():
    async def body(engine, membership, front):
        running = [asyncio.ensure_future(answer(engine, f"r{i}", -60)) for i in range(4)]
        await asyncio.sleep(0.01)
        leaving = engine._remotes["engine-1"]
        draining = asyncio.ensure_future(membership.drain_worker("engine-1"))
        await asyncio.sleep(0.01)
        assert states(membership)[1] == ("engine-1", "half", "draining") and not leaving.closed
        assert await answer(engine, "later", 5) == (10,)
        await draining
        assert leaving.closed and leaving.retired
        assert states(membership) == [("engine-0", "full", "running")]
        assert await asyncio.gather(*running) == [(-120,)] * 4
        assert leaving._parts.controller.num_runs == 2
        engine._loop.post("front", Drained("engine-1"))  # a late word of one that left harms nobody

    with_engine(body)


def test_draining_goes_on_when_nobody_waits_for_it():
    async def body(engine, membership, front):
        running = asyncio.ensure_future(answer(engine, "r", -60))
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(membership.drain_worker("engine-1"), 0.01)
        assert states(membership)[1][2] == "draining"
        while len(membership.workers()) == 2:
            await asyncio.sleep(0.005)
        assert await running == (-120,)

    with_engine(body)


def test_a_worker_changes_its_role():
    async def body(engine, membership, front):
        running = asyncio.ensure_future(answer(engine, "r", -60))  # on engine-1
        await asyncio.sleep(0.01)
        changing = asyncio.ensure_future(membership.change_role("engine-1", "full"))
        await asyncio.sleep(0.01)
        assert states(membership)[1] == ("engine-1", "half", "draining")
        await changing
        assert running.done() and states(membership)[1] == ("engine-1", "full", "running")
        await membership.change_role("engine-0", "half")
        await membership.change_role("engine-0", "half")  # it is already
        assert states(membership)[0] == ("engine-0", "half", "running")
        assert [await answer(engine, f"r{i}", i) for i in range(3)] == [(0,), (2,), (4,)]

    with_engine(body)


def test_what_operators_must_not_do_names_the_field():
    async def body(engine, membership, front):
        for call, kind, field, said in [
            (membership.add_worker("quarter"), InvalidRequest, "role", "must be one of full, half"),
            (membership.change_role("engine-0", "quarter"), InvalidRequest, "role", "must be one of"),
            (
                membership.change_role("engine-9", "full"),
                UnknownWorker,
                "name",
                "there is: engine-0, engine-1",
            ),
            (membership.drain_worker("engine-9"), UnknownWorker, "name", "no worker 'engine-9'"),
            (membership.drain_worker("engine-0"), InvalidRequest, "name", "a full worker is needed"),
            (membership.change_role("engine-0", "half"), InvalidRequest, "role", "a full worker is needed"),
        ]:
            with pytest.raises(kind, match=said) as raised:
                await call
            assert raised.value.field == field
        running = asyncio.ensure_future(answer(engine, "r", -60))  # on engine-1
        await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(membership.drain_worker("engine-1"))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="engine-1 is draining already"):
            await membership.change_role("engine-1", "full")
        await draining
        assert await running == (-120,)
        await membership.add_worker("half")
        with pytest.raises(InvalidRequest, match="no half worker could be added: no room") as raised:
            await membership.add_worker("half")
        assert raised.value.field == "role" and len(membership.workers()) == 2

    with_engine(body)


def test_one_that_will_not_come_back_can_be_removed_and_replaced():
    async def body(engine, membership, front):
        await membership.add_worker("full")
        lost = engine._remotes["engine-0"]
        lost.give_up()
        await asyncio.sleep(0)
        assert states(membership)[0] == ("engine-0", "full", "lost") and engine.failure is None
        with pytest.raises(InvalidRequest, match="a full worker is needed"):
            await membership.drain_worker("engine-2")
        await membership.drain_worker("engine-0")
        assert [name for name, _, _ in states(membership)] == ["engine-1", "engine-2"]

    with_engine(body)


def test_with_the_last_worker_goes_the_engine_and_whoever_waits():
    async def body(engine, membership, front):
        asyncio.ensure_future(answer(engine, "r", -60)).add_done_callback(lambda task: task.exception())
        await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(membership.drain_worker("engine-1"))
        await asyncio.sleep(0.01)
        engine._remotes["engine-0"].give_up()
        await asyncio.sleep(0.01)
        assert engine.failure is None  # the other one still has a request
        engine._remotes["engine-1"].give_up()
        with pytest.raises(ExecutorLost, match="engine-0 is gone"):
            await draining
        assert isinstance(engine.failure, ExecutorLost)
        with pytest.raises(ExecutorLost):
            await membership.add_worker("full")

    with_engine(body)


def test_closing_ends_whoever_waits():
    async def body(engine, membership, front):
        asyncio.ensure_future(answer(engine, "r", -60)).add_done_callback(lambda task: task.exception())
        await asyncio.sleep(0.01)
        draining = asyncio.ensure_future(membership.drain_worker("engine-1"))
        await asyncio.sleep(0.01)
        await engine.aclose()
        with pytest.raises((ExecutorLost, asyncio.CancelledError)):
            await draining

    with_engine(body)


# -- in actors -------------------------------------------------------------------------------------------


def with_actors(body, bundle, **placing) -> None:
    from genserve.core.runtime.ray_controller import RemoteSpec, start_remotes
    from genserve.core.runtime.ray_placement import Placing

    async def start(members):
        return await start_remotes(
            [RemoteSpec(name, (), Lost, Back) for name, _ in members],
            build,
            Placing(bundle, **placing),
            reply_to=("front",),
        )

    with_engine(body, start=start)


def groups() -> list[str]:
    from ray.util.placement_group import placement_group_table

    return sorted(group["state"] for group in placement_group_table().values() if group["state"] != "REMOVED")


@pytest.mark.ray
def test_actors_join_drain_die_while_draining_and_free_their_places(ray_session):
    import ray

    before = groups()

    async def body(engine, membership, front):
        assert len(groups()) == len(before) + 1
        assert await membership.add_worker("full") == "engine-2"
        assert len(groups()) == len(before) + 2
        assert await asyncio.gather(*(answer(engine, f"r{i}", i) for i in range(6))) == [
            (2 * i,) for i in range(6)
        ]
        pids = {worker.name: worker.pid for worker in membership.workers()}
        await membership.drain_worker("engine-2")
        await until(lambda: not is_running(pids["engine-2"]), 1.0)
        assert len(groups()) == len(before) + 1
        # It dies while it is drained: no new one is started in its place.
        asyncio.ensure_future(answer(engine, "r", -60_000)).add_done_callback(lambda task: task.exception())
        await until(lambda: front.held["engine-1"])
        draining = asyncio.ensure_future(membership.drain_worker("engine-1"))
        await asyncio.sleep(0.01)
        os.kill(pids["engine-1"], signal.SIGKILL)
        await draining
        assert states(membership) == [("engine-0", "full", "running")]
        assert await answer(engine, "last", 4) == (8,)

    with_actors(body, {"CPU": 0.1})
    assert groups() == before
    asyncio.run(until(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"]))


@pytest.mark.ray
def test_a_deployment_that_does_not_fit_is_a_configuration_error_at_once_or_in_time(ray_session):
    async def nothing(*_):
        raise AssertionError("it was started")

    before = groups()
    with pytest.raises(
        ConfigError, match=r"2 worker\(s\) ask for 1 GPU each \(PACK\), more than the cluster has"
    ):
        with_actors(nothing, {"GPU": 1})
    with pytest.raises(
        ConfigError, match=r"found no place within 0.3 s; there is: 2 CPU, 0 GPU on 1 node\(s\)"
    ):
        with_actors(nothing, {"CPU": 0.1}, strategy="STRICT_SPREAD", timeout_s=0.3)
    assert groups() == before
