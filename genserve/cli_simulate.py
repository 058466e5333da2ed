"""`genserve simulate`: a workload through an engine's own scheduler, on a virtual clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genserve import cli_options as opt
from genserve.cli_bench import parse_loads

if TYPE_CHECKING:
    from genserve.core.metrics.summary import SLO, Summary
    from genserve.core.metrics.timelines import Timeline

app = typer.Typer(
    no_args_is_help=True,
    help="Try a workload on modelled hardware, in a fraction of the time.",
    rich_markup_mode=None,
)


@app.callback()
def simulate() -> None:
    """Try a workload on modelled hardware, in a fraction of the time."""


@app.command("ar")
def simulate_ar(
    workload: Annotated[
        str,
        typer.Option(
            help="chat, code, sangam-sharegpt, sangam-arxiv, mooncake-like, tiny, or a trace's path."
        ),
    ] = "chat",
    rate: Annotated[
        list[str] | None,
        typer.Option(help="Requests/s; several or a comma list for a sweep; by default the workload's own."),
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of each run, at most.")] = 1000,
    model: Annotated[
        str, typer.Option("--model", "-m", help="llama-3-8b, llama-2-70b or smollm2.")
    ] = "llama-3-8b",
    hardware: Annotated[str, typer.Option(help="h100, h200, a100 or laptop.")] = "h100",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that share the model.")] = 1,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences in a step, at most.")] = 256,
    budget_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step, at most.")] = 2048,
    max_context_tokens: Annotated[
        int,
        typer.Option(min=1, help="Prompts and outputs above half of it are cut to fit; how many is told."),
    ] = 131_072,
    kv_pool_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of KV; by default what the weights leave of the memory. "
            "Prompts and outputs above half of it are cut to fit; how many is told.",
        ),
    ] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Share the KV of common prefixes.")] = True,
    slo: Annotated[
        str | None, typer.Option(help="Limits in seconds, e.g. ttft=0.5,tpot=0.05,e2e=10.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths and prompts.")] = 0,
    as_json: opt.Json = False,
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and plots.")] = None,
) -> None:
    """Simulate the autoregressive engine on modelled hardware.

    The scheduler is the engine's own; a roofline of model and hardware tells the time.
    """
    from genserve.ar.cost import HARDWARE, MODELS, RooflineCost
    from genserve.ar.engine import EngineLimits
    from genserve.ar.simulate import simulate
    from genserve.core.errors import ConfigError
    from genserve.core.kv.blocks import PAGE_TOKENS
    from genserve.core.metrics.summary import SLO, summarize
    from genserve.core.workload.presets import open_workload

    if model not in MODELS:
        raise ConfigError(f"model: no {model!r}; there are: {', '.join(MODELS)}")
    if hardware not in HARDWARE:
        raise ConfigError(f"hardware: no {hardware!r}; there are: {', '.join(HARDWARE)}")
    limits_s = SLO.parse(slo) if slo else None
    cost = RooflineCost(MODELS[model], HARDWARE[hardware], tensor_parallel)
    num_pages = (kv_pool_tokens or cost.kv_pool_tokens) // PAGE_TOKENS
    if num_pages < 1:
        raise ConfigError(
            f"hardware: {model} leaves no room for KV on {tensor_parallel} x {hardware}; raise --tensor-parallel"
        )
    try:
        limits = EngineLimits(
            num_pages, max_context_tokens, max_running, budget_tokens, prefix_cache=prefix_cache
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    requests = open_workload(workload, num_requests, seed)
    longest = min(max_context_tokens, num_pages * PAGE_TOKENS)
    wanted, half = requests, max(1, longest // 2)
    requests = wanted.clip_lengths(half, half)
    num_cut = sum(a != b for a, b in zip(wanted.requests, requests.requests, strict=True))
    fitted = {"num_requests": len(wanted.requests), "num_cut": num_cut, "max_tokens_each": half}
    rows: list[tuple[str, Summary]] = []
    runs: dict[str, tuple[Timeline, ...]] = {}
    engines: list[dict[str, Any]] = []
    for rate_per_s, _, label in parse_loads(rate or [], []):
        offered = requests if rate_per_s is None else requests.at_rate(rate_per_s)
        typer.echo(f"simulating {len(offered.requests)} requests, {label}", err=True)
        start_s = time.perf_counter()
        result = simulate(offered, limits, cost)
        took_s = time.perf_counter() - start_s
        rows.append((label, summarize(result.timelines, duration_s=result.duration_s, slo=limits_s)))
        runs[label] = result.timelines
        figures = {"num_events": result.num_events, "events_per_s": result.num_events / max(took_s, 1e-9)}
        engines.append({"offered_rate_per_s": offered.rate_per_s, **figures, "engine": dict(result.engine)})
    title = f"{model} on {tensor_parallel} x {hardware} (simulated), workload {requests.name}"
    notes = [
        f"{label}: {engine['engine']['num_steps']:,} steps, {engine['engine']['num_preemptions']:,} preemptions, "
        f"{engine['engine']['num_cached_tokens']:,} prompt tokens from the prefix cache, "
        f"{engine['events_per_s']:,.0f} events/s"
        for (label, _), engine in zip(rows, engines, strict=True)
    ]
    described = {**requests.summary().to_dict(), "fitted": fitted}
    cut = f"prompt and output to {half:,} tokens each"
    _report(title, described, rows, runs, engines, limits_s, as_json, out, cut, notes)


@app.command("dllm")
def simulate_dllm(
    workload: opt.Workload = "sangam-sharegpt",
    rate: Annotated[
        list[str] | None,
        typer.Option(help="Requests/s; several or a comma list for a sweep; by default the workload's own."),
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of each run, at most.")] = 1000,
    model: opt.ModelledDiffusion = "llada-8b",
    hardware: opt.Hardware = "h100",
    num_workers: opt.NumWorkers = 8,
    max_running: opt.ModelledRunning = 256,
    budget_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a step in the long run, the paper's tau.")
    ] = 1024,
    policy: opt.BudgetPolicy = "signed",
    routing: Annotated[
        str, typer.Option(help="least_outstanding, round_robin or sticky.")
    ] = "least_outstanding",
    num_prefill_workers: Annotated[
        int, typer.Option(min=0, help="Of the workers, those that only prefill; the others decode.")
    ] = 0,
    overflow_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Outstanding tokens of every prefill worker from which the others prefill too, the paper's "
            "theta; 0: never.",
        ),
    ] = 8192,
    prefill_tokens: opt.PrefillTokens = 4096,
    cache: opt.Cache = "dual",
    block_length: opt.BlockLength = 32,
    tokens_per_pass: opt.TokensPerPass = None,
    num_masks: opt.NumMasks = None,
    profiles: opt.Profiles = None,
    slo: opt.Slo = None,
    seed: opt.SimulationSeed = 0,
    as_json: opt.Json = False,
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and plots.")] = None,
) -> None:
    """Simulate dispatcher and diffusion engines on modelled hardware.

    The schedulers are the server's own; a cost model tells the time, and how many positions a pass commits
    is drawn.
    """
    from typing import get_args

    from genserve.core.metrics.summary import SLO, summarize
    from genserve.dllm.routing import Routing
    from genserve.dllm.scenario import check_choice, open_scenario
    from genserve.dllm.simulate import mean_breakdown, simulate

    check_choice("routing", routing, get_args(Routing))
    scenario = open_scenario(
        workload,
        num_requests,
        seed,
        model=model,
        hardware=hardware,
        profiles=profiles,
        max_running=max_running,
        budget_tokens=budget_tokens,
        policy=policy,
        prefill_tokens=prefill_tokens,
        cache=cache,
        block_length=block_length,
        tokens_per_pass=tokens_per_pass,
        num_masks=num_masks,
    )
    limits_s = SLO.parse(slo) if slo else None
    requests, masks, most = scenario.workload, scenario.num_masks, scenario.max_prompt_tokens
    fitted = {"num_requests": len(requests.requests), "num_cut": scenario.num_cut, "max_prompt_tokens": most}
    fitted["max_output_tokens"] = masks
    rows: list[tuple[str, Summary]] = []
    runs: dict[str, tuple[Timeline, ...]] = {}
    engines: list[dict[str, Any]] = []
    notes: list[str] = []
    for rate_per_s, _, label in parse_loads(rate or [], []):
        offered = requests if rate_per_s is None else requests.at_rate(rate_per_s)
        typer.echo(f"simulating {len(offered.requests)} requests, {label}", err=True)
        start_s = time.perf_counter()
        result = simulate(
            offered,
            scenario.limits,
            scenario.cost,
            num_workers,
            routing,  # type: ignore[arg-type]
            scenario.params,
            masks,
            scenario.denoising,
            num_prefill_workers=num_prefill_workers,
            overflow_tokens=overflow_tokens or None,
        )
        took_s = time.perf_counter() - start_s
        rows.append((label, summarize(result.timelines, duration_s=result.duration_s, slo=limits_s)))
        runs[label] = result.timelines
        figures = {"num_events": result.num_events, "events_per_s": result.num_events / max(took_s, 1e-9)}
        mean = mean_breakdown(result.breakdowns)
        engines.append(
            {
                "offered_rate_per_s": offered.rate_per_s,
                **figures,
                "breakdown": mean,
                "engine": dict(result.engine),
            }
        )
        stats = result.engine
        per_step = (stats["num_prefill_tokens"] + stats["num_decode_tokens"]) / max(stats["num_steps"], 1)
        notes.append(
            f"{label}: mean request {mean['queue_s']:.2f} s queued, {mean['prefill_s']:.2f} s in prefills, "
            f"{mean['decode_s']:.2f} s in decodes, {mean['transfer_s']:.2f} s in transfers; {mean['num_passes']:.0f} passes, "
            f"{mean['num_blocks']:.1f} blocks; {per_step:,.0f} tokens per step, "
            f"{stats['num_steps']:,.0f} steps, {figures['events_per_s']:,.0f} events/s"
        )
    split = f", {num_prefill_workers} of them prefill" if num_prefill_workers else ""
    title = (
        f"{model} on {num_workers} x {hardware}{split} (simulated), workload {requests.name}, "
        f"budget {budget_tokens} {policy}"
    )
    described = {**requests.summary().to_dict(), "fitted": fitted}
    cut = f"prompts to {most:,} tokens, outputs to {masks:,}"
    _report(title, described, rows, runs, engines, limits_s, as_json, out, cut, notes)


def _report(
    title: str,
    workload: dict[str, Any],
    rows: list[tuple[str, Summary]],
    runs: dict[str, tuple[Timeline, ...]],
    engines: list[dict[str, Any]],
    slo: SLO | None,
    as_json: bool,
    out: Path | None,
    cut: str,
    notes: list[str],
) -> None:
    import json
    import math

    from genserve.core.metrics.summary import to_plain

    points = [
        {"label": label, "summary": summary.to_dict(), **engine}
        for (label, summary), engine in zip(rows, engines, strict=True)
    ]
    text = json.dumps(to_plain({"title": title, "workload": workload, "points": points}), allow_nan=False)
    if out is not None:
        from genserve.core.metrics import plots
        from genserve.core.metrics.report import write_plots

        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(text + "\n")
        write_plots(out, title, runs)
        swept = [
            (engine["offered_rate_per_s"], summary)
            for engine, (_, summary) in zip(engines, rows, strict=True)
            if math.isfinite(engine["offered_rate_per_s"])
        ]
        if len(swept) > 1:
            plots.rate_sweep(swept, out / "sweep.png", title=title)
    if as_json:
        typer.echo(text)
        return
    from rich.console import Console

    from genserve.core.metrics.report import summary_table

    console = Console()
    console.print(summary_table(title, rows, slo))
    fitted = workload["fitted"]
    if fitted["num_cut"]:
        console.print(
            f"! {fitted['num_cut']} of {fitted['num_requests']} requests cut to fit: {cut}",
            style="yellow",
            highlight=False,
        )
    for note in notes:
        console.print(note, highlight=False)
    if out is not None:
        console.print(f"Wrote report.json and plots to {out}")
