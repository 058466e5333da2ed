"""Dispatcher and engines under random requests, aborts, deadlines and failing steps, on the virtual clock."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from genserve.core.control import Done, Failed, Run
from genserve.core.sim.simulator import Simulator
from genserve.core.types import Abort, Submit
from genserve.dllm.dispatcher import Dispatcher
from genserve.dllm.engine import Engine
from genserve.dllm.limits import EngineLimits
from tests.dllm.driver import EOS, CheckingWorker, submit

CONTEXT = 48


@st.composite
def engine_limits(draw):
    return EngineLimits(
        num_pages=draw(st.integers(6, 30)),
        max_context_tokens=CONTEXT,
        max_running=draw(st.integers(1, 5)),
        budget_tokens=draw(st.integers(1, 80)),
        policy=draw(st.sampled_from(["signed", "signed", "paper"])),
        page_tokens=4,
        prefix_cache=draw(st.booleans()),
        shifted=draw(st.booleans()),
        fill_token_id=EOS,
        eos_token_ids=(EOS,),
    )


@st.composite
def workloads(draw):
    """(time, message) pairs; times tie, some prompts are equal."""
    posts = []
    for index in range(draw(st.integers(1, 12))):
        at_s = draw(st.integers(0, 20))
        cache = draw(st.sampled_from(["none", "prefix", "dual", "dual", "dkv", "block", "block"]))
        request = submit(
            f"r{index}",
            draw(st.integers(0, 20)),
            draw(st.one_of(st.none(), st.integers(0, 24))),
            seed=draw(st.integers(0, 3)),
            deadline_s=at_s + draw(st.integers(0, 60)) if draw(st.integers(0, 5)) == 0 else None,
            cache=cache,
            block_length=draw(st.integers(1, 12)),
            refresh_interval=draw(st.integers(1, 4)),
            cfg_scale=1.0 if cache == "none" and draw(st.booleans()) else 0.0,
            first_position=draw(st.sampled_from(["commit", "left_neighbour"])),
            early_stop=draw(st.booleans()),
            end_when_settled=draw(st.booleans()),
            include_unmasking=draw(st.booleans()),
        )
        posts.append((at_s, request))
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
            posts.append((at_s + draw(st.integers(0, 30)), Abort(f"r{index}")))
    return posts


class Price:
    def price_s(self, run):
        return 0.5 + 0.25 * (len(run.args.passes) % 3)


class Lanes:
    """An outcome model of one worker per lane that checks its contract; some steps fail."""

    def __init__(self, limits, failing):
        self.limits, self.failing = limits, failing
        self.workers = {}
        self.num_runs = 0

    def outcome(self, run: Run):
        worker = self.workers.setdefault(run.lane, CheckingWorker(self.limits))
        self.num_runs += 1
        result = worker.perform(run.args)
        if self.num_runs in self.failing:
            return Failed(run.lane, run.run_id, "made to fail")
        return Done(run.lane, run.run_id, result)


class Watched(Engine):
    """Checks its accounts after each decision."""

    def decide(self, now):
        effects = super().decide(now)
        pages = self.pages
        assert pages.num_used + pages.num_free == pages.num_pages
        assert pages.num_leases + len(self._free_slots) == self.limits.max_running
        busy = self._flight is not None
        # What the link still does may be what they wait for.
        waits = [request for request in self._requests.values() if not request.in_flight]
        link = self.exchange.staging.num_used or len(waits) < len(self._requests)
        assert busy or link or not waits, "a request waits beside an idle device"
        return effects


def play(limits, posts, num_engines, routing, failing):
    names = [f"engine-{index}" for index in range(num_engines)]
    dispatcher = Dispatcher(names, limits, routing)
    engines = {name: Watched(name, limits) for name in names}
    heard: dict[str, list] = {}

    def gateway(now, outputs):
        for output in outputs:
            heard.setdefault(output.request_id, []).append((now, output))

    simulator = Simulator(
        {"dispatcher": dispatcher, **engines}, Price(), Lanes(limits, failing), {"gateway": gateway}
    )
    for at_s, body in posts:
        simulator.post("dispatcher", body, at_s)
    simulator.run()
    for engine in engines.values():
        stats = engine.stats()
        assert stats["num_sequences"] == stats["num_used_pages"] == stats["num_leases"] == 0
        assert stats["num_free_slots"] == limits.max_running
    stats = dispatcher.stats()
    assert stats["num_sequences"] == stats["num_waiting"] == stats["num_held_pages"] == 0
    assert stats["num_outstanding_tokens"] == 0
    return heard


@settings(max_examples=80, deadline=None)
@given(
    engine_limits(),
    workloads(),
    st.integers(1, 3),
    st.sampled_from(["least_outstanding", "round_robin", "sticky"]),
    st.sets(st.integers(1, 40), max_size=2),
)
def test_every_request_ends_exactly_once_and_everything_comes_back(
    limits, posts, num_engines, routing, failing
):
    heard = play(limits, posts, num_engines, routing, failing)
    submits = [body for _, body in posts if isinstance(body, Submit)]
    assert set(heard) == {body.request_id for body in submits}
    for body in submits:
        outputs = [output for _, output in heard[body.request_id]]
        ended = [output.finish_reason is not None for output in outputs]
        assert ended == [False] * (len(outputs) - 1) + [True]
        tokens = [token for output in outputs for token in output.token_ids]
        last, wanted = outputs[-1], body.sampling.max_tokens
        if last.finish_reason == "length":
            assert wanted is None or len(tokens) == wanted
            assert EOS not in tokens
        elif last.finish_reason == "stop":
            assert tokens.index(EOS) == len(tokens) - 1
        assert wanted is None or len(tokens) <= wanted


@settings(max_examples=30, deadline=None)
@given(engine_limits(), workloads(), st.integers(1, 3))
def test_what_a_request_gets_does_not_depend_on_its_company(limits, posts, num_engines):
    crowd = play(limits, [p for p in posts if isinstance(p[1], Submit)], num_engines, "round_robin", set())
    for _, body in posts:
        if isinstance(body, Submit):
            alone = play(limits, [(0, body)], 1, "sticky", set())[body.request_id]
            reasons = {alone[-1][1].finish_reason, crowd[body.request_id][-1][1].finish_reason}
            if body.deadline_s is None:
                assert len(reasons) == 1
                assert [t for _, o in alone for t in o.token_ids] == [
                    t for _, o in crowd[body.request_id] for t in o.token_ids
                ]
