"""Late answers, overdue runs, and killing the right process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from genserve.core.control import Run
from genserve.core.errors import ExecutorLost
from genserve.core.runtime.executors import ModelledExecutor
from genserve.core.runtime.health import (
    HealthLimits,
    Process,
    ends_within,
    is_alive,
    kill_process,
    this_process,
)
from genserve.core.runtime.loop import LiveLoop


def test_an_answer_that_came_while_this_loop_stood_still_is_no_late_one():
    async def main() -> None:
        aio = asyncio.get_running_loop()
        answer = aio.create_future()
        # The loop stands still for longer than the limit; the answer arrives just after.
        aio.call_later(0.0, time.sleep, 0.3)
        aio.call_later(0.33, answer.set_result, None)
        assert await ends_within(answer, 0.2)
        assert not await ends_within(aio.create_future(), 0.05)

    asyncio.run(main())


def test_a_run_is_overdue_from_the_deadline_on():
    limits = HealthLimits(step_deadline_s=2.0)
    assert limits.overdue(1.9) is None
    error = limits.overdue(2.5)
    assert isinstance(error, ExecutorLost) and "2.5 s (step_deadline_s: 2)" in str(error)
    assert replace(limits, step_deadline_s=None).overdue(1e9) is None


@pytest.fixture
def sleeper():
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.kill()
    child.wait()


def started_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def test_a_stopped_process_can_be_killed(sleeper):
    process = Process(sleeper.pid, started_of(sleeper.pid))
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert is_alive(process)
    kill_process(process)
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
    assert not is_alive(process)
    kill_process(process)  # gone already


def test_a_later_process_of_the_same_id_is_spared(sleeper):
    kill_process(Process(sleeper.pid, started_of(sleeper.pid) - 1))
    time.sleep(0.05)
    assert sleeper.poll() is None
    assert is_alive(this_process())


def test_a_loop_knows_for_how_long_its_oldest_run_has_been_running():
    class TwoLanes:
        def __init__(self) -> None:
            self.effects = [Run("a", 1, "sleep", 0.05), Run("a", 2, "sleep", 0.2), Run("b", 3, "sleep", 0.01)]

        def observe(self, event, now): ...

        def decide(self, now):
            effects, self.effects = self.effects, []
            return effects

    class Sleeping:
        def price_s(self, run):
            return run.args

        def outcome(self, run):
            return None

    async def main() -> None:
        model = Sleeping()
        executor = ModelledExecutor(model, model)
        loop = LiveLoop({"c": TwoLanes()}, {"a": executor, "b": executor})
        assert loop.run_age_s() == 0.0
        loop.post("c", "begin")
        await asyncio.sleep(0.04)
        assert 0.03 < loop.run_age_s() < 0.1
        await asyncio.sleep(0.04)  # into run 2, which began when run 1 ended
        assert loop.run_age_s() < 0.06
        while loop.run_age_s() and loop.run_age_s() < 5:
            await asyncio.sleep(0.01)
        assert loop.run_age_s() == 0.0
        await loop.aclose()

    asyncio.run(main())
