"""Composition root of dLLM simulation: dispatcher and engines themselves, on the virtual clock.

Owns the invented outcome of passes. Imports no torch and reads no clock; a run depends on its workload,
its seed and its options alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from genserve.core.control import Controller, Run
from genserve.core.cost import CostModel
from genserve.core.dispatch import LogEntry
from genserve.core.errors import ConfigError
from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.core.metrics.recorder import Recorder
from genserve.core.metrics.timelines import RequestLog, Timeline
from genserve.core.sim.simulator import Simulator
from genserve.core.types import SamplingParams, Submit, TokenOutput
from genserve.core.workload.spec import RequestSpec, synthesize_prompt
from genserve.core.workload.workload import Workload
from genserve.dllm.cache import LASTING, kv_end
from genserve.dllm.canvas import Canvas
from genserve.dllm.dispatcher import Dispatcher
from genserve.dllm.engine import Engine
from genserve.dllm.limits import EngineLimits
from genserve.dllm.pool import engine_roles
from genserve.dllm.request import DiffusionParams
from genserve.dllm.routing import Routing
from genserve.dllm.step import (
    FETCH,
    STEP,
    Admit,
    Commit,
    Denoised,
    Handover,
    Pass,
    StepArgs,
    StepResult,
)

_PROMPT_VOCABULARY = 30_000
_TOKEN = _PROMPT_VOCABULARY
EOS = _PROMPT_VOCABULARY + 1


@dataclass(frozen=True, slots=True)
class Denoising:
    """How many positions a pass commits: 1 and a Poisson number more.

    Its mean is `1 + (tokens_per_pass - 1) * difficulty`, with a lognormal factor for the request (of
    `request_sigma`) and a gamma one for the block (of `block_shape`), both of mean 1: outputs of one length
    take widely different numbers of passes. The defaults are an assumption, calibrated with the cost
    model (`dllm.cost`): some 16 passes for a block of 32 at threshold 0.9.
    """

    tokens_per_pass: float = 3.25
    request_sigma: float = 0.5
    block_shape: float = 4.0


class _Slot:
    """A canvas; `left` are the block's open positions in the order of their commits, last first."""

    __slots__ = ("block", "canvas", "counts", "eos", "left", "mean_more", "params", "seed")

    def __init__(self, admit: Admit, mean_more: float, eos: int | None) -> None:
        self.canvas = Canvas(
            admit.ids,
            admit.prompt_len,
            admit.answer_end,
            admit.params.block_length,
            aligned=admit.params.cache == "block",
            stop_ids=admit.sampling.stop_token_ids,
            stop_in_prompt=admit.params.stop_in_prompt,
        )
        self.params = admit.params
        self.seed = admit.sampling.seed or 0
        self.mean_more = mean_more
        self.eos = eos
        self.block = -1
        self.left: list[int] = []
        self.counts: list[int] = []
        if admit.resume is not None:
            self.block, left, counts = admit.resume
            self.left, self.counts = list(left), list(counts)

    def begin(self, index: int, start: int, end: int, shape: float) -> None:
        """Draw what the passes of a block commit."""
        self.block = index
        rng = np.random.default_rng((self.seed, 1 + index))
        left = self.canvas.open_positions(start, end)
        self.left = [left[place] for place in rng.permutation(len(left)).tolist()]
        mean_more = self.mean_more * rng.gamma(shape, 1 / shape)
        self.counts = rng.poisson(mean_more, len(left)).tolist()
        if self.eos in self.left:
            # The end is among the surest: it goes first, and takes what follows it with it.
            self.left.remove(self.eos)
            self.left.append(self.eos)


