"""Dispatcher and engines over a worker that checks its contract: endings, pages, order, streams."""

from dataclasses import replace

import pytest

from genserve.core.metrics.recorder import Recorder
from genserve.core.types import DEADLINE_EXCEEDED
from genserve.dllm.dispatcher import MAX_RESTARTS, Dispatcher
from genserve.dllm.request import DiffusionParams
from tests.dllm.driver import EOS, LIMITS, Driver, answer, submit

CACHES = ("none", "prefix", "dual", "dkv", "block")


@pytest.mark.parametrize("cache", CACHES)
def test_an_answer_has_the_tokens_asked_for(cache):
    driver = Driver(eos_probability=0.0)
    outputs = driver.run(submit("a", num_prompt=11, max_tokens=21, cache=cache))["a"]
    assert len(driver.tokens("a")) == 21
    assert outputs[-1].finish_reason == "length"
    assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)


@pytest.mark.parametrize("cache", CACHES)
def test_blocks_behind_a_stop_token_never_run(cache):
    for seed in range(20):
        driver = Driver(eos_probability=0.1)
        body = submit("a", seed=seed, max_tokens=60, cache=cache)
        outputs = driver.run(body)["a"]
        tokens = driver.tokens("a")
        if outputs[-1].finish_reason == "stop":
            assert tokens[-1] == EOS == outputs[-1].stop_token_id and EOS not in tokens[:-1]
            last = max(p.block[0] for step in driver.workers["engine-0"].steps for p in step.passes)
            first = (10 // 8 * 8) if cache == "block" else 10
            assert last == (10 + len(tokens) - 1 - first) // 8
        else:
            assert len(tokens) == 60 and EOS not in tokens


def test_pages_of_a_block_are_given_back_at_its_end_and_those_of_lasting_caches_kept():
    for cache, num_admits in (("dual", 4), ("prefix", 4), ("none", 4), ("dkv", 1), ("block", 1)):
        driver = Driver(eos_probability=0.0)
        driver.run(submit("a", num_prompt=8, max_tokens=32, cache=cache))
        steps = driver.workers["engine-0"].steps
        assert sum(len(step.admits) for step in steps) == num_admits, cache


def test_dkv_refreshes_all_behind_the_prompt():
    driver = Driver(eos_probability=0.0)
    driver.run(submit("a", num_prompt=8, max_tokens=64, cache="dkv", refresh_interval=3))
    steps = [step.passes[0].spans for step in driver.workers["engine-0"].steps]
    assert [spans == ((8, 72),) for spans in steps[1:]] == [n % 3 == 0 for n in range(1, len(steps))]
    assert steps[0] == ((0, 72),)
    assert driver.engines["engine-0"].stats()["num_refreshes"] == (len(steps) - 1) // 3


def test_block_runs_what_is_final_once_more_and_then_finds_it_cached():
    driver = Driver(eos_probability=0.0)
    body = submit("a", num_prompt=16, max_tokens=24, cache="block")
    driver.run(body)
    starts = [p.spans for s in driver.workers["engine-0"].steps for p in s.passes if p.is_start]
    assert starts == [((0, 24),), ((16, 32),), ((24, 40),)]
    answered = driver.tokens("a")
    longer = replace(body, request_id="b", prompt_token_ids=(*body.prompt_token_ids, *answered))
    outputs = driver.run(longer)["b"]
    assert outputs[0].num_cached_tokens == 32  # the last block never became final
    other = replace(longer, request_id="c", options=replace(body.options, block_length=12))
    assert driver.run(other)["c"][0].num_cached_tokens == 0


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("num_engines", [1, 2])
def test_cancel_at_every_step(cache, num_engines):
    for after in range(80):
        driver = Driver(num_engines, eos_probability=0.0)
        driver.submit(*[submit(f"r{i}", max_tokens=24, seed=i, cache=cache) for i in range(3)])
        for _ in range(after):
            driver.step()
        over = driver.outputs["r1"][-1].finish_reason if driver.outputs["r1"] else None
        driver.abort("r1")
        assert driver.outputs["r1"][-1].finish_reason == (over or "abort")
        driver.run()
        for name in ("r0", "r2"):
            assert driver.tokens(name) == answer(
                submit("x", max_tokens=24, seed=int(name[1]), cache=cache), 0.0
            )
        if over:
            return
    raise AssertionError("it never ended")


def test_a_cancelled_request_holds_its_pages_until_its_step_returns():
    driver = Driver()
    driver.submit(submit("a"))
    driver.abort("a")
    assert driver.engines["engine-0"].stats()["num_used_pages"] > 0
    assert driver.outputs.pop("a")[-1].finish_reason == "abort"
    driver.submit(submit("a", seed=1))  # its name is free at once
    driver.step()
    driver.run()
    assert driver.tokens("a") == answer(submit("a", seed=1))


def test_deadlines_in_every_state():
    small = replace(LIMITS, num_pages=8)
    for deadline_s in range(1, 12):
        driver = Driver(limits=small, eos_probability=0.0)
        bodies = [submit(f"r{i}", seed=i, deadline_s=float(deadline_s) if i else None) for i in range(3)]
        driver.run(*bodies)
        assert len(driver.tokens("r0")) == 20
        for name in ("r1", "r2"):
            last = driver.outputs[name][-1]
            assert last.error == DEADLINE_EXCEEDED or last.finish_reason == "length"
        assert driver.outputs["r2"][-1].error == DEADLINE_EXCEEDED


def test_a_failed_step_fails_its_requests_alone():
    driver = Driver(limits=replace(LIMITS, num_pages=8), eos_probability=0.0)
    driver.submit(submit("a"), submit("b", seed=1))
    driver.step()
    driver.step(error="made to fail")
    assert driver.outputs["a"][-1].error == "made to fail"
    driver.workers["engine-0"].slots.clear()
    driver.workers["engine-0"].slots.update({0: None})  # the step's freed slot is named once more
    driver.run()
    assert len(driver.tokens("b")) == 20


def test_routed_and_kept_requests_give_the_same_tokens():
    bodies = [
        submit(f"r{i}", num_prompt=5 + i, max_tokens=10 + 3 * i, seed=i, cache=CACHES[i % 5])
        for i in range(10)
    ]
    expected = {body.request_id: answer(body) for body in bodies}
    for num_engines, routing in (
        (1, "round_robin"),
        (3, "round_robin"),
        (2, "least_outstanding"),
        (2, "sticky"),
    ):
        driver = Driver(num_engines, routing=routing)
        driver.run(*bodies)
        assert {name: driver.tokens(name) for name in driver.outputs} == expected


def test_sticky_requests_stay_and_others_move():
    for routing, moves in (("sticky", False), ("round_robin", True)):
        driver = Driver(2, routing=routing, eos_probability=0.0)
        driver.run(submit("a", max_tokens=32))
        used = {name for name, worker in driver.workers.items() if worker.steps}
        assert len(used) == 1 + moves


@pytest.mark.parametrize("cache", CACHES)
def test_a_lost_engine_loses_nothing(cache):
    bodies = [submit(f"r{i}", max_tokens=24, seed=i, cache=cache, include_unmasking=True) for i in range(4)]
    expected = {body.request_id: answer(body) for body in bodies}
    alone = Driver()
    alone.run(*bodies)
    told = {name: events(alone, name) for name in alone.outputs}
    for after in range(0, 24, 3):
        driver = Driver(2)
        driver.submit(*bodies)
        for _ in range(after):
            driver.step()
        driver.lose("engine-1")
        for _ in range(3):
            driver.step()
        driver.bring_back("engine-1")
        driver.run()
        assert {name: driver.tokens(name) for name in driver.outputs} == expected
        assert {name: events(driver, name) for name in driver.outputs} == told


def events(driver, request_id):
    return [event for output in driver.outputs[request_id] for event in output.unmasked]


def test_a_request_that_takes_every_engine_with_it_ends():
    driver = Driver(1, eos_probability=0.0)
    driver.submit(submit("a"))
    for _ in range(MAX_RESTARTS):
        driver.lose("engine-0")
        driver.bring_back("engine-0")
    assert driver.outputs["a"] == []
    driver.lose("engine-0")
    assert "4 engines were lost" in driver.outputs["a"][-1].error
    driver.bring_back("engine-0")
    assert len(driver.run(submit("b"))["b"][-1].token_ids) > 0
    driver.check_empty()


def test_with_no_engine_left_requests_wait():
    driver = Driver(1, eos_probability=0.0)
    driver.submit(submit("a"))
    driver.step()
    driver.lose("engine-0")
    assert not driver.step() and driver.dispatcher.stats()["num_waiting"] == 1
    driver.bring_back("engine-0")
    driver.run()
    assert len(driver.tokens("a")) == 20


def test_the_stream_is_the_committed_prefix_and_events_are_everything():
    driver = Driver(eos_probability=0.0)
    outputs = driver.run(submit("a", max_tokens=20, logprobs=0, include_unmasking=True))["a"]
    events = [u for output in outputs for u in output.unmasked]
    assert sorted(u.position for u in events) == list(range(20))
    assert [u.token_id for u in sorted(events)] == driver.tokens("a")
    steps = [u.step for u in events]
    assert steps == sorted(steps) and steps[0] == 0
    assert any(output.unmasked and not output.token_ids for output in outputs)
    assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)


