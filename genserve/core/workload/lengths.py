"""How long prompts and outputs are: distributions of token counts, single and paired.

Owns lengths only; it must not know when requests arrive nor what their tokens are. `sample` returns
int64 token counts of at least 1 and takes its generator, so equal seeds give equal lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from genserve.core.errors import ConfigError

_Z99 = 2.3263478740408408  # the 99th percentile of a standard normal variable


class Lengths(Protocol):
    """A distribution of token counts."""

    def sample(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """`num` token counts, int64 [num], each at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always `tokens`."""

    tokens: int

    def __post_init__(self) -> None:
        _at_least("tokens", self.tokens, 1)

    def sample(self, num: int, rng: np.random.Generator) -> np.ndarray:
        return np.full(num, self.tokens, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every count from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _at_least("low", self.low, 1)
        _at_least("high", self.high, self.low)

    def sample(self, num: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(self.low, self.high, num, endpoint=True)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """`exp(N(mu, sigma))`, rounded."""

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and math.isfinite(self.sigma) and self.sigma >= 0):
            raise ConfigError(f"mu, sigma: must be finite and sigma >= 0, got {self.mu}, {self.sigma}")

    @classmethod
    def from_median_p99(cls, median: float, p99: float) -> Lognormal:
        """The lognormal with this median and 99th percentile, in tokens."""
        if not 0 < median <= p99:
            raise ConfigError(f"median, p99: need 0 < median <= p99, got {median}, {p99}")
        return cls(math.log(median), math.log(p99 / median) / _Z99)

    @classmethod
    def from_mean_std(cls, mean: float, std: float) -> Lognormal:
        """The lognormal with this mean and standard deviation, in tokens."""
        if not (mean > 0 and std >= 0):
            raise ConfigError(f"mean, std: need mean > 0 and std >= 0, got {mean}, {std}")
        variance = math.log1p((std / mean) ** 2)
        return cls(math.log(mean) - variance / 2, math.sqrt(variance))

    def sample(self, num: int, rng: np.random.Generator) -> np.ndarray:
        return _to_tokens(np.exp(self.mu + self.sigma * rng.standard_normal(num)))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Straight lines between published quantiles: `points` are (probability, tokens), from 0 to 1."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        probabilities, tokens = zip(*self.points, strict=True) if self.points else ((), ())
        if len(self.points) < 2 or probabilities[0] != 0 or probabilities[-1] != 1:
            raise ConfigError("points: the first probability must be 0 and the last 1")
        if list(probabilities) != sorted(set(probabilities)) or list(tokens) != sorted(tokens):
            raise ConfigError("points: probabilities must rise, and tokens must not fall")

    def sample(self, num: int, rng: np.random.Generator) -> np.ndarray:
        probabilities, tokens = zip(*self.points, strict=True)
        return _to_tokens(np.interp(rng.random(num), probabilities, tokens))


@dataclass(frozen=True, slots=True)
class Empirical:
    """A histogram: `tokens[i]` comes with probability `weights[i] / sum(weights)`."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.weights):
            raise ConfigError("tokens, weights: need equally many, at least one")
        _at_least("tokens", min(self.tokens), 1)
        total = math.fsum(self.weights)
        if min(self.weights) < 0 or not (math.isfinite(total) and total > 0):
            raise ConfigError("weights: must be >= 0, finite, and not all 0")

    @classmethod
    def from_samples(cls, samples: Sequence[int]) -> Empirical:
        """The histogram of observed token counts."""
        tokens, counts = np.unique(np.asarray(samples, dtype=np.int64), return_counts=True)
        return cls(tuple(tokens.tolist()), tuple(counts.astype(float).tolist()))

    @classmethod
    def from_pdf(cls, pdf: Mapping[int, float]) -> Empirical:
        """The histogram `{tokens: probability}`."""
        return cls(tuple(pdf), tuple(pdf.values()))

    def sample(self, num: int, rng: np.random.Generator) -> np.ndarray:
        cumulative = np.cumsum(self.weights)
        picks = np.searchsorted(cumulative, rng.random(num) * cumulative[-1], side="right")
        # Rounding may put the very last draw at the end of the table.
        return np.asarray(self.tokens, dtype=np.int64)[np.minimum(picks, len(self.tokens) - 1)]


@dataclass(frozen=True, slots=True)
class Clipped:
    """Another distribution with values outside `low`..`high` moved to the nearer bound."""

    inner: Lengths
    low: int
    high: int

    def __post_init__(self) -> None:
        _at_least("low", self.low, 1)
        _at_least("high", self.high, self.low)

    def sample(self, num: int, rng: np.random.Generator) -> np.ndarray:
        return np.clip(self.inner.sample(num, rng), self.low, self.high)


class LengthPairs(Protocol):
    """A joint distribution of prompt and output token counts."""

    def sample_pairs(self, num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and output token counts, int64 [num] each."""
        ...


@dataclass(frozen=True, slots=True)
class Independent:
    """Prompt and output lengths that do not depend on each other."""

    prompt: Lengths
    output: Lengths

    def sample_pairs(self, num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        prompt_rng, output_rng = rng.spawn(2)
        return self.prompt.sample(num, prompt_rng), self.output.sample(num, output_rng)


@dataclass(frozen=True, slots=True)
class ObservedPairs:
    """Observed (prompt, output) pairs, drawn with replacement, so their correlation stays."""

    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.pairs:
            raise ConfigError("pairs: at least one is needed")
        _at_least("pairs", min(min(pair) for pair in self.pairs), 1)

    def sample_pairs(self, num: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        table = np.asarray(self.pairs, dtype=np.int64)
        picked = table[rng.integers(0, len(table), num)]
        return picked[:, 0].copy(), picked[:, 1].copy()


def _to_tokens(values: np.ndarray) -> np.ndarray:
    return np.maximum(np.rint(values), 1).astype(np.int64)


def _at_least(name: str, value: int, limit: int) -> None:
    if value < limit:
        raise ConfigError(f"{name}: must be at least {limit}, got {value}")
