"""Recorders as a Prometheus collector.

Owns the mapping of names to Prometheus conventions (`genserve_` in front, `_seconds` for `_s`,
`_total` for counters); it must not know what the instruments mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from genserve.core.errors import ConfigError
from genserve.core.metrics.recorder import Counter, Histogram, Instrument, Recorder


class RecorderCollector(Collector):
    """Exports recorders, read at every scrape; `recorders` may be a function if they come and go.

    Instruments of one name form one family with the union of their labels. Register it with
    `CollectorRegistry().register(RecorderCollector([...]))`.
    """

    def __init__(self, recorders: Iterable[Recorder] | Callable[[], Iterable[Recorder]]) -> None:
        fixed = None if callable(recorders) else tuple(recorders)
        self._recorders = recorders if callable(recorders) else lambda: fixed or ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, list[Instrument]] = {}
        for recorder in self._recorders():
            for instrument in recorder:
                families.setdefault(instrument.name, []).append(instrument)
        for name, instruments in families.items():
            yield _family(name, instruments)

    def describe(self) -> Iterator[Metric]:
        # Otherwise registering would scrape: before there is anything to scrape.
        return iter(())


def prometheus_name(name: str) -> str:
    """`ttft_s` is `genserve_ttft_seconds`; the client library adds `_total` to counters."""
    return "genserve_" + (f"{name[:-2]}_seconds" if name.endswith("_s") else name)


def _family(name: str, instruments: list[Instrument]) -> Metric:
    first = instruments[0]
    if any(type(instrument) is not type(first) for instrument in instruments):
        raise ConfigError(f"{name}: recorders disagree on what kind of instrument it is")
    label_names = sorted({label for instrument in instruments for label, _ in instrument.labels})
    kinds = {Counter: CounterMetricFamily, Histogram: HistogramMetricFamily}
    family = kinds.get(type(first), GaugeMetricFamily)(prometheus_name(name), first.help, labels=label_names)
    for instrument in instruments:
        values = [dict(instrument.labels).get(label, "") for label in label_names]
        if isinstance(instrument, Histogram):
            family.add_metric(values, _cumulative(instrument), instrument.sum)
        else:
            family.add_metric(values, instrument.value)
    return family


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip((*histogram.bounds, float("inf")), list(histogram.counts), strict=True):
        total += count
        buckets.append((floatToGoString(bound), total))
    return buckets
