"""Reproduces Figures 5, 9, 10 and 12 of the Sangam paper in simulation: colocated, disaggregated, hybrid.

    python docs/studies/dllm_modes.py --out build/dllm_modes [--profiles DIR] [--only figure9 ...]

Every point is 4,000 requests on 8 workers and a file of its own in `OUT/points`, so that a run that was
stopped goes on where it was. Prints the tables of `dllm_modes.md` and draws its plots from the points there are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.core.workload.presets import open_workload
from genserve.dllm.cost import Calibration, open_cost
from genserve.dllm.limits import EngineLimits
from genserve.dllm.simulate import Denoising, simulate

# "loaded": three factors a model, from the lowest loads that the paper gives figures of in seconds: 0.5/s on one
# device and 6.5/s on eight for LLaDA, 8.5/s on eight for Dream. "lone": the product's own two, without an
# overhead for each request in a step; for LLaDA they too give the service time at 0.5/s. dllm_modes.md says how.
CALIBRATIONS = {
    ("llada-8b", "loaded"): (
        Calibration(slowdown=1.5, pass_overhead_s=3.0e-3),
        Denoising(tokens_per_pass=3.8),
    ),
    ("dream-7b", "loaded"): (
        Calibration(slowdown=1.35, pass_overhead_s=2.8e-3),
        Denoising(tokens_per_pass=2.7),
    ),
    ("llada-8b", "lone"): (Calibration(slowdown=1.85), Denoising(tokens_per_pass=3.25)),
}
MASKS = {"sharegpt": 1024, "arxiv": 512}
CONTEXT_TOKENS = 8192  # the paper appends its masks to prompts that fill LLaDA's 4,096
THETA = 8192
# Prefill workers, theta (None: they never overflow).
MODES: dict[str, tuple[int, int | None]] = {
    "colocated": (0, None),
    "5P3D": (5, None),
    "5P3C": (5, THETA),
    "3P5C": (3, THETA),
    "4P4D": (4, None),
    "6P2D": (6, None),
}
RATES = {
    ("llada-8b", "sharegpt"): (5.0, 6.0, 6.5, 7.0, 7.5),
    ("llada-8b", "arxiv"): (5.0, 7.0, 8.0),
    ("dream-7b", "sharegpt"): (5.0, 7.0, 8.5),
    ("dream-7b", "arxiv"): (5.0, 7.0, 8.5, 9.5),
}
# The pairs that the paper gives most figures of.
LLADA, DREAM = ("llada-8b", "sharegpt"), ("dream-7b", "arxiv")
SHOWN = {"colocated": "tab:blue", "5P3D": "tab:red", "5P3C": "tab:green"}


@dataclass(frozen=True, slots=True)
class Point:
    """One run. `prefill_tokens` caps a prefill worker's step."""

    model: str
    trace: str
    mode: str
    rate: float
    budget: int = 1024
    prefill_tokens: int = 4096
    num_requests: int = 4000
    calibration: str = "loaded"

    @property
    def name(self) -> str:
        cap = "" if self.prefill_tokens == 4096 else f"_cap{self.prefill_tokens}"
        other = "" if self.calibration == "loaded" else f"_{self.calibration}"
        return f"{self.model}_{self.trace}_{self.mode}_{self.budget}{cap}_{self.rate:g}{other}"


