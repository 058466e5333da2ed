"""Advice by simulation: what is tried, for how long, and that the ranking is the simulator's own."""

import pytest

from genserve.core.errors import ConfigError
from genserve.core.metrics.summary import SLO
from genserve.dllm.plan import Candidate, candidates, plan, rounds
from genserve.dllm.scenario import open_scenario
from genserve.dllm.simulate import simulate


def test_candidates_that_cannot_differ_are_tried_once():
    found = candidates(3, range(3), (512, 1024), (4096, None))
    assert len(found) == len(set(found)) == 2 + 2 * (2 + 1)
    modes = [each.mode for each in found]
    assert [modes.count(mode) for mode in ("colocated", "disaggregated", "hybrid")] == [2, 2, 4]
    with pytest.raises(ConfigError, match="num_prefill_workers: 3 of 3 workers; 0 to 2 are possible"):
        candidates(3, (0, 3), (512,), (None,))


@pytest.mark.parametrize(("num", "num_requests"), [(1, 10), (6, 1000), (95, 1000), (95, 120), (40, 100)])
def test_rounds_grow_from_all_candidates_to_all_requests(num, num_requests):
    found = rounds(num, num_requests)
    assert found[0][0] == num and found[-1][1] == num_requests
    assert sorted(found, key=lambda each: (-each[0], each[1])) == found
    assert sum(kept * length for kept, length in found) <= num * num_requests


def test_the_best_of_each_mode_is_run_in_full_and_ranked_by_the_objective():
    scenario = open_scenario("tiny", 200, 3, num_masks=64)
    tried = candidates(3, (0, 1, 2), (256, 1024), (512, None))
    runs = []
    found = plan(scenario, tried, 40.0, 3, "mean", on_run=lambda *run: runs.append(run))
    assert [run[0] for run in runs] == list(range(1, len(runs) + 1)) and runs[-1][1] == len(runs)
    assert {each.candidate for each in found.ranked} == set(tried)
    full = [each for each in found.ranked if each.summary.num_requests == 200]
    assert list(found.ranked[: len(full)]) == full and len(full) < len(tried)
    assert {each.candidate.mode for each in full} == {"colocated", "disaggregated", "hybrid"}
    means = [each.summary.e2e_s.mean for each in full]
    assert means == sorted(means) and means[0] < means[-1]
    assert found.config["num_workers"] == 3 and found.config["budget_tokens"] == found.best.budget_tokens


def test_a_score_is_what_the_simulator_says():
    scenario = open_scenario("tiny", 40, 0, num_masks=64)
    (scored,) = plan(scenario, [Candidate(1, 512, 1024)], 20.0, 2).ranked
    result = simulate(
        scenario.workload.at_rate(20.0),
        open_scenario("tiny", 40, 0, num_masks=64, budget_tokens=512).limits,
        scenario.cost,
        2,
        num_masks=64,
        num_prefill_workers=1,
        overflow_tokens=1024,
    )
    assert scored.summary.e2e_s.mean == pytest.approx(sum(each.e2e_s for each in result.breakdowns) / 40)


def test_goodput_prefers_what_keeps_the_limit():
    scenario = open_scenario("tiny", 60, 0, num_masks=64)
    tried = candidates(3, (0, 2), (256,), (None,))
    with pytest.raises(ConfigError, match="objective: goodput needs an slo"):
        plan(scenario, tried, 30.0, 3, "goodput")
    found = plan(scenario, tried, 30.0, 3, "goodput", SLO.parse("e2e=0.3"))
    assert found == plan(scenario, tried, 30.0, 3, "goodput", SLO.parse("e2e=0.3"))
    shares = [each.summary.slo_attainment for each in found.ranked]
    assert shares[0] > shares[1]


def test_the_advice_is_a_configuration():
    from genserve.dllm.config import DllmConfig

    scenario = open_scenario("tiny", 10, 0, num_masks=64)
    for candidate in (Candidate(0, 512), Candidate(1, 512), Candidate(1, 512, 2048)):
        config = plan(scenario, [candidate], 1.0, 2).config
        read = DllmConfig(model="tiny-llada", **config)
        overflow = None if read.overflow_tokens == "never" else read.overflow_tokens
        assert (read.num_workers, read.num_prefill_workers) == (2, candidate.num_prefill_workers)
        assert not candidate.num_prefill_workers or overflow == candidate.overflow_tokens
