"""Prefill and colocated engines that die, hang, join, leave and change roles, on the virtual clock.

Whatever happens, every request is answered exactly once, with the tokens of an undisturbed run.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import event, given, settings

from genserve.core.control import Done, Failed
from genserve.core.errors import TensorError
from genserve.core.sim.simulator import Simulator
from genserve.core.types import Submit
from genserve.dllm.dispatcher import MAX_RESTARTS, Dispatcher
from genserve.dllm.messages import (
    ChangeRole,
    Drain,
    Drained,
    EngineBack,
    EngineJoined,
    EngineLost,
    RoleChanged,
)
from tests.dllm.driver import CheckingWorker, Store
from tests.properties.test_dllm_engine import Watched, engine_limits, workloads

NOTICED_S = 0.125  # after its death an engine is known to be lost


class Price:
    def price_s(self, run):
        if run.lane.startswith("link"):
            return 0.375 * (1 + run.run_id % 3)
        return 0.5 + 0.25 * (len(run.args.passes) % 3)


class Deployment:
    """Dispatcher and engines in the simulator, with workers that check what they are told."""

    def __init__(self, limits, roles, overload_tokens):
        self.limits = limits
        self.store = Store()
        self.heard = {}
        self.told = []
        self.dispatcher = Dispatcher(roles, limits, overload_tokens=overload_tokens)
        self.engines = {name: Watched(name, limits) for name in roles}
        self.workers = {}
        self.simulator = Simulator(
            {"dispatcher": self.dispatcher, **self.engines},
            Price(),
            self,
            {"gateway": self._hear, "membership": lambda now, body: self.told.append(body)},
        )

    def _hear(self, now, outputs):
        for output in outputs:
            self.heard.setdefault(output.request_id, []).append(output)

    def outcome(self, run):
        number = run.lane.rpartition("-")[2]
        worker = self.workers.get(number)
        if worker is None:
            worker = self.workers[number] = CheckingWorker(self.limits, store=self.store)
        try:
            return Done(run.lane, run.run_id, worker.perform(run.args, run.op))
        except TensorError as error:
            return Failed(run.lane, run.run_id, str(error))

    def kill(self, name, at_s):
        """At `at_s`, for good unless `start` follows."""
        self.simulator.run(before_s=at_s)
        if self.engines.pop(name, None) is not None:
            self.simulator.remove(name)
            worker = self.workers.pop(name.rpartition("-")[2], None)
            if worker is not None:
                self.store.lose(worker)
            self.simulator.post("dispatcher", EngineLost(name, "gone"), at_s + NOTICED_S)

    def start(self, name, at_s, message):
        self.simulator.run(before_s=at_s)
        if name not in self.engines:
            self.engines[name] = Watched(name, self.limits)
            self.simulator.add(name, self.engines[name])
            self.simulator.post("dispatcher", message, at_s)

    def check_empty(self):
        for engine in self.engines.values():
            stats = engine.stats()
            for held in ("num_sequences", "num_used_pages", "num_leases", "num_staged", "num_staged_pages"):
                assert stats[held] == 0, held
            assert stats["num_fetching"] == stats["num_waiting"] == 0
            assert stats["num_free_slots"] == self.limits.max_running
        stats = self.dispatcher.stats()
        for held in ("sequences", "waiting", "held", "held_pages", "kept_pages", "outstanding_tokens"):
            assert stats[f"num_{held}"] == 0, held
        assert self.store.kept == {}


@st.composite
def faults(draw, num_engines):
    """(time, what, engine, further) in order of time."""
    found = []
    for _ in range(draw(st.integers(0, 5))):
        what = draw(st.sampled_from(["kill", "kill", "kill", "refuse", "break", "role", "drain"]))
        at_s = draw(st.integers(0, 320)) / 8 + 1 / 64
        found.append((at_s, what, draw(st.integers(0, num_engines - 1)), draw(st.integers(2, 80)) / 8))
    return sorted(found)


def tokens(outputs):
    return [token for output in outputs for token in output.token_ids]


def undisturbed(limits, body):
    alone = Deployment(limits, {"engine-0": "colocated"}, None)
    alone.simulator.post("dispatcher", body)
    alone.simulator.run()
    return alone.heard[body.request_id]


@settings(max_examples=120, deadline=None)
@given(st.data(), engine_limits(), workloads(), st.integers(1, 4))
def test_every_request_is_answered_once_and_as_undisturbed(data, limits, posts, num_engines):
    roles = {
        f"engine-{index}": data.draw(st.sampled_from(["prefill", "colocated"]))
        for index in range(num_engines)
    }
    overload_tokens = data.draw(st.sampled_from([None, 1, 30, 100, 10_000]))
    limits = replace(limits, num_staging_pages=data.draw(st.sampled_from([0, 0, 2, 4, 8])))
    deployment = Deployment(limits, roles, overload_tokens)
    for at_s, body in posts:
        deployment.simulator.post("dispatcher", body, at_s)
    num_faults = 0
    actions = []
    for number, (at_s, what, index, further_s) in enumerate(data.draw(faults(num_engines))):
        name = f"engine-{index}"
        num_faults += what in ("kill", "refuse", "break")
        actions.append((at_s, number, what, name))
        if what == "kill":
            actions.append((at_s + further_s, number, "start", name))
        elif what == "drain":
            actions.append((at_s + further_s, number, "leave", name))
    for at_s, number, what, name in sorted(actions):
        deployment.simulator.run(before_s=at_s)
        ledger = deployment.dispatcher.pool.engines.get(name)
        if what == "kill":
            deployment.kill(name, at_s)
        elif what == "start":
            deployment.start(name, at_s, EngineBack(name))
        elif what == "refuse":
            deployment.store.num_refusals += 1
        elif what == "break":
            deployment.store.num_failures += 1 + number
        elif what == "drain":
            joined = f"engine-{num_engines + number}"
            deployment.start(joined, at_s, EngineJoined(joined, roles[name]))
        elif ledger is not None and what == "leave":
            deployment.simulator.post("dispatcher", Drain(name), at_s)
        elif ledger is not None:
            role = "prefill" if ledger.role == "colocated" else "colocated"
            deployment.simulator.post("dispatcher", ChangeRole(name, role), at_s)
    deployment.simulator.run()
    for told in deployment.told:
        if isinstance(told, Drained):
            del deployment.engines[told.engine]
        else:
            assert isinstance(told, RoleChanged)
    assert not any(engine.leaving for engine in deployment.dispatcher.pool.engines.values())
    deployment.check_empty()
    aborted = {body.request_id for _, body in posts if not isinstance(body, Submit)}
    assert set(deployment.heard) == {body.request_id for _, body in posts if isinstance(body, Submit)}
    for _, body in posts:
        if not isinstance(body, Submit):
            continue
        outputs = deployment.heard[body.request_id]
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [
            True
        ]
        expected = undisturbed(limits, body)
        last = outputs[-1]
        if last.finish_reason in ("length", "stop"):
            assert tokens(outputs) == tokens(expected)
            assert last.finish_reason == expected[-1].finish_reason
        elif last.error is not None and "engines were lost" in last.error:
            assert num_faults > MAX_RESTARTS
            event("given up")
        elif body.request_id not in aborted and body.deadline_s is None:
            assert last.error == expected[-1].error
        assert tokens(outputs) == tokens(expected)[: len(tokens(outputs))]