class Denoiser:
    """`OutcomeModel` of diffusion steps: answers settle in random order and end where `num_outputs` says.

    `num_outputs` maps a request id to the length of its answer, its end-of-sequence token included; ids
    that it does not know end at their last position. What a pass commits is a function of the request's
    seed, the block and the pass.
    """

    def __init__(self, model: Denoising, num_outputs: Mapping[str, int]) -> None:
        self._model = model
        self._num_outputs = num_outputs
        self._slots: dict[tuple[str, int], _Slot] = {}
        self._mean_more: dict[int, float] = {}

    def outcome(self, run: Run) -> StepResult | None:
        if run.op != STEP:
            return None
        args: StepArgs = run.args
        for slot in args.freed:
            self._slots.pop((run.lane, slot), None)
        for admit in args.admits:
            # Engines know requests by their id and their number of arrival.
            num_output = self._num_outputs.get(admit.request_id.rpartition("#")[0])
            eos = None if num_output is None else admit.prompt_len + num_output - 1
            self._slots[run.lane, admit.slot] = _Slot(admit, self._difficulty(admit.sampling.seed or 0), eos)
        return StepResult(tuple([self._pass(self._slots[run.lane, p.slot], p) for p in args.passes]))

    def _difficulty(self, seed: int) -> float:
        """Mean number of further positions that a request's pass commits."""
        found = self._mean_more.get(seed)
        if found is None:
            sigma = self._model.request_sigma
            factor = np.random.default_rng((seed, 0)).lognormal(-sigma * sigma / 2, sigma)
            found = self._mean_more[seed] = (self._model.tokens_per_pass - 1) * float(factor)
        return found

    def _pass(self, slot: _Slot, asked: Pass) -> Denoised:
        index, start, end = asked.block
        canvas = slot.canvas
        if slot.block != index:
            slot.begin(index, start, end, self._model.block_shape)
        left = slot.left
        num_chosen = 1 + slot.counts.pop()
        chosen = left[-num_chosen:]
        del left[-num_chosen:]
        chosen.sort()
        eos = slot.eos
        filled = eos is not None and eos in chosen
        if eos is not None and filled:
            chosen = [position for position in chosen if position <= eos]
            slot.left = left = [position for position in left if position < eos]
        commits = tuple([Commit(p, EOS if p == eos else _TOKEN, 0.95) for p in chosen])
        for position in chosen:
            canvas.commit(position, EOS if position == eos else _TOKEN)
        if filled:
            canvas.fill_after_stop(EOS)
        handover = None
        mode = slot.params.cache
        if asked.hand_over and (left or mode in LASTING):
            num_tokens = kv_end(mode, canvas.block(index), len(canvas))
            handover = Handover((index, tuple(left), tuple(slot.counts)), -(-num_tokens // PAGE_TOKENS))
        return Denoised(asked.slot, commits, filled, not left, handover=handover)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where a request's time went. `queue_s` is what is none of the others: waits for a prefill, above all."""

    request_id: str
    e2e_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    transfer_s: float
    num_blocks: int
    num_passes: int
    num_output_tokens: int


class _Metered:
    """Passes prices through, and notes which requests each step held up, and for what."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._request_of: dict[tuple[str, int], str] = {}
        self.figures: dict[str, list[float]] = {}

    def price_s(self, run: Run) -> float:
        price_s = self._cost.price_s(run)
        if run.op == FETCH:
            self.figures[run.args.request_id.rpartition("#")[0]][4] += price_s
        if run.op != STEP:
            return price_s
        args: StepArgs = run.args
        new = {admit.slot for admit in args.admits if admit.resume is None}
        for admit in args.admits:
            self._request_of[run.lane, admit.slot] = admit.request_id.rpartition("#")[0]
        for asked in args.passes:
            request_id = self._request_of[run.lane, asked.slot]
            figures = self.figures.get(request_id)
            if figures is None:
                figures = self.figures[request_id] = [0.0, 0.0, 0, 0, 0.0]
            figures[0 if asked.slot in new else 1] += price_s
            figures[2] += asked.is_start
            figures[3] += 1
        return price_s


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a simulated run did. Times are on the virtual clock."""

    timelines: tuple[Timeline, ...]
    breakdowns: tuple[Breakdown, ...]
    duration_s: float
    num_events: int
    engine: Mapping[str, float]
    recorder: Recorder


def to_submit(spec: RequestSpec, index: int, params: DiffusionParams, num_masks: int) -> Submit:
    """The request that the simulated front end hands over: its answer has `num_masks` open positions."""
    if params.cache == "block":
        prompt = tuple(synthesize_prompt(spec, _PROMPT_VOCABULARY))
    else:
        prompt = (1,) * spec.num_prompt_tokens
    sampling = SamplingParams(temperature=0, seed=spec.seed & 0x7FFFFFFF, max_tokens=num_masks)
    return Submit(f"r{index}", prompt, sampling, options=params)


def simulate(
    workload: Workload,
    limits: EngineLimits,
    cost: CostModel,
    num_workers: int = 1,
    routing: Routing = "least_outstanding",
    params: DiffusionParams | None = None,
    num_masks: int = 1024,
    denoising: Denoising | None = None,
    log: list[LogEntry] | None = None,
    num_prefill_workers: int = 0,
    overflow_tokens: int | None = None,
) -> SimulationResult:
    """Run `workload` on `num_workers` engines; outputs longer than `num_masks` are cut there.

    `num_prefill_workers` of them only prefill; the others take prefills too once each of these has
    `overflow_tokens` outstanding (None: never).

    Raises `ConfigError` for requests that can never fit.
    """
    params = params if params is not None else DiffusionParams()
    limits = replace(limits, fill_token_id=EOS, eos_token_ids=(EOS,))
    longest = max((spec.num_prompt_tokens for spec in workload.requests), default=0) + num_masks
    most = min(limits.max_context_tokens, limits.num_pages * limits.page_tokens)
    if longest > most:
        raise ConfigError(
            f"workload {workload.name}: a request needs {longest} tokens with its {num_masks} masks, "
            f"an engine holds {most}; clip the lengths or enlarge the pool"
        )
    recorder = Recorder()
    requests = RequestLog(recorder, max_timelines=len(workload.requests))

    def gateway(now: float, outputs: tuple[TokenOutput, ...]) -> None:
        for output in outputs:
            if output.num_cached_tokens:
                requests.cached(output.request_id, output.num_cached_tokens)
            if output.token_ids:
                requests.tokens(output.request_id, now, len(output.token_ids))
            if output.finish_reason is not None:
                ok = output.finish_reason in ("stop", "length")
                requests.finished(output.request_id, now, output.finish_reason, ok=ok)

    roles = engine_roles(num_workers, num_prefill_workers)
    dispatcher = Dispatcher(roles, limits, routing, recorder=recorder, overload_tokens=overflow_tokens)
    engines = {name: Engine(name, limits) for name in roles}
    controllers: dict[str, Controller] = {"dispatcher": dispatcher, **engines}
    num_outputs = {
        f"r{index}": max(1, spec.num_output_tokens) for index, spec in enumerate(workload.requests)
    }
    outcome = Denoiser(denoising if denoising is not None else Denoising(), num_outputs)
    metered = _Metered(cost)
    simulator = Simulator(controllers, metered, outcome, {"gateway": gateway}, log)
    # One arrival ahead at a time: prompts of a long trace would fill memory.
    for index, spec in enumerate(workload.requests):
        simulator.run(before_s=spec.arrival_s)
        requests.arrived(f"r{index}", spec.arrival_s, spec.num_prompt_tokens, spec.kind)
        simulator.post("dispatcher", to_submit(spec, index, params, num_masks), spec.arrival_s)
    duration_s = simulator.run()
    breakdowns = []
    for timeline in requests.timelines:
        prefill_s, decode_s, num_blocks, num_passes, transfer_s = metered.figures.get(
            timeline.request_id, (0, 0, 0, 0, 0)
        )
        queue_s = max(timeline.e2e_s - prefill_s - decode_s - transfer_s, 0.0)
        breakdowns.append(
            Breakdown(
                timeline.request_id,
                timeline.e2e_s,
                queue_s,
                prefill_s,
                decode_s,
                transfer_s,
                int(num_blocks),
                int(num_passes),
                timeline.num_output_tokens,
            )
        )
    stats = dispatcher.stats([engine.stats() for engine in engines.values()])
    return SimulationResult(
        requests.timelines, tuple(breakdowns), duration_s, simulator.num_events, stats, recorder
    )


def mean_breakdown(breakdowns: Sequence[Breakdown]) -> dict[str, float]:
    """The mean of every figure; empty for no request."""
    names = (
        "e2e_s",
        "queue_s",
        "prefill_s",
        "decode_s",
        "transfer_s",
        "num_blocks",
        "num_passes",
        "num_output_tokens",
    )
    num = len(breakdowns)
    return {name: sum([getattr(each, name) for each in breakdowns]) / num for name in names} if num else {}