def test_pinned_tokens_and_a_suffix_stay():
    driver = Driver(eos_probability=0.0)
    pinned = ((0, 40), (3, 41), *[(i, 42) for i in range(8, 16)])
    driver.run(submit("a", max_tokens=20, pinned=pinned, suffix_token_ids=(7, 8, 9)))
    tokens = driver.tokens("a")
    assert len(tokens) == 20 and all(tokens[offset] == token for offset, token in pinned)
    blocks = {p.block[0] for step in driver.workers["engine-0"].steps for p in step.passes}
    assert blocks == {0, 2}  # nothing is open in the second
    assert driver.run(submit("b", max_tokens=2, pinned=((0, 5), (1, 6))))["b"][-1].token_ids == (5, 6)
    assert driver.run(submit("c", max_tokens=0))["c"][-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_prompt": 0}, "prompt is empty"),
        ({"num_prompt": 250}, "270 tokens exceed the context of 256"),
        ({"num_prompt": 120, "max_tokens": 120, "cfg_scale": 1.0, "cache": "none"}, "KV pool of 256 tokens"),
        ({"block_length": 0}, "block_length"),
        ({"refresh_interval": 0}, "refresh_interval"),
        ({"cfg_scale": 1.0}, "cfg_scale"),
        ({"pinned": ((20, 1),)}, "offset 20"),
        ({"cache": "block", "suffix_token_ids": (1,)}, "suffix"),
    ],
)
def test_what_can_never_run_is_refused(options, words):
    driver = Driver()
    (output,) = driver.run(submit("a", **options))["a"]
    assert output.finish_reason == "error" and words in output.error