def points(only: list[str], num: int | None) -> Iterator[Point]:
    """What the named parts need; what the paper's text gives figures of comes first.

    By default the two pairs of `LLADA` and `DREAM` get the paper's 4,000 requests, the others 2,000.
    """
    others = [pair for pair in RATES if pair not in (LLADA, DREAM)]
    parts = {
        "stated": [
            *(Point(*LLADA, mode, rate) for rate in (6.5, 7.5) for mode in SHOWN),
            *(Point(*DREAM, mode, rate) for rate in (8.5, 7.0, 9.5) for mode in SHOWN),
        ],
        "figure12": [
            Point(*LLADA, mode, rate, budget)
            for rate in (7.5, 7.0, 6.0)
            for mode in ("5P3C", "3P5C")
            for budget in (1024, 4096)
        ],
        "figure5": [Point(*LLADA, mode, 6.5) for mode in ("4P4D", "5P3D", "6P2D")],
        "lone": [Point(*LLADA, mode, rate, calibration="lone") for rate in (7.5, 6.5) for mode in SHOWN],
        "figure9": [
            Point(*pair, mode, rate)
            for pair in (*others, LLADA, DREAM)
            for rate in reversed(RATES[pair])
            for mode in SHOWN
        ],
        "budget512": [Point(*LLADA, "colocated", rate, 512) for rate in (7.0, 7.5)],
        "cap": [
            Point(*LLADA, mode, 7.5, prefill_tokens=cap) for cap in (2048, 16384) for mode in ("5P3D", "5P3C")
        ],
    }
    for part in only or parts:
        for point in parts[part]:
            default = 4000 if (point.model, point.trace) in (LLADA, DREAM) else 2000
            yield replace(point, num_requests=num or default)


def run(point: Point, profiles: Path | None) -> dict[str, Any]:
    """Figures of one simulated run."""
    calibration, denoising = CALIBRATIONS[point.model, point.calibration]
    cost = open_cost(point.model, "h100", profiles, calibration)
    num_prefill, theta = MODES[point.mode]
    limits = EngineLimits(
        cost.kv_pool_tokens // PAGE_TOKENS,
        CONTEXT_TOKENS,
        256,
        point.budget,
        "paper",
        prefill_tokens=point.prefill_tokens,
    )
    workload = open_workload(f"sangam-{point.trace}", point.num_requests, 0).at_rate(point.rate)
    start_s = time.process_time()
    result = simulate(
        workload,
        limits,
        cost,
        8,
        num_masks=MASKS[point.trace],
        denoising=denoising,
        num_prefill_workers=num_prefill,
        overflow_tokens=theta,
    )
    took_s = time.process_time() - start_s
    stats = result.engine
    row: dict[str, Any] = {
        **asdict(point),
        "num_overflows": stats.get("num_overflows", 0),
        "num_blocks": stats["num_blocks"],
        "tokens_per_step": (stats["num_prefill_tokens"] + stats["num_decode_tokens"]) / stats["num_steps"],
        "duration_s": result.duration_s,
        "took_s": took_s,
    }
    for part in ("e2e", "queue", "prefill", "decode", "transfer"):
        values = np.array([getattr(each, f"{part}_s") for each in result.breakdowns])
        p50, p90, p99 = np.percentile(values, (50, 90, 99)).tolist()
        row[part] = {"mean": float(values.mean()), "p50": p50, "p90": p90, "p99": p99}
    return row


