"""Passive instruments: counters, gauges and histograms, the same for live and simulated runs.

Owns the numbers; it must not know who reads them, nor a clock: times are passed in. One thread writes
to a recorder; others may read it at any moment. Names end in their unit (`ttft_s`).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from genserve.core.errors import ConfigError

# Seconds: fine enough for a step on a GPU, long enough for a queue on a laptop.
LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))

Labels = tuple[tuple[str, str], ...]
_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Counter:
    """A total that only grows."""

    __slots__ = ("help", "labels", "name", "value")

    def __init__(self, name: str, help: str, labels: Labels) -> None:
        self.name, self.help, self.labels, self.value = name, help, labels, 0.0

    def add(self, amount: float = 1) -> None:
        """Grow by `amount` >= 0."""
        self.value += amount


class Gauge:
    """A level that goes up and down."""

    __slots__ = ("help", "labels", "name", "value")

    def __init__(self, name: str, help: str, labels: Labels) -> None:
        self.name, self.help, self.labels, self.value = name, help, labels, 0.0

    def set(self, value: float) -> None:
        """The level now."""
        self.value = value


class Histogram:
    """Observations counted in fixed buckets; `bounds` are inclusive upper ends, and one more is open."""

    __slots__ = ("bounds", "counts", "help", "labels", "name", "sum")

    def __init__(self, name: str, help: str, labels: Labels, bounds: Sequence[float]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ConfigError(f"{name}: bucket bounds must rise, got {list(bounds)}")
        self.name, self.help, self.labels = name, help, labels
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def num_observations(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def quantile(self, q: float) -> float:
        """An estimate of the `q` quantile (0..1): the upper end of its bucket; 0 with no observation."""
        left = q * self.num_observations
        if left <= 0:
            return 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            left -= count
            if left <= 0:
                return bound
        return self.bounds[-1]


class _OffCounter(Counter):
    __slots__ = ()

    def add(self, amount: float = 1) -> None:
        pass


class _OffGauge(Gauge):
    __slots__ = ()

    def set(self, value: float) -> None:
        pass


class _OffHistogram(Histogram):
    __slots__ = ()

    def observe(self, value: float) -> None:
        pass


Instrument = Counter | Gauge | Histogram
InstrumentT = TypeVar("InstrumentT", Counter, Gauge, Histogram)


class Recorder:
    """A set of instruments with common labels. Asking again for a name and labels gives the same one.

    Fetch instruments once and keep them: an observation is then one method call. A recorder that is
    not `enabled` hands out instruments that do nothing, and iterates over none.
    """

    def __init__(self, labels: Mapping[str, str] | None = None, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._labels = dict(labels or {})
        self._instruments: dict[tuple[str, Labels], Instrument] = {}

    def counter(self, name: str, help: str, **labels: str) -> Counter:
        """The counter of this name and these labels. The export adds `_total`."""
        return self._get(Counter if self.enabled else _OffCounter, name, help, labels)

    def gauge(self, name: str, help: str, **labels: str) -> Gauge:
        """The gauge of this name and these labels."""
        return self._get(Gauge if self.enabled else _OffGauge, name, help, labels)

    def histogram(
        self, name: str, help: str, bounds: Sequence[float] = LATENCY_BUCKETS_S, **labels: str
    ) -> Histogram:
        """The histogram of this name and these labels; all of a name have the same bounds."""
        return self._get(Histogram if self.enabled else _OffHistogram, name, help, labels, bounds)

    def __iter__(self) -> Iterator[Instrument]:
        return iter(list(self._instruments.values()) if self.enabled else ())

    def _get(
        self, kind: type[InstrumentT], name: str, help: str, labels: Mapping[str, str], *rest: Sequence[float]
    ) -> InstrumentT:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r}: an instrument's name is lower case letters, digits and _")
        merged: Labels = tuple(sorted({**self._labels, **labels}.items()))
        found = self._instruments.get((name, merged))
        if found is None:
            found = self._instruments[name, merged] = kind(name, help, merged, *rest)
        if not isinstance(found, kind):
            raise ConfigError(f"{name}: already is a {type(found).__name__.lower()}")
        if isinstance(found, Histogram) and found.bounds != tuple(float(bound) for bound in rest[0]):
            raise ConfigError(f"{name}: already has other bucket bounds")
        return found
