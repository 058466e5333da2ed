"""`genserve bench offline`: throughput of an engine in this process, without HTTP."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genserve import cli_options as opt

if TYPE_CHECKING:
    from genserve.core.workload.workload import Workload
    from genserve.offline import OfflineResult


def offline(
    model: opt.Model = "tiny-llama",
    workload: Annotated[
        str,
        typer.Option(
            help="chat, code, sangam-sharegpt, sangam-arxiv, mooncake-like, tiny, or a trace's path."
        ),
    ] = "tiny",
    num_requests: Annotated[int, typer.Option(min=1, help="Requests, at most.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests handed over at a time.")] = 64,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer outputs.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths and prompts.")] = 0,
    dtype: opt.Dtype = None,
    kv_pool: opt.KvPool = None,
    num_threads: opt.NumThreads = None,
    max_running: opt.MaxRunning = None,
    budget_tokens: opt.BudgetTokens = None,
    executor: opt.Executor = None,
    as_json: opt.Json = False,
) -> None:
    """Measure an engine's throughput without HTTP.

    Of the workload the lengths count, not the arrival times.
    """
    import json
    from dataclasses import asdict

    from genserve.core.metrics.summary import summarize, to_plain
    from genserve.core.workload.presets import open_workload

    requests = open_workload(workload, num_requests, seed)
    requests = requests.clip_lengths(max_prompt_tokens or sys.maxsize, max_output_tokens or sys.maxsize)
    options = opt.given(
        dtype=dtype,
        kv_pool=kv_pool,
        num_threads=num_threads,
        max_running=max_running,
        budget_tokens=budget_tokens,
        executor=executor,
    )
    result = _run(model, options, requests, concurrency)
    summary = summarize(result.timelines, duration_s=result.duration_s)
    if as_json:
        engine = {"cpu_s": result.cpu_s, "engine": dict(result.engine)}
        report = {"model": model, "workload": asdict(requests.summary()), "summary": summary.to_dict()}
        typer.echo(json.dumps(to_plain({**report, **engine}), allow_nan=False))
    else:
        from rich.console import Console

        from genserve.core.metrics.report import summary_table

        console = Console(highlight=False)
        label = f"{concurrency} at a time"
        console.print(
            summary_table(f"{model} in process, workload {requests.name}", [(label, summary)], None)
        )
        stats, busy_s = result.engine, max(result.cpu_s, 1e-9)
        others = {"num_steps": "steps", "num_passes": "passes", "num_preemptions": "preemptions"}
        others |= {"num_cached_tokens": "cached prompt tokens"}
        told = ", ".join(f"{stats[name]:,.0f} {text}" for name, text in others.items() if name in stats)
        console.print(
            f"{result.duration_s:.2f} s, {result.cpu_s:.2f} CPU seconds: "
            f"{summary.total_tokens_per_s:,.1f} tokens/s with prompts, "
            f"{summary.num_output_tokens / busy_s:,.1f} output tokens per CPU second; "
            f"{told}"
        )
    if summary.num_ok < summary.num_requests:
        typer.echo(f"Error: requests ended as {summary.outcomes}", err=True)
        raise typer.Exit(1)


def _run(model: str, options: dict[str, Any], workload: Workload, concurrency: int) -> OfflineResult:
    from rich.console import Console
    from rich.progress import Progress

    from genserve.cli_progress import LoadProgress
    from genserve.core.server.run import run
    from genserve.llm import AsyncLLM
    from genserve.offline import run_offline

    async def measure() -> OfflineResult:
        with LoadProgress() as loading:
            loading.begin(model)
            llm = await AsyncLLM.start(model, on_progress=loading.on_progress, **options)
        async with llm:
            info = llm.engine.info
            longest = min(info.max_context_tokens, info.kv_pool_tokens) // 2
            fitting = workload.clip_lengths(longest, longest)
            console = Console(stderr=True)
            with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
                task = bar.add_task("running", total=len(fitting.requests))

                def show(num_done: int, num_all: int, num_tokens: int, elapsed_s: float) -> None:
                    speed = num_tokens / max(elapsed_s, 1e-9)
                    bar.update(task, completed=num_done, description=f"{speed:.0f} tokens/s")

                return await run_offline(llm, fitting, concurrency, show)

    result: OfflineResult = run(measure)
    return result
