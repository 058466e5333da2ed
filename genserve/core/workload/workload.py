"""A workload: requests in order of arrival, from distributions or from a trace, and ways to reshape it.

Owns the composition of arrivals and lengths; it must not know who serves the requests. A workload is
frozen, each reshaping gives a new one, and all follows from its seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from genserve.core.errors import ConfigError
from genserve.core.workload.arrivals import Arrivals, Superposition, arrivals_until, first_arrivals
from genserve.core.workload.lengths import LengthPairs, ObservedPairs
from genserve.core.workload.spec import RequestSpec


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Mean, standard deviation and percentiles of token counts."""

    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """What a workload looks like. `inter_arrival_cv` is 0 with fewer than three requests."""

    name: str
    num_requests: int
    span_s: float
    rate_per_s: float
    inter_arrival_cv: float
    prompt_tokens: TokenStatistics
    output_tokens: TokenStatistics
    shared_prefix_fraction: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by arrival time. Construct with `generate`, `from_requests`, or `presets.open_workload`."""

    name: str
    requests: tuple[RequestSpec, ...]

    def __post_init__(self) -> None:
        if not self.requests:
            raise ConfigError(f"workload {self.name}: has no requests")
        if any(b.arrival_s < a.arrival_s for a, b in zip(self.requests, self.requests[1:], strict=False)):
            raise ConfigError(f"workload {self.name}: requests must be in order of arrival")

    @classmethod
    def from_requests(cls, name: str, requests: Sequence[RequestSpec]) -> Workload:
        """Sort by arrival and let the first one arrive at 0."""
        ordered = sorted(requests, key=lambda request: request.arrival_s)
        start_s = ordered[0].arrival_s if ordered else 0.0
        return cls(name, tuple(replace(r, arrival_s=r.arrival_s - start_s) for r in ordered))

    @classmethod
    def generate(
        cls,
        arrivals: Arrivals,
        lengths: LengthPairs | Sequence[LengthPairs],
        *,
        seed: int,
        num_requests: int | None = None,
        duration_s: float | None = None,
        name: str = "generated",
    ) -> Workload:
        """Draw arrivals and lengths; give `num_requests` or `duration_s`.

        A sequence of lengths has one entry per client of a `Superposition`. More requests of the
        same seed begin with the same requests.
        """
        if (num_requests is None) == (duration_s is None):
            raise ConfigError("num_requests, duration_s: give exactly one")
        if num_requests is not None and num_requests < 1:
            raise ConfigError(f"num_requests: must be at least 1, got {num_requests}")
        arrival_rng, length_rng = np.random.default_rng(seed).spawn(2)
        if isinstance(lengths, Sequence):
            times_s, clients = _client_arrivals(arrivals, len(lengths), num_requests, duration_s, arrival_rng)
            prompt, output = _client_lengths(lengths, clients, length_rng)
            kinds = [f"client-{client}" for client in clients.tolist()]
        else:
            if num_requests is not None:
                times_s = first_arrivals(arrivals, num_requests, arrival_rng)
            else:
                times_s = arrivals_until(arrivals, duration_s or 0.0, arrival_rng)
            prompt, output = lengths.sample_pairs(len(times_s), length_rng)
            kinds = [""] * len(times_s)
        rows = zip(times_s.tolist(), prompt.tolist(), output.tolist(), kinds, strict=True)
        requests = [
            RequestSpec(time_s, num_prompt, num_output, kind=kind, seed=(seed << 32) + index)
            for index, (time_s, num_prompt, num_output, kind) in enumerate(rows)
        ]
        return cls.from_requests(name, requests)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate; infinite when all arrive at once."""
        gaps = len(self.requests) - 1
        return gaps / self.span_s if self.span_s > 0 else math.inf

    def compress_time(self, factor: float) -> Workload:
        """Let time pass `factor` times as fast: the pattern stays, the rate is multiplied."""
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"factor: must be a finite number > 0, got {factor}")
        return replace(
            self, requests=tuple(replace(r, arrival_s=r.arrival_s / factor) for r in self.requests)
        )

    def at_rate(self, rate_per_s: float) -> Workload:
        """The same pattern at another mean rate; `math.inf` lets all arrive at once."""
        if not rate_per_s > 0:
            raise ConfigError(f"rate_per_s: must be > 0, got {rate_per_s}")
        if math.isinf(rate_per_s):
            return replace(self, requests=tuple(replace(r, arrival_s=0.0) for r in self.requests))
        if math.isinf(self.rate_per_s):
            if len(self.requests) == 1:
                return self
            raise ConfigError(f"workload {self.name}: all requests arrive at once, so no rate can be set")
        return self.compress_time(rate_per_s / self.rate_per_s)

    def first(self, num_requests: int) -> Workload:
        """The first `num_requests` requests, or all if there are fewer."""
        if num_requests < 1:
            raise ConfigError(f"num_requests: must be at least 1, got {num_requests}")
        return replace(self, requests=self.requests[:num_requests])

    def between(self, start_s: float, end_s: float) -> Workload:
        """The requests that arrive in `start_s` <= t < `end_s`, on a clock that starts at `start_s`."""
        kept = tuple(r for r in self.requests if start_s <= r.arrival_s < end_s)
        if not kept:
            raise ConfigError(f"workload {self.name}: no request arrives between {start_s} s and {end_s} s")
        return replace(self, requests=tuple(replace(r, arrival_s=r.arrival_s - start_s) for r in kept))

    def scale_lengths(self, factor: float) -> Workload:
        """Multiply prompt and output lengths, and the size of shared blocks, by `factor`; at least 1."""
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"factor: must be a finite number > 0, got {factor}")

        def scaled(tokens: int) -> int:
            return max(1, round(tokens * factor))

        return replace(
            self,
            requests=tuple(
                replace(
                    r,
                    num_prompt_tokens=scaled(r.num_prompt_tokens),
                    num_output_tokens=scaled(r.num_output_tokens),
                    prefix_block_tokens=scaled(r.prefix_block_tokens),
                )
                for r in self.requests
            ),
        )

    def clip_lengths(self, max_prompt_tokens: int, max_output_tokens: int) -> Workload:
        """Cut longer prompts and outputs to these limits."""
        if max_prompt_tokens < 1 or max_output_tokens < 1:
            raise ConfigError(
                "max_prompt_tokens, max_output_tokens: must be at least 1, "
                f"got {max_prompt_tokens}, {max_output_tokens}"
            )
        return replace(
            self,
            requests=tuple(
                replace(
                    r,
                    num_prompt_tokens=min(r.num_prompt_tokens, max_prompt_tokens),
                    num_output_tokens=min(r.num_output_tokens, max_output_tokens),
                )
                for r in self.requests
            ),
        )

    def with_other_prompts(self, salt: int) -> Workload:
        """The same requests with other tokens, so that a server's prefix cache has seen none of them.

        What they share among themselves stays shared. `salt` 0 is this workload.
        """
        return replace(
            self,
            requests=tuple(
                replace(
                    r, seed=r.seed ^ (salt << 44), prefix_ids=tuple(i + (salt << 44) for i in r.prefix_ids)
                )
                for r in self.requests
            ),
        )

    def observed_lengths(self) -> ObservedPairs:
        """The (prompt, output) lengths as a distribution, to combine with other arrivals."""
        return ObservedPairs(tuple((r.num_prompt_tokens, r.num_output_tokens) for r in self.requests))

    def summary(self) -> WorkloadSummary:
        """Statistics of arrivals, lengths, and the share of prompt tokens that came before as a prefix."""
        gaps_s = np.diff([r.arrival_s for r in self.requests])
        cv = float(gaps_s.std() / gaps_s.mean()) if len(gaps_s) > 1 and gaps_s.mean() > 0 else 0.0
        return WorkloadSummary(
            self.name,
            len(self.requests),
            self.span_s,
            self.rate_per_s,
            cv,
            _statistics([r.num_prompt_tokens for r in self.requests]),
            _statistics([r.num_output_tokens for r in self.requests]),
            _shared_prefix_fraction(self.requests),
        )


