"""Simulated AR serving: every request is answered in full, figures are plausible and repeatable."""

import pytest

from genserve.ar.cost import HARDWARE, MODELS, RooflineCost
from genserve.ar.engine import EngineLimits
from genserve.ar.simulate import simulate
from genserve.core.errors import ConfigError
from genserve.core.workload.presets import preset
from genserve.core.workload.spec import RequestSpec
from genserve.core.workload.workload import Workload

COST = RooflineCost(MODELS["llama-3-8b"], HARDWARE["h100"])
LIMITS = EngineLimits(2000, 16_384, max_running=32, budget_tokens=1024)


def test_every_request_is_answered_in_full_and_runs_repeat():
    workload = preset("chat", 200, 1).at_rate(8.0)
    first, again = (simulate(workload, LIMITS, COST) for _ in range(2))
    assert first.timelines == again.timelines
    assert len(first.timelines) == 200
    wanted = {f"r{i}": spec.num_output_tokens for i, spec in enumerate(workload.requests)}
    assert {t.request_id: t.num_output_tokens for t in first.timelines} == wanted
    assert all(t.arrival_s < t.first_token_s <= t.finish_s for t in first.timelines)
    assert first.engine["num_used_pages"] == 0


def test_a_higher_rate_waits_longer_and_a_faster_device_less():
    workload = preset("chat", 150, 2)

    def mean_ttft(rate, hardware="h100"):
        cost = RooflineCost(MODELS["llama-3-8b"], HARDWARE[hardware])
        timelines = simulate(workload.at_rate(rate), LIMITS, cost).timelines
        return sum(t.ttft_s for t in timelines) / len(timelines)

    assert mean_ttft(1.0) < mean_ttft(12.0)
    assert mean_ttft(4.0, "h100") < mean_ttft(4.0, "a100")


def test_shared_prefixes_are_cached_and_counted_once():
    specs = [RequestSpec(float(10 * i), 600, 5, prefix_ids=(7,), seed=i) for i in range(3)]
    result = simulate(Workload.from_requests("shared", specs), LIMITS, COST)
    assert [t.num_cached_tokens for t in sorted(result.timelines, key=lambda t: t.arrival_s)] == [0, 512, 512]
    assert result.engine["num_cached_tokens"] == 1024


def test_requests_that_can_never_fit_are_refused_with_the_numbers():
    workload = Workload.from_requests("big", [RequestSpec(0.0, 600, 500)])
    with pytest.raises(ConfigError, match="needs 1100 tokens, the engine holds 160"):
        simulate(workload, EngineLimits(10, 4096, max_running=4, budget_tokens=64), COST)
