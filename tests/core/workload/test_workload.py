"""Workloads: composition, reshaping, determinism, made-up prompts, presets."""

import math

import numpy as np
import pytest

from genserve.core.errors import ConfigError
from genserve.core.workload.arrivals import Superposition, constant, gamma, poisson
from genserve.core.workload.lengths import Fixed, Independent, Uniform
from genserve.core.workload.presets import open_workload, preset, preset_names
from genserve.core.workload.spec import RequestSpec, synthesize_prompt, synthesize_text
from genserve.core.workload.workload import Workload

LENGTHS = Independent(Uniform(10, 100), Uniform(5, 20))


def generate(num_requests=200, seed=0, arrivals=None) -> Workload:
    return Workload.generate(arrivals or poisson(4.0), LENGTHS, seed=seed, num_requests=num_requests)


def test_equal_seeds_give_equal_workloads_and_longer_ones_begin_alike():
    assert generate() == generate()
    assert generate(seed=1) != generate()
    assert generate(300).first(200) == generate(200)


def test_first_request_arrives_at_zero_even_if_bursty():
    assert generate(arrivals=gamma(1.0, 8.0)).requests[0].arrival_s == 0.0


def test_duration_bounds_instead_of_a_count():
    workload = Workload.generate(constant(2.0), LENGTHS, seed=0, duration_s=10.0)
    assert len(workload.requests) == 20
    with pytest.raises(ConfigError, match="exactly one"):
        Workload.generate(constant(2.0), LENGTHS, seed=0)


def test_lengths_per_client_of_a_superposition():
    clients = Superposition((constant(1.0), constant(3.0)))
    lengths = [Independent(Fixed(10), Fixed(1)), Independent(Fixed(20), Fixed(2))]
    workload = Workload.generate(clients, lengths, seed=0, num_requests=400)
    by_kind = {r.kind: (r.num_prompt_tokens, r.num_output_tokens) for r in workload.requests}
    assert by_kind == {"client-0": (10, 1), "client-1": (20, 2)}
    assert sum(r.kind == "client-1" for r in workload.requests) == pytest.approx(300, abs=2)
    with pytest.raises(ConfigError, match="lengths"):
        Workload.generate(poisson(1.0), lengths, seed=0, num_requests=4)


def test_rate_time_and_slices():
    workload = generate()
    assert workload.at_rate(9.0).rate_per_s == pytest.approx(9.0)
    assert workload.compress_time(2.0).span_s == pytest.approx(workload.span_s / 2)
    assert workload.at_rate(math.inf).span_s == 0.0
    piece = workload.between(5.0, 15.0)
    assert len(piece.requests) == sum(5.0 <= r.arrival_s < 15.0 for r in workload.requests)
    assert 0 <= piece.requests[0].arrival_s < 10
    with pytest.raises(ConfigError, match="all requests arrive at once"):
        workload.at_rate(math.inf).at_rate(1.0)
    with pytest.raises(ConfigError, match="no request arrives"):
        workload.between(1e6, 2e6)


def test_lengths_are_scaled_and_clipped():
    request = RequestSpec(0.0, 1000, 100, prefix_ids=(1, 2), prefix_block_tokens=512)
    scaled = Workload("w", (request,)).scale_lengths(1 / 16).requests[0]
    assert (scaled.num_prompt_tokens, scaled.num_output_tokens, scaled.prefix_block_tokens) == (62, 6, 32)
    clipped = Workload("w", (request,)).clip_lengths(64, 8).requests[0]
    assert (clipped.num_prompt_tokens, clipped.num_output_tokens) == (64, 8)


def test_summary_counts_shared_prefixes_once_seen():
    first = RequestSpec(0.0, 1024, 10, prefix_ids=(1, 2))
    second = RequestSpec(1.0, 1100, 30, prefix_ids=(1, 2, 3))
    third = RequestSpec(2.0, 100, 20, prefix_ids=(9, 2))
    summary = Workload("w", (first, second, third)).summary()
    assert summary.shared_prefix_fraction == pytest.approx(1024 / 2224)
    assert summary.output_tokens.mean == 20
    assert summary.rate_per_s == 1.0
    assert summary.to_dict()["prompt_tokens"]["max"] == 1100


