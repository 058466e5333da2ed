"""One contract for every executor, and what a lost actor does to whoever waits on it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from genserve.core.control import Done, Failed, Run
from genserve.core.errors import ConfigError
from genserve.core.runtime.executors import ModelledExecutor, ThreadExecutor

RAY = pytest.param("ray", marks=pytest.mark.ray)


class Worker:
    """`echo` gives back, `boom` raises, `sleep` takes that long, `calls` counts."""

    def __init__(self, build_error: str | None = None) -> None:
        if build_error:
            raise ValueError(build_error)
        self.calls = 0

    def perform(self, op, args):
        self.calls += 1
        if op == "boom":
            raise ValueError(f"cannot do {args}")
        if op == "unsendable":
            return threading.Lock()
        if op == "sleep":
            time.sleep(args)
        if op == "write_and_sleep":
            path, sleep_s = args
            Path(path).write_text("begun")
            time.sleep(sleep_s)
        if op == "sleep_and_write":
            sleep_s, path = args
            time.sleep(sleep_s)
            Path(path).write_text("ended")
        return (self.calls, args)


class Modelled:
    """The same worker as cost and outcome models."""

    def __init__(self) -> None:
        self._worker = Worker()

    def price_s(self, run):
        return run.args if run.op == "sleep" else 0.0005

    def outcome(self, run):
        try:
            return self._worker.perform("echo" if run.op == "sleep" else run.op, run.args)
        except ValueError as error:
            return Failed(run.lane, run.run_id, f"ValueError: {error}")


async def make(kind):
    if kind == "thread":
        return ThreadExecutor(Worker(), "test")
    if kind == "modelled":
        model = Modelled()
        return ModelledExecutor(model, model)
    from genserve.core.runtime.ray_executor import RayExecutor

    return await RayExecutor.start(Worker)


class Reports:
    """What was reported, and on which thread."""

    def __init__(self) -> None:
        self.events = []
        self.threads = set()
        self._more = asyncio.Event()

    def __call__(self, event) -> None:
        self.threads.add(threading.get_ident())
        self.events.append(event)
        self._more.set()

    async def wait(self, count, timeout_s=30.0):
        async with asyncio.timeout(timeout_s):
            while len(self.events) < count:
                self._more.clear()
                await self._more.wait()
        return self.events


def check(kind, request, contract):
    if kind == "ray":
        request.getfixturevalue("ray_session")

    async def main():
        executor = await make(kind)
        reports = Reports()
        try:
            await contract(executor, reports)
        finally:
            async with asyncio.timeout(20):
                await executor.aclose()
        assert reports.threads <= {threading.get_ident()}

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["thread", "modelled", RAY])
def test_runs_of_a_lane_go_in_order_one_at_a_time(kind, request):
    async def contract(executor, reports):
        for run_id in range(50):
            op, args = ("sleep", 0.02) if run_id % 10 == 0 else ("echo", run_id)
            executor.submit(Run("lane", run_id, op, args), reports)
        assert reports.events == []  # never reported from within submit
        events = await reports.wait(50)
        assert all(isinstance(event, Done) and event.lane == "lane" for event in events)
        assert [event.run_id for event in events] == list(range(50))
        assert [event.result[0] for event in events] == list(range(1, 51))

    check(kind, request, contract)


@pytest.mark.parametrize("kind", ["thread", "modelled", RAY])
def test_an_exception_fails_its_run_alone_with_its_message(kind, request):
    async def contract(executor, reports):
        for run_id, op in enumerate(["echo", "boom", "echo", "boom", "echo"]):
            executor.submit(Run("lane", run_id, op, run_id), reports)
        events = await reports.wait(5)
        assert [type(event) for event in events] == [Done, Failed, Done, Failed, Done]
        assert events[1] == Failed("lane", 1, "ValueError: cannot do 1")
        assert events[4].result == (5, 4)

    check(kind, request, contract)


@pytest.mark.parametrize("kind", ["thread", RAY])
def test_closing_ends_what_waits_and_frees(kind, request):
    async def contract(executor, reports):
        for run_id in range(20):
            executor.submit(Run("lane", run_id, "sleep", 0.05), reports)
        await reports.wait(1)
        begun = time.monotonic()
        await executor.aclose()
        assert time.monotonic() - begun < 0.5
        await executor.aclose()  # again: nothing to do
        count = len(reports.events)
        await asyncio.sleep(0.1)
        assert len(reports.events) == count < 20

    check(kind, request, contract)


@pytest.mark.parametrize("kind", ["thread", RAY])
def test_closing_lets_the_current_run_end(kind, request, tmp_path):
    async def contract(executor, reports):
        for run_id in range(6):
            op, args = ("sleep_and_write", (0.4, str(tmp_path / str(run_id)))) if run_id else ("echo", 0)
            executor.submit(Run("lane", run_id, op, args), reports)
        await reports.wait(1)
        await asyncio.sleep(0.1)  # into run 1
        await executor.aclose()
        assert [path.name for path in tmp_path.iterdir()] == ["1"]

    check(kind, request, contract)


@pytest.mark.ray
def test_closing_kills_an_actor_whose_run_does_not_end(ray_session, tmp_path):
    from ray.exceptions import RayActorError

    async def main():
        executor = await make("ray")
        reports = Reports()
        executor.submit(Run("lane", 0, "echo", 0), reports)
        executor.submit(Run("lane", 1, "write_and_sleep", (str(tmp_path / "1"), 60)), reports)
        await reports.wait(1)
        while not (tmp_path / "1").exists():
            await asyncio.sleep(0.01)
        begun = time.monotonic()
        await executor.aclose(timeout_s=0.3)
        assert 0.25 < time.monotonic() - begun < 5
        with pytest.raises(RayActorError):
            await executor._actor.handle.drop_rest.remote()

    asyncio.run(main())


def test_no_threads_are_left():
    async def main():
        executor = ThreadExecutor(Worker(), "leaving")
        assert any(thread.name == "genserve-leaving" for thread in threading.enumerate())
        await executor.aclose()

    asyncio.run(main())
    assert not any(thread.name == "genserve-leaving" for thread in threading.enumerate())


@pytest.mark.ray
def test_a_result_that_cannot_be_sent_fails_its_run(ray_session):
    async def contract(executor, reports):
        executor.submit(Run("lane", 1, "unsendable", None), reports)
        executor.submit(Run("lane", 2, "echo", None), reports)
        failed, done = await reports.wait(2)
        assert isinstance(failed, Failed) and "pickle" in failed.error and not failed.lost
        assert isinstance(done, Done)

    async def main():
        executor = await make("ray")
        try:
            await contract(executor, Reports())
        finally:
            await executor.aclose()

    asyncio.run(main())


@pytest.mark.ray
def test_a_killed_actor_fails_every_pending_run_as_lost(ray_session):
    import ray

    async def main():
        executor = await make("ray")
        reports = Reports()
        for run_id in range(5):
            executor.submit(Run("lane", run_id, "sleep", 0.0 if run_id == 0 else 30), reports)
        await reports.wait(1)
        begun = time.monotonic()
        ray.kill(executor._actor.handle)
        events = await reports.wait(5)
        assert time.monotonic() - begun < 5
        assert isinstance(events[0], Done)
        assert all(isinstance(event, Failed) and event.lost for event in events[1:])
        executor.submit(Run("lane", 9, "echo", 1), reports)
        late = (await reports.wait(6))[-1]
        assert isinstance(late, Failed) and late.lost and late.run_id == 9
        await executor.aclose()

    asyncio.run(main())


@pytest.mark.ray
def test_a_worker_that_cannot_be_built_is_a_configuration_error(ray_session):
    from genserve.core.runtime.ray_executor import RayExecutor

    async def main():
        with pytest.raises(ConfigError, match="ValueError: no such model"):
            await RayExecutor.start(Worker, "no such model")

    asyncio.run(main())


@pytest.mark.ray
def test_a_control_lane_goes_on_beside_a_run_and_a_lost_actor_is_replaced(ray_session):
    from genserve.core.runtime.ray_executor import LastingExecutor

    async def main():
        told = []
        executor = await LastingExecutor.start(
            Worker,
            control_lane="lane/io",
            on_lost=lambda reason: told.append(("lost", len(reports.events))),
            on_back=lambda: told.append("back"),
            on_gone=lambda: told.append("gone"),
        )
        reports = Reports()
        executor.submit(Run("lane", 0, "sleep", 30), reports)
        executor.submit(Run("lane", 1, "echo", 1), reports)
        executor.submit(Run("lane/io", 2, "echo", 2), reports)
        (aside,) = await reports.wait(1)
        assert isinstance(aside, Done) and aside.lane == "lane/io"
        first = executor.pid
        os.kill(first, signal.SIGKILL)
        lost = (await reports.wait(3))[1:]
        assert all(isinstance(event, Failed) and event.lost for event in lost)
        async with asyncio.timeout(30):
            while "back" not in told:
                executor.submit(Run("lane", 10 + len(reports.events), "echo", 0), reports)
                await asyncio.sleep(0.1)
        assert told[0][0] == "lost" and told[0][1] >= 3, "every run was reported by then"
        assert told[1:] == ["back"] and executor.pid not in (None, first)
        executor.submit(Run("lane", 1000, "echo", 5), reports)
        while reports.events[-1].run_id != 1000:
            await reports.wait(len(reports.events) + 1)
        assert isinstance(reports.events[-1], Done)
        await executor.aclose()

    asyncio.run(main())
