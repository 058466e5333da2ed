"""Diffusion dispatcher and engines: simulator and live loop give the same event log, ties included."""

import asyncio
import random
from dataclasses import replace
from itertools import groupby

import pytest

from genserve.core.control import Done, Failed
from genserve.core.errors import TensorError
from genserve.core.runtime.executors import ModelledExecutor
from genserve.core.runtime.loop import LiveLoop
from genserve.core.runtime.virtual import VirtualLoop
from genserve.core.sim.simulator import Simulator
from genserve.core.types import Abort
from genserve.dllm.dispatcher import Dispatcher
from genserve.dllm.engine import Engine
from genserve.dllm.messages import ChangeRole
from genserve.dllm.step import STEP
from tests.dllm.driver import LIMITS, CheckingWorker, Store, submit

# Roles and overload threshold of each way to serve.
MODES = {
    "colocated": ({"engine-0": "colocated", "engine-1": "colocated"}, None),
    "disaggregated": ({"engine-0": "prefill", "engine-1": "colocated"}, None),
    "hybrid": ({"engine-0": "prefill", "engine-1": "colocated"}, 40),
}
SMALL = replace(LIMITS, num_pages=40, max_running=4, budget_tokens=40)


class CoarseCost:
    """Prices in whole quarters, so that steps of different engines end at the same instants."""

    def price_s(self, run):
        if run.op != STEP:
            return 0.25
        return 0.25 * (1 + len(run.args.passes) // 2)


class Lanes:
    def __init__(self):
        self.workers = {}
        self.store = Store()

    def outcome(self, run):
        number = run.lane[-1]
        worker = self.workers.setdefault(number, CheckingWorker(SMALL, store=self.store))
        try:
            result = worker.perform(run.args, run.op)
        except TensorError as error:
            return Failed(run.lane, run.run_id, str(error))
        if run.op == "release":
            return Done(run.lane, run.run_id, None)
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


def controllers(mode):
    roles, overload_tokens = MODES[mode]
    dispatcher = Dispatcher(roles, SMALL, overload_tokens=overload_tokens)
    return {"dispatcher": dispatcher, **{name: Engine(name, SMALL) for name in roles}}


def simulated(work, mode):
    log, heard = [], []
    sinks = {"gateway": lambda now, body: heard.append((now, body))}
    sinks["membership"] = sinks["gateway"]
    simulator = Simulator(controllers(mode), CoarseCost(), Lanes(), sinks, log)
    for at_s, body in work:
        simulator.post("dispatcher", body, at_s)
    simulator.run()
    return log, heard


def live(work, mode):
    log, heard = [], []
    aio = VirtualLoop()

    async def main():
        executor = ModelledExecutor(CoarseCost(), Lanes())
        loop = LiveLoop(
            controllers(mode),
            {f"{lane}-{index}": executor for index in range(2) for lane in ("device", "link")},
            dict.fromkeys(("gateway", "membership"), lambda body: heard.append((aio.time(), body))),
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


@pytest.mark.parametrize("mode", MODES)
def test_event_logs_are_equal(mode):
    work = list(posts(200, seed=5))
    if mode != "colocated":
        work.append((100.0, ChangeRole("engine-0", "colocated")))
        work.append((200.0, ChangeRole("engine-0", "prefill")))
    expected_log, expected_heard = simulated(work, mode)
    log, heard = live(work, mode)
    assert len(expected_log) > 3000
    for index, (got, expected) in enumerate(zip(log, expected_log, strict=False)):
        assert got == expected, f"entry {index}"
    assert len(log) == len(expected_log)
    assert heard == expected_heard
    ends = [entry.time_s for entry in log if isinstance(entry.what, Done)]
    assert len(ends) - len(set(ends)) > 100, "there were ties"
    assert any(isinstance(entry.what, Failed) for entry in log)
    fetched = [entry for entry in log if isinstance(entry.what, Done) and entry.what.lane.startswith("link")]
    assert (len(fetched) > 100) == (mode != "colocated")