def test_prompts_share_exactly_their_prefix_blocks():
    first = RequestSpec(0.0, 150, 1, prefix_ids=(7, 8), prefix_block_tokens=50, seed=1)
    second = RequestSpec(0.0, 170, 1, prefix_ids=(7, 9), prefix_block_tokens=50, seed=2)
    a, b = synthesize_prompt(first, 32000), synthesize_prompt(second, 32000)
    assert (len(a), len(b)) == (150, 170)
    assert a[:50] == b[:50]
    assert not set(zip(a[50:], b[50:150], strict=True)) & {(x, x) for x in range(32000)}
    assert a == synthesize_prompt(first, 32000)
    assert synthesize_text(first).split()[:50] == synthesize_text(second).split()[:50]
    assert len(synthesize_text(first).split()) == 150


def test_other_prompts_share_nothing_with_the_first_but_all_among_themselves():
    spec = RequestSpec(0.0, 150, 1, prefix_ids=(7, 8), prefix_block_tokens=50, seed=1)
    other = RequestSpec(1.0, 150, 1, prefix_ids=(7, 9), prefix_block_tokens=50, seed=2)
    workload = Workload("w", (spec, other))
    prompts = [synthesize_prompt(r, 32000) for r in workload.requests]
    salted = [synthesize_prompt(r, 32000) for r in workload.with_other_prompts(3).requests]
    assert salted[0][:50] == salted[1][:50] != prompts[0][:50]
    assert salted[0][100:] != prompts[0][100:]
    assert workload.with_other_prompts(0) == workload


def test_prompt_ids_are_fixed_for_ever_and_spread_over_the_vocabulary():
    ids = synthesize_prompt(RequestSpec(0.0, 20_000, 1, seed=3), 1000, first_token_id=10)
    assert ids[:4] == [67, 681, 233, 632]
    assert (min(ids), max(ids)) == (10, 999)
    assert np.bincount(ids, minlength=1000)[10:].std() < 6


def test_a_last_block_may_be_partial_and_blocks_may_exceed_the_prompt():
    spec = RequestSpec(0.0, 70, 1, prefix_ids=(1, 2, 3), prefix_block_tokens=50)
    assert len(synthesize_prompt(spec, 100)) == 70


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_deterministic_and_can_be_re_rated(name):
    assert preset(name, 50, seed=3) == preset(name, 80, seed=3).first(50)
    assert preset(name, 50, seed=3) != preset(name, 50, seed=4)
    assert open_workload(name, 50, 3).at_rate(2.0).rate_per_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("chat", (1020, 4142, 1109), (129, 601, 163)),
        ("sangam-sharegpt", (795, 2007, 596), (266, 874, 206)),
        ("sangam-arxiv", (2827, 3923, 890), (162, 360, 73)),
        ("mooncake-like", (6909, 85400, 15800), (350, 1119, 250)),
    ],
)
def test_presets_match_published_median_p99_and_std(name, prompt, output):
    summary = preset(name, 6000).summary()
    for tokens, expected in ((summary.prompt_tokens, prompt), (summary.output_tokens, output)):
        assert (tokens.p50, tokens.p99, tokens.std) == pytest.approx(expected, rel=0.08)


def test_mooncake_like_shares_prefixes_as_the_trace_does():
    assert preset("mooncake-like", 4000).summary().shared_prefix_fraction == pytest.approx(0.37, abs=0.05)


def test_unknown_workloads_and_bad_requests_are_refused():
    with pytest.raises(ConfigError, match="neither a file nor one of chat"):
        open_workload("nope")
    with pytest.raises(ConfigError, match="num_requests"):
        preset("chat", 0)
    with pytest.raises(ConfigError, match="num_prompt_tokens"):
        RequestSpec(0.0, 0, 1)
    with pytest.raises(ConfigError, match="arrival_s"):
        RequestSpec(-1.0, 1, 1)
    with pytest.raises(ConfigError, match="order of arrival"):
        Workload("w", (RequestSpec(1.0, 1, 1), RequestSpec(0.0, 1, 1)))
