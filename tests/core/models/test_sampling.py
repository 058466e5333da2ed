"""The sampler: equal to transformers' processors, and a function of the row and its seed alone."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from genserve.core.models.distribution import draw_over_vocabulary, top_candidates, uniform
from genserve.core.models.sampling import SampledToken, SamplerState, sample, token_logprobs
from genserve.core.types import SamplingParams


def make_logits(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def ids(tokens: list[SampledToken]) -> list[int]:
    assert not [token.error for token in tokens if token.error]
    return [token.token_id for token in tokens]


def empirical(logits_V: torch.Tensor, params: SamplingParams, num_draws: int) -> torch.Tensor:
    rows = logits_V.expand(num_draws, -1).contiguous()
    states = [SamplerState(replace(params, seed=seed)) for seed in range(num_draws)]
    drawn = torch.tensor(ids(sample(rows, states)))
    return torch.bincount(drawn, minlength=logits_V.shape[-1]) / num_draws


def test_uniform_is_the_documented_function() -> None:
    # SplitMix64 by hand for one point, so that a change of the stream is noticed.
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    state = mix(7 + 0x9E3779B97F4A7C15 & mask) + 4 * 0x9E3779B97F4A7C15 & mask
    assert uniform(7, 3) == (mix(state) >> 11) / 2**53


def test_uniforms_look_uniform_across_seeds_and_indices() -> None:
    for values in (
        [uniform(seed, 0) for seed in range(20_000)],
        [uniform(1234, index) for index in range(20_000)],
        [uniform(seed, 3) for seed in range(-(2**70), -(2**70) + 20_000)],
    ):
        assert all(0.0 <= value < 1.0 for value in values)
        counts = torch.histc(torch.tensor(values), bins=20, min=0, max=1)
        # chi-square with 19 degrees of freedom: 99.99 % of samples lie under 51
        assert ((counts - 1000) ** 2 / 1000).sum() < 51
        assert len(set(values)) == len(values)


@pytest.mark.parametrize("vocab_size", [7, 64, 1000, 5003])
@pytest.mark.parametrize("k", [1, 5, 50, 130, 600, 5003])
def test_top_candidates_are_the_canonical_order_ties_included(vocab_size: int, k: int) -> None:
    logits = make_logits(4, vocab_size, seed=k).mul(2).round().div(2)
    logits[1] = 0.0
    logits[1, ::2] = -0.0
    logits[2, : vocab_size - 1] = float("-inf")
    expected = [
        sorted(range(vocab_size), key=lambda i, row=row: (-row[i], i))[: min(k, vocab_size)]
        for row in logits.tolist()
    ]
    assert top_candidates(logits, k).tolist() == expected


def test_greedy_takes_the_lowest_id_on_ties_and_ignores_the_seed() -> None:
    logits = torch.zeros(3, 100)
    logits[1, [40, 41, 99]] = 1.0
    logits[2, 99] = 1.0
    for seed in (None, 5):
        params = SamplingParams(temperature=0, seed=seed, top_k=3, top_p=0.5)
        assert ids(sample(logits, [SamplerState(params)] * 3)) == [0, 40, 99]


WARPED = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.9, top_k=64),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=2.0, top_p=0.97),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1.5, top_p=0.9, min_p=0.1),
]


@pytest.mark.parametrize("params", WARPED, ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_distribution_equals_transformers_warpers(params: SamplingParams) -> None:
    logits = make_logits(1, 300, seed=3, scale=1.5)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone()).softmax(-1)[0].double()
    num_draws = 6000
    drawn = empirical(logits[0], params, num_draws)
    assert not drawn[expected == 0].any(), "drew a token that the warpers remove"
    likely = expected > 5 / num_draws
    z = (drawn - expected)[likely].abs() / (expected * (1 - expected) / num_draws).sqrt().clamp_min(1e-6)[
        likely
    ]
    assert z.max() < 4.8


@pytest.mark.parametrize("params", WARPED, ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_kept_set_equals_transformers_warpers(params: SamplingParams) -> None:
    """Every kept token can be drawn: the uniform that hits its middle is found by walking the CDF."""
    from genserve.core.models import sampling

    logits = make_logits(1, 60, seed=9, scale=2.0)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone()).softmax(-1)[0]
    kept = set(expected.nonzero().flatten().tolist())
    drawn = set()
    grid = 20_000
    method = sampling._method(params, 60)
    for start in range(0, grid, 2000):
        values = [(start + i + 0.5) / grid for i in range(2000)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "uniform", lambda seed, index, values=values: values[index])
            state = SamplerState(replace(params, seed=0))
            drawn |= set(
                sampling._draw(
                    method, logits.expand(2000, -1).contiguous(), [state] * 2000, list(range(2000))
                )
            )
    assert drawn <= kept
    assert {i for i in kept if expected[i] > 2 / grid} <= drawn


def test_repetition_penalty_equals_transformers_prompt_included() -> None:
    logits = make_logits(1, 200)
    prompt, output = [3, 3, 17, 150], [17, 9]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    state = SamplerState(SamplingParams(temperature=0, repetition_penalty=1.7), prompt, output)
    edited = logits[0].clone()
    state.apply_extras(edited)
    torch.testing.assert_close(edited, expected[0])


def test_presence_and_frequency_count_output_tokens_only() -> None:
    logits = make_logits(1, 50)
    params = SamplingParams(temperature=0, presence_penalty=0.5, frequency_penalty=0.25)
    state = SamplerState(params, [1, 2, 3])
    for token_id in [7, 7, 7, 9, *range(10, 50), *range(10, 50)]:
        state.append(token_id)
    edited = logits[0].clone()
    state.apply_extras(edited)
    expected = logits[0].clone()
    expected[7] -= 0.5 + 3 * 0.25
    expected[9] -= 0.5 + 0.25
    expected[10:50] -= 0.5 + 2 * 0.25
    torch.testing.assert_close(edited, expected)


def test_incremental_state_equals_rebuilt_state() -> None:
    params = SamplingParams(
        temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    )
    output = [5, 6, 5, *range(100, 300), 5]
    grown = SamplerState(params, [1, 2, 5])
    for token_id in output:
        grown.append(token_id)
    rebuilt = SamplerState(params, [1, 2, 5], output)
    rows = make_logits(1, 400).expand(2, -1).clone()
    grown.apply_extras(rows[0])
    rebuilt.apply_extras(rows[1])
    assert torch.equal(rows[0], rows[1])
    assert grown.num_output_tokens == rebuilt.num_output_tokens == len(output)


def test_logit_bias_acts_before_penalties_and_repeated_ids_add_up() -> None:
    logits = torch.zeros(1, 20)
    params = SamplingParams(
        temperature=0, logit_bias=((4, 1.0), (4, 1.5), (5, -100.0)), repetition_penalty=2.0
    )
    row = logits[0].clone()
    SamplerState(params, [4, 5]).apply_extras(row)
    assert row[4] == 1.25 and row[5] == -200.0
    assert ids(sample(logits, [SamplerState(params)])) == [4]
    assert not logits.any(), "the caller's logits are left alone"


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = make_logits(3, 500)
    before = logits.clone()
    states = [
        SamplerState(SamplingParams(temperature=0.3, top_k=2, seed=1, logprobs=3, logit_bias=((11, 50.0),))),
        SamplerState(SamplingParams(temperature=0)),
        SamplerState(SamplingParams(temperature=0, logprobs=0)),
    ]
    biased, plain, chosen_only = sample(logits, states)
    raw = logits.log_softmax(-1)
    assert biased.token_id == 11 and biased.logprobs is not None
    assert biased.logprobs.logprob == pytest.approx(raw[0, 11].item(), abs=1e-5)
    top = raw[0].topk(3)
    assert [i for i, _ in biased.logprobs.top] == top.indices.tolist()
    assert [v for _, v in biased.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert plain.logprobs is None
    assert chosen_only.logprobs is not None and chosen_only.logprobs.top == ()
    assert torch.equal(logits, before)


def test_token_logprobs_of_given_tokens() -> None:
    logits = make_logits(4, 100)
    result = token_logprobs(logits, [1, 2, 3, 4], [0, 2, 200, 1])
    raw = logits.log_softmax(-1)
    assert [r.logprob for r in result] == pytest.approx([raw[i, i + 1].item() for i in range(4)], abs=1e-5)
    assert [len(r.top) for r in result] == [0, 2, 100, 1]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_broken_row_fails_alone(poison: float) -> None:
    logits = make_logits(4, 300)
    logits[1] = poison
    logits[2, 7] = math.nan
    for params in (SamplingParams(temperature=0), *(replace(p, seed=3) for p in WARPED)):
        params = replace(params, logprobs=1)
        tokens = sample(logits, [SamplerState(params) for _ in range(4)])
        assert [token.error is None for token in tokens] == [True, False, False, True]
        assert tokens[1].token_id == -1
        alone = sample(logits[3:], [SamplerState(params)])
        assert tokens[3] == alone[0]


@pytest.mark.parametrize("token_id", [-1, 300])
def test_a_bias_outside_the_vocabulary_fails_its_row_alone(token_id: int) -> None:
    states = [
        SamplerState(SamplingParams(temperature=0, logit_bias=((token_id, 1.0),))),
        SamplerState(SamplingParams(temperature=0)),
    ]
    biased, other = sample(make_logits(2, 300), states)
    assert biased.error is not None and "logit_bias" in biased.error
    assert other.error is None


def test_single_finite_token_is_drawn_whatever_the_options() -> None:
    logits = torch.full((1, 1000), -math.inf)
    logits[0, 777] = -5.0
    for params in WARPED:
        assert ids(sample(logits, [SamplerState(replace(params, seed=1))])) == [777]


def test_padding_ids_are_never_chosen() -> None:
    logits = make_logits(2, 400)
    logits[:, 350:] += 100
    for params in (
        SamplingParams(temperature=0),
        *(replace(p, seed=3, logit_bias=((360, 5.0),)) for p in WARPED),
    ):
        params = replace(params, logprobs=4)
        for token in sample(logits, [SamplerState(params)] * 2, num_valid_tokens=350):
            assert 0 <= token.token_id < 350 and token.logprobs is not None
            assert all(i < 350 for i, _ in token.logprobs.top)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = make_logits(1, 300)
    for params in WARPED:
        state = SamplerState(replace(params, temperature=temperature, seed=1))
        assert ids(sample(logits, [state])) == [int(logits.argmax())]


def test_huge_temperature_is_uniform() -> None:
    drawn = empirical(make_logits(1, 16)[0], SamplingParams(temperature=1e30), 4000)
    assert (drawn - 1 / 16).abs().max() < 0.02


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_a_draw_never_lands_on_weight_zero(u: float) -> None:
    for vocab_size in (3, 256, 257, 1000):
        for place in {0, vocab_size // 2, vocab_size - 1}:
            weights = torch.zeros(1, vocab_size)
            weights[0, place] = 1e-30
            assert draw_over_vocabulary(weights, torch.tensor([u], dtype=torch.float64)).tolist() == [place]


def test_vocabulary_draw_follows_the_cdf() -> None:
    weights = torch.rand(1, 1000, generator=torch.Generator().manual_seed(1))
    cdf = weights.double().cumsum(-1)[0] / weights.double().sum()
    u = torch.linspace(0, 1 - 1e-9, 5000, dtype=torch.float64)
    drawn = draw_over_vocabulary(weights.expand(5000, -1).contiguous(), u)
    exact = torch.searchsorted(cdf, u, right=True)
    assert (drawn != exact).sum() <= 2, "only a uniform within rounding of a boundary may differ"


def test_nucleus_from_candidates_equals_the_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    from genserve.core.models import sampling

    logits = torch.cat([make_logits(20, 3000, seed=1, scale=s) for s in (0.1, 1.0, 3.0, 8.0)])
    logits[::3] = logits[::3].mul(4).round().div(4)
    params = [SamplingParams(temperature=0.8, top_p=p) for p in (0.2, 0.5, 0.9, 0.999)]

    def run() -> list[int]:
        states = [SamplerState(replace(params[i % 4], seed=i)) for i in range(len(logits))]
        return ids(sample(logits, states))

    staged = run()
    monkeypatch.setattr(sampling, "_NUCLEUS_CANDIDATES", ())
    assert run() == staged


OPTIONS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.3, 0.95]),
    top_k=st.sampled_from([0, 1, 7, 200, 5000]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (90, -2.0))]),
    logprobs=st.sampled_from([None, 0, 3]),
    seed=st.integers(-(2**63), 2**64),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(OPTIONS, st.integers(0, 50), st.integers(0, 1000)), min_size=1, max_size=24),
    order=st.randoms(use_true_random=False),
    ties=st.booleans(),
    broken=st.integers(0, 30),
)
def test_result_is_the_same_alone_or_in_any_batch_in_any_order(rows, order, ties: bool, broken: int) -> None:
    logits = torch.cat([make_logits(1, 1003, seed=which) for _, which, _ in rows])
    if ties:
        logits = logits.mul(2).round().div(2)
    if broken < len(rows):
        logits[broken, 5] = math.nan
    states = [SamplerState(params, [1, 2, 3], [3, 4, which]) for params, which, _ in rows]
    positions = [position for _, _, position in rows]
    alone = [
        sample(logits[i : i + 1], [state], [position])[0]
        for i, (state, position) in enumerate(zip(states, positions, strict=True))
    ]
    permutation = list(range(len(rows)))
    order.shuffle(permutation)
    together = sample(
        logits[permutation], [states[i] for i in permutation], [positions[i] for i in permutation]
    )
    for i, token in zip(permutation, together, strict=True):
        assert token.token_id == alone[i].token_id and token.error == alone[i].error
        if token.logprobs is not None:
            assert alone[i].logprobs is not None
            assert [t for t, _ in token.logprobs.top] == [t for t, _ in alone[i].logprobs.top]
            assert token.logprobs.logprob == pytest.approx(alone[i].logprobs.logprob, abs=1e-5)


def test_a_seed_is_needed_to_draw() -> None:
    with pytest.raises(ValueError, match="seed"):
        SamplerState(SamplingParams(temperature=1.0))


def test_the_step_does_not_walk_a_bias_in_python() -> None:
    """Per token and row it is one indexed addition: as many Python calls for 1 entry as for 4096."""
    logits = make_logits(2, 5000)

    def num_calls(num_entries: int) -> int:
        bias = tuple((token_id, 1.0) for token_id in range(num_entries))
        states = [SamplerState(SamplingParams(temperature=0, logit_bias=bias)) for _ in range(2)]
        sample(logits, states)
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            sample(logits, states)
        finally:
            sys.setprofile(None)
        return calls

    assert num_calls(4096) == num_calls(1)


EXTREME = [
    SamplingParams(temperature=5e-324, seed=1),
    SamplingParams(temperature=1e-310, seed=1, top_p=0.5, min_p=0.5),
    SamplingParams(temperature=1e4, seed=1, top_k=1 << 62),
    SamplingParams(seed=1, top_k=(1 << 63) - 1, top_p=0.5),
    SamplingParams(seed=1, top_p=5e-324, min_p=1.0),
    SamplingParams(seed=1, top_k=100, top_p=1e-9, min_p=1.0),
    SamplingParams(seed=1, repetition_penalty=5e-324),
    SamplingParams(seed=1, repetition_penalty=math.inf),
    SamplingParams(seed=1, repetition_penalty=math.nan),
    SamplingParams(seed=1, repetition_penalty=0.0),
    SamplingParams(seed=1, logit_bias=tuple((i, -math.inf) for i in range(100))),
    SamplingParams(seed=1, logit_bias=((3, math.nan),)),
    SamplingParams(seed=1, logit_bias=((3, math.inf),)),
    SamplingParams(seed=1, logit_bias=tuple((i, -100.0) for i in range(100))),
]


@pytest.mark.parametrize("params", EXTREME, ids=lambda p: str(p)[:60])
def test_extreme_options_give_a_token_or_an_error_of_their_own_row(params: SamplingParams) -> None:
    logits = make_logits(3, 100)
    neutral = SamplingParams(seed=9)

    def state(params: SamplingParams) -> SamplerState:
        return SamplerState(params, list(range(100)), [1, 2])

    alone = sample(logits, [state(neutral)] * 3)
    mixed = sample(logits, [state(neutral), state(params), state(neutral)])
    assert [mixed[0], mixed[2]] == [alone[0], alone[2]]
    if mixed[1].error is None:
        assert 0 <= mixed[1].token_id < 100
    else:
        assert mixed[1].token_id == -1


def test_the_coldest_temperature_is_greedy() -> None:
    logits = make_logits(1, 100)
    cold = SamplerState(SamplingParams(temperature=5e-324, seed=3))
    assert ids(sample(logits, [cold])) == [int(logits.argmax())]


def test_a_bias_that_forbids_everything_is_the_error_of_its_row() -> None:
    params = SamplingParams(seed=1, logit_bias=tuple((i, -math.inf) for i in range(100)))
    (token,) = sample(make_logits(1, 100), [SamplerState(params)])
    assert token.error is not None and "no token is allowed" in token.error
