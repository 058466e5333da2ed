"""Sangam's Algorithm 2, part by part: who prefills, who decodes, who waits, and what happens to the KV."""

from dataclasses import replace

import pytest

from genserve.core.scheduling.budget import PrefillNeed
from genserve.dllm.budget import BudgetState, CapBudget
from genserve.dllm.exchange import MAX_FETCHES
from genserve.dllm.messages import ChangeRole, Drain, Drained, EngineJoined, RoleChanged
from tests.dllm.driver import LIMITS, Driver, answer, submit

P, C = "prefill", "colocated"
CACHES = ("none", "prefix", "dual", "dkv", "block")


def outstanding(driver):
    return {name: ledger.outstanding_tokens for name, ledger in driver.dispatcher.pool.engines.items()}


def holders(driver):
    """Request ids by engine."""
    engines = driver.dispatcher.pool.engines.items()
    return {name: [key.partition("#")[0] for key in ledger.held] for name, ledger in engines}


def figure(driver, name, engine):
    return driver.engines[f"engine-{engine}"].stats()[f"num_{name}"]


@pytest.mark.parametrize("cache", CACHES)
def test_disaggregated_answers_are_those_of_one_engine(cache):
    bodies = [submit(f"r{n}", 8 + n, 24, seed=n, cache=cache) for n in range(5)]
    driver = Driver(roles=[P, C])
    driver.run(*bodies)
    for body in bodies:
        assert driver.tokens(body.request_id) == answer(body)
    prefiller, decoder = driver.engines["engine-0"].stats(), driver.engines["engine-1"].stats()
    assert prefiller["num_decode_tokens"] == 0 and prefiller["num_handed_over"] >= 5
    assert cache == "dkv" or decoder["num_prefill_tokens"] == 0
    assert decoder["num_fetched"] == (0 if cache == "none" else prefiller["num_handed_over"])


def test_kv_does_not_move_at_block_boundaries():
    driver = Driver(roles=[P, C], eos_probability=0.0)
    driver.run(submit("dies", 8, 32, cache="dual"), submit("lasts", 8, 32, cache="dkv", seed=1))
    # Each block of the one is prefilled anew; the other moves once, and stays.
    assert figure(driver, "handed_over", 0) == figure(driver, "fetched", 1)
    assert 2 <= figure(driver, "handed_over", 0) <= 5
    admits = [a.request_id.partition("#")[0] for s in driver.workers["engine-0"].steps for a in s.admits]
    assert admits.count("lasts") == 1 and admits.count("dies") == 4


def test_the_least_loaded_prefill_worker_under_the_threshold_is_taken():
    driver = Driver(roles=[P, P, C], overload_tokens=70)
    driver.submit(submit("a", 40, 8), submit("b", 10, 8, seed=1), submit("c", 10, 8, seed=2))
    assert holders(driver) == {"engine-0": ["a"], "engine-1": ["b", "c"], "engine-2": []}
    assert outstanding(driver) == {"engine-0": 48, "engine-1": 36, "engine-2": 0}


def test_overflow_begins_when_every_prefill_worker_is_at_the_threshold():
    driver = Driver(roles=[P, P, C, C], overload_tokens=18)
    for n in range(2):
        driver.submit(submit(f"full{n}", 10, 8, seed=n))
    assert outstanding(driver)["engine-0"] == outstanding(driver)["engine-1"] == 18
    driver.submit(
        submit("over0", 10, 8, seed=5), submit("over1", 10, 8, seed=6), submit("waits", 10, 8, seed=7)
    )
    assert holders(driver)["engine-2"] == ["over0"] and holders(driver)["engine-3"] == ["over1"]
    assert driver.dispatcher.pool.num_overflows == 2
    assert driver.dispatcher.stats()["num_queued"] == 1, "the colocated ones are at the threshold too"
    driver.step("engine-2")  # its prefill is done: no longer outstanding
    assert "waits" in holders(driver)["engine-2"]
    assert figure(driver, "handed_over", 2) == 0
    driver.run()
    for n, name in ((0, "full0"), (1, "full1"), (5, "over0"), (6, "over1"), (7, "waits")):
        assert driver.tokens(name) == answer(submit(name, 10, 8, seed=n))


def test_without_a_threshold_nothing_overflows():
    limits = replace(LIMITS, num_staging_pages=10)
    driver = Driver(roles=[P, C], limits=limits)
    driver.submit(*[submit(f"r{n}", 10, 10, seed=n) for n in range(8)])
    assert holders(driver) == {"engine-0": ["r0", "r1"], "engine-1": []}, "ten pages keep two of five"
    assert driver.dispatcher.stats()["num_queued"] == 6
    driver.run()
    assert driver.dispatcher.pool.num_overflows == 0 and figure(driver, "prefill_tokens", 1) == 0


