"""Actors that die or hang, under every kind of user; and a driver that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genserve.core.control import Failed, Run
from genserve.core.errors import ExecutorLost
from genserve.core.runtime.health import HealthLimits
from genserve.core.runtime.local_engine import LocalEngine
from genserve.core.runtime.ray_controller import RemoteController
from genserve.core.runtime.ray_executor import RayEngine, RayExecutor
from genserve.core.types import SamplingParams, Submit

from .doubling import INFO, Back, Doubler, Front, Lost, answer, build, build_engine, is_running, until

pytestmark = pytest.mark.ray
LIMITS = HealthLimits(heartbeat_s=0.5, park_s=0.2, step_deadline_s=0.3)
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("how", "within_s", "why"),
    [
        ("killed", 1.0, "died"),
        ("stopped", 4.0, "no sign of life for 0.7 s"),
        ("endless step", 4.0, "a step has not ended after"),
    ],
)
def test_a_controller_whose_actor_dies_or_hangs_is_lost_and_comes_back(
    ray_session, how, within_s, why, record_property
):
    async def main() -> None:
        remote = await RemoteController.start(
            "remote-0", build, reply_to=("front",), lost=Lost, back=Back, limits=LIMITS
        )
        front = Front(["remote-0"])
        engine = LocalEngine(INFO, front, {}, entry="front", remotes={"remote-0": remote})
        assert await answer(engine, "r1", 4) == (8,)
        pid = remote.pid
        if how == "endless step":
            engine.submit(Submit("r14", (14,), SamplingParams(max_tokens=1)))
        else:
            os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        took_s = await until(lambda: front.told)
        record_property("noticed_s", took_s)
        print(f"{how}: noticed after {took_s:.3f} s")
        assert took_s < within_s and why in front.told[0].error
        await until(lambda: not is_running(pid), 1.0)
        await until(lambda: len(front.told) == 2)
        assert front.told[1] == Back() and remote.pid != pid
        assert await answer(engine, "r2", 5) == (10,)
        await engine.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["killed", "stopped", "endless step"])
def test_every_run_of_an_executor_whose_actor_dies_or_hangs_fails_as_lost(ray_session, how):
    async def main() -> None:
        executor = await RayExecutor.start(Doubler, limits=LIMITS)
        events: list = []
        pid = executor._actor.pid
        executor.submit(Run("lane", 0, "double", (1,)), events.append)
        await until(lambda: events)
        for run_id, number in enumerate((14, 1, 2), start=1):
            executor.submit(Run("lane", run_id, "double", (number,)), events.append)
        if how != "endless step":
            os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        took_s = await until(lambda: len(events) == 4)
        print(f"{how}: noticed after {took_s:.3f} s")
        assert took_s < (1.0 if how == "killed" else 4.0)
        assert all(isinstance(event, Failed) and event.lost for event in events[1:])
        assert [event.run_id for event in events] == [0, 1, 2, 3]
        await until(lambda: not is_running(pid), 1.0)
        await executor.aclose()

    asyncio.run(main())


def test_every_run_of_an_executor_that_cannot_be_watched_fails_as_lost(ray_session, monkeypatch):
    async def main() -> None:
        executor = await RayExecutor.start(Doubler, limits=LIMITS)
        events: list = []
        pid = executor._actor.pid
        executor.submit(Run("lane", 0, "double", (14,)), events.append)

        async def broken(reply):
            raise ValueError("no answer")

        monkeypatch.setattr(executor._actor, "answer", broken)
        await until(lambda: events)
        assert isinstance(events[0], Failed) and events[0].lost
        await until(lambda: not is_running(pid), 1.0)
        await executor.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["stopped", "endless step"])
def test_an_engine_in_an_actor_that_hangs_is_lost(ray_session, how):
    async def main() -> None:
        engine = await RayEngine.start(build_engine, limits=LIMITS)
        assert await answer(engine, "r1", 4) == (8,)
        pid = engine._actor.pid
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ExecutorLost, match="no sign of life" if how == "stopped" else "has not ended"):
            await asyncio.wait_for(answer(engine, "r14", 14), 5)
        await until(lambda: not is_running(pid), 1.0)
        assert isinstance(engine.failure, ExecutorLost)
        await engine.aclose()

    asyncio.run(main())


DRIVER = """
import asyncio, sys
from genserve.core.runtime.ray_actor import ensure_ray
from genserve.core.runtime.ray_controller import RemoteSpec, start_remotes
from genserve.core.runtime.ray_placement import Placing
from tests.core.runtime.doubling import Back, Lost, build

async def main():
    ensure_ray(sys.argv[1] or None, num_cpus=1)
    specs = [RemoteSpec(f"remote-{i}", (), Lost, Back) for i in range(2)]
    remotes = await start_remotes(specs, build, Placing({"CPU": 0.1}), reply_to=("front",))
    print(*(remote.pid for remote in remotes), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def below(root: int) -> set[int]:
    """Processes that descend from `root`."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


@pytest.mark.parametrize("cluster", [pytest.param("its own", marks=pytest.mark.slow), "an existing one"])
def test_a_driver_that_is_killed_leaves_no_process_behind(ray_session, cluster):
    import ray

    address = "" if cluster == "its own" else ray.get_runtime_context().gcs_address
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, address], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    actors = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(actors) == 2 and all(map(is_running, actors))
    left = {*actors, *below(driver.pid)}
    driver.kill()
    driver.wait()
    begun = time.monotonic()
    while any(map(is_running, left)):
        assert time.monotonic() - begun < 10, [
            Path(f"/proc/{pid}/comm").read_text() for pid in left if is_running(pid)
        ]
        time.sleep(0.05)
    print(f"{len(left)} processes gone after {time.monotonic() - begun:.1f} s")
