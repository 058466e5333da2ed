"""Composition root of AR simulation: the engine's own controller on the virtual clock.

Imports no torch and reads no clock; a run depends on its workload and seed alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from genserve.ar.engine import Engine, EngineLimits
from genserve.ar.step import Sampled, StepArgs, StepResult
from genserve.core.control import Run
from genserve.core.cost import CostModel
from genserve.core.dispatch import LogEntry
from genserve.core.errors import ConfigError
from genserve.core.metrics.recorder import Recorder
from genserve.core.metrics.timelines import RequestLog, Timeline
from genserve.core.sim.simulator import Simulator
from genserve.core.types import SamplingParams, Submit, TokenOutput
from genserve.core.workload.spec import RequestSpec, synthesize_prompt
from genserve.core.workload.workload import Workload

# Prompts are drawn from this many ids; generated tokens all have the id above them, so that a
# generated page is never mistaken for a prompt's.
_PROMPT_VOCABULARY = 30_000


class NeverEnding:
    """`OutcomeModel` of AR steps: every row gets the same token, so requests end at `max_tokens`."""

    def outcome(self, run: Run) -> StepResult:
        args: StepArgs = run.args
        return StepResult(tuple([Sampled(row.slot, _PROMPT_VOCABULARY) for row in args.rows if row.sample]))


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a simulated run did. Times are on the virtual clock."""

    timelines: tuple[Timeline, ...]
    duration_s: float
    num_events: int
    engine: Mapping[str, float]
    recorder: Recorder


def to_submit(spec: RequestSpec, request_id: str) -> Submit:
    """The request that the simulated front end hands to the engine."""
    return Submit(
        request_id,
        tuple(synthesize_prompt(spec, _PROMPT_VOCABULARY)),
        SamplingParams(temperature=0, max_tokens=spec.num_output_tokens, ignore_eos=True),
    )


def simulate(
    workload: Workload,
    limits: EngineLimits,
    cost: CostModel,
    keep_token_times: bool = False,
    log: list[LogEntry] | None = None,
) -> SimulationResult:
    """Run `workload` through one engine. Raises `ConfigError` for requests that can never fit."""
    most = min(limits.max_context_tokens, limits.num_pages * limits.page_tokens)
    for index, spec in enumerate(workload.requests):
        total = spec.num_prompt_tokens + spec.num_output_tokens
        if total > most:
            raise ConfigError(
                f"workload {workload.name}: request {index} needs {total} tokens, the engine holds {most}; "
                "clip the lengths or enlarge the pool"
            )
    recorder = Recorder()
    requests = RequestLog(recorder, max_timelines=len(workload.requests), keep_token_times=keep_token_times)

    def gateway(now: float, outputs: tuple[TokenOutput, ...]) -> None:
        for output in outputs:
            if output.num_cached_tokens:
                requests.cached(output.request_id, output.num_cached_tokens)
            if output.token_ids:
                requests.tokens(output.request_id, now, len(output.token_ids))
            if output.finish_reason is not None:
                ok = output.finish_reason in ("stop", "length")
                requests.finished(output.request_id, now, output.finish_reason, ok=ok)

    engine = Engine(limits)
    simulator = Simulator({"engine": engine}, cost, NeverEnding(), {"gateway": gateway}, log)
    # One arrival ahead at a time: prompts of a long trace would fill memory.
    for index, spec in enumerate(workload.requests):
        simulator.run(before_s=spec.arrival_s)
        request_id = f"r{index}"
        requests.arrived(request_id, spec.arrival_s, spec.num_prompt_tokens, spec.kind)
        simulator.post("engine", to_submit(spec, request_id), spec.arrival_s)
    duration_s = simulator.run()
    stats: dict[str, Any] = engine.stats()
    return SimulationResult(requests.timelines, duration_s, simulator.num_events, stats, recorder)