def test_with_a_threshold_prefill_workers_out_of_memory_overflow():
    limits = replace(LIMITS, num_staging_pages=10)
    driver = Driver(roles=[P, C], limits=limits, overload_tokens=1000)
    driver.submit(*[submit(f"r{n}", 10, 10, seed=n) for n in range(4)])
    assert holders(driver) == {"engine-0": ["r0", "r1"], "engine-1": ["r2", "r3"]}
    driver.run()


def test_memory_goes_first_to_requests_that_wait_to_decode():
    limits = replace(LIMITS, num_pages=10, num_staging_pages=40)
    driver = Driver(roles=[P, C], limits=limits, overload_tokens=41, eos_probability=0.0)
    driver.submit(*[submit(f"r{n}", 12, 8, seed=n) for n in range(3)])  # 5 pages each; 20, 40, 60 outstanding
    assert holders(driver) == {"engine-0": ["r0", "r1", "r2"], "engine-1": []}
    driver.step("engine-0")
    driver.step("engine-0")
    assert holders(driver)["engine-1"] == ["r0", "r1"], "ten pages hold two"
    assert driver.dispatcher.stats()["num_prefilled"] == 1
    driver.submit(*[submit(f"s{n}", 12, 8, seed=9 + n) for n in range(4)])
    assert driver.dispatcher.stats()["num_queued"] == 1
    while "r2" not in holders(driver)["engine-1"]:
        assert not any(name.startswith("s") for name in holders(driver)["engine-1"])
        assert driver.link() or driver.step("engine-1")
    driver.run()


def test_the_queue_waits_for_its_head():
    driver = Driver(roles=[P, C], limits=replace(LIMITS, num_staging_pages=20))
    driver.submit(submit("a", 40, 8), submit("big", 60, 8, seed=1), submit("small", 4, 4, seed=2))
    assert holders(driver)["engine-0"] == ["a"] and driver.dispatcher.stats()["num_queued"] == 2
    driver.run()


def test_an_older_request_s_next_block_goes_before_a_newer_request():
    driver = Driver(
        roles=[P, C], limits=replace(LIMITS, prefill_tokens=40, num_staging_pages=99), eos_probability=0.0
    )
    driver.submit(submit("old", 8, 32))
    driver.step("engine-0")
    driver.submit(*[submit(f"new{n}", 30, 8, seed=n) for n in range(6)])
    while driver.link() or ("engine-1" in driver.running and driver.step("engine-1")):
        pass
    assert outstanding(driver)["engine-0"] > 6 * 38, "its second block waits with the new ones"
    driver.run()
    admits = [a.request_id.partition("#")[0] for s in driver.workers["engine-0"].steps for a in s.admits]
    assert admits[:4] == ["old", "new0", "old", "new1"], "the second ran when the first block ended"


def test_a_prefill_worker_s_step_holds_up_to_its_cap_and_one_larger_prefill():
    plan = CapBudget(100).plan
    needs = [PrefillNeed(n, size, False) for n, size in enumerate((60, 30, 20))]
    assert [grant.key for grant in plan(BudgetState(), 0, needs).grants] == [0, 1]
    assert [grant.key for grant in plan(BudgetState(), 0, [PrefillNeed(0, 500, False)]).grants] == [0]
    driver = Driver(roles=[P, C], limits=replace(LIMITS, prefill_tokens=40))
    driver.submit(*[submit(f"r{n}", 10, 8, seed=n) for n in range(4)])
    driver.run()
    assert max(sum(p.num_tokens for p in s.passes) for s in driver.workers["engine-0"].steps) <= 40


@pytest.mark.parametrize(("num_failures", "num_restarts"), [(1, 0), (MAX_FETCHES - 1, 0), (MAX_FETCHES, 1)])
def test_a_transfer_is_tried_again_and_then_the_block_is(num_failures, num_restarts):
    driver = Driver(roles=[P, C])
    driver.store.num_failures = num_failures
    driver.run(submit("a"))
    assert driver.tokens("a") == answer(submit("a"))
    assert driver.dispatcher.num_restarts == num_restarts


def test_a_request_that_cannot_be_handed_over_is_prefilled_where_it_decodes():
    driver = Driver(roles=[P, C], eos_probability=0.0)
    driver.store.num_failures = 10**6
    driver.run(submit("a", 10, 40))
    assert driver.tokens("a") == answer(submit("a", 10, 40), 0.0)
    assert driver.dispatcher.num_restarts == 1
    assert driver.store.num_failures == 10**6 - MAX_FETCHES, "nobody tried again at its next block"
    assert figure(driver, "handed_over", 0) == 1


