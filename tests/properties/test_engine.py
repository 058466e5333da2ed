"""The engine's controller under random requests, aborts, deadlines and failing steps, on the virtual clock."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from genserve.ar.engine import Engine, EngineLimits
from genserve.ar.simulate import NeverEnding
from genserve.core.control import Failed, Run
from genserve.core.sim.simulator import Simulator
from genserve.core.types import Abort, SamplingParams, Submit

PAGE_TOKENS = 4
CONTEXT = 48


@st.composite
def engine_limits(draw):
    max_running = draw(st.integers(1, 5))
    return EngineLimits(
        num_pages=draw(st.integers(2, 20)),
        max_context_tokens=CONTEXT,
        max_running=max_running,
        budget_tokens=draw(st.integers(max_running, 24)),
        page_tokens=PAGE_TOKENS,
        prefix_cache=draw(st.booleans()),
    )


@st.composite
def workloads(draw):
    """(time, message) pairs; prompts share prefixes, times tie."""
    posts = []
    num_requests = draw(st.integers(1, 14))
    for index in range(num_requests):
        at_s = draw(st.integers(0, 30))
        shared = draw(st.integers(0, 14))
        prompt = (*([7] * shared), *draw(st.lists(st.integers(0, 1), min_size=1, max_size=20)))
        sampling = SamplingParams(
            temperature=0,
            max_tokens=draw(st.one_of(st.none(), st.integers(0, 20))),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        )
        after = f"r{draw(st.integers(0, index))}" if draw(st.booleans()) else None
        deadline_s = at_s + draw(st.integers(0, 40)) if draw(st.integers(0, 5)) == 0 else None
        request_id = f"r{index}"
        posts.append((at_s, Submit(request_id, prompt, sampling, after, deadline_s)))
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
            posts.append((at_s + draw(st.integers(0, 30)), Abort(request_id)))
    return posts


class Price:
    def price_s(self, run):
        return 0.5 + 0.25 * (len(run.args.rows) % 3)


class Failing(NeverEnding):
    """Every step whose number is in `failing` raises; prompt log-probabilities are made up."""

    def __init__(self, failing, lost) -> None:
        self.failing, self.lost = failing, lost

    def outcome(self, run):
        if run.run_id in self.failing:
            return Failed(run.lane, run.run_id, "made to fail", lost=self.lost)
        return super().outcome(run)


class Watched(Engine):
    """The engine, with what must hold checked around each decision."""

    def __init__(self, limits) -> None:
        super().__init__(limits)
        self.in_order = False

    def decide(self, now):
        was_in_flight = self._flight is not None
        effects = list(super().decide(now))
        runs = [effect for effect in effects if isinstance(effect, Run)]
        assert len(runs) <= (0 if was_in_flight else 1)
        for run in runs:
            self.check(run.args)
        stats = self.stats()
        assert stats["num_used_pages"] + stats["num_free_pages"] == stats["num_pages"]
        assert stats["num_leases"] == stats["num_running"] <= self.limits.max_running
        assert stats["num_free_slots"] + stats["num_running"] == self.limits.max_running
        assert stats["num_sequences"] == stats["num_running"] + stats["num_waiting"]
        # Something to do and nobody doing it would be for ever.
        assert self._flight is not None or stats["num_sequences"] == 0
        if self.in_order:
            # As they came, preempted ones included: whoever is on the device is older than all who wait.
            arrival = list(self._sequences)
            waiting = list(self._waiting)
            assert waiting == arrival[len(arrival) - len(waiting) :]
        return effects

    def check(self, args):
        assert args.num_tokens <= self.limits.budget_tokens
        slots = [row.slot for row in args.rows]
        assert len(set(slots)) == len(slots) <= self.limits.max_running
        in_step = {sequence.request_id for sequence, _ in self._flight}
        assert {sequence.request_id for sequence in self._decoding} <= in_step
        for sequence, row in self._flight:
            pages = sequence.lease.pages
            assert row.start + row.num_tokens <= len(pages) * PAGE_TOKENS
            assert row.start == sequence.num_computed and row.num_tokens > 0
            assert sequence.num_pages_sent == len(pages)


def play(limits, posts, failing=(), lost=False, in_order=False):
    engine = Watched(limits)
    engine.in_order = in_order
    heard: dict[str, list] = {}
    simulator = Simulator(
        {"engine": engine},
        Price(),
        Failing(failing, lost),
        {
            "gateway": lambda now, outputs: [
                heard.setdefault(o.request_id, []).append((now, o)) for o in outputs
            ]
        },
    )
    for at_s, body in posts:
        simulator.post("engine", body, at_s)
    simulator.run()
    stats = engine.stats()
    assert stats["num_sequences"] == stats["num_used_pages"] == stats["num_leases"] == 0
    assert stats["num_free_slots"] == limits.max_running
    return engine, heard


@settings(max_examples=120, deadline=None)
@given(engine_limits(), workloads(), st.sets(st.integers(1, 40), max_size=4), st.booleans())
def test_every_request_ends_exactly_once_and_everything_comes_back(limits, posts, failing, lost):
    _, heard = play(limits, posts, failing, lost)
    submits = [body for _, body in posts if isinstance(body, Submit)]
    assert set(heard) == {submit.request_id for submit in submits}
    most = min(CONTEXT, limits.num_pages * PAGE_TOKENS)
    for submit in submits:
        outputs = [output for _, output in heard[submit.request_id]]
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [
            True
        ]
        num_tokens = sum(len(output.token_ids) for output in outputs)
        room = most - len(submit.prompt_token_ids)
        wanted = room if submit.sampling.max_tokens is None else submit.sampling.max_tokens
        last = outputs[-1]
        if last.finish_reason == "length":
            assert num_tokens == min(wanted, room) >= 0
        elif len(submit.prompt_token_ids) + (submit.sampling.max_tokens or 0) > most:
            assert last.finish_reason in ("error", "abort") and num_tokens == 0
        else:
            assert last.finish_reason in ("abort", "error") and num_tokens <= min(wanted, room)
            if last.finish_reason == "error":
                assert "made to fail" in last.error or (
                    submit.deadline_s is not None and "deadline" in last.error
                )


@settings(max_examples=80, deadline=None)
@given(engine_limits(), workloads())
def test_first_tokens_come_in_the_order_of_arrival(limits, posts):
    """Nobody overtakes, so nobody starves; siblings (`after`) wait for their leader and are left out."""
    arrivals = [
        (
            at_s,
            index,
            Submit(
                s.request_id,
                s.prompt_token_ids,
                SamplingParams(temperature=0, max_tokens=s.sampling.max_tokens),
            ),
        )
        for index, (at_s, s) in enumerate(posts)
        if isinstance(s, Submit) and s.sampling.max_tokens != 0
    ]
    arrivals.sort(key=lambda item: item[:2])
    _, heard = play(limits, [(at_s, submit) for at_s, _, submit in arrivals], in_order=True)
    firsts = [
        next((now for now, output in heard[submit.request_id] if output.token_ids), None)
        for _, _, submit in arrivals
    ]
    seen = [now for now in firsts if now is not None]
    assert seen == sorted(seen)
