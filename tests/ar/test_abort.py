"""Abort and deadline in every state a sequence can be in: everything is freed, the others never notice."""

from __future__ import annotations

import pytest

from genserve.ar.engine import Engine, EngineLimits
from genserve.ar.simulate import NeverEnding
from genserve.core.control import Done, Failed, Message, Run, Send, Timer, WakeAt
from genserve.core.types import Abort, SamplingParams, Submit
from tests.ar.driver import Driver, submit, tiny_parts

PAGE_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, k and v, heads, head size, fp32
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LONG = list(range(10, 110))


def where(engine, request_id):
    sequence = engine._sequences[request_id]
    if any(sequence in parked for parked in engine._parked.values()):
        return "parked"
    if request_id in engine._waiting:
        return "preempted" if sequence.num_preemptions else "waiting"
    return "prefilling" if sequence in engine._prefilling else "decoding"


def reach(driver, request_id, state, num_steps=200):
    for _ in range(num_steps):
        if where(driver.engine, request_id) == state:
            return
        driver.step()
    raise AssertionError(f"{request_id} never was {state}")


CASES = {
    # state: (engine, submits, the one to abort)
    "waiting": ({"max_running": 1}, [submit("other", LONG, GREEDY), submit("it", [5, 6], GREEDY)]),
    "parked": (
        {"budget_tokens": 16},
        [submit("other", LONG, GREEDY), submit("it", LONG, GREEDY, after="other")],
    ),
    "prefilling": ({"budget_tokens": 16}, [submit("it", LONG, GREEDY), submit("other", [5, 6], GREEDY)]),
    "decoding": ({}, [submit("other", LONG, GREEDY), submit("it", [5, 6], GREEDY)]),
    "preempted": (
        {"kv_pool": 9 * PAGE_BYTES},
        [submit("other", LONG, GREEDY), submit("it", [5, 6, *range(20)], GREEDY)],
    ),
}


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("state", CASES)
def test_abort(state, in_flight):
    settings, submits = CASES[state]
    settings = {"max_running": 8, **settings}
    undisturbed = Driver(tiny_parts())
    undisturbed.run(*submits)
    driver = Driver(tiny_parts(**settings))
    driver.submit(*submits)
    driver.step()
    reach(driver, "it", state)
    if in_flight:
        (run,) = driver.decide()
        driver.abort("it")
        assert "it" not in driver.engine._sequences  # freed at once, not when the step ends
        driver.engine.observe(Done(run.lane, run.run_id, driver.worker.perform(run.op, run.args)), 0.0)
    else:
        driver.abort("it")
    while driver.step():
        pass
    outputs = driver.outputs["it"]
    assert outputs[-1].finish_reason == "abort"
    assert sum(output.finish_reason is not None for output in outputs) == 1
    assert driver.tokens("it") == undisturbed.tokens("it")[: len(driver.tokens("it"))]
    assert driver.tokens("other") == undisturbed.tokens("other")
    stats = driver.engine.stats()
    assert stats["num_free_slots"] == settings["max_running"]
    for held in ("num_sequences", "num_waiting", "num_running", "num_leases", "num_used_pages"):
        assert stats[held] == 0
    driver.abort("it")  # again, and unknown ids: nothing
    driver.abort("nobody")
    assert list(driver.engine.decide(0.0)) == []
    driver.run(submit("next", LONG, GREEDY))
    assert driver.tokens("next") == plain(LONG)


def plain(prompt):
    driver = Driver(tiny_parts(prefix_cache=False))
    driver.run(submit("plain", prompt, GREEDY))
    return driver.tokens("plain")


def test_abort_of_a_leader_lets_its_siblings_run():
    driver = Driver(tiny_parts(budget_tokens=16))
    driver.submit(submit("leader", LONG, GREEDY))
    driver.submit(*[submit(f"sibling{i}", LONG, GREEDY, after="leader") for i in range(3)])
    driver.step()
    assert where(driver.engine, "sibling2") == "parked"
    driver.abort("leader")
    while driver.step():
        pass
    assert [driver.tokens(f"sibling{i}") for i in range(3)] == [plain(LONG)] * 3


def bare(**limits):
    """An engine without a worker; `turn` gives each step the same token."""
    engine = Engine(EngineLimits(**{"num_pages": 8, "max_context_tokens": 100, "max_running": 4, **limits}))
    outcome = NeverEnding()

    def turn(now=0.0):
        outputs = []
        for effect in engine.decide(now):
            if isinstance(effect, Send):
                outputs.extend(effect.body)
            elif isinstance(effect, Run):
                engine.observe(Done(effect.lane, effect.run_id, outcome.outcome(effect)), now)
        return outputs

    return engine, turn


def test_a_sibling_that_comes_late_does_not_wait_for_its_leader_to_end():
    """The leader's prompt was computed once; after a preemption the cache may give back more than the prompt."""
    engine, turn = bare(budget_tokens=64)
    engine.observe(Message("x", Submit("leader", tuple(range(20)), GREEDY)), 0.0)
    for _ in range(20):
        turn()
    engine._preempt(engine._decoding.pop())
    engine.observe(Message("x", Submit("late", tuple(range(20)), GREEDY, after="leader")), 0.0)
    turn()
    turn()
    assert "leader" in engine._sequences and where(engine, "late") == "decoding"


def test_a_deadline_ends_a_request_and_not_a_later_one_of_the_same_name():
    engine, turn = bare(budget_tokens=64)
    engine.observe(Message("x", Submit("r", (1, 2), GREEDY, deadline_s=5.0)), 0.0)
    effects = list(engine.decide(0.0))
    assert WakeAt(5.0, "r") in effects
    engine.observe(Message("x", Abort("r")), 1.0)
    engine.observe(Message("x", Submit("r", (1, 2), GREEDY)), 2.0)
    engine.observe(Timer("r"), 5.0)
    assert "r" in engine._sequences
    engine.observe(Message("x", Submit("s", (1, 2), GREEDY, deadline_s=6.0)), 5.0)
    engine.observe(Timer("s"), 6.0)
    (ended,) = [output for output in turn(6.0) if output.finish_reason == "error"]
    assert ended.request_id == "s" and "deadline" in ended.error


@pytest.mark.parametrize("lost", [False, True])
def test_a_failed_step_ends_what_was_in_it_and_gives_all_back(lost):
    driver = Driver(tiny_parts(max_running=2))
    driver.submit(*[submit(name, LONG[:20], GREEDY) for name in ("a", "b", "waits")])
    (run,) = [effect for effect in driver.engine.decide(0.0) if isinstance(effect, Run)]
    driver.engine.observe(Failed(run.lane, run.run_id, "out of luck", lost=lost), 0.0)
    while driver.step():
        pass
    ended = {name: outputs[-1].finish_reason for name, outputs in driver.outputs.items()}
    assert ended == {"a": "error", "b": "error", "waits": "error" if lost else "length"}
    assert "out of luck" in driver.outputs["a"][-1].error
    stats = driver.engine.stats()
    assert stats["num_used_pages"] == stats["num_leases"] == stats["num_sequences"] == 0
    assert stats["num_free_slots"] == 2
