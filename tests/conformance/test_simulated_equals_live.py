"""The simulator and the live loop on a virtual clock give the same event log, ties included."""

import asyncio
import random
from collections import Counter
from itertools import groupby

import pytest

from genserve.ar.engine import Engine, EngineLimits
from genserve.ar.simulate import NeverEnding
from genserve.core.control import Done, Failed, Message, Run, Send, Timer, WakeAt
from genserve.core.runtime.executors import ModelledExecutor
from genserve.core.runtime.loop import LiveLoop
from genserve.core.runtime.virtual import VirtualLoop
from genserve.core.sim.simulator import Simulator
from genserve.core.types import Abort, SamplingParams, Submit


class Router:
    """Round robin over engines, on messages; pokes itself by timer, for the loops' sake."""

    def __init__(self, num_engines):
        self.num_engines = num_engines
        self.next = 0
        self.outbox = []

    def observe(self, event, now):
        if isinstance(event, Message) and isinstance(event.body, Submit):
            self.outbox.append(Send(f"engine{self.next}", event.body))
            self.next = (self.next + 1) % self.num_engines
            self.outbox.append(WakeAt(now + 0.5, "tick"))
        elif isinstance(event, Message):
            self.outbox.extend(Send(f"engine{i}", event.body) for i in range(self.num_engines))
        elif isinstance(event, Timer):
            self.outbox.append(Send("outside", f"tick at {now}"))

    def decide(self, now):
        effects, self.outbox = self.outbox, []
        return effects


class CoarseCost:
    """Prices in whole quarters, so that steps of different engines end at the same instants."""

    def price_s(self, run):
        return 0.25 * (1 + len(run.args.rows) // 4)


class SometimesFailing(NeverEnding):
    def outcome(self, run):
        if run.run_id % 97 == 0:
            return Failed(run.lane, run.run_id, "made to fail")
        return super().outcome(run)


def posts(num_requests, seed):
    """(time, body): arrivals in whole quarters; some aborts, some deadlines."""
    rng = random.Random(seed)
    now = 0.0
    for index in range(num_requests):
        now += 0.25 * rng.randrange(3)
        prompt = tuple(rng.randrange(50) for _ in range(rng.randrange(1, 60)))
        deadline = now + 0.25 * rng.randrange(1, 100) if rng.random() < 0.1 else None
        sampling = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 30))
        yield now, Submit(f"r{index}", prompt, sampling, deadline_s=deadline)
        if rng.random() < 0.1:
            yield now + 0.25 * rng.randrange(20), Abort(f"r{index}")


def controllers(num_engines):
    limits = EngineLimits(num_pages=40, max_context_tokens=100, max_running=8, budget_tokens=32)

    class Lane(Engine):
        """The engine under its own lane name."""

        def __init__(self, lane):
            super().__init__(limits, reply_to="outside")
            self.lane = lane

        def decide(self, now):
            for effect in super().decide(now):
                yield (
                    Run(self.lane, effect.run_id, effect.op, effect.args)
                    if isinstance(effect, Run)
                    else effect
                )

    engines = {f"engine{i}": Lane(f"lane{i}") for i in range(num_engines)}
    return {"router": Router(num_engines), **engines}


def simulated(work, num_engines):
    log, heard = [], []
    simulator = Simulator(
        controllers(num_engines),
        CoarseCost(),
        SometimesFailing(),
        {"outside": lambda now, body: heard.append((now, body))},
        log,
    )
    for at_s, body in work:
        simulator.post("router", body, at_s)
    simulator.run()
    return log, heard


def live(work, num_engines):
    log, heard = [], []
    aio = VirtualLoop()

    async def main():
        executor = ModelledExecutor(CoarseCost(), SometimesFailing())
        loop = LiveLoop(
            controllers(num_engines),
            {f"lane{i}": executor for i in range(num_engines)},
            {"outside": lambda body: heard.append((aio.time(), body))},
            log,
        )
        # One callback an instant: asyncio does not keep the order of timers of equal time.
        for at_s, group in groupby(sorted(work, key=lambda item: item[0]), key=lambda item: item[0]):
            aio.call_at(
                at_s, lambda bodies: [loop.post("router", body) for body in bodies], [b for _, b in group]
            )
        await asyncio.sleep(max(at_s for at_s, _ in work) + 1e6)
        assert loop.fatal is None

    try:
        aio.run_until_complete(main())
    finally:
        aio.close()
    return log, heard


@pytest.mark.parametrize(("num_requests", "num_engines"), [(50, 1), (400, 3), (3000, 2)])
def test_event_logs_are_equal(num_requests, num_engines):
    work = list(posts(num_requests, seed=num_engines))
    expected_log, expected_heard = simulated(work, num_engines)
    log, heard = live(work, num_engines)
    assert len(expected_log) > 3 * num_requests
    for index, (got, expected) in enumerate(zip(log, expected_log, strict=False)):
        assert got == expected, f"entry {index}"
    assert len(log) == len(expected_log)
    assert heard == expected_heard


def test_ties_and_failures_did_occur():
    log, _ = simulated(list(posts(400, seed=3)), 3)
    ends = Counter(entry.time_s for entry in log if isinstance(entry.what, Done))
    assert sum(count > 1 for count in ends.values()) > 100
    assert any(isinstance(entry.what, Failed) for entry in log)
    assert any(isinstance(entry.what, Timer) for entry in log)