def test_first_passes_come_in_the_order_of_arrival_and_few_wait_at_the_engine():
    driver = Driver(limits=replace(LIMITS, num_pages=16), eos_probability=0.0)
    bodies = [submit(f"r{i}", num_prompt=4 + i % 5, seed=i) for i in range(12)]
    driver.submit(*bodies)
    while True:
        stats = driver.engines["engine-0"].stats()
        assert stats["num_sequences"] <= 16 // 6 + 1
        if not driver.step():
            break
    admits = [a.request_id for step in driver.workers["engine-0"].steps for a in step.admits]
    firsts = list(dict.fromkeys(name.partition("#")[0] for name in admits))
    assert firsts == [f"r{i}" for i in range(12)]


def test_guidance_doubles_rows_and_pages():
    driver = Driver(eos_probability=0.0)
    driver.run(submit("a", num_prompt=8, max_tokens=8, cache="none", cfg_scale=1.0))
    stats = driver.engines["engine-0"].stats()
    assert stats["num_prefill_tokens"] == 32
    assert len(driver.workers["engine-0"].steps[0].passes[0].new_pages) == 8


def test_waits_and_passes_are_recorded():
    driver = Driver(2, limits=replace(LIMITS, num_pages=8), routing="round_robin", eos_probability=0.0)
    recorder = Recorder()
    driver.dispatcher = Dispatcher(list(driver.engines), driver.limits, "round_robin", recorder=recorder)
    driver.run(*[submit(f"r{i}", max_tokens=16, seed=i) for i in range(3)])
    found = {instrument.name: instrument for instrument in recorder}
    assert found["queue_s"].num_observations == found["first_commit_s"].num_observations == 3
    assert found["queue_s"].sum > 0  # two engines, each with room for one
    assert found["prefill_wait_s"].num_observations == found["block_passes"].num_observations == 6
    stats = [engine.stats() for engine in driver.engines.values()]
    total = driver.dispatcher.stats(stats)
    assert total["num_passes"] == found["block_passes"].sum
    assert total["num_blocks"] == 6 and total["num_refreshes"] == 3 and total["num_commits"] == 48


def test_options_of_another_family_are_refused():
    driver = Driver()
    driver.submit(replace(submit("a"), options="dual"))
    assert "options" in driver.outputs["a"][-1].error
    assert driver.run(replace(submit("b"), options=None))["b"][-1].finish_reason in ("stop", "length")
    assert DiffusionParams().cache == "dual"
