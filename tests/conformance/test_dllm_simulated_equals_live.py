"""Diffusion dispatcher and engines: simulator and live loop give the same event log, ties included."""

import asyncio
import random
from dataclasses import replace
from itertools import groupby

from genserve.core.control import Done, Failed
from genserve.core.runtime.executors import ModelledExecutor
from genserve.core.runtime.loop import LiveLoop
from genserve.core.runtime.virtual import VirtualLoop
from genserve.core.sim.simulator import Simulator
from genserve.core.types import Abort
from genserve.dllm.dispatcher import Dispatcher
from genserve.dllm.engine import Engine
from tests.dllm.driver import LIMITS, CheckingWorker, submit

NAMES = ("engine-0", "engine-1")
SMALL = replace(LIMITS, num_pages=40, max_running=4, budget_tokens=40)


class CoarseCost:
    """Prices in whole quarters, so that steps of different engines end at the same instants."""

    def price_s(self, run):
        return 0.25 * (1 + len(run.args.passes) // 2)


class Lanes:
    def __init__(self):
        self.workers = {}

    def outcome(self, run):
        result = self.workers.setdefault(run.lane, CheckingWorker(SMALL)).perform(run.args)
        if run.run_id % 97 == 0:
            return Failed(run.lane, run.run_id, "made to fail")
        return Done(run.lane, run.run_id, result)


def posts(num_requests, seed):
    rng = random.Random(seed)
    now = 0.0
    for index in range(num_requests):
        now += 0.25 * rng.randrange(8)
        yield (
            now,
            submit(
                f"r{index}",
                rng.randrange(1, 40),
                rng.randrange(0, 40),
                seed=index,
                deadline_s=now + 0.25 * rng.randrange(1, 80) if rng.random() < 0.1 else None,
                cache=rng.choice(["none", "prefix", "dual", "dkv", "block"]),
                block_length=rng.choice([4, 8, 12]),
            ),
        )
        if rng.random() < 0.1:
            yield now + 0.25 * rng.randrange(20), Abort(f"r{index}")


def controllers():
    return {"dispatcher": Dispatcher(NAMES, SMALL), **{name: Engine(name, SMALL) for name in NAMES}}


def simulated(work):
    log, heard = [], []
    simulator = Simulator(
        controllers(), CoarseCost(), Lanes(), {"gateway": lambda now, body: heard.append((now, body))}, log
    )
    for at_s, body in work:
        simulator.post("dispatcher", body, at_s)
    simulator.run()
    return log, heard


def live(work):
    log, heard = [], []
    aio = VirtualLoop()

    async def main():
        executor = ModelledExecutor(CoarseCost(), Lanes())
        loop = LiveLoop(
            controllers(),
            {f"device-{index}": executor for index in range(2)},
            {"gateway": lambda body: heard.append((aio.time(), body))},
            log,
        )
        # One callback an instant: asyncio does not keep the order of timers of equal time.
        for at_s, group in groupby(sorted(work, key=lambda item: item[0]), key=lambda item: item[0]):
            aio.call_at(
                at_s,
                lambda bodies: [loop.post("dispatcher", body) for body in bodies],
                [body for _, body in group],
            )
        await asyncio.sleep(max(at_s for at_s, _ in work) + 1e6)
        assert loop.fatal is None

    try:
        aio.run_until_complete(main())
    finally:
        aio.close()
    return log, heard


def test_event_logs_are_equal():
    work = list(posts(300, seed=5))
    expected_log, expected_heard = simulated(work)
    log, heard = live(work)
    assert len(expected_log) > 3000
    for index, (got, expected) in enumerate(zip(log, expected_log, strict=False)):
        assert got == expected, f"entry {index}"
    assert len(log) == len(expected_log)
    assert heard == expected_heard
    ends = [entry.time_s for entry in log if isinstance(entry.what, Done)]
    assert len(ends) - len(set(ends)) > 100, "there were ties"
    assert any(isinstance(entry.what, Failed) for entry in log)