Rows = Mapping[str, Mapping[str, Any]]
# A figure of the paper: what it is, the point, the part and statistic of it, the paper's value in seconds.
STATED: tuple[tuple[Point, str, str, float], ...] = (
    (Point(*LLADA, "colocated", 7.5), "e2e", "mean", 7.1),
    (Point(*LLADA, "5P3D", 7.5), "e2e", "mean", 11.8),
    (Point(*LLADA, "5P3C", 7.5), "e2e", "mean", 9.0),
    (Point(*LLADA, "colocated", 7.5), "e2e", "p99", 22.1),
    (Point(*LLADA, "5P3C", 7.5), "e2e", "p99", 31.5),
    (Point(*LLADA, "5P3C", 7.5, 4096), "e2e", "p99", 36.7),
    (Point(*LLADA, "5P3C", 7.0), "e2e", "p99", 26.8),
    (Point(*LLADA, "5P3C", 7.0, 4096), "e2e", "p99", 29.1),
    (Point(*LLADA, "3P5C", 7.5), "e2e", "mean", 9.5),
    (Point(*LLADA, "3P5C", 7.5, 4096), "e2e", "mean", 8.7),
    (Point(*LLADA, "3P5C", 7.5), "e2e", "p99", 27.5),
    (Point(*LLADA, "3P5C", 7.5, 4096), "e2e", "p99", 34.1),
    (Point(*LLADA, "colocated", 7.0, 512), "e2e", "p99", 27.8),
    (Point(*LLADA, "colocated", 7.5, 512), "e2e", "p99", 45.6),
    (Point(*LLADA, "colocated", 6.5), "queue", "p90", 2.6),
    (Point(*LLADA, "colocated", 6.5), "queue", "p99", 6.4),
    (Point(*LLADA, "5P3D", 6.5), "queue", "p90", 6.3),
    (Point(*LLADA, "5P3D", 6.5), "queue", "p99", 11.6),
    (Point(*LLADA, "5P3C", 6.5), "queue", "p99", 6.4),
    (Point(*LLADA, "5P3D", 6.5), "decode", "p99", 16.6),
    (Point(*LLADA, "5P3C", 6.5), "decode", "p99", 18.3),
    (Point(*LLADA, "5P3D", 6.5), "transfer", "p99", 0.384),
    (Point(*LLADA, "4P4D", 6.5), "e2e", "p50", 28.0),
    (Point(*LLADA, "4P4D", 6.5), "queue", "p50", 24.0),
    (Point(*LLADA, "6P2D", 6.5), "e2e", "p50", 23.0),
    (Point(*LLADA, "6P2D", 6.5), "queue", "p50", 8.0),
    (Point("llada-8b", "arxiv", "colocated", 8.0), "e2e", "p99", 12.5),
    (Point(*DREAM, "colocated", 9.5), "e2e", "mean", 5.8),
    (Point(*DREAM, "5P3D", 9.5), "e2e", "mean", 7.2),
    (Point(*DREAM, "5P3C", 8.5), "queue", "p99", 1.1),
    (Point(*DREAM, "5P3C", 8.5), "decode", "p99", 6.2),
    (Point(*DREAM, "5P3D", 8.5), "transfer", "p99", 0.192),
)
# The points calibrated on, with the paper's values.
CALIBRATED: tuple[tuple[Point, str, str, float], ...] = (
    (Point(*LLADA, "colocated", 6.5), "decode", "p50", 2.7),
    (Point(*LLADA, "5P3D", 6.5), "decode", "p50", 2.5),
    (Point(*DREAM, "colocated", 8.5), "decode", "p99", 7.3),
    (Point(*DREAM, "5P3D", 8.5), "decode", "p99", 5.6),
)
# One point against another, in percent: the paper's "hybrid 17 % below colocated" is -17.
RATIOS: tuple[tuple[Point, Point, str, float], ...] = (
    (Point(*DREAM, "5P3D", 7.0), Point(*DREAM, "colocated", 7.0), "mean", -12),
    (Point(*DREAM, "5P3D", 7.0), Point(*DREAM, "colocated", 7.0), "p99", -12),
    (Point(*DREAM, "5P3C", 7.0), Point(*DREAM, "colocated", 7.0), "mean", -17),
    (Point(*DREAM, "5P3C", 7.0), Point(*DREAM, "colocated", 7.0), "p99", -16),
    (Point(*DREAM, "5P3D", 9.5), Point(*DREAM, "colocated", 9.5), "mean", 24),
    (Point(*LLADA, "5P3D", 7.5), Point(*LLADA, "colocated", 7.5), "mean", 66),
    (Point(*LLADA, "5P3C", 7.5), Point(*LLADA, "colocated", 7.5), "mean", 27),
    (Point(*LLADA, "5P3C", 7.0), Point(*LLADA, "5P3C", 7.0, 4096), "p99", -8),
    (Point(*LLADA, "5P3C", 7.5), Point(*LLADA, "5P3C", 7.5, 4096), "p99", -14),
    (Point(*LLADA, "3P5C", 6.0), Point(*LLADA, "3P5C", 6.0, 4096), "p99", -5),
    (Point(*LLADA, "3P5C", 7.5), Point(*LLADA, "3P5C", 7.5, 4096), "p99", -19),
    (Point(*LLADA, "3P5C", 6.0), Point(*LLADA, "3P5C", 6.0, 4096), "mean", 2),
    (Point(*LLADA, "3P5C", 7.5), Point(*LLADA, "3P5C", 7.5, 4096), "mean", 9),
)


