"""Length distributions: that fitted statistics come out."""

import numpy as np
import pytest

from genserve.core.errors import ConfigError
from genserve.core.workload.lengths import (
    Clipped,
    Empirical,
    Fixed,
    Independent,
    Lognormal,
    ObservedPairs,
    Quantiles,
    Uniform,
)

NUM = 100_000


def sample(lengths, num=NUM):
    tokens = lengths.sample(num, np.random.default_rng(1))
    assert tokens.dtype == np.int64
    assert len(tokens) == num
    assert tokens.min() >= 1
    return tokens


def test_fixed_and_uniform():
    assert set(sample(Fixed(7), 10)) == {7}
    assert set(sample(Uniform(3, 6), 1000)) == {3, 4, 5, 6}


def test_lognormal_from_median_and_p99():
    tokens = sample(Lognormal.from_median_p99(795, 2007))
    assert np.median(tokens) == pytest.approx(795, rel=0.02)
    assert np.percentile(tokens, 99) == pytest.approx(2007, rel=0.03)


def test_lognormal_from_mean_and_std():
    tokens = sample(Lognormal.from_mean_std(500, 400))
    assert tokens.mean() == pytest.approx(500, rel=0.02)
    assert tokens.std() == pytest.approx(400, rel=0.04)


def test_quantiles_come_out():
    tokens = sample(Quantiles(((0, 10), (0.5, 100), (0.9, 300), (1, 1000))))
    assert np.percentile(tokens, [50, 90]) == pytest.approx([100, 300], rel=0.03)
    assert tokens.min() >= 10
    assert tokens.max() <= 1000


def test_empirical_frequencies_and_zero_weights():
    tokens = sample(Empirical.from_pdf({5: 0.2, 9: 0.0, 11: 0.6}))
    assert set(tokens) == {5, 11}
    assert np.mean(tokens == 5) == pytest.approx(0.25, abs=0.01)
    observed = Empirical.from_samples([3, 3, 3, 8])
    assert observed == Empirical((3, 8), (3.0, 1.0))


def test_clipped_moves_to_the_bounds():
    tokens = sample(Clipped(Lognormal.from_mean_std(100, 100), 50, 120))
    assert (tokens.min(), tokens.max()) == (50, 120)


def test_observed_pairs_keep_their_correlation():
    prompt, output = ObservedPairs(((1, 10), (2, 20), (3, 30))).sample_pairs(500, np.random.default_rng(0))
    assert np.array_equal(prompt * 10, output)
    assert set(prompt) == {1, 2, 3}


def test_independent_pairs_do_not_correlate():
    prompt, output = Independent(Uniform(1, 100), Uniform(1, 100)).sample_pairs(NUM, np.random.default_rng(0))
    assert abs(np.corrcoef(prompt, output)[0, 1]) < 0.02


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Fixed(0), "tokens"),
        (lambda: Uniform(5, 4), "high"),
        (lambda: Lognormal.from_median_p99(10, 5), "median"),
        (lambda: Lognormal.from_mean_std(0, 5), "mean"),
        (lambda: Quantiles(((0.1, 1), (1, 5))), "points"),
        (lambda: Quantiles(((0, 5), (1, 1))), "points"),
        (lambda: Empirical((), ()), "tokens"),
        (lambda: Empirical((0,), (1.0,)), "tokens"),
        (lambda: Empirical((1,), (0.0,)), "weights"),
        (lambda: Clipped(Fixed(1), 0, 1), "low"),
        (lambda: ObservedPairs(((1, 0),)), "pairs"),
    ],
)
def test_impossible_distributions_are_refused_by_field(build, field):
    with pytest.raises(ConfigError, match=f"^{field}"):
        build()
