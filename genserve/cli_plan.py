"""`genserve plan`: which deployment suits a workload, by simulation of the ones there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from genserve import cli_options as opt

if TYPE_CHECKING:
    from genserve.core.metrics.summary import SLO
    from genserve.dllm.plan import Candidate, Plan

app = typer.Typer(
    no_args_is_help=True,
    help="Find the deployment that suits a workload, by simulation.",
    rich_markup_mode=None,
)


@app.callback()
def plan() -> None:
    """Find the deployment that suits a workload, by simulation."""


@app.command("dllm")
def plan_dllm(
    rate: Annotated[float, typer.Option(help="Requests/s to plan for.")],
    workload: opt.Workload = "sangam-sharegpt",
    num_requests: Annotated[
        int,
        typer.Option(min=1, help="Requests of the longest runs; the shorter ones take the first of them."),
    ] = 1000,
    model: opt.ModelledDiffusion = "llada-8b",
    hardware: opt.Hardware = "h100",
    num_workers: opt.NumWorkers = 8,
    num_prefill_workers: Annotated[
        list[str] | None,
        typer.Option(help="To try, several or a comma list; by default 0 to all workers but one."),
    ] = None,
    budget_tokens: Annotated[
        list[str] | None, typer.Option(help="To try [default: 512,1024,2048,4096], the paper's tau.")
    ] = None,
    overflow_tokens: Annotated[
        list[str] | None,
        typer.Option(help="To try [default: 4096,8192,16384,0], the paper's theta; 0: never."),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="p99 or mean end to end, or goodput: requests within --slo.")
    ] = "p99",
    max_running: opt.ModelledRunning = 256,
    policy: opt.BudgetPolicy = "signed",
    prefill_tokens: opt.PrefillTokens = 4096,
    cache: opt.Cache = "dual",
    block_length: opt.BlockLength = 32,
    tokens_per_pass: opt.TokensPerPass = None,
    num_masks: opt.NumMasks = None,
    profiles: opt.Profiles = None,
    slo: opt.Slo = None,
    seed: opt.SimulationSeed = 0,
    as_json: opt.Json = False,
) -> None:
    """Advise on prefill workers, budget and overflow threshold for a rate.

    Every combination is simulated with the same requests: briefly at first, the better ones for longer.
    """
    import math
    from typing import get_args

    from genserve.core.errors import ConfigError
    from genserve.core.metrics.summary import SLO
    from genserve.dllm.plan import Objective, candidates
    from genserve.dllm.plan import plan as find_plan
    from genserve.dllm.scenario import check_choice, open_scenario

    check_choice("objective", objective, get_args(Objective))
    if not (math.isfinite(rate) and rate > 0):
        raise ConfigError(f"rate: must be above 0, got {rate:g}")
    limits_s = SLO.parse(slo) if slo else None
    tried = candidates(
        num_workers,
        _integers("num_prefill_workers", num_prefill_workers, range(num_workers), 0),
        _integers("budget_tokens", budget_tokens, (512, 1024, 2048, 4096), 1),
        [
            tokens or None
            for tokens in _integers("overflow_tokens", overflow_tokens, (4096, 8192, 16384, 0), 0)
        ],
    )
    scenario = open_scenario(
        workload,
        num_requests,
        seed,
        model=model,
        hardware=hardware,
        profiles=profiles,
        max_running=max_running,
        policy=policy,
        prefill_tokens=prefill_tokens,
        cache=cache,
        block_length=block_length,
        tokens_per_pass=tokens_per_pass,
        num_masks=num_masks,
    )
    if scenario.num_cut:
        typer.echo(
            f"{scenario.num_cut} of {len(scenario.workload.requests)} requests cut to fit: prompts to "
            f"{scenario.max_prompt_tokens:,} tokens, outputs to {scenario.num_masks:,}",
            err=True,
        )

    def on_run(run: int, num_runs: int, candidate: Candidate, num: int) -> None:
        typer.echo(f"{run} of {num_runs}: {_describe(candidate, num_workers)}, {num} requests", err=True)

    found = find_plan(scenario, tried, rate, num_workers, objective, limits_s, on_run)  # type: ignore[arg-type]
    title = (
        f"{model} on {num_workers} x {hardware} (simulated), workload {scenario.workload.name}, {rate:g}/s"
    )
    if as_json:
        typer.echo(_json(title, found, rate))
    else:
        _print(title, found, limits_s)


def _integers(name: str, texts: list[str] | None, default: Any, least: int) -> list[int]:
    from genserve.core.errors import ConfigError

    values = []
    for text in ",".join(texts).split(",") if texts else map(str, default):
        if not text.strip().isdecimal() or int(text) < least:
            raise ConfigError(f"{name}: expected whole numbers from {least}, got {text!r}")
        values.append(int(text))
    return values


def _describe(candidate: Candidate, num_workers: int) -> str:
    num_prefill = candidate.num_prefill_workers
    if candidate.mode == "colocated":
        return f"colocated, budget {candidate.budget_tokens}"
    split = f"{num_prefill} of {num_workers} prefill"
    if candidate.overflow_tokens is None:
        return f"{split}, no overflow"
    return f"{split}, budget {candidate.budget_tokens}, overflow from {candidate.overflow_tokens}"


def _json(title: str, found: Plan, rate: float) -> str:
    import json
    from dataclasses import asdict

    from genserve.core.metrics.summary import to_plain

    ranked = [
        {**asdict(each.candidate), "mode": each.candidate.mode, "summary": each.summary.to_dict()}
        for each in found.ranked
    ]
    plain = {"title": title, "rate_per_s": rate, "objective": found.objective}
    return json.dumps(to_plain({**plain, "config": found.config, "ranked": ranked}), allow_nan=False)


def _print(title: str, found: Plan, slo: SLO | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    headings = ("prefill", "budget", "overflow", "requests", "mean", "p99")
    for heading in (*headings, "within SLO") if slo is not None else headings:
        table.add_column(heading, justify="right")
    for each in found.ranked:
        candidate, summary = each.candidate, each.summary
        is_static = candidate.num_prefill_workers and candidate.overflow_tokens is None
        row = [
            str(candidate.num_prefill_workers),
            "-" if is_static else str(candidate.budget_tokens),
            str(candidate.overflow_tokens or ("never" if is_static else "-")),
            str(summary.num_requests),
            f"{summary.e2e_s.mean:.2f} s",
            f"{summary.e2e_s.p99:.2f} s",
        ]
        table.add_row(*row, *([f"{summary.slo_attainment:.1%}"] if slo is not None else []))
    console = Console(highlight=False)
    console.print(title, style="bold")
    console.print()
    console.print(table)
    console.print()
    by = "mean end to end" if found.objective == "mean" else found.objective
    console.print(f"Best by {by}: {_describe(found.best, found.num_workers)}. In the model's configuration:")
    console.print()
    for key, value in found.config.items():
        console.print(f"{key}: {value}")