def describe(point: Point) -> str:
    budget = f", τ {point.budget}" if point.budget != 1024 else ""
    cap = f", cap {point.prefill_tokens}" if point.prefill_tokens != 4096 else ""
    lone = ", lone" if point.calibration == "lone" else ""
    return f"{point.model} {point.trace} {point.rate:g}/s, {point.mode}{budget}{cap}{lone}"


def stated_table(rows: Rows, stated: tuple[tuple[Point, str, str, float], ...]) -> str:
    lines = ["| point | figure | paper (s) | here (s) | error |", "| :--- | :--- | ---: | ---: | ---: |"]
    for point, part, statistic, paper in stated:
        row = rows.get(point.name)
        if row is not None:
            ours = row[part][statistic]
            shown = f"{paper:g} | {ours:.2f}" if paper < 1 else f"{paper:.1f} | {ours:.1f}"
            what = f"{part} {statistic}".replace("p50", "median")
            lines.append(f"| {describe(point)} | {what} | {shown} | {100 * (ours / paper - 1):+.0f} % |")
    return "\n".join(lines)


def ratio_table(rows: Rows) -> str:
    lines = ["| point | against | figure | paper | here |", "| :--- | :--- | :--- | ---: | ---: |"]
    for point, against, statistic, paper in RATIOS:
        if point.name in rows and against.name in rows:
            ours = 100 * (rows[point.name]["e2e"][statistic] / rows[against.name]["e2e"][statistic] - 1)
            other = f"τ {against.budget}" if against.mode == point.mode else against.mode
            lines.append(f"| {describe(point)} | {other} | {statistic} | {paper:+g} % | {ours:+.0f} % |")
    return "\n".join(lines)


