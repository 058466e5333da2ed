"""What a benchmark of a server found: as data, as a table, and as files in a folder.

Owns how results are presented; it must not know how they were measured. rich and matplotlib are
imported where they are used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genserve.core.metrics.report import summary_table, write_plots
from genserve.core.metrics.summary import SLO, Summary, to_plain
from genserve.core.server.loadgen import LoadResult, Target
from genserve.core.workload.workload import WorkloadSummary

if TYPE_CHECKING:
    from rich.console import RenderableType

# A client later than this at its 99th percentile measures itself as much as the server.
MAX_SEND_LAG_S = 0.02


@dataclass(frozen=True, slots=True)
class BenchPoint:
    """One run of a sweep. `label` says at what load, e.g. `rate 2/s` or `concurrency 8`."""

    label: str
    result: LoadResult
    summary: Summary

    @property
    def load(self) -> float:
        """The offered rate in requests/s, or the number kept in flight."""
        if self.result.concurrency is not None:
            return float(self.result.concurrency)
        return self.result.offered_rate_per_s or math.nan


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A sweep over one server with one workload."""

    target: Target
    workload: WorkloadSummary
    seed: int
    slo: SLO | None
    points: tuple[BenchPoint, ...]

    @property
    def warnings(self) -> list[str]:
        """What a reader must know before believing the figures."""
        found: list[str] = []
        for point in self.points:
            result = point.result
            for kind, count in sorted(result.num_errors.items()):
                example = result.error_examples.get(kind, "")
                found.append(f"{point.label}: {count} x {kind}: {example}")
            if result.num_without_usage:
                found.append(
                    f"{point.label}: {result.num_without_usage} responses without usage; "
                    "their tokens were counted by events"
                )
            if result.send_lag_s.num and result.send_lag_s.p99 > MAX_SEND_LAG_S:
                lag_ms = result.send_lag_s.p99 * 1000
                found.append(
                    f"{point.label}: the client sent up to {lag_ms:.0f} ms late (p99); latency includes it"
                )
            not_sent = result.num_planned - len(result.timelines)
            if not_sent:
                found.append(
                    f"{point.label}: {not_sent} of {result.num_planned} requests were not sent in time"
                )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. The API key is left out, NaN and infinity are None; times in seconds."""
        target = asdict(self.target)
        del target["api_key"]
        return to_plain(
            {
                "target": target,
                "workload": self.workload.to_dict(),
                "seed": self.seed,
                "slo": asdict(self.slo) if self.slo else None,
                "points": [
                    {
                        "label": point.label,
                        "offered_rate_per_s": point.result.offered_rate_per_s,
                        "concurrency": point.result.concurrency,
                        "num_planned": point.result.num_planned,
                        "hit_time_limit": point.result.hit_time_limit,
                        "errors": point.result.num_errors,
                        "num_without_usage": point.result.num_without_usage,
                        "send_lag_s": asdict(point.result.send_lag_s),
                        "client_cpu_s": point.result.client_cpu_s,
                        "summary": point.summary.to_dict(),
                    }
                    for point in self.points
                ],
                "warnings": self.warnings,
            }
        )


def report_table(report: BenchReport) -> RenderableType:
    """The report as tables that fit 80 columns, and its warnings below."""
    from rich.console import Group
    from rich.text import Text

    title = f"{report.target.model} at {report.target.base_url}, workload {report.workload.name}"
    table = summary_table(title, [(point.label, point.summary) for point in report.points], report.slo)
    return Group(table, *(Text(f"! {warning}", style="yellow") for warning in report.warnings))


def write_report(report: BenchReport, directory: str | Path) -> list[Path]:
    """Write `report.json`, `requests.jsonl` (a line per request) and plots; returns what was written."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / "report.json", directory / "requests.jsonl"]
    written[0].write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n")
    with written[1].open("w") as file:
        for point in report.points:
            for timeline in point.result.timelines:
                row = {"point": point.label, **to_plain(asdict(timeline))}
                file.write(json.dumps(row, allow_nan=False) + "\n")
    title = f"{report.target.model}, {report.workload.name}"
    written += write_plots(directory, title, {point.label: point.result.timelines for point in report.points})
    if len(report.points) > 1:
        written.append(_sweep_plot(report.points, directory / "sweep.png", title))
    return written


def _sweep_plot(points: Sequence[BenchPoint], path: Path, title: str) -> Path:
    from genserve.core.metrics import plots

    closed = points[0].result.concurrency is not None
    xlabel = "requests in flight" if closed else "offered load (requests/s)"
    drawable = [(point.load, point.summary) for point in points if math.isfinite(point.load)]
    return plots.rate_sweep(drawable, path, xlabel=xlabel, title=title)
