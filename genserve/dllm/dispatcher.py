"""The controller in front of the engines: admits requests, routes their blocks, streams what is settled.

Owns the order of arrival and each request (`dllm.tracked`); which engine takes it is `dllm.pool`. Must not
know steps, budgets or tensors (Sangam §4.3). An engine is told to keep a request for all its
blocks if there is no choice (one engine, `sticky`) or its KV outlives a block; else every block is
routed anew. Whatever was told is rebuilt from token ids when an engine is lost: a request goes back to
the start of its block (`dkv`: of its answer, whose KV its later blocks build upon), and since noise is
a function of the position alone, what was streamed already comes out again and is not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from genserve.core.control import Effect, Event, Message, Send, Timer, WakeAt
from genserve.core.metrics.recorder import TOKEN_BUCKETS, Recorder
from genserve.core.types import (
    DEADLINE_EXCEEDED,
    Abort,
    FinishReason,
    Submit,
    TokenLogprobs,
    TokenOutput,
    Unmasked,
)
from genserve.dllm.ledger import EngineLedger
from genserve.dllm.limits import EngineLimits
from genserve.dllm.messages import (
    ChangeRole,
    Drain,
    EngineBack,
    EngineJoined,
    EngineLost,
    Handed,
    Progress,
    Report,
    Role,
)
from genserve.dllm.pool import Pool
from genserve.dllm.request import DiffusionParams
from genserve.dllm.routing import Routing
from genserve.dllm.step import Commit
from genserve.dllm.tracked import TrackedRequest, answer_end, max_tokens

# A request whose engines die this often and once more may be what kills them, and others must go on.
MAX_RESTARTS = 3


class Dispatcher:
    """The `Controller` of a deployment of equal `engines`. Outputs go to `reply_to`, one `Send` a decision.

    engines    names, or names with roles; without roles all are colocated.
    overload_tokens  Sangam's theta: prefill workers with as many tokens outstanding get no more, and the
                     colocated ones prefill too, up to as many each. None: they never do.
    `recorder` gets queue times, times to the first commit and passes per block.
    """

    def __init__(
        self,
        engines: Sequence[str] | Mapping[str, Role],
        limits: EngineLimits,
        routing: Routing = "least_outstanding",
        reply_to: str = "gateway",
        recorder: Recorder | None = None,
        overload_tokens: int | None = None,
    ) -> None:
        roles: Mapping[str, Role] = (
            engines if isinstance(engines, Mapping) else dict.fromkeys(engines, "colocated")
        )
        self.limits = limits
        self.pool = Pool(roles, limits, routing, overload_tokens)
        self._reply_to = reply_to
        self._requests: dict[str, TrackedRequest] = {}
        self._num_arrived = 0
        self._outbox: list[TokenOutput] = []
        self._effects: list[Effect] = []
        recorder = recorder if recorder is not None else Recorder(enabled=False)
        self._queue_s = recorder.histogram("queue_s", "Time from arrival until the first pass began")
        self._wait_s = recorder.histogram("prefill_wait_s", "Time that a block's prefill waited")
        self._handover_s = recorder.histogram(
            "handover_s", "Time from a prefill's end until its KV was fetched"
        )
        self._first_commit_s = recorder.histogram("first_commit_s", "Time from arrival to the first commit")
        self._block_passes = recorder.histogram("block_passes", "Passes per block", TOKEN_BUCKETS)
        self.num_restarts = 0

    # -- facts ---------------------------------------------------------------------------------

    def observe(self, event: Event, now: float) -> None:
        if isinstance(event, Message):
            body = event.body
            if isinstance(body, Report):
                self._on_report(body, now)
            elif isinstance(body, Submit):
                self._on_submit(body, now)
            elif isinstance(body, Abort):
                self._abandon(body.request_id, "abort")
            elif isinstance(body, EngineLost):
                self._on_lost(body, now)
            elif isinstance(body, EngineBack):
                self.pool.back(body.engine)
            elif isinstance(body, EngineJoined):
                self.pool.join(body.engine, body.role)
            elif isinstance(body, Drain):
                self.pool.drain(body.engine)
            elif isinstance(body, ChangeRole):
                self.pool.change_role(body)
            else:
                raise TypeError(f"dispatcher got a message it does not know: {type(body).__name__}")
        elif isinstance(event, Timer):
            request = self._requests.get(event.tag.rpartition("#")[0])
            if request is not None and request.tag == event.tag:
                self._abandon(request.request_id, "error", DEADLINE_EXCEEDED)
        else:
            raise TypeError(f"dispatcher got an event it does not know: {type(event).__name__}")

    def _on_submit(self, submit: Submit, now: float) -> None:
        params = submit.options if submit.options is not None else DiffusionParams()
        problem = self._refusal(submit, params)
        if problem is not None:
            self._outbox.append(TokenOutput(submit.request_id, finish_reason="error", error=problem))
            return
        self._num_arrived += 1
        request = TrackedRequest(submit, self._num_arrived, params, self.limits, now)
        self._requests[request.request_id] = request
        if submit.deadline_s is not None:
            self._effects.append(WakeAt(submit.deadline_s, request.tag))
        block = request.next_block()
        if block is None or request.canvas.is_settled:
            self._tell(request, ended=True)
        else:
            request.enter(block)
            self.pool.enqueue(request, now)

    def _refusal(self, submit: Submit, params: DiffusionParams) -> str | None:
        limits = self.limits
        if not isinstance(params, DiffusionParams):
            return f"options of type {type(params).__name__} are not a diffusion model's"
        if submit.request_id in self._requests:
            return f"request id {submit.request_id!r} is already in use"
        if not submit.prompt_token_ids:
            return "the prompt is empty"
        if params.block_length < 1:
            return f"block_length must be at least 1, not {params.block_length}"
        if params.refresh_interval < 1:
            return f"refresh_interval must be at least 1, not {params.refresh_interval}"
        if params.cfg_scale > 0 and params.cache != "none":
            return f"cfg_scale needs cache 'none', not {params.cache!r}"
        if params.suffix_token_ids and params.cache in ("block", "canvas"):
            return f"cache {params.cache!r} never sees a suffix"
        num_answer = max_tokens(submit, params, limits)
        total = len(submit.prompt_token_ids) + num_answer + len(params.suffix_token_ids)
        if num_answer < 0 or total > limits.max_context_tokens:
            return f"{total - min(num_answer, 0)} tokens exceed the context of {limits.max_context_tokens}"
        for offset, _ in params.pinned:
            if not 0 <= offset < num_answer:
                return f"pinned: offset {offset} is outside the answer of {num_answer} tokens"
        length = answer_end(submit, params, limits) + len(params.suffix_token_ids)
        if length > limits.max_context_tokens:
            return f"{length} tokens in whole canvases exceed the context of {limits.max_context_tokens}"
        if limits.pages_for(length, params) > limits.num_pages:
            pool = limits.num_pages * limits.page_tokens
            each = " twice" if params.cfg_scale > 0 else ""
            return f"{length} tokens{each} exceed the KV pool of {pool} tokens"
        return None

    def _on_report(self, report: Report, now: float) -> None:
        engine = self.pool.engines.get(report.engine)
        if engine is None:  # it was drained and is gone
            return
        for progress in report.progress:
            held = engine.held.get(progress.request_id)
            if held is None:
                continue
            if progress.ended is not None:
                engine.give_back(progress.request_id)
            elif progress.prefilled:
                engine.started(progress.request_id)
            if held.request is not None:
                self._on_progress(held.request, engine, progress, now)

    def _on_progress(
        self, request: TrackedRequest, engine: EngineLedger, progress: Progress, now: float
    ) -> None:
        ended = progress.ended
        if ended in ("error", "cancelled"):
            request.engine = None
            self._finish(request, "error", progress.error or "the engine dropped the request")
            return
        if progress.arrived:
            self._handover_s.observe(now - request.queued_s)
            self.pool.forget_source(request)
            return
        canvas = request.canvas
        if progress.block_index != request.block.index:
            self._block_passes.observe(request.num_block_passes)
            request.enter(canvas.block(progress.block_index))
        if progress.prefilled:
            waited_s = request.waited_s + progress.waited_s
            request.waited_s = 0.0
            self._wait_s.observe(waited_s)
            if not request.num_passes:
                self._queue_s.observe(waited_s)
        if progress.num_cached_tokens and not request.told_first:
            request.num_cached = progress.num_cached_tokens
        step = request.num_passes
        request.num_passes += 1
        request.num_block_passes += 1
        if progress.commits and not request.has_committed:
            request.has_committed = True
            self._first_commit_s.observe(now - request.arrival_s)
        for commit in progress.commits:
            canvas.commit(commit.position, commit.token_id)
            if commit.logprobs is not None:
                request.logprobs[commit.position] = commit.logprobs
        if progress.filled:
            canvas.fill_after_stop(self.limits.fill_token_id)
        if ended == "transfer":
            request.engine = None
            request.stays_whole = True
            self.pool.forget_source(request)
            self._begin_again(request, progress.error or "", now)
            return
        if progress.handed is not None:
            self._on_handed(request, engine, progress.handed, now)
        if ended is None:
            self._tell(request, progress.commits, step)
            return
        request.engine = None
        self._block_passes.observe(request.num_block_passes)
        following = request.next_block() if ended == "block" else None
        if following is None:
            self._tell(request, progress.commits, step, ended=True)
        else:
            request.enter(following)
            self._tell(request, progress.commits, step)
            self.pool.enqueue(request, now)

    def _on_handed(self, request: TrackedRequest, engine: EngineLedger, handed: Handed, now: float) -> None:
        """The block's prefill is done; `engine` keeps the KV for another one, or for itself."""
        if handed.block_index != request.block.index:
            self._block_passes.observe(request.num_block_passes)
            request.enter(request.canvas.block(handed.block_index))
        engine.keeps(request.key)
        request.engine, request.source, request.source_key = None, engine, request.key
        request.handed = handed
        self.pool.prefilled(request, now)

    def _on_lost(self, lost: EngineLost, now: float) -> None:
        for request in self.pool.lost(lost.engine):
            self._begin_again(request, lost.error, now)

    def _begin_again(self, request: TrackedRequest, error: str, now: float) -> None:
        """From KV that another engine still keeps, else from the last place that token ids suffice for."""
        if request.num_restarts == MAX_RESTARTS:
            tries = f"{MAX_RESTARTS + 1} engines were lost with this request or could not hand it over"
            self._finish(request, "error", f"{tries}, the last: {error}")
            return
        self.num_restarts += 1
        request.num_restarts += 1
        if request.source is not None:
            self.pool.prefilled(request, now)
        else:
            request.restart()
            self.pool.enqueue(request, now)

    # -- outputs and endings ---------------------------------------------------------------------

    def _tell(
        self, request: TrackedRequest, commits: Sequence[Commit] = (), step: int = -1, *, ended: bool = False
    ) -> None:
        """Stream what has become the committed prefix, and end the request with its answer."""
        canvas, first = request.canvas, request.canvas.prompt_len
        end = min(canvas.settled_end(), request.limit)
        stop = canvas.first_stop
        if stop is not None and stop >= request.limit:
            stop = None
        if stop is not None:
            end = min(end, stop + 1)
        if request.params.editing_threshold is not None and not ended:
            end = min(end, request.block.start)
        start = first + request.num_told
        token_ids = tuple(canvas.ids[start:end])
        unmasked: tuple[Unmasked, ...] = ()
        if request.params.include_unmasking and step >= request.num_told_passes:
            request.num_told_passes = step + 1
            unmasked = tuple(
                [
                    Unmasked(commit.position - first, commit.token_id, commit.confidence, step)
                    for commit in commits
                    if commit.position < request.limit
                ]
            )
        if not (token_ids or unmasked or ended):
            return
        request.num_told += len(token_ids)
        self._outbox.append(
            TokenOutput(
                request.request_id,
                token_ids,
                self._take_logprobs(request, start, token_ids),
                finish_reason=None if not ended else "length" if stop is None else "stop",
                stop_token_id=canvas.ids[stop] if ended and stop is not None else None,
                num_cached_tokens=request.num_cached,
                unmasked=unmasked,
            )
        )
        request.num_cached = 0
        request.told_first = True
        if ended:
            self._forget(request)

    def _take_logprobs(
        self, request: TrackedRequest, start: int, token_ids: Sequence[int]
    ) -> tuple[TokenLogprobs, ...]:
        if request.sampling.logprobs is None:
            return ()
        # What was given (pinned) was certain.
        certain = [TokenLogprobs(token_id, 0.0) for token_id in token_ids]
        return tuple([request.logprobs.pop(at, given) for at, given in enumerate(certain, start)])

    def _abandon(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End a request on its client's or its deadline's behalf, wherever it is. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason, error)

    def _finish(self, request: TrackedRequest, reason: FinishReason, error: str | None) -> None:
        output = TokenOutput(
            request.request_id, finish_reason=reason, error=error, num_cached_tokens=request.num_cached
        )
        self._outbox.append(output)
        self._forget(request)

    def _forget(self, request: TrackedRequest) -> None:
        del self._requests[request.request_id]
        if request.has_deadline:
            self._effects.append(WakeAt(math.inf, request.tag))
        self.pool.leave(request)

    # -- plans ---------------------------------------------------------------------------------

    def decide(self, now: float) -> Iterable[Effect]:
        effects: list[Effect] = [*self._effects, *self.pool.take_effects(now)]
        self._effects.clear()
        if self._outbox:
            effects.append(Send(self._reply_to, tuple(self._outbox)))
            self._outbox.clear()
        return effects

    # -- for gauges and leak checks --------------------------------------------------------------

    def stats(self, engines: Sequence[Mapping[str, float]] = ()) -> dict[str, float]:
        """Gauges and counters: the engines' own added up, if given, and the dispatcher's."""
        total: dict[str, float] = {}
        for figures in engines:
            for name, value in figures.items():
                total[name] = total.get(name, 0) + value
        total["num_sequences"] = len(self._requests)
        pool = self.pool.stats()
        total["num_waiting"] = total.get("num_waiting", 0) + pool["num_queued"] + pool["num_prefilled"]
        total["num_restarts"] = self.num_restarts
        return {**total, **pool}