def _client_arrivals(
    arrivals: Arrivals,
    num_lengths: int,
    num_requests: int | None,
    duration_s: float | None,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(arrivals, Superposition) or len(arrivals.clients) != num_lengths:
        raise ConfigError("lengths: a sequence needs a Superposition with one client per entry")
    pairs: list[tuple[float, int]] = []
    for pair in arrivals.labelled_stream(rng):
        if len(pairs) == num_requests or (duration_s is not None and pair[0] >= duration_s):
            break
        pairs.append(pair)
    return np.array([time_s for time_s, _ in pairs]), np.array(
        [client for _, client in pairs], dtype=np.int64
    )


def _client_lengths(
    lengths: Sequence[LengthPairs], clients: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    prompt, output = np.zeros(len(clients), np.int64), np.zeros(len(clients), np.int64)
    for index, (pairs, child) in enumerate(zip(lengths, rng.spawn(len(lengths)), strict=True)):
        mine = np.flatnonzero(clients == index)
        prompt[mine], output[mine] = pairs.sample_pairs(len(mine), child)
    return prompt, output


def _statistics(tokens: list[int]) -> TokenStatistics:
    values = np.asarray(tokens, dtype=np.float64)
    p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
    return TokenStatistics(float(values.mean()), float(values.std()), p50, p90, p99, int(values.max()))


def _shared_prefix_fraction(requests: Sequence[RequestSpec]) -> float:
    """What an unbounded prefix cache would save: leading blocks seen before, by prompt tokens."""
    seen: set[tuple[int, int]] = set()
    shared = 0
    for request in requests:
        blocks = [(request.prefix_block_tokens, block_id) for block_id in request.prefix_ids]
        num_hits = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        shared += min(num_hits * request.prefix_block_tokens, request.num_prompt_tokens)
        seen.update(blocks)
    return shared / sum(request.num_prompt_tokens for request in requests)