def test_kv_that_could_not_be_kept_is_computed_again():
    driver = Driver(roles=[P, C])
    driver.store.num_refusals = 2
    driver.run(submit("a"), submit("b", seed=1))
    assert driver.tokens("a") == answer(submit("a")) and driver.tokens("b") == answer(submit("b", seed=1))
    assert driver.dispatcher.num_restarts == 2


def test_a_decoder_lost_before_the_kv_arrived_costs_no_second_prefill():
    driver = Driver(roles=[P, C, C])
    driver.submit(submit("a"))
    driver.step("engine-0")
    (decoder,) = [name for name, held in holders(driver).items() if held == ["a"] and name != "engine-0"]
    driver.lose(decoder)
    num_tokens = figure(driver, "prefill_tokens", 0)
    other = "engine-1" if decoder == "engine-2" else "engine-2"
    assert holders(driver)[other] == ["a"] and driver.dispatcher.num_restarts == 1
    driver.link()
    assert figure(driver, "prefill_tokens", 0) == num_tokens
    driver.run()
    assert driver.tokens("a") == answer(submit("a"))


@pytest.mark.parametrize("when", ["prefilling", "fetching", "decoding"])
def test_a_cancelled_request_leaves_nothing(when):
    driver = Driver(roles=[P, C], eos_probability=0.0)
    driver.submit(submit("a", 10, 60))
    if when != "prefilling":
        driver.step("engine-0")
    if when == "decoding":
        driver.link()
    driver.abort("a")
    assert driver.outputs["a"][-1].finish_reason == "abort"
    driver.run()


def test_if_one_pool_is_gone_the_other_does_both():
    for lost in ("engine-0", "engine-1"):
        driver = Driver(roles=[P, C])
        driver.submit(submit("a"), submit("b", seed=1))
        driver.step("engine-0")
        driver.lose(lost)
        driver.run()
        assert driver.tokens("a") == answer(submit("a")) and driver.tokens("b") == answer(submit("b", seed=1))
        driver.bring_back(lost)
        driver.run(submit("c", seed=2))
        assert figure(driver, "handed_over", 0) > 0


def test_an_engine_takes_a_role_once_it_is_empty():
    driver = Driver(roles=[C, C], eos_probability=0.0)
    driver.submit(submit("a", 10, 40), submit("b", 10, 40, seed=1))
    driver.post("dispatcher", ChangeRole("engine-0", P))
    assert driver.told == []
    driver.submit(submit("c", 10, 40, seed=2))
    assert "c" not in holders(driver)["engine-0"]
    driver.run()
    assert driver.told == [RoleChanged("engine-0", P)] and driver.engines["engine-0"].role == P
    for n, name in enumerate("abc"):
        assert driver.tokens(name) == answer(submit(name, 10, 40, seed=n), 0.0)
    driver.run(submit("d", seed=3))
    assert figure(driver, "handed_over", 0) > 0


def test_engines_join_and_leave():
    driver = Driver(roles=[P, C])
    driver.submit(*[submit(f"r{n}", 10, 40, seed=n) for n in range(4)])
    driver.step("engine-0")
    driver.engines["engine-2"] = type(driver.engines["engine-0"])("engine-2", LIMITS)
    driver.workers["engine-2"] = type(driver.workers["engine-0"])(LIMITS, store=driver.store)
    driver.post("dispatcher", EngineJoined("engine-2", P))
    driver.post("dispatcher", Drain("engine-0"))
    assert driver.told == []
    driver.run()
    assert driver.told == [Drained("engine-0")]
    assert figure(driver, "handed_over", 2) > 0
    for n in range(4):
        assert driver.tokens(f"r{n}") == answer(submit(f"r{n}", 10, 40, seed=n))


@pytest.mark.parametrize("overload_tokens", [None, 10])
def test_a_request_larger_than_the_transfer_pool_never_moves(overload_tokens):
    limits = replace(LIMITS, num_staging_pages=8)
    driver = Driver(roles=[P, C], limits=limits, overload_tokens=overload_tokens)
    large, small = submit("large", 30, 8), submit("small", 4, 8, seed=1)
    driver.run(large, small)
    assert driver.tokens("large") == answer(large) and driver.tokens("small") == answer(small)
    assert driver.engines["engine-1"].stats()["num_prefill_tokens"] >= 38


def test_a_request_that_became_too_large_to_move_does_not_block_the_queue():
    driver = Driver(roles=[C, C], limits=replace(LIMITS, num_staging_pages=2))
    driver.post("dispatcher", ChangeRole("engine-0", P))
    driver.run(submit("a", 30, 10), submit("b", 3, 4, seed=1))
