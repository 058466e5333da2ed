"""The workflow coordinator: simulator and live loop give the same event log, with ties, failures, kills and cancels."""

from __future__ import annotations

import asyncio
import random
from itertools import groupby

import pytest

from genserve.core.control import Done, Failed
from genserve.core.runtime.executors import ModelledExecutor
from genserve.core.runtime.loop import LiveLoop
from genserve.core.runtime.virtual import VirtualLoop
from genserve.core.sim.simulator import Simulator
from genserve.t2i import messages as m
from genserve.t2i.graph import Const
from tests.t2i.cluster import Cluster, Gateway, denoising

KILL_S, BACK_S = 40.1, 80.1


def posts(num_requests, seed):
    rng = random.Random(seed)
    now = 0.0
    for steps in (2, 3):
        yield now, m.Register(f"steps{steps}", denoising(Const(steps), name=f"steps{steps}"), {})
    for index in range(num_requests):
        now += 0.25 * rng.randrange(24)
        yield (
            now,
            m.Arrive(
                f"r{index}",
                f"steps{rng.choice([2, 3])}",
                {"seed": rng.randrange(9), "x": rng.randrange(9)},
                rng.randrange(1, 4),
                preview_every_steps=rng.randrange(2),
                deadline_s=now + 0.25 * rng.randrange(1, 200) if rng.random() < 0.1 else None,
            ),
        )
        if rng.random() < 0.1:
            yield now + 0.25 * rng.randrange(40), m.Cancel(f"r{index}")
    yield KILL_S, m.ExecutorLost("e1", "killed")
    yield BACK_S, m.ExecutorBack("e1")


def cluster(apart):
    def cost(run):
        return 0.25 * (1 + run.run_id % 3)

    return Cluster(3, apart, fails=lambda run: run.run_id % 41 == 0, cost=cost)


def change(made, at_s):
    if at_s == KILL_S and made.apart:
        made.kill("e1")
    elif at_s == BACK_S and made.apart:
        made.revive("e1")


def simulated(work, apart):
    log, heard, made = [], [], cluster(apart)
    gateway = Gateway(made, lambda body: simulator.post(m.COORDINATOR, body))
    sinks = {m.GATEWAY: lambda now, body: (heard.append((now, body)), gateway(body))}
    simulator = Simulator({m.COORDINATOR: made.coordinator()}, made, made, sinks, log)
    for at_s, body in work:
        simulator.post(m.COORDINATOR, body, at_s)
    for at_s in (KILL_S, BACK_S):
        simulator.run(at_s)
        change(made, at_s)
    simulator.run()
    return log, heard


def live(work, apart):
    log, heard, made = [], [], cluster(apart)
    aio = VirtualLoop()

    async def main():
        executor = ModelledExecutor(made, made)
        gateway = Gateway(made, lambda body: loop.post(m.COORDINATOR, body))
        lanes = [f"e{index}{io}" for index in range(3) for io in ("", "/io")]
        loop = LiveLoop(
            {m.COORDINATOR: made.coordinator()},
            dict.fromkeys((*lanes, "home"), executor),
            {m.GATEWAY: lambda body: (heard.append((aio.time(), body)), gateway(body))},
            log,
        )

        def post(at_s, bodies):
            change(made, at_s)
            for body in bodies:
                loop.post(m.COORDINATOR, body)

        for at_s, group in groupby(sorted(work, key=lambda item: item[0]), key=lambda item: item[0]):
            aio.call_at(at_s, post, at_s, [body for _, body in group])
        await asyncio.sleep(1e6)
        assert loop.fatal is None

    try:
        aio.run_until_complete(main())
    finally:
        aio.close()
    return log, heard


@pytest.mark.parametrize("apart", [True, False])
def test_event_logs_are_equal(apart):
    work = list(posts(60, seed=5))
    expected_log, expected_heard = simulated(work, apart)
    log, heard = live(work, apart)
    assert len(expected_log) > 3000
    for index, (got, expected) in enumerate(zip(log, expected_log, strict=False)):
        assert got == expected, f"entry {index}"
    assert len(log) == len(expected_log)
    assert heard == expected_heard
    ends = [entry.time_s for entry in log if isinstance(entry.what, Done)]
    assert len(ends) - len(set(ends)) > 100, "there were ties"
    failed = [entry.what for entry in log if isinstance(entry.what, Failed)]
    assert any(each.lost for each in failed) == apart and not all(each.lost for each in failed)
    assert sum(isinstance(body, m.Finished) for _, body in heard) > 40
