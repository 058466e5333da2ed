"""When requests arrive: renewal, varying-rate, bursty and superposed arrival processes.

Owns the shape of time only; it must not know what arrives, nor read a clock. A process is a frozen
description; `stream(rng)` yields its arrival times, so a longer draw always begins with the shorter
one of an equal seed. Every process starts in equilibrium: it is observed from a random instant, so
the expected number of arrivals in `t` seconds is `rate * t` however bursty it is. (Starting each of
many bursty clients with an arrival would put a burst at time zero that no trace has.)
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from genserve.core.errors import ConfigError

_MAX_CHUNK = 1024


class Gaps(Protocol):
    """A distribution of the time between arrivals, with mean 1."""

    def draw(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """`num` independent gaps, float64 [num]."""
        ...

    def residual(self, rng: np.random.Generator) -> float:
        """What is left of the gap that covers a random instant."""
        ...


class Arrivals(Protocol):
    """An arrival process: its long-run rate, and its times."""

    @property
    def rate_per_s(self) -> float: ...

    def stream(self, rng: np.random.Generator) -> Iterator[float]:
        """Arrival times in seconds from 0, never decreasing. May end (a trace's last window)."""
        ...


@dataclass(frozen=True, slots=True)
class GammaGaps:
    """Gamma gaps with coefficient of variation `cv`; 1 is exponential (Poisson arrivals)."""

    cv: float = 1.0

    def __post_init__(self) -> None:
        _positive("cv", self.cv)

    def draw(self, num: int, rng: np.random.Generator) -> np.ndarray:
        if self.cv == 1.0:
            return rng.standard_exponential(num)
        shape = self.cv**-2
        return rng.standard_gamma(shape, num) / shape

    def residual(self, rng: np.random.Generator) -> float:
        shape = self.cv**-2
        # The gap that covers a random instant is length-biased: Gamma(shape + 1).
        return float(rng.random() * rng.standard_gamma(shape + 1) / shape)


@dataclass(frozen=True, slots=True)
class WeibullGaps:
    """Weibull gaps; `shape` below 1 is burstier than Poisson. `with_cv` solves for the shape."""

    shape: float

    def __post_init__(self) -> None:
        _positive("shape", self.shape)

    @classmethod
    def with_cv(cls, cv: float) -> WeibullGaps:
        """The shape whose coefficient of variation is `cv` (0.02 to 1000)."""
        if not 0.02 <= cv <= 1000:
            raise ConfigError(f"cv: must be between 0.02 and 1000 for Weibull gaps, got {cv}")
        low, high = 0.05, 100.0
        for _ in range(100):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if cls(middle).cv > cv else (low, middle)
        return cls(math.sqrt(low * high))

    @property
    def cv(self) -> float:
        log_ratio = math.lgamma(1 + 2 / self.shape) - 2 * math.lgamma(1 + 1 / self.shape)
        return math.sqrt(math.expm1(log_ratio))

    def draw(self, num: int, rng: np.random.Generator) -> np.ndarray:
        return rng.weibull(self.shape, num) / math.exp(math.lgamma(1 + 1 / self.shape))

    def residual(self, rng: np.random.Generator) -> float:
        # Length-biased Weibull: its shape-th power is Gamma(1 + 1/shape).
        biased = rng.standard_gamma(1 + 1 / self.shape) ** (1 / self.shape)
        return float(rng.random() * biased / math.exp(math.lgamma(1 + 1 / self.shape)))


@dataclass(frozen=True, slots=True)
class ConstantGaps:
    """All gaps equal; the first arrival is at once."""

    def draw(self, num: int, rng: np.random.Generator) -> np.ndarray:
        return np.ones(num)

    def residual(self, rng: np.random.Generator) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """`rate_per_s` (0 is silence) for `duration_s`, with its own gap distribution."""

    duration_s: float
    rate_per_s: float
    gaps: Gaps = field(default_factory=GammaGaps)

    def __post_init__(self) -> None:
        _positive("duration_s", self.duration_s)
        if not (math.isfinite(self.rate_per_s) and self.rate_per_s >= 0):
            raise ConfigError(f"rate_per_s: must be a finite number >= 0, got {self.rate_per_s}")


@dataclass(frozen=True, slots=True)
class Renewal:
    """Independent gaps at one rate."""

    rate_per_s: float
    gaps: Gaps = field(default_factory=GammaGaps)

    def __post_init__(self) -> None:
        _positive("rate_per_s", self.rate_per_s)

    def stream(self, rng: np.random.Generator) -> Iterator[float]:
        time_s = self.gaps.residual(rng) / self.rate_per_s
        for gap in _draws(self.gaps, rng):
            yield time_s
            time_s += gap / self.rate_per_s


@dataclass(frozen=True, slots=True)
class VaryingRate:
    """Segments of constant rate one after another, then again if `repeat`.

    A gap that reaches over a border is stretched by the new rate, or drawn anew in equilibrium where
    the gap distribution changes; either way each segment expects `rate * duration` arrivals.
    """

    segments: tuple[Segment, ...]
    repeat: bool = True

    def __post_init__(self) -> None:
        if not any(segment.rate_per_s > 0 for segment in self.segments):
            raise ConfigError("segments: at least one must have a rate above 0")

    @property
    def rate_per_s(self) -> float:
        duration_s = sum(segment.duration_s for segment in self.segments)
        return sum(segment.rate_per_s * segment.duration_s for segment in self.segments) / duration_s

    def stream(self, rng: np.random.Generator) -> Iterator[float]:
        return _walk(itertools.cycle(self.segments) if self.repeat else iter(self.segments), rng)


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson arrivals whose rate switches between two values after exponential periods (MMPP-2)."""

    on_rate_per_s: float
    mean_on_s: float
    mean_off_s: float
    off_rate_per_s: float = 0.0

    def __post_init__(self) -> None:
        _positive("on_rate_per_s", self.on_rate_per_s)
        _positive("mean_on_s", self.mean_on_s)
        _positive("mean_off_s", self.mean_off_s)
        if not (math.isfinite(self.off_rate_per_s) and self.off_rate_per_s >= 0):
            raise ConfigError(f"off_rate_per_s: must be a finite number >= 0, got {self.off_rate_per_s}")

    @property
    def rate_per_s(self) -> float:
        weighted = self.on_rate_per_s * self.mean_on_s + self.off_rate_per_s * self.mean_off_s
        return weighted / (self.mean_on_s + self.mean_off_s)

    def stream(self, rng: np.random.Generator) -> Iterator[float]:
        period_rng, gap_rng = rng.spawn(2)
        return _walk(self._periods(period_rng), gap_rng)

    def _periods(self, rng: np.random.Generator) -> Iterator[Segment]:
        is_on = rng.random() * (self.mean_on_s + self.mean_off_s) < self.mean_on_s
        poisson = GammaGaps()
        while True:
            mean_s, rate = (
                (self.mean_on_s, self.on_rate_per_s) if is_on else (self.mean_off_s, self.off_rate_per_s)
            )
            yield Segment(max(float(rng.exponential(mean_s)), 1e-9), rate, poisson)
            is_on = not is_on


@dataclass(frozen=True, slots=True)
class Superposition:
    """Many independent clients at once, as ServeGen composes them."""

    clients: tuple[Arrivals, ...]

    def __post_init__(self) -> None:
        if not self.clients:
            raise ConfigError("clients: at least one is needed")

    @property
    def rate_per_s(self) -> float:
        return sum(client.rate_per_s for client in self.clients)

    def stream(self, rng: np.random.Generator) -> Iterator[float]:
        return (time_s for time_s, _ in self.labelled_stream(rng))

    def labelled_stream(self, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
        """`(arrival time, index of the client)`, by time and then by client."""
        streams = [
            zip(client.stream(child), itertools.repeat(index))
            for index, (client, child) in enumerate(
                zip(self.clients, rng.spawn(len(self.clients)), strict=True)
            )
        ]
        return heapq.merge(*streams)


def poisson(rate_per_s: float) -> Renewal:
    """Poisson arrivals."""
    return Renewal(rate_per_s)


def gamma(rate_per_s: float, cv: float) -> Renewal:
    """Gamma gaps with coefficient of variation `cv`."""
    return Renewal(rate_per_s, GammaGaps(cv))


def weibull(rate_per_s: float, cv: float) -> Renewal:
    """Weibull gaps with coefficient of variation `cv`."""
    return Renewal(rate_per_s, WeibullGaps.with_cv(cv))


def constant(rate_per_s: float) -> Renewal:
    """An arrival every `1 / rate_per_s` seconds, from 0."""
    return Renewal(rate_per_s, ConstantGaps())


def diurnal(
    mean_rate_per_s: float,
    peak_to_trough: float,
    period_s: float = 86400.0,
    gaps: Gaps | None = None,
    num_segments: int = 96,
) -> VaryingRate:
    """A sine-shaped day that begins at its mean, rising; `peak_to_trough` >= 1 is the ratio of rates."""
    _positive("mean_rate_per_s", mean_rate_per_s)
    if not peak_to_trough >= 1:
        raise ConfigError(f"peak_to_trough: must be >= 1, got {peak_to_trough}")
    swing = (peak_to_trough - 1) / (peak_to_trough + 1)
    middles = (np.arange(num_segments) + 0.5) / num_segments
    rates = mean_rate_per_s * (1 + swing * np.sin(2 * np.pi * middles))
    gaps = gaps or GammaGaps()
    return VaryingRate(tuple(Segment(period_s / num_segments, float(rate), gaps) for rate in rates))


def first_arrivals(process: Arrivals, num: int, rng: np.random.Generator) -> np.ndarray:
    """The first `num` arrival times in seconds, float64; fewer if the process ends before."""
    return np.fromiter(itertools.islice(process.stream(rng), num), dtype=np.float64)


def arrivals_until(process: Arrivals, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    """The arrival times below `duration_s`, in seconds, float64."""
    times = itertools.takewhile(lambda time_s: time_s < duration_s, process.stream(rng))
    return np.fromiter(times, dtype=np.float64)


def _walk(segments: Iterator[Segment], rng: np.random.Generator) -> Iterator[float]:
    draws: dict[Gaps, Iterator[float]] = {}
    in_force: Gaps | None = None
    start_s, needed = 0.0, 0.0
    for segment in segments:
        end_s, time_s, rate = start_s + segment.duration_s, start_s, segment.rate_per_s
        if rate > 0:
            if segment.gaps != in_force:
                in_force, needed = segment.gaps, segment.gaps.residual(rng)
            if (gaps := draws.get(segment.gaps)) is None:
                gaps = draws[segment.gaps] = _draws(segment.gaps, rng)
            while time_s + needed / rate < end_s:
                time_s += needed / rate
                yield time_s
                needed = next(gaps)
            needed = max(0.0, needed - (end_s - time_s) * rate)
        start_s = end_s


def _draws(gaps: Gaps, rng: np.random.Generator) -> Iterator[float]:
    size = 16
    while True:
        yield from gaps.draw(size, rng).tolist()
        size = min(2 * size, _MAX_CHUNK)


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}: must be a finite number > 0, got {value}")
