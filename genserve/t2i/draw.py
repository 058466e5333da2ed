"""Pictures of graphs: boxes for nodes, frames for loops, wires for tensors; small values are lines in the boxes.

Owns the look (matplotlib); `layout` says where things are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from genserve.core.errors import ConfigError
from genserve.t2i.compiler import Stage
from genserve.t2i.layout import Box, Level, Wire, laid_out

FORMATS = (".svg", ".png", ".pdf")

_FILL = {"node": "#eef3fb", "loop": "#fbfaf4", "pill": "#ffffff", "carried": "#f6e7b0", "output": "#e7f4e8"}
_EDGE = {"node": "#5b7db1", "loop": "#a89a5c", "pill": "#a89a5c", "carried": "#a89a5c", "output": "#5c9a63"}
_TEXT = {"input": "#1f5fa8", "constant": "#777777", "index": "#8a6d00", "patch": "#8a3fa0"}
_WIRE = {"value": "#444444", "deferred": "#c2571a", "patch": "#8a3fa0"}
_STYLE = {"value": "-", "deferred": (0, (4, 2)), "patch": (0, (1, 1.5))}
_LEGEND = 16.0


def draw(stages: Sequence[Stage], path: Path) -> None:
    """Draw graphs side by side into a file, whose suffix says the format. Raises `ConfigError` for another suffix."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"output: {path.name} must end in one of {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"output: no folder {path.absolute().parent}")
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    matplotlib.rcParams["svg.hashsalt"] = "genserve"
    from matplotlib.figure import Figure

    levels = [laid_out(stage.graph) for stage in stages]
    widths = [
        max(level.width, 7.0 * len(stage.name) + 20) for level, stage in zip(levels, stages, strict=True)
    ]
    width = sum(widths) + 24.0 * (len(levels) - 1)
    height = max(level.height for level in levels) + 24.0 + _LEGEND
    figure = Figure(figsize=(width / 72, height / 72))
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    x = 0.0
    for stage, level, own in zip(stages, levels, widths, strict=True):
        axes.text(x + 12, 14, stage.name, fontsize=10, fontweight="bold", va="center")
        _level(axes, level, x + (own - level.width) / 2, 22.0, depth=0)
        x += own + 24.0
    _legend(axes, height - _LEGEND / 2)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def _legend(axes: Any, y: float) -> None:
    x = 12.0
    for kind, label in (("value", "value"), ("deferred", "deferred input"), ("patch", "adapter")):
        axes.plot([x, x + 18], [y, y], color=_WIRE[kind], linestyle=_STYLE[kind], linewidth=1.1)
        axes.text(x + 22, y, label, fontsize=6.5, va="center", color="#444444")
        x += 34 + 4.2 * len(label)
    axes.text(x + 4, y, "blue: workflow inputs", fontsize=6.5, va="center", color=_TEXT["input"])
    axes.text(x + 92, y, "yellow: carried to the next iteration", fontsize=6.5, va="center", color="#8a6d00")


def _level(axes: Any, level: Level, x: float, y: float, depth: int) -> None:
    for box in level.boxes.values():
        _box(axes, box, x, y, depth)
    for wire in level.wires:
        _wire(axes, wire, x, y)


def _box(axes: Any, box: Box, x: float, y: float, depth: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, top = x + box.x, y + box.y
    rounding = {"node": 3.0, "loop": 6.0}.get(box.kind, box.height / 2)
    axes.add_patch(
        FancyBboxPatch(
            (left, top),
            box.width,
            box.height,
            boxstyle=f"round,pad=0,rounding_size={rounding}",
            facecolor=_FILL[box.kind],
            edgecolor=_EDGE[box.kind],
            linewidth=1.0,
            zorder=2 + 4 * depth,
        )
    )
    style: dict[str, Any] = {"va": "center", "zorder": 4 + 4 * depth}
    if box.inner is not None:
        behind = {"facecolor": _FILL["loop"], "edgecolor": "none", "pad": 1.0}
        style["zorder"] = 40
        axes.text(left + 10, top + 10, box.title, fontsize=8, fontstyle="italic", bbox=behind, **style)
        inner_x = left + (box.width - box.inner.width) / 2
        _level(axes, box.inner, inner_x, top + box.height - box.inner.height, depth + 1)
        return
    weight = "bold" if box.kind == "node" else "normal"
    size = 8 if box.kind == "node" else 7
    line = top + (box.height if box.kind in ("pill", "carried") else 20.0) / 2
    axes.text(left + box.width / 2, line, box.title, fontsize=size, fontweight=weight, ha="center", **style)
    for number, (kind, text) in enumerate(box.lines):
        where = top + 23.0 + 10.0 * number
        axes.text(left + box.width / 2, where, text, fontsize=7, color=_TEXT[kind], ha="center", **style)


def _wire(axes: Any, wire: Wire, x: float, y: float) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    points = [(x + wire.start, y + _edge_of(wire.source, wire.source_pill, below=True))]
    for bend in wire.bends:
        points += [(x + bend.middle, y + bend.y), (x + bend.middle, y + bend.y + bend.height)]
    points.append((x + wire.stop, y + _edge_of(wire.target, wire.target_pill, below=False)))
    vertices, codes = [points[0]], [Curve.MOVETO]
    for (x0, y0), (x1, y1) in pairwise(points):
        half = (y0 + y1) / 2
        vertices += [(x0, half), (x1, half), (x1, y1)]
        codes += [Curve.CURVE4] * 3
    axes.add_patch(
        FancyArrowPatch(
            path=Curve(vertices, codes),
            arrowstyle="-|>",
            mutation_scale=7,
            linewidth=1.0,
            linestyle=_STYLE[wire.kind],
            color=_WIRE[wire.kind],
            fill=True,
            zorder=30,
            shrinkA=0,
            shrinkB=0,
        )
    )


def _edge_of(box: Box, pill: Any, below: bool) -> float:
    """The height at which a wire meets a box, or a value on the edge of a loop."""
    if pill is not None and box.inner is not None and pill in box.inner.boxes:
        inner = box.inner.boxes[pill]
        return box.y + box.height - box.inner.height + inner.y + (inner.height if below else 0.0)
    return box.y + (box.height if below else 0.0)
