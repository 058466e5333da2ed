"""What the benchmarks share: where they ran, tables, JSON and bars."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """Where and when."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = dict(
            tuple(part.strip() for part in line.split(":", 1))
            for line in cpuinfo.read_text().splitlines()
            if ":" in line
        )
        widest = next((f for f in ("amx_bf16", "avx512f", "avx2") if f in lines.get("flags", "")), "")
        processor = f"{lines.get('model name', processor)} ({widest or platform.machine()})"
    return {
        "processor": processor,
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(rows: list[Row]) -> str:
    """Markdown; a new header wherever the columns change."""
    lines: list[str] = []
    shown: tuple[str, ...] = ()
    for row in rows:
        if tuple(row) != shown:
            shown = tuple(row)
            lines += [""] * bool(lines) + ["| " + " | ".join(shown) + " |", "|" + "---|" * len(shown)]
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def save(name: str, sections: dict[str, list[Row]], bars: dict[str, tuple[str, str, str]], out: Path) -> None:
    """Write NAME.md, NAME.json and NAME.png. `bars`: section to (label column, value column, axis label)."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps({"machine": machine(), **sections}, indent=1))
    text = "\n\n".join(f"## {title}\n\n{table(rows)}" for title, rows in sections.items())
    (out / f"{name}.md").write_text(text + "\n")
    _plot(sections, bars, out / f"{name}.png")


def _plot(sections: dict[str, list[Row]], bars: dict[str, tuple[str, str, str]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = {
        title: [row for row in sections[title] if bars[title][1] in row]
        for title in sections
        if title in bars
    }
    heights = [1.0 + 0.28 * len(rows) for rows in drawn.values()]
    figure, axes = plt.subplots(
        len(drawn), 1, figsize=(9, sum(heights)), squeeze=False, height_ratios=heights
    )
    for axis, (title, rows) in zip(axes[:, 0], drawn.items(), strict=True):
        what, value, label = bars[title]
        drawn_bars = axis.barh([str(row[what]) for row in rows], [row[value] for row in rows])
        axis.bar_label(drawn_bars, fmt="%.4g", padding=3)
        axis.margins(x=0.15)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel(label)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
