"""A workload through an engine in this process, no HTTP between: what `genserve bench offline` measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from genserve.core.errors import GenserveError
from genserve.core.metrics.recorder import Recorder
from genserve.core.metrics.timelines import RequestLog, Timeline
from genserve.core.types import SamplingParams
from genserve.core.workload.spec import RequestSpec, synthesize_prompt
from genserve.core.workload.workload import Workload
from genserve.llm import AsyncLLM

# Called with (requests ended, all requests, output tokens so far, seconds so far).
OnProgress = Callable[[int, int, int, float], None]


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """`cpu_s` is of the whole process; `engine` holds the engine's figures at the end."""

    timelines: tuple[Timeline, ...]
    duration_s: float
    cpu_s: float
    engine: Mapping[str, float]


async def run_offline(
    llm: AsyncLLM,
    workload: Workload,
    concurrency: int,
    on_progress: OnProgress = lambda *state: None,
) -> OfflineResult:
    """Run every request, `concurrency` at a time, arrival times aside: greedy, to its exact length."""
    log = RequestLog(Recorder(), max_timelines=len(workload.requests))
    vocabulary = llm.engine.info.vocab_size
    prompts = [synthesize_prompt(spec, vocabulary) for spec in workload.requests]
    slots = asyncio.Semaphore(concurrency)
    num_done = num_tokens = 0
    start_s, cpu_start_s = time.monotonic(), time.process_time()

    async def one(index: int, spec: RequestSpec) -> None:
        nonlocal num_done, num_tokens
        name = f"r{index}"
        sampling = SamplingParams(temperature=0, max_tokens=spec.num_output_tokens, ignore_eos=True)
        async with slots:
            log.arrived(name, time.monotonic() - start_s, spec.num_prompt_tokens, spec.kind)
            outcome = "stop"
            try:
                async for delta in llm.stream(prompts[index], sampling=sampling):
                    log.tokens(name, time.monotonic() - start_s, len(delta.token_ids))
                    num_tokens += len(delta.token_ids)
                    outcome = delta.finish_reason or outcome
            except GenserveError as error:
                outcome = type(error).__name__
            ok = outcome in ("stop", "length")
            log.finished(name, time.monotonic() - start_s, outcome, ok=ok)
        num_done += 1
        on_progress(num_done, len(prompts), num_tokens, time.monotonic() - start_s)

    await asyncio.gather(*(one(index, spec) for index, spec in enumerate(workload.requests)))
    duration_s, cpu_s = time.monotonic() - start_s, time.process_time() - cpu_start_s
    return OfflineResult(log.timelines, duration_s, cpu_s, await llm.engine.stats())
