"""Simulated diffusion serving: every request is answered in full, times add up, runs repeat."""

import csv
import gzip

import pytest

from genserve.core.control import Run
from genserve.core.errors import ConfigError
from genserve.core.workload.presets import preset
from genserve.core.workload.spec import RequestSpec
from genserve.core.workload.workload import Workload
from genserve.dllm.cost import HARDWARE, MODELS, Profile, Roofline, open_cost
from genserve.dllm.limits import EngineLimits
from genserve.dllm.request import DiffusionParams
from genserve.dllm.simulate import Denoising, mean_breakdown, simulate
from genserve.dllm.step import STEP, Pass, StepArgs

LIMITS = EngineLimits(6000, 4096, max_running=64, budget_tokens=1024)


def cost():
    return open_cost("llada-8b")


def test_every_request_is_answered_in_full_and_runs_repeat():
    workload = preset("sangam-sharegpt", 40, 1).at_rate(2.0)
    first, again = (simulate(workload, LIMITS, cost(), 2) for _ in range(2))
    assert first.timelines == again.timelines and first.breakdowns == again.breakdowns
    wanted = {f"r{i}": spec.num_output_tokens for i, spec in enumerate(workload.requests)}
    assert {t.request_id: t.num_output_tokens for t in first.timelines} == wanted
    assert first.engine["num_used_pages"] == first.engine["num_held_pages"] == 0
    for each in first.breakdowns:
        assert each.num_blocks == -(-each.num_output_tokens // 32)
        assert each.num_passes >= each.num_blocks
        assert each.queue_s >= 0 and each.prefill_s > 0
        assert each.e2e_s == pytest.approx(each.queue_s + each.prefill_s + each.decode_s)


def test_what_a_request_needs_does_not_depend_on_load_or_policy():
    workload = preset("sangam-sharegpt", 30, 2)
    passes = []
    for rate, policy, routing in ((0.1, "paper", "sticky"), (6.0, "signed", "round_robin")):
        limits = EngineLimits(6000, 4096, budget_tokens=1024, policy=policy)
        result = simulate(workload.at_rate(rate), limits, cost(), 2, routing)
        passes.append({b.request_id: b.num_passes for b in result.breakdowns})
    assert passes[0] == passes[1]


def test_outputs_of_one_length_take_different_numbers_of_passes():
    specs = [RequestSpec(0.0, 20, 256, seed=seed) for seed in range(60)]
    params = DiffusionParams(cache="dual")
    result = simulate(Workload.from_requests("equal", specs), LIMITS, cost(), params=params, num_masks=256)
    passes = sorted(b.num_passes for b in result.breakdowns)
    assert passes[-1] > 2 * passes[0] > 2 * 8
    fast = simulate(
        Workload.from_requests("equal", specs),
        LIMITS,
        cost(),
        params=params,
        num_masks=256,
        denoising=Denoising(tokens_per_pass=8.0),
    )
    assert mean_breakdown(fast.breakdowns)["num_passes"] < mean_breakdown(result.breakdowns)["num_passes"] / 2


def test_requests_that_can_never_fit_are_refused_with_the_numbers():
    workload = Workload.from_requests("big", [RequestSpec(0.0, 600, 500)])
    with pytest.raises(ConfigError, match="needs 1624 tokens with its 1024 masks, an engine holds 1600"):
        simulate(workload, EngineLimits(100, 4096), cost())


def step(rows, context=2000):
    passes = (Pass(0, ((0, rows),), (), (0, context - 32, context), False),)
    return StepArgs((), (), passes)


def test_a_step_is_priced_by_its_rows_and_never_below_reading_the_weights():
    model = open_cost("llada-8b")
    model._lengths["device-0", 0] = (0, 1)
    price = [model.price_s(Run("device-0", 1, STEP, step(rows))) for rows in (32, 512, 1024, 2000)]
    assert 16e9 / 3.35e12 < price[0] < 0.012
    assert price == sorted(price)
    assert price[3] == pytest.approx(2 * price[2], rel=0.3)
    assert MODELS["llada-8b"].kv_bytes_per_token == 512 * 1024
    assert MODELS["llada-8b"].weight_bytes == pytest.approx(16e9, rel=0.02)
    assert MODELS["dream-7b"].weight_bytes == pytest.approx(15.2e9, rel=0.02)


def test_kernel_times_come_from_tables_when_given(tmp_path):
    model, device = MODELS["llada-8b"], HARDWARE["h100"]
    gemm = [("bfloat16", m, 4096, 4096, 0.1 * m) for m in (1, 1024)]
    context = [("x", 1, size, 0, 32, 32, 128, "bfloat16", "bfloat16", 1.0 * size) for size in (512, 1024)]
    generation = [("x", 1, 1, 1000, 32, 8, 128, "bfloat16", "bfloat16", 1000 * 8 * 4 * 128 / 1e6)]
    heads = (
        "kernel_source,batch_size,isl,step,num_heads,num_key_value_heads,head_dim,attn_dtype,kv_cache_dtype"
    )
    for name, heading, rows in (
        ("gemm", "gemm_dtype,m,n,k,latency_ms", gemm),
        ("context_attention", f"{heads},latency_ms", context),
        ("generation_attention", f"{heads},latency_ms", generation),
    ):
        with gzip.open(tmp_path / f"h100_sxm_{name}.csv.gz", "wt", newline="") as file:
            csv.writer(file).writerows([heading.split(","), *rows])
    profile = Profile(tmp_path, model, device)
    assert profile.product_s(512, 4096, 4096) == pytest.approx(0.0512)
    assert profile.product_s(2048, 8192, 4096) == pytest.approx(0.4096)
    assert profile.attention_s(768) == pytest.approx(2 * 0.768)
    assert profile.bandwidth_bytes_per_s() == pytest.approx(1e9)
    assert Roofline(model, device).product_s(4096, 4096, 4096) > 2 * 4096**3 / 989e12
    with pytest.raises(ConfigError, match="no gemm table for a100"):
        open_cost("llada-8b", "a100", tmp_path)
