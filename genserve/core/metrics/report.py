"""Summaries of several runs as a table, and the standard plots of a run, for any kind of run.

Owns how results are presented; it must not know how they came about. rich and matplotlib are
imported where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from genserve.core.metrics.summary import SLO, Distribution, Summary
from genserve.core.metrics.timelines import Timeline

if TYPE_CHECKING:
    from rich.table import Table


def summary_table(title: str, rows: Sequence[tuple[str, Summary]], slo: SLO | None) -> Table:
    """A rich table, a row per labelled run."""
    from rich.table import Table

    table = Table(title=title)
    headings = ["load", "ok / sent", "req/s", "out tok/s"]
    headings += ["TTFT p50 / p90 / p99", "TPOT p50 / p90 / p99", "end to end p50 / p90 / p99"]
    if slo is not None:
        headings += ["within SLO", "goodput req/s"]
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for label, summary in rows:
        row = [
            label,
            f"{summary.num_ok} / {summary.num_requests}",
            f"{summary.requests_per_s:.3g}",
            f"{summary.output_tokens_per_s:.4g}",
            *(_percentiles(values) for values in (summary.ttft_s, summary.tpot_s, summary.e2e_s)),
        ]
        if slo is not None:
            attained, good = summary.slo_attainment, summary.goodput_per_s
            row += ["-" if attained is None else f"{attained:.1%}", "-" if good is None else f"{good:.3g}"]
        table.add_row(*row)
    if slo is not None:
        table.caption = f"SLO: {slo} (seconds)"
    return table


def write_plots(directory: Path, title: str, runs: Mapping[str, Sequence[Timeline]]) -> list[Path]:
    """CDFs of TTFT, TPOT and end-to-end latency over all runs, and a timeline of each; what was written."""
    from genserve.core.metrics import plots

    written: list[Path] = []
    for name, attribute in {"TTFT": "ttft_s", "TPOT": "tpot_s", "end to end": "e2e_s"}.items():
        latencies = {
            label: [
                value
                for timeline in timelines
                if timeline.ok and (value := getattr(timeline, attribute)) is not None
            ]
            for label, timelines in runs.items()
        }
        path = directory / f"{attribute.removesuffix('_s')}_cdf.png"
        written.append(plots.latency_cdf(latencies, path, xlabel=f"{name} (s)", title=title))
    for index, (label, timelines) in enumerate(runs.items()):
        path = directory / f"timeline_{index}.png"
        written.append(plots.timeline(timelines, path, title=f"{title}, {label}"))
    return written


def _percentiles(values: Distribution) -> str:
    return " / ".join(_duration(value) for value in (values.p50, values.p90, values.p99))


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
