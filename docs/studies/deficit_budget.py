"""Reproduces the budget sweep of the Sangam paper's Figure 11 (LLaDA-8B, ShareGPT) in simulation.

    python docs/studies/deficit_budget.py --out build/deficit_budget [--profiles DIR] [--jobs 2]

Runs 4,000 requests on 8 workers for every policy, budget and rate, one after the other or on `--jobs`
processes; what has run already is kept in `results.json` and not run again. Prints the tables of
`deficit_budget.md` and draws its plots.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.core.workload.presets import open_workload
from genserve.dllm.cost import open_cost
from genserve.dllm.limits import EngineLimits
from genserve.dllm.simulate import Breakdown, mean_breakdown, simulate

BUDGETS = (512, 1024, 2048, 16384)
POLICIES = ("paper", "signed")
RATES = (6.0, 6.5, 7.0, 7.5, 8.0)
BREAKDOWN_RATE = 7.5
BANDS = {"median": (45, 55), "tail": (98, 99.8)}


def run(policy: str, budget: int, rate: float, num: int, profiles: Path | None) -> dict[str, Any]:
    """Figures of one simulated run."""
    cost = open_cost("llada-8b", "h100", profiles)
    workload = open_workload("sangam-sharegpt", num, 0).at_rate(rate)
    limits = EngineLimits(cost.kv_pool_tokens // PAGE_TOKENS, 4096, 256, budget, policy)  # type: ignore[arg-type]
    start_s = time.process_time()
    result = simulate(workload, limits, cost, num_workers=8)
    took_s = time.process_time() - start_s
    e2e_s = np.array([each.e2e_s for each in result.breakdowns])
    stats = result.engine
    bands: dict[str, dict[str, float]] = {"mean": mean_breakdown(result.breakdowns)}
    for name, (low, high) in BANDS.items():
        bands[name] = mean_breakdown(_between(result.breakdowns, *np.percentile(e2e_s, (low, high))))
    return {
        "policy": policy,
        "budget": budget,
        "rate": rate,
        "mean_s": float(e2e_s.mean()),
        "p50_s": float(np.percentile(e2e_s, 50)),
        "p99_s": float(np.percentile(e2e_s, 99)),
        "max_s": float(e2e_s.max()),
        "breakdown": bands,
        "tokens_per_step": (stats["num_prefill_tokens"] + stats["num_decode_tokens"]) / stats["num_steps"],
        "took_s": took_s,
    }


def _between(breakdowns: tuple[Breakdown, ...], low: float, high: float) -> list[Breakdown]:
    return [each for each in breakdowns if low <= each.e2e_s <= high]


def table(rows: list[dict[str, Any]], policy: str, figure: str) -> str:
    """Budgets down, rates across."""
    rates = sorted({row["rate"] for row in rows})
    lines = [
        f"| budget | {' | '.join(f'{rate:g}/s' for rate in rates)} |",
        "| ---: |" + " ---: |" * len(rates),
    ]
    for budget in BUDGETS:
        found = {
            row["rate"]: row[figure] for row in rows if (row["policy"], row["budget"]) == (policy, budget)
        }
        cells = [f"{found[rate]:.1f}" if rate in found else "" for rate in rates]
        lines.append(f"| {budget} | {' | '.join(cells)} |")
    return "\n".join(lines)


def breakdown_table(rows: list[dict[str, Any]], policy: str) -> str:
    lines = [
        "| budget | request | end to end | queue | prefill | decode |",
        "| ---: | :--- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if row["policy"] == policy and row["rate"] == BREAKDOWN_RATE:
            for name in ("mean", *BANDS):
                part = row["breakdown"][name]
                cells = [part[f"{key}_s"] for key in ("e2e", "queue", "prefill", "decode")]
                lines.append(f"| {row['budget']} | {name} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """p99 over rate for both policies, and the tail's breakdown."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "deficit_budget"
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, policy in zip(axes, POLICIES, strict=True):
        for budget in BUDGETS:
            line = sorted(
                (row["rate"], row["p99_s"])
                for row in rows
                if (row["policy"], row["budget"]) == (policy, budget)
            )
            if line:
                axis.plot(*zip(*line, strict=True), marker="o", label=f"budget {budget}")
        axis.set(title=policy, xlabel="requests/s", ylim=(0, 60))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("p99 end to end (s)")
    axes[0].legend(fontsize=8)
    figure.savefig(out / "deficit_budget_p99.svg", metadata={"Date": None})
    pyplot.close(figure)
    figure, axis = pyplot.subplots(figsize=(6, 3), layout="constrained")
    places, labels = [], []
    shown = [row for row in rows if (row["policy"], row["rate"]) == ("signed", BREAKDOWN_RATE)]
    for index, row in enumerate(shown):
        for offset, name in enumerate(("mean", "tail")):
            place, bottom = 2.5 * index + offset, 0.0
            places.append(place)
            labels.append(f"{row['budget']}\n{name}")
            for part, colour in (("queue", "tab:red"), ("prefill", "tab:orange"), ("decode", "tab:blue")):
                height = row["breakdown"][name][f"{part}_s"]
                axis.bar(place, height, bottom=bottom, color=colour, label=part if not places[1:] else None)
                bottom += height
    axis.set_xticks(places, labels, fontsize=8)
    axis.set_ylabel(f"seconds at {BREAKDOWN_RATE:g}/s")
    axis.legend(fontsize=8)
    figure.savefig(out / "deficit_budget_parts.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and plots")
    parser.add_argument(
        "--profiles", type=Path, help="folder of AIConfigurator tables; by default a roofline"
    )
    parser.add_argument("--num-requests", type=int, default=4000)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    done = {(row["policy"], row["budget"], row["rate"]) for row in rows}
    wanted = [
        (policy, budget, rate)
        for rate in sorted(options.rates, key=lambda rate: abs(rate - BREAKDOWN_RATE))
        for budget in BUDGETS
        for policy in options.policies
        if (policy, budget, rate) not in done
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        runs = [pool.submit(run, *each, options.num_requests, options.profiles) for each in wanted]
        for finished in as_completed(runs):
            row = finished.result()
            rows.append(row)
            rows.sort(key=lambda row: (row["policy"], row["budget"], row["rate"]))
            path.write_text(json.dumps(rows, indent=1) + "\n")
            print(
                f"{row['policy']} {row['budget']} at {row['rate']:g}/s: mean {row['mean_s']:.1f} s, "
                f"p99 {row['p99_s']:.1f} s ({row['took_s']:.0f} s of CPU)",
                flush=True,
            )
    for policy in POLICIES:
        print(f"\n{policy}: p99 end to end (s)\n\n{table(rows, policy, 'p99_s')}")
        print(f"\n{policy}: mean end to end (s)\n\n{table(rows, policy, 'mean_s')}")
        print(
            f"\n{policy}: where the time goes at {BREAKDOWN_RATE:g}/s (s)\n\n{breakdown_table(rows, policy)}"
        )
    draw(rows, options.out)


if __name__ == "__main__":
    main()
