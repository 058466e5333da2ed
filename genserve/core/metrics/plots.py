"""Plots of measured or simulated runs, as image files.

Owns how results look; it must not know how they came about. matplotlib is imported where a plot is
drawn, and figures are drawn without pyplot, so nothing global changes and no display is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from genserve.core.metrics.summary import Summary
from genserve.core.metrics.timelines import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct to colour-blind readers, and in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def latency_cdf(
    series: Mapping[str, Sequence[float]], path: str | Path, *, xlabel: str = "latency (s)", title: str = ""
) -> Path:
    """Share of requests within a latency, one curve per label; values in seconds, logarithmic axis."""
    figure, axes = _figure(1, title)
    for colour, (label, values) in zip(_colours(len(series)), series.items(), strict=True):
        ordered = np.sort(np.asarray(values, dtype=np.float64))
        share = np.arange(1, len(ordered) + 1) / max(1, len(ordered))
        axes[0].step(ordered, share * 100, where="post", color=colour, label=f"{label} (n={len(ordered)})")
    if any(min(values, default=0.0) > 0 for values in series.values()):
        axes[0].set_xscale("log")
        axes[0].xaxis.set_major_formatter("{x:g}")
        axes[0].xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "235" else "")
    axes[0].set(xlabel=xlabel, ylabel="requests (%)", ylim=(0, 101))
    _legend(axes[0], len(series))
    return _save(figure, path)


def rate_sweep(
    points: Sequence[tuple[float, Summary]],
    path: str | Path,
    *,
    xlabel: str = "offered load (requests/s)",
    title: str = "",
) -> Path:
    """TTFT, TPOT, end-to-end latency (p50, p90, p99) and throughput over load, one panel each."""
    points = sorted(points, key=lambda point: point[0])
    loads = [load for load, _ in points]
    figure, axes = _figure(4, title)
    for ax, name, label in zip(
        axes, ("ttft_s", "tpot_s", "e2e_s"), ("TTFT (s)", "TPOT (s)", "end to end (s)"), strict=False
    ):
        for colour, percentile in zip(_colours(3), ("p50", "p90", "p99"), strict=True):
            values = [getattr(getattr(summary, name), percentile) for _, summary in points]
            ax.plot(loads, values, marker="o", color=colour, label=percentile)
        ax.set(xlabel=xlabel, ylabel=label)
        _from_zero(ax)
        _legend(ax, 3)
    axes[3].plot(
        loads, [s.requests_per_s for _, s in points], marker="o", color=_COLOURS[0], label="completed"
    )
    if any(s.goodput_per_s is not None for _, s in points):
        good = [np.nan if s.goodput_per_s is None else s.goodput_per_s for _, s in points]
        axes[3].plot(loads, good, marker="s", color=_COLOURS[2], label=f"within SLO ({points[0][1].slo})")
    axes[3].set(xlabel=xlabel, ylabel="requests/s")
    _from_zero(axes[3])
    _legend(axes[3], 2)
    return _save(figure, path)


def timeline(timelines: Sequence[Timeline], path: str | Path, *, title: str = "") -> Path:
    """A bar per request from arrival to finish, waiting apart from decoding, and how many are in flight."""
    ordered = sorted(timelines, key=lambda t: t.arrival_s)
    start_s = ordered[0].arrival_s if ordered else 0.0
    rows = np.arange(len(ordered))
    arrival = np.array([t.arrival_s for t in ordered]) - start_s
    finish = np.array([t.finish_s for t in ordered]) - start_s
    first = np.array([t.finish_s if t.first_token_s is None else t.first_token_s for t in ordered]) - start_s
    failed = np.array([not t.ok for t in ordered], dtype=bool)
    figure, axes = _figure(2, title)
    axes[0].hlines(rows, arrival, first, color=_COLOURS[4], label="to the first token")
    axes[0].hlines(rows, first, finish, color=_COLOURS[0], label="decoding")
    if failed.any():
        axes[0].scatter(finish[failed], rows[failed], marker="x", color=_COLOURS[1], label="failed", zorder=3)
    axes[0].set(xlabel="time (s)", ylabel="request, by arrival")
    # The first to arrive are at the bottom, so this corner is free.
    axes[0].legend(frameon=False, fontsize=9, loc="upper left")
    times = np.concatenate([arrival, finish])
    steps = np.concatenate([np.ones(len(arrival)), -np.ones(len(finish))])
    order = np.argsort(times, kind="stable")
    axes[1].step(times[order], np.cumsum(steps[order]), where="post", color=_COLOURS[0])
    axes[1].set(xlabel="time (s)", ylabel="requests in flight")
    _from_zero(axes[1])
    return _save(figure, path)


def bars(
    groups: Mapping[str, Mapping[str, float]], path: str | Path, *, ylabel: str, title: str = ""
) -> Path:
    """A comparison: one group of bars per outer key, one bar per inner key, values written on top."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    figure, axes = _figure(1, title)
    positions, width = np.arange(len(groups)), 0.8 / max(1, len(names))
    for index, (colour, name) in enumerate(zip(_colours(len(names)), names, strict=True)):
        heights = [values.get(name, np.nan) for values in groups.values()]
        offset = (index - (len(names) - 1) / 2) * width
        drawn = axes[0].bar(positions + offset, heights, width, color=colour, label=name)
        axes[0].bar_label(drawn, fmt="%.3g", padding=2, fontsize=8)
    axes[0].set_xticks(positions, list(groups))
    axes[0].set(ylabel=ylabel)
    axes[0].margins(y=0.12)
    _legend(axes[0], len(names))
    return _save(figure, path)


def _figure(num_panels: int, title: str) -> tuple[Figure, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_columns = 1 if num_panels == 1 else 2
    num_rows = -(-num_panels // num_columns)
    figure = Figure(figsize=(6.4 * num_columns, 4.2 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, num_columns, squeeze=False).ravel().tolist()
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    return figure, axes


def _colours(num: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(num)]


def _from_zero(ax: Any) -> None:
    # A curve that hardly varies would otherwise lie on the upper edge.
    drawn = np.concatenate(
        [np.asarray(line.get_ydata(), dtype=np.float64) for line in ax.lines] or [np.zeros(0)]
    )
    drawn = drawn[np.isfinite(drawn)]
    ax.set_ylim(0, 1.1 * drawn.max() if drawn.size and drawn.max() > 0 else 1)


def _legend(ax: Any, num_series: int) -> None:
    if num_series > 1:
        ax.legend(frameon=False, fontsize=9)


def _save(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