def load_table(rows: Rows, model: str, trace: str) -> str:
    """Mean and p99 of the three modes, rates across."""
    rates = RATES[model, trace]
    head = " | ".join(f"{rate:g}/s" for rate in rates)
    lines = [f"| {model} {trace} | {head} |", "| :--- |" + " ---: |" * len(rates)]
    for statistic in ("mean", "p99"):
        for mode in SHOWN:
            found = [rows.get(Point(model, trace, mode, rate).name) for rate in rates]
            cells = [f"{row['e2e'][statistic]:.1f}" if row else "" for row in found]
            lines.append(f"| {mode}, {statistic} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parts_table(rows: Rows, chosen: list[Point]) -> str:
    """Where the time goes: queue, decode and transfer at three percentiles."""
    lines = [
        "| point | e2e p50 / p99 | queue p50 / p90 / p99 | decode p50 / p90 / p99 | transfer p99 | overflows |",
        "| :--- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for point in chosen:
        row = rows.get(point.name)
        if row is not None:
            e2e, queue, decode = row["e2e"], row["queue"], row["decode"]
            cells = [
                " / ".join(f"{part[key]:.1f}" for key in ("p50", "p90", "p99")) for part in (queue, decode)
            ]
            share = row["num_overflows"] / row["num_blocks"]
            lines.append(
                f"| {describe(point)} | {e2e['p50']:.1f} / {e2e['p99']:.1f} | {' | '.join(cells)} "
                f"| {row['transfer']['p99']:.2f} | {share:.0%} |"
            )
    return "\n".join(lines)


def draw(rows: Rows, out: Path) -> None:
    """Figure 9 and Figure 12; the paper's figures, where its text gives them, as hollow marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "dllm_modes"

    def marks(axis: Any, model: str, trace: str, mode: str, budget: int, statistic: str, colour: str) -> None:
        for point, part, stated, paper in STATED:
            same = (point.model, point.trace, point.mode, point.budget) == (model, trace, mode, budget)
            if same and (part, stated) == ("e2e", statistic):
                axis.plot(point.rate, paper, "o", mfc="none", mec=colour, ms=9)

    def line(axis: Any, model: str, trace: str, mode: str, budget: int, statistic: str, **style: Any) -> None:
        wanted = [Point(model, trace, mode, rate, budget) for rate in RATES[model, trace]]
        found = [(point.rate, rows[point.name]["e2e"][statistic]) for point in wanted if point.name in rows]
        if found:
            axis.plot(*zip(*found, strict=True), marker=".", **style)
        marks(axis, model, trace, mode, budget, statistic, style["color"])

    figure, axes = pyplot.subplots(2, 4, figsize=(12, 5.4), layout="constrained")
    for column, (model, trace) in enumerate(RATES):
        for axis, statistic, top in zip(axes[:, column], ("mean", "p99"), (15, 45), strict=True):
            for mode, colour in SHOWN.items():
                line(axis, model, trace, mode, 1024, statistic, color=colour, label=mode)
            axis.set(title=f"{model} {trace}, {statistic}", ylim=(0, top))
            axis.grid(alpha=0.3)
        axes[1, column].set_xlabel("requests/s")
    axes[0, 0].set_ylabel("end to end (s)")
    axes[1, 0].set_ylabel("end to end (s)")
    axes[0, 0].legend(fontsize=8)
    figure.savefig(out / "dllm_modes_load.svg", metadata={"Date": None})
    pyplot.close(figure)
    figure, axes = pyplot.subplots(1, 4, figsize=(12, 2.9), layout="constrained")
    for axis, (mode, statistic) in zip(
        axes, ((mode, statistic) for mode in ("5P3C", "3P5C") for statistic in ("mean", "p99")), strict=True
    ):
        for budget, colour in ((1024, "tab:blue"), (4096, "tab:orange")):
            line(axis, *LLADA, mode, budget, statistic, color=colour, label=f"τ {budget}")
        axis.set(title=f"{mode}, {statistic}", xlabel="requests/s", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("end to end (s)")
    axes[0].legend(fontsize=8)
    figure.savefig(out / "dllm_modes_budget.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for points and plots")
    parser.add_argument(
        "--profiles", type=Path, help="folder of AIConfigurator tables; by default a roofline"
    )
    parser.add_argument("--num-requests", type=int, help="of every point [default: 4000 or 2000]")
    parser.add_argument("--only", nargs="*", default=[], help="parts: stated, figure12, ...")
    options = parser.parse_args()
    folder = options.out / "points"
    folder.mkdir(parents=True, exist_ok=True)
    for point in points(options.only, options.num_requests):
        path = folder / f"{point.name}.json"
        if path.exists():
            continue
        row = run(point, options.profiles)
        path.write_text(json.dumps(row, indent=1) + "\n")
        print(
            f"{point.name}: mean {row['e2e']['mean']:.1f} s, p99 {row['e2e']['p99']:.1f} s "
            f"({row['took_s']:.0f} s of CPU)",
            flush=True,
        )
    rows = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    print(f"\nCalibrated on\n\n{stated_table(rows, CALIBRATED)}")
    near = {(point.model, point.trace, point.rate) for point, *_ in CALIBRATED}
    beside = tuple(each for each in STATED if (each[0].model, each[0].trace, each[0].rate) in near)
    print(f"\nAt the load calibrated on\n\n{stated_table(rows, beside)}")
    print(f"\nPredicted\n\n{stated_table(rows, tuple(each for each in STATED if each not in beside))}")
    lone = tuple((replace(each[0], calibration="lone"), *each[1:]) for each in (*CALIBRATED, *STATED))
    print(f"\nWithout an overhead of a pass\n\n{stated_table(rows, lone)}")
    print(f"\nOne against the other\n\n{ratio_table(rows)}")
    for model, trace in RATES:
        print(f"\n{load_table(rows, model, trace)}")
    moderate = [Point(*LLADA, mode, 6.5) for mode in (*SHOWN, "4P4D", "6P2D")]
    moderate += [Point(*DREAM, mode, 8.5) for mode in SHOWN]
    high = [Point(*LLADA, mode, 7.5) for mode in (*SHOWN, "3P5C")]
    capped = [
        Point(*LLADA, mode, 7.5, prefill_tokens=cap) for cap in (2048, 16384) for mode in ("5P3D", "5P3C")
    ]
    lone_points = [Point(*LLADA, mode, rate, calibration="lone") for rate in (6.5, 7.5) for mode in SHOWN]
    print(f"\nWhere the time goes (s)\n\n{parts_table(rows, [*moderate, *high, *capped, *lone_points])}")
    draw(rows, options.out)


if __name__ == "__main__":
    main()
