"""`genserve bench`: benchmarks from the command line.

Owns options, progress and output; measuring is `core.server.loadgen`. Whatever a command needs is
imported in its body, so that `genserve --help` stays fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

if TYPE_CHECKING:
    from genserve.core.metrics.summary import SLO
    from genserve.core.server.bench_report import BenchReport
    from genserve.core.server.loadgen import OnProgress, Target
    from genserve.core.workload.workload import Workload

app = typer.Typer(
    no_args_is_help=True, help="Measure latency, throughput and goodput.", rich_markup_mode=None
)

ResultT = TypeVar("ResultT")
# (options of run_load, label) of one run; an unset rate is the workload's own.
Load = tuple[float | None, int | None, str]


@app.callback()
def bench() -> None:
    """Measure latency, throughput and goodput."""


@app.command("serve")
def serve(
    base_url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; the server's only one if not given.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="GENSERVE_API_KEY", help="Sent as a bearer token.")
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="chat, code, sangam-sharegpt, sangam-arxiv, mooncake-like, tiny, or a trace's path."
        ),
    ] = "tiny",
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Requests/s, open loop; several or a comma list for a sweep, `inf` for all at once."
        ),
    ] = None,
    concurrency: Annotated[
        list[str] | None, typer.Option(help="Requests kept in flight, closed loop; several for a sweep.")
    ] = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of each run, at most.")] = 100,
    time_limit_s: Annotated[
        float | None, typer.Option(help="Cut each run off after so many seconds.")
    ] = None,
    request_timeout_s: Annotated[
        float, typer.Option(help="Give a request up after so many seconds.")
    ] = 600.0,
    slo: Annotated[
        str | None, typer.Option(help="Limits in seconds, e.g. ttft=0.5,tpot=0.05,e2e=10.")
    ] = None,
    endpoint: Annotated[Literal["chat", "completions"], typer.Option(help="Which API to call.")] = "chat",
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="completions: send token ids below this, of exact length.")
    ] = None,
    scale_lengths: Annotated[float, typer.Option(help="Multiply prompt and output lengths.")] = 1.0,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Cut longer outputs.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for exactly the wanted number of tokens.")] = True,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests sent first and not counted.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths and prompts.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON and nothing else.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json, requests.jsonl and plots.")
    ] = None,
) -> None:
    """Measure any OpenAI-compatible server: percentiles and goodput.

    Without --rate or --concurrency requests arrive as the workload says. Each run of a sweep has
    its own prompts; give another --seed to a server that may remember those of an earlier benchmark.
    """
    from dataclasses import replace

    from genserve.core.errors import ConfigError, GenserveError
    from genserve.core.metrics.summary import SLO
    from genserve.core.server.loadgen import Target, served_models
    from genserve.core.workload.presets import open_workload

    try:
        loads = parse_loads(rate or [], concurrency or [])
        limits = SLO.parse(slo) if slo else None
        requests = open_workload(workload, num_requests, seed).scale_lengths(scale_lengths)
        requests = requests.clip_lengths(max_prompt_tokens or sys.maxsize, max_output_tokens or sys.maxsize)
        common: dict[str, Any] = {"vocab_size": vocab_size, "ignore_eos": ignore_eos, "api_key": api_key}
        common |= {"request_timeout_s": request_timeout_s}
        target = Target(base_url, model or "", endpoint, **common)
        names = _run_async(served_models(target))
        if model is None:
            if len(names) != 1:
                raise ConfigError(
                    f"model: the server has {', '.join(names) or 'none'}; name one with --model"
                )
            target = replace(target, model=names[0])
        elif model not in names:
            raise ConfigError(f"model: no {model!r}; the server has: {', '.join(names) or 'none'}")
        report = _sweep(target, requests, loads, limits, seed, num_warmups, time_limit_s)
        _show(report, as_json, out)
    except GenserveError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    if not any(point.summary.num_ok for point in report.points):
        raise typer.Exit(1)


def parse_loads(rates: list[str], concurrencies: list[str]) -> list[Load]:
    from genserve.core.errors import ConfigError

    if rates and concurrencies:
        raise ConfigError("rate, concurrency: give one or the other")
    loads: list[Load] = [(value, None, f"rate {value:g}/s") for value in _numbers("rate", rates, float)] + [
        (None, value, f"concurrency {value}") for value in _numbers("concurrency", concurrencies, int)
    ]
    return loads or [(None, None, "as the workload says")]


def _numbers(name: str, texts: list[str], kind: Callable[[str], ResultT]) -> list[ResultT]:
    from genserve.core.errors import ConfigError

    values: list[Any] = []
    for text in ",".join(texts).split(",") if texts else []:
        try:
            values.append(kind(text))
        except ValueError:
            raise ConfigError(f"{name}: expected numbers, got {text!r}") from None
        if not values[-1] > 0:
            raise ConfigError(f"{name}: must be above 0, got {text}")
    return values


def _sweep(
    target: Target,
    workload: Workload,
    loads: list[Load],
    slo: SLO | None,
    seed: int,
    num_warmups: int,
    time_limit_s: float | None,
) -> BenchReport:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from genserve.core.server.bench_report import BenchPoint, BenchReport
    from genserve.core.server.loadgen import run_load

    points: list[BenchPoint] = []
    # On stderr, so that stdout carries the result alone.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as progress:
        if num_warmups:
            warmup = workload.with_other_prompts(len(loads)).first(num_warmups)
            shown = _shown(progress, "warm-up", len(warmup.requests))
            _run_async(run_load(target, warmup, concurrency=4, time_limit_s=time_limit_s, on_progress=shown))
        for salt, (rate, concurrency, label) in enumerate(loads):
            requests = workload.with_other_prompts(salt)
            requests = requests if rate is None else requests.at_rate(rate)
            shown = _shown(progress, label, len(requests.requests))
            load = run_load(
                target, requests, concurrency=concurrency, time_limit_s=time_limit_s, on_progress=shown
            )
            result = _run_async(load)
            points.append(BenchPoint(label, result, result.summary(slo)))
    return BenchReport(target, workload.summary(), seed, slo, tuple(points))


def _shown(progress: Any, label: str, num_total: int) -> OnProgress:
    task = progress.add_task(label, total=num_total, note="")

    def show(state: Any) -> None:
        failed = f", {state.num_failed} failed" if state.num_failed else ""
        speed = state.num_output_tokens / max(state.elapsed_s, 1e-9)
        in_flight = state.num_sent - state.num_done
        note = f"{in_flight} in flight, {speed:.0f} tok/s{failed}"
        progress.update(task, completed=state.num_done, note=note)

    return show


def _show(report: BenchReport, as_json: bool, out: Path | None) -> None:
    import json

    from rich.console import Console

    from genserve.core.server.bench_report import report_table, write_report

    written = write_report(report, out) if out is not None else []
    if as_json:
        typer.echo(json.dumps(report.to_dict(), allow_nan=False))
        return
    console = Console()
    console.print(report_table(report))
    if written:
        console.print(f"Wrote {len(written)} files to {out}")


def _run_async(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    from genserve.core.server.run import run

    result: ResultT = run(lambda: work)
    return result
