"""Engines' own gauges and counters for `/metrics`: `genserve_engine_<name>{model=...}`.

Engines may be in other processes, so their figures are asked for first (`refresh`) and then
collected; histograms of controllers in this process are read as they are. What the figures mean is
said in `core.runtime.client`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from genserve.core.errors import GenserveError
from genserve.core.metrics.recorder import Histogram, Recorder
from genserve.core.runtime.client import COUNTERS, LEVELS, EngineClient
from genserve.core.workflows import WorkflowClient

_log = logging.getLogger("genserve.server")
_TIMEOUT_S = 2.0


class EngineMetrics(Collector):
    """Collects the figures of `engines` into `registry`; an engine that gives none has `up` 0.

    `recorders` are of some of the models, by name. `workflows` are clients of models that make images.
    """

    def __init__(
        self,
        engines: Sequence[EngineClient],
        registry: CollectorRegistry,
        recorders: Mapping[str, Recorder] | None = None,
        workflows: Mapping[str, WorkflowClient] | None = None,
    ) -> None:
        self._engines = engines
        self._recorders = dict(recorders or {})
        self._workflows = dict(workflows or {})
        self._stats: dict[str, dict[str, float]] = {}
        registry.register(self)

    async def refresh(self) -> None:
        """Ask every engine, for two seconds at most."""
        asked = {engine.info.model: self._ask_engine(engine) for engine in self._engines}
        asked |= {name: self._ask(name, client) for name, client in self._workflows.items()}
        found = await asyncio.gather(*asked.values())
        self._stats = dict(zip(asked, found, strict=True))

    async def _ask_engine(self, engine: EngineClient) -> dict[str, float]:
        if engine.failure is not None:
            _log.warning("no figures of engine %s: %s", engine.info.model, engine.failure)
            return {"up": 0.0}
        return await self._ask(engine.info.model, engine)

    async def _ask(self, name: str, client: EngineClient | WorkflowClient) -> dict[str, float]:
        stats: dict[str, float] = {}
        try:
            stats = await asyncio.wait_for(client.stats(), _TIMEOUT_S)
        except (GenserveError, TimeoutError) as error:
            _log.warning("no figures of %s: %s", name, error or type(error).__name__)
        return {**stats, "up": float(bool(stats))}

    def collect(self) -> Iterator[Metric]:
        names = dict.fromkeys(name for stats in self._stats.values() for name in stats)
        for name in names:
            text = f"{COUNTERS.get(name) or LEVELS.get(name, name)}."
            kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            family = kind(f"genserve_engine_{name.removeprefix('num_')}", text, labels=["model"])
            for model, stats in self._stats.items():
                if name in stats:
                    family.add_metric([model], stats[name])
            yield family
        yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        families: dict[str, HistogramMetricFamily] = {}
        for model, recorder in self._recorders.items():
            for instrument in recorder:
                if isinstance(instrument, Histogram):
                    name = f"genserve_engine_{instrument.name}"
                    name = f"{name.removesuffix('_s')}_seconds" if name.endswith("_s") else name
                    family = families.setdefault(
                        name, HistogramMetricFamily(name, f"{instrument.help}.", labels=["model"])
                    )
                    family.add_metric([model], _cumulated(instrument), instrument.sum)
        yield from families.values()


def _cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper ends, as Prometheus writes them, and how many observations are at or below each."""
    ends = [*map(str, histogram.bounds), "+Inf"]
    counts = histogram.counts
    return [(end, float(sum(counts[: index + 1]))) for index, end in enumerate(ends)]
