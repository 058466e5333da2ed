"""Arrival processes: their rate, their burstiness, and that equal seeds give equal times."""

import itertools
import math

import numpy as np
import pytest

from genserve.core.errors import ConfigError
from genserve.core.workload.arrivals import (
    GammaGaps,
    OnOff,
    Segment,
    Superposition,
    VaryingRate,
    WeibullGaps,
    arrivals_until,
    constant,
    diurnal,
    first_arrivals,
    gamma,
    poisson,
    weibull,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def cv(times_s: np.ndarray) -> float:
    gaps = np.diff(times_s)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize(
    ("process", "expected_cv"),
    [
        (poisson(5.0), 1.0),
        (gamma(5.0, 3.0), 3.0),
        (gamma(5.0, 0.4), 0.4),
        (weibull(5.0, 2.5), 2.5),
        (constant(5.0), 0.0),
    ],
)
def test_rate_and_cv_of_renewal_processes(process, expected_cv):
    times_s = first_arrivals(process, 100_000, rng())
    assert len(times_s) / times_s[-1] == pytest.approx(5.0, rel=0.04)
    assert cv(times_s) == pytest.approx(expected_cv, rel=0.06, abs=1e-9)
    assert np.all(np.diff(times_s) >= 0)


def test_weibull_shape_is_solved_from_cv():
    assert WeibullGaps.with_cv(1.0).shape == pytest.approx(1.0)
    assert WeibullGaps.with_cv(7.0).cv == pytest.approx(7.0, rel=1e-6)


@pytest.mark.parametrize(
    "process",
    [
        gamma(2.0, 4.0),
        weibull(2.0, 4.0),
        OnOff(4.0, 10.0, 10.0),
        VaryingRate((Segment(5.0, 3.0, GammaGaps(4.0)), Segment(5.0, 1.0, WeibullGaps(0.4)))),
    ],
)
def test_processes_start_in_equilibrium(process):
    # An ordinary renewal process of CV 4 would give about 7 arrivals too many in any horizon.
    counts = [len(arrivals_until(process, 10.0, rng(seed))) for seed in range(1500)]
    standard_error = np.std(counts) / math.sqrt(len(counts))
    assert abs(np.mean(counts) - 20.0) < 4 * standard_error
    assert standard_error < 0.8


def test_varying_rate_follows_its_segments_and_repeats():
    process = VaryingRate((Segment(10.0, 20.0), Segment(10.0, 0.0), Segment(20.0, 5.0)))
    times_s = arrivals_until(process, 40_000.0, rng())
    phase = times_s % 40.0
    assert np.sum(phase < 10) / 1000 == pytest.approx(200, rel=0.02)
    assert np.sum((phase >= 10) & (phase < 20)) == 0
    assert np.sum(phase >= 20) / 1000 == pytest.approx(100, rel=0.02)
    assert process.rate_per_s == pytest.approx(7.5)


def test_varying_rate_without_repeat_ends():
    process = VaryingRate((Segment(10.0, 5.0),), repeat=False)
    times_s = list(process.stream(rng()))
    assert 20 < len(times_s) < 90
    assert max(times_s) < 10.0


def test_diurnal_peak_to_trough():
    process = diurnal(10.0, peak_to_trough=3.0, period_s=1000.0)
    rates = [segment.rate_per_s for segment in process.segments]
    assert max(rates) / min(rates) == pytest.approx(3.0, rel=0.01)
    assert process.rate_per_s == pytest.approx(10.0)


def test_on_off_has_its_rate_and_its_analytic_cv():
    process = OnOff(on_rate_per_s=5.14, mean_on_s=67.4, mean_off_s=67.4)
    times_s = first_arrivals(process, 400_000, rng())
    assert process.rate_per_s == pytest.approx(2.57)
    assert len(times_s) / times_s[-1] == pytest.approx(2.57, rel=0.05)
    assert cv(times_s) == pytest.approx(math.sqrt(1 + 5.14 * 67.4 / 2), rel=0.05)


def test_superposition_merges_labelled_clients():
    process = Superposition((poisson(1.0), gamma(3.0, 2.0), constant(2.0)))
    pairs = list(itertools.islice(process.labelled_stream(rng()), 30_000))
    times_s = [time_s for time_s, _ in pairs]
    assert times_s == sorted(times_s)
    clients = np.bincount([client for _, client in pairs]) / times_s[-1]
    assert clients == pytest.approx([1.0, 3.0, 2.0], rel=0.06)
    assert process.rate_per_s == 6.0


@pytest.mark.parametrize(
    "process",
    [
        gamma(3.0, 2.0),
        OnOff(4.0, 3.0, 3.0),
        Superposition((poisson(1.0), weibull(2.0, 3.0))),
        diurnal(2.0, 2.0, 60.0),
    ],
)
def test_longer_draws_begin_with_shorter_ones(process):
    long, short = first_arrivals(process, 3000, rng(7)), first_arrivals(process, 500, rng(7))
    assert np.array_equal(long[:500], short)
    assert not np.array_equal(first_arrivals(process, 500, rng(8)), short)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: poisson(0.0), "rate_per_s"),
        (lambda: poisson(math.inf), "rate_per_s"),
        (lambda: gamma(1.0, -1.0), "cv"),
        (lambda: weibull(1.0, math.nan), "cv"),
        (lambda: VaryingRate((Segment(1.0, 0.0),)), "segments"),
        (lambda: Segment(1.0, -2.0), "rate_per_s"),
        (lambda: OnOff(1.0, 0.0, 1.0), "mean_on_s"),
        (lambda: diurnal(1.0, 0.5), "peak_to_trough"),
        (lambda: Superposition(()), "clients"),
    ],
)
def test_impossible_processes_are_refused_by_field(build, field):
    with pytest.raises(ConfigError, match=f"^{field}"):
        build()
