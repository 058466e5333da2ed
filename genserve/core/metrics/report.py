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
    from rich.console import RenderableType


def summary_table(title: str, rows: Sequence[tuple[str, Summary]], slo: SLO | None) -> RenderableType:
    """Throughput, a row per labelled run, and below it latency percentiles; fits 80 columns."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(*headings: str, num_left: int) -> Table:
        made = Table(box=box.SIMPLE_HEAD, show_edge=False)
        for index, heading in enumerate(headings):
            made.add_column(heading, justify="left" if index < num_left else "right")
        return made

    goodput = ["within SLO", "goodput/s"] if slo is not None else []
    throughput = table("load", "ok / sent", "req/s", "out tok/s", *goodput, num_left=1)
    latency = table("load", "latency", "p50", "p90", "p99", num_left=2)
    for label, summary in rows:
        row = [
            label,
            f"{summary.num_ok} / {summary.num_requests}",
            f"{summary.requests_per_s:.3g}",
            f"{summary.output_tokens_per_s:.4g}",
        ]
        if slo is not None:
            attained, good = summary.slo_attainment, summary.goodput_per_s
            row += ["-" if attained is None else f"{attained:.1%}", "-" if good is None else f"{good:.3g}"]
        throughput.add_row(*row)
        named = {"TTFT": summary.ttft_s, "TPOT": summary.tpot_s, "end to end": summary.e2e_s}
        for index, (name, values) in enumerate(named.items()):
            latency.add_row("" if index else label, name, *_percentiles(values))
    limits = [Text(f"SLO: {slo} (seconds)", style="italic")] if slo is not None else []
    return Group(Text(title, style="bold"), Text(), throughput, *limits, Text(), latency)


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


def _percentiles(values: Distribution) -> tuple[str, str, str]:
    return _duration(values.p50), _duration(values.p90), _duration(values.p99)


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
