"""From timelines to the figures that people compare: latency percentiles, throughput, goodput.

Owns the definitions; it must not know where the timelines come from. A request that failed has no
place in the latency percentiles but misses every SLO, so failing fast never looks good.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from genserve.core.errors import ConfigError
from genserve.core.metrics.timelines import Timeline


@dataclass(frozen=True, slots=True)
class SLO:
    """Upper limits in seconds; None is no limit. A request attains it if it is within every limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> SLO:
        """Read `ttft=0.5,tpot=0.05,e2e=10` (seconds; any of the three)."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in ("ttft", "tpot", "e2e") or not equals or f"{name}_s" in limits:
                raise ConfigError(f"slo: expected ttft=, tpot= or e2e= once each, got {part.strip()!r}")
            try:
                limits[f"{name}_s"] = float(value)
            except ValueError:
                raise ConfigError(f"slo: {name} must be a number of seconds, got {value!r}") from None
            if not (math.isfinite(limits[f"{name}_s"]) and limits[f"{name}_s"] > 0):
                raise ConfigError(f"slo: {name} must be above 0 seconds, got {value!r}")
        return cls(**limits)

    def attained_by(self, timeline: Timeline) -> bool:
        """Whether a request ended well and within every limit (a single token meets any TPOT)."""
        if not timeline.ok:
            return False
        if self.ttft_s is not None and (timeline.ttft_s is None or timeline.ttft_s > self.ttft_s):
            return False
        if self.tpot_s is not None and (timeline.tpot_s or 0.0) > self.tpot_s:
            return False
        return self.e2e_s is None or timeline.e2e_s <= self.e2e_s

    def __str__(self) -> str:
        limits = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return ",".join(f"{name}={limit:g}" for name, limit in limits.items() if limit is not None)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of `num` values, in seconds; all NaN if there are none."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        """Mean, percentiles (linear between ranks) and maximum."""
        array = np.fromiter(values, dtype=np.float64)
        if not len(array):
            return cls(0, *[math.nan] * 5)
        p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
        return cls(len(array), float(array.mean()), p50, p90, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Rates are per second of `duration_s`; goodput counts requests that attained the SLO."""

    num_requests: int
    num_ok: int
    outcomes: dict[str, int]
    duration_s: float
    ttft_s: Distribution
    tpot_s: Distribution
    inter_token_s: Distribution
    e2e_s: Distribution
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    slo: SLO | None
    slo_attainment: float | None
    goodput_per_s: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON (`to_plain`)."""
        return to_plain(asdict(self))


def summarize(
    timelines: Sequence[Timeline], *, duration_s: float | None = None, slo: SLO | None = None
) -> Summary:
    """Condense ended requests. `duration_s` is from the first arrival to the last finish unless told."""
    if duration_s is None:
        starts, ends = [t.arrival_s for t in timelines], [t.finish_s for t in timelines]
        duration_s = max(ends) - min(starts) if timelines else 0.0
    ok = [t for t in timelines if t.ok]
    num_prompt = sum(t.num_prompt_tokens for t in ok)
    num_output = sum(t.num_output_tokens for t in timelines)
    num_good = sum(slo.attained_by(t) for t in timelines) if slo else None

    def per_second(count: float) -> float:
        return count / duration_s if duration_s > 0 else math.nan

    return Summary(
        num_requests=len(timelines),
        num_ok=len(ok),
        outcomes=dict(sorted(Counter(t.outcome for t in timelines).items())),
        duration_s=duration_s,
        ttft_s=Distribution.of(t.ttft_s for t in ok if t.ttft_s is not None),
        tpot_s=Distribution.of(t.tpot_s for t in ok if t.tpot_s is not None),
        inter_token_s=Distribution.of(
            later - earlier
            for t in ok
            for earlier, later in zip(t.token_times_s, t.token_times_s[1:], strict=False)
        ),
        e2e_s=Distribution.of(t.e2e_s for t in ok),
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(t.num_cached_tokens for t in ok),
        num_output_tokens=num_output,
        num_preemptions=sum(t.num_preemptions for t in timelines),
        requests_per_s=per_second(len(ok)),
        output_tokens_per_s=per_second(num_output),
        total_tokens_per_s=per_second(num_prompt + num_output),
        slo=slo,
        slo_attainment=num_good / len(timelines) if num_good is not None and timelines else None,
        goodput_per_s=per_second(num_good) if num_good is not None else None,
    )


def to_plain(value: Any) -> Any:
    """Nested dicts and lists as strict JSON can hold them: NaN and infinity become None."""
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
