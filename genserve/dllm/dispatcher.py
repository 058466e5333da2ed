"""The controller in front of the engines: admits requests, routes their blocks, streams what is settled.

Owns the order of arrival, each request (`dllm.tracked`) and the engines' ledgers (`dllm.ledger`); must not
know steps, budgets or tensors (Sangam §4.3, colocated). An engine is told to keep a request for all its
blocks if there is no choice (one engine, `sticky`) or its KV outlives a block; else every block is
routed anew. Whatever was told is rebuilt from token ids when an engine is lost: a request goes back to
the start of its block (`dkv`: of its answer, whose KV its later blocks build upon), and since noise is
a function of the position alone, what was streamed already comes out again and is not repeated.
"""

from __future__ import annotations

import math
from bisect import insort
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
from genserve.dllm.cache import LASTING
from genserve.dllm.engine import EngineLimits
from genserve.dllm.ledger import EngineLedger, Held
from genserve.dllm.messages import Assign, Cancel, EngineBack, EngineLost, Progress, Report
from genserve.dllm.request import DiffusionParams
from genserve.dllm.routing import Routing, choose
from genserve.dllm.step import Commit
from genserve.dllm.tracked import TrackedRequest, answer_end, max_tokens

# A request whose engines die this often and once more may be what kills them, and others must go on.
MAX_RESTARTS = 3


class Dispatcher:
    """The `Controller` of a deployment of equal `engines`. Outputs go to `reply_to`, one `Send` a decision.

    `recorder` gets queue times, times to the first commit and passes per block.
    """

    def __init__(
        self,
        engines: Sequence[str],
        limits: EngineLimits,
        routing: Routing = "least_outstanding",
        reply_to: str = "gateway",
        recorder: Recorder | None = None,
    ) -> None:
        if not engines:
            raise ValueError("a dispatcher needs at least one engine")
        self.limits = limits
        self._routing = routing
        self._reply_to = reply_to
        self._engines = {name: EngineLedger(name) for name in engines}
        self._in_turn = list(self._engines.values())
        self._last = -1
        self._requests: dict[str, TrackedRequest] = {}
        self._queue: list[TrackedRequest] = []
        self._num_arrived = 0
        self._outbox: list[TokenOutput] = []
        self._effects: list[Effect] = []
        recorder = recorder if recorder is not None else Recorder(enabled=False)
        self._queue_s = recorder.histogram("queue_s", "Time from arrival until the first pass began")
        self._wait_s = recorder.histogram("prefill_wait_s", "Time that a block's prefill waited")
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
                self._engines[body.engine].alive = True
            else:
                raise TypeError(f"dispatcher got a message it does not know: {type(body).__name__}")
        elif isinstance(event, Timer):
            request = self._requests.get(event.tag.rpartition("#")[0])
            if request is not None and request.key == event.tag:
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
            self._effects.append(WakeAt(submit.deadline_s, request.key))
        block = request.next_block()
        if block is None or request.canvas.is_settled:
            self._tell(request, ended=True)
        else:
            request.enter(block)
            self._enqueue(request, now)

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
        engine = self._engines[report.engine]
        for progress in report.progress:
            held = engine.held.get(progress.request_id)
            if held is None:
                continue
            if progress.ended is not None:
                engine.give_back(progress.request_id)
            elif progress.prefilled:
                engine.started(progress.request_id)
            if held.request is not None:
                self._on_progress(held.request, progress, now)

    def _on_progress(self, request: TrackedRequest, progress: Progress, now: float) -> None:
        ended = progress.ended
        if ended in ("error", "cancelled"):
            request.engine = None
            self._finish(request, "error", progress.error or "the engine dropped the request")
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
            self._enqueue(request, now)

    def _enqueue(self, request: TrackedRequest, now: float) -> None:
        request.queued_s = now
        insort(self._queue, request)

    def _on_lost(self, lost: EngineLost, now: float) -> None:
        engine = self._engines[lost.engine]
        orphans = [held.request for held in engine.held.values() if held.request is not None]
        engine.forget_all()
        for request in orphans:
            if request.num_restarts == MAX_RESTARTS:
                request.engine = None
                error = f"{MAX_RESTARTS + 1} engines were lost with this request, the last: {lost.error}"
                self._finish(request, "error", error)
                continue
            self.num_restarts += 1
            request.num_restarts += 1
            request.restart()
            self._enqueue(request, now)

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
            self._effects.append(WakeAt(math.inf, request.key))
        if request.engine is not None:
            # Its pages stay in the ledger until the engine says that they are free.
            request.engine.held[request.key].request = None
            self._effects.append(Send(request.engine.name, Cancel(request.key)))
        elif request in self._queue:
            self._queue.remove(request)

    # -- plans ---------------------------------------------------------------------------------

    def decide(self, now: float) -> Iterable[Effect]:
        num_placed = 0
        for request in self._queue:
            if not self._place(request, now):
                break
            num_placed += 1
        del self._queue[:num_placed]
        effects, self._effects = self._effects, []
        if self._outbox:
            effects.append(Send(self._reply_to, tuple(self._outbox)))
            self._outbox.clear()
        return effects

    def _place(self, request: TrackedRequest, now: float) -> bool:
        """Assign the request to an engine; False if it must wait, and whoever comes after it."""
        limits, canvas, params = self.limits, request.canvas, request.params
        num_pages = limits.pages_for(len(canvas), params)
        views = [engine.view(request.order, num_pages, limits) for engine in self._in_turn]
        chosen = choose(self._routing, views, self._last)
        if chosen is None:
            return False
        self._last = chosen
        engine = request.engine = self._in_turn[chosen]
        weight = 2 if params.cfg_scale > 0 else 1
        engine.take(request.key, Held(request, num_pages, weight * len(canvas)))
        request.waited_s += now - request.queued_s
        keep = len(self._in_turn) == 1 or self._routing == "sticky" or params.cache in LASTING
        assign = Assign(
            request.key,
            request.order,
            tuple(canvas.ids),
            canvas.prompt_len,
            canvas.answer_end,
            request.block.index,
            keep,
            request.sampling,
            params,
        )
        self._effects.append(Send(engine.name, assign))
        return True

    # -- for gauges and leak checks --------------------------------------------------------------

    def stats(self, engines: Sequence[Mapping[str, float]] = ()) -> dict[str, float]:
        """Gauges and counters: the engines' own added up, if given, and the dispatcher's."""
        total: dict[str, float] = {}
        for figures in engines:
            for name, value in figures.items():
                total[name] = total.get(name, 0) + value
        total["num_sequences"] = len(self._requests)
        total["num_waiting"] = total.get("num_waiting", 0) + len(self._queue)
        total["num_engines"] = sum([engine.alive for engine in self._in_turn])
        total["num_restarts"] = self.num_restarts
        total["num_held"] = sum([len(engine.held) for engine in self._in_turn])
        total["num_held_pages"] = sum([engine.num_pages for engine in self._in_turn])
        total["num_outstanding_tokens"] = sum([engine.outstanding_tokens for engine in self._in_turn])
        return total
