"""The controller of one diffusion worker: decodes and whole prefills packed into steps over paged KV.

Owns the worker's queue, its active requests, slots and page accounts, and each request's canvas; must
not know tensors, threads, clocks or other workers (Sangam §4.1, §4.3). One step is in flight at a time:
`decide` plans it (every active request, then prefills as the budget allows), `observe(Done)` folds its
commits in. KV that a cache drops with its block is given back at the block's end, and the next block's
prefill queues at the request's original place. Waiting requests that hold KV go first: what they hold
would otherwise block the memory that those before them wait for.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from genserve.core.control import Done, Effect, Event, Failed, Message, Run, Send
from genserve.core.kv.blocks import NO_MATCH, PAGE_TOKENS, KvPages, PageLease, PrefixMatch
from genserve.core.scheduling.budget import PrefillNeed
from genserve.dllm.budget import BudgetPolicy, BudgetState, PaperBudget, SignedBudget
from genserve.dllm.cache import LASTING, Passes, PlannedPass
from genserve.dllm.canvas import Block, Canvas
from genserve.dllm.messages import Assign, Cancel, Ended, Progress, Report
from genserve.dllm.request import DiffusionParams
from genserve.dllm.step import STEP, Admit, Denoised, Pass, StepArgs, StepResult

# Caches whose KV before the block is a function of the tokens alone, so that requests may share it.
_EXACT = ("block", "canvas")


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds an engine.

    budget_tokens  tokens an iteration computes in the long run (`dllm.budget`).
    shifted        the model predicts a position from its left neighbour's row.
    fill_token_id  what stands behind an answer's first stop token (`DiffusionParams.early_stop`).
    eos_token_ids  the model's own; requests end at them unless they ignore them.
    """

    num_pages: int
    max_context_tokens: int
    max_running: int = 64
    budget_tokens: int = 1024
    policy: Literal["signed", "paper"] = "signed"
    page_tokens: int = PAGE_TOKENS
    prefix_cache: bool = True
    shifted: bool = False
    fill_token_id: int = 0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.budget_tokens < 1:
            raise ValueError("max_running and budget_tokens must be at least 1")

    def budget_policy(self) -> BudgetPolicy:
        if self.policy == "paper":
            return PaperBudget(self.budget_tokens)
        return SignedBudget(self.budget_tokens)

    def pages_for(self, num_tokens: int, params: DiffusionParams) -> int:
        """Pages that a canvas of `num_tokens` takes."""
        num_pages = -(-num_tokens // self.page_tokens)
        return 2 * num_pages if params.cfg_scale > 0 else num_pages


class _Request:
    __slots__ = (
        "assign",
        "block",
        "cancelled",
        "canvas",
        "in_flight",
        "keep",
        "key",
        "lease",
        "num_cached_told",
        "num_pages_sent",
        "params",
        "passes",
        "planned",
        "queued_s",
        "request_id",
        "slot",
        "span",
        "waited_s",
    )

    def __init__(self, assign: Assign, limits: EngineLimits, now: float) -> None:
        params = assign.params
        self.assign = assign
        self.request_id = assign.request_id
        self.params = params
        self.keep = assign.keep
        self.canvas = Canvas(
            assign.ids,
            assign.prompt_len,
            assign.answer_end,
            params.block_length,
            aligned=params.cache == "block",
            stop_ids=assign.sampling.stop_token_ids,
            stop_in_prompt=params.stop_in_prompt,
        )
        self.enter(Block(-1, 0, 0))
        self.passes = Passes(params, len(assign.ids), assign.prompt_len, shifted=limits.shifted)
        self.planned: PlannedPass | None = None
        self.lease: PageLease | None = None
        self.slot = -1
        self.num_pages_sent = 0
        self.num_cached_told = -1
        self.in_flight = False
        self.cancelled = False
        self.key = (1, assign.order)
        self.queued_s = now
        self.waited_s = 0.0

    def __lt__(self, other: _Request) -> bool:
        return self.key < other.key

    def next_block(self, first: int) -> Block | None:
        """The first block from number `first` on that has open positions."""
        canvas = self.canvas
        for index in range(first, canvas.num_blocks):
            block = canvas.block(index)
            if canvas.has_open(block.start, block.end):
                return block
        return None

    def enter(self, block: Block) -> None:
        self.block = block
        self.span = (block.index, block.start, block.end)


class Engine:
    """The `Controller` of one worker; its runs go to `lane` (`device-<n>` for a name that ends in -<n>)."""

    def __init__(
        self, name: str, limits: EngineLimits, dispatcher: str = "dispatcher", lane: str | None = None
    ) -> None:
        self.name = name
        self.limits = limits
        self.lane = lane if lane is not None else f"device-{name.rpartition('-')[2]}"
        self.pages = KvPages(limits.num_pages, limits.page_tokens, limits.prefix_cache)
        self._dispatcher = dispatcher
        self._policy = limits.budget_policy()
        self._budget = BudgetState()
        self._requests: dict[str, _Request] = {}
        self._waiting: list[_Request] = []
        self._active: dict[str, _Request] = {}
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._freed: list[int] = []
        self._admits: list[Admit] = []
        self._outbox: list[Progress] = []
        self._flight: list[_Request] | None = None
        self._decode_tokens = 0
        self._run_id = 0
        self.num_steps = 0
        self.num_passes = 0
        self.num_refreshes = 0
        self.num_blocks = 0
        self.num_commits = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self.num_cached_tokens = 0

    # -- facts ---------------------------------------------------------------------------------

    def observe(self, event: Event, now: float) -> None:
        if isinstance(event, Done):
            self._on_step(event.result, now)
        elif isinstance(event, Message):
            if isinstance(event.body, Assign):
                self._on_assign(event.body, now)
            elif isinstance(event.body, Cancel):
                self._on_cancel(event.body.request_id)
            else:
                raise TypeError(f"engine got a message it does not know: {type(event.body).__name__}")
        elif isinstance(event, Failed):
            self._on_failed(event)

    def _on_assign(self, assign: Assign, now: float) -> None:
        if assign.request_id in self._requests:
            raise ValueError(f"request {assign.request_id!r} is here already")
        request = _Request(assign, self.limits, now)
        block = request.next_block(assign.block_index)
        num_pages = self.limits.pages_for(len(assign.ids), assign.params)
        if num_pages > self.pages.num_pages:
            error = f"the canvas needs {num_pages} pages, the KV pool has {self.pages.num_pages}"
            self._outbox.append(Progress(assign.request_id, assign.block_index, ended="error", error=error))
        elif block is None:
            self._outbox.append(Progress(assign.request_id, assign.block_index, ended="answer"))
        else:
            request.enter(block)
            self._requests[assign.request_id] = request
            insort(self._waiting, request)

    def _on_cancel(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        request.cancelled = True
        if not request.in_flight:
            self._end(request, "cancelled")

    def _on_step(self, result: StepResult, now: float) -> None:
        flight, self._flight = self._flight or [], None
        for request, denoised in zip(flight, result.denoised, strict=True):
            request.in_flight = False
            if request.cancelled:
                self._end(request, "cancelled")
            elif denoised.error is not None:
                self._end(request, "error", error=denoised.error)
            else:
                self._fold(request, denoised, now)

    def _fold(self, request: _Request, denoised: Denoised, now: float) -> None:
        commits, filled, block_done = denoised.commits, denoised.filled, denoised.block_done
        canvas, planned = request.canvas, request.planned
        assert planned is not None
        for commit in commits:
            canvas.commit(commit.position, commit.token_id)
        if filled:
            canvas.fill_after_stop(self.limits.fill_token_id)
        self.num_commits += len(commits)
        passes = request.passes
        passes.ran(planned, [commit.position for commit in commits])
        params = request.params
        if params.cache in _EXACT and planned.is_start and request.lease is not None:
            request.lease.index(canvas.ids, request.block.start)
        block = request.block
        ended: Ended | None = None
        following: Block | None = None
        if block_done:
            self.num_blocks += 1
            if (params.early_stop or params.end_when_settled) and canvas.is_settled:
                ended = "answer"
            else:
                following = request.next_block(block.index + 1)
                ended = "answer" if following is None else None if request.keep else "block"
        elif params.end_when_settled and params.editing_threshold is None and commits and canvas.is_settled:
            self.num_blocks += 1
            ended = "answer"
        num_cached = 0
        waited_s = request.waited_s if planned.is_prefill else 0.0
        if request.num_cached_told < 0:
            num_cached = request.num_cached_told = request.lease.num_cached_tokens if request.lease else 0
        if ended is not None:
            self._forget(request)
        elif following is not None:
            self._enter(request, following, now)
        elif passes.wants_refresh:
            self._queue_refresh(request, now)
        self._outbox.append(
            Progress(
                request.request_id,
                block.index,
                commits,
                filled,
                planned.is_prefill,
                num_cached,
                ended,
                None,
                waited_s,
            )
        )

    def _enter(self, request: _Request, block: Block, now: float) -> None:
        """Go on to the next block: with the KV at hand, or from the queue."""
        request.enter(block)
        if request.params.cache in LASTING:
            request.passes.begin(block)
            if request.passes.wants_refresh:
                self._queue_refresh(request, now)
        else:
            self._leave_device(request)
            request.queued_s = now
            insort(self._waiting, request)

    def _queue_refresh(self, request: _Request, now: float) -> None:
        request.queued_s = now
        del self._active[request.request_id]
        request.key = (0, request.assign.order)
        insort(self._waiting, request)

    def _on_failed(self, event: Failed) -> None:
        flight, self._flight = self._flight or [], None
        for request in flight:
            request.in_flight = False
        for request in list(self._requests.values()) if event.lost else flight:
            if request.cancelled:
                self._end(request, "cancelled")
            else:
                self._end(request, "error", error=event.error)

    # -- endings -------------------------------------------------------------------------------

    def _end(self, request: _Request, ended: Ended, error: str | None = None) -> None:
        self._forget(request)
        self._outbox.append(Progress(request.request_id, request.block.index, ended=ended, error=error))

    def _forget(self, request: _Request) -> None:
        del self._requests[request.request_id]
        if request.request_id not in self._active:
            self._waiting.remove(request)
        self._leave_device(request)

    def _leave_device(self, request: _Request) -> None:
        """Give back the slot and all pages, if it holds any."""
        self._active.pop(request.request_id, None)
        if request.lease is None:
            return
        request.lease.release()
        request.lease = None
        self._freed.append(request.slot)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.num_pages_sent = 0
        request.key = (1, request.assign.order)

    # -- plans ---------------------------------------------------------------------------------

    def decide(self, now: float) -> Iterable[Effect]:
        effects: list[Effect] = []
        if self._flight is None and (self._active or self._waiting):
            passes, flight = self._plan_decodes()
            self._plan_prefills(passes, flight, now)
            if flight:
                effects.append(self._launch(passes, flight))
        if self._outbox:
            effects.append(Send(self._dispatcher, Report(self.name, tuple(self._outbox))))
            self._outbox.clear()
        return effects

    def _launch(self, passes: list[Pass], flight: list[_Request]) -> Run:
        args = StepArgs(tuple(self._freed), tuple(self._admits), tuple(passes))
        self._freed.clear()
        self._admits.clear()
        self._flight = flight
        self._run_id += 1
        self.num_steps += 1
        self.num_passes += len(passes)
        return Run(self.lane, self._run_id, STEP, args)

    def _plan_decodes(self) -> tuple[list[Pass], list[_Request]]:
        """Every active request runs, whatever it costs."""
        passes: list[Pass] = []
        flight: list[_Request] = []
        num_tokens = 0
        for request in self._active.values():
            planned = request.passes.next(request.canvas)
            request.planned = planned
            request.in_flight = True
            num_tokens += planned.num_tokens
            passes.append(Pass(request.slot, planned.spans, (), request.span, planned.is_start))
            flight.append(request)
        self._decode_tokens = num_tokens
        self.num_decode_tokens += num_tokens
        return passes, flight

    def _plan_prefills(self, passes: list[Pass], flight: list[_Request], now: float) -> None:
        room = self.pages.num_free
        slots = len(self._free_slots)
        matches: dict[str, PrefixMatch] = {}

        def needs() -> Iterator[PrefillNeed]:
            for request in self._waiting:
                if request.lease is not None:
                    yield PrefillNeed(request, request.passes.next(request.canvas).num_tokens, False)
                    continue
                match = matches[request.request_id] = self._match(request)
                request.passes.begin(request.block, len(match.pages) * self.limits.page_tokens)
                yield PrefillNeed(request, request.passes.next(request.canvas).num_tokens, False)

        def has_room(need: PrefillNeed) -> bool:
            nonlocal room, slots
            request = need.key
            assert isinstance(request, _Request)
            if request.lease is not None:
                return True
            match = matches[request.request_id]
            wanted = self._num_pages(request) - len(match.pages) + match.num_free_pages
            if slots < 1 or wanted > room:
                return False
            room -= wanted
            slots -= 1
            return True

        plan = self._policy.plan(self._budget, self._decode_tokens, needs(), has_room)
        self._budget = plan.state
        for position, grant in enumerate(plan.grants):
            request = grant.key
            assert isinstance(request, _Request)
            if request.lease is None and not self._admit(request, matches[request.request_id]):
                del self._waiting[:position]
                return
            self._active[request.request_id] = request
            request.waited_s = now - request.queued_s
            self._prefill(request, passes, flight)
        del self._waiting[: len(plan.grants)]

    def _match(self, request: _Request) -> PrefixMatch:
        params = request.params
        if params.cache not in _EXACT or not self.limits.prefix_cache:
            return NO_MATCH
        if params.cache == "canvas":  # causal up to the block, so any page will do
            return self.pages.match(request.canvas.ids[: request.block.start + 1])
        length = params.block_length
        unit = math.lcm(length, self.limits.page_tokens)
        end = request.block.start
        if self.limits.shifted and params.first_position == "left_neighbour":
            end -= 1
        return self.pages.match(request.canvas.ids[: max(end, 0) + 1], unit, length)

    def _num_pages(self, request: _Request) -> int:
        return self.limits.pages_for(len(request.canvas), request.params)

    def _admit(self, request: _Request, match: PrefixMatch) -> bool:
        """Lease pages for the whole canvas, and a slot. Admissions before it may have moved the cache."""
        if match.pages:
            match = self._match(request)
            request.passes.begin(request.block, len(match.pages) * self.limits.page_tokens)
        lease = self.pages.open(match)
        if not lease.grow_to(self._num_pages(request) * self.limits.page_tokens):
            lease.release()
            return False
        request.lease = lease
        request.slot = self._free_slots.pop()
        self.num_cached_tokens += lease.num_cached_tokens
        assign = request.assign
        self._admits.append(
            Admit(
                request.slot,
                request.request_id,
                tuple(request.canvas.ids),
                assign.prompt_len,
                assign.answer_end,
                assign.sampling,
                assign.params,
            )
        )
        return True

    def _prefill(self, request: _Request, passes: list[Pass], flight: list[_Request]) -> None:
        planned = request.passes.next(request.canvas)
        lease = request.lease
        assert lease is not None
        new_pages = tuple(lease.pages[request.num_pages_sent :])
        request.num_pages_sent += len(new_pages)
        request.planned = planned
        request.in_flight = True
        request.key = (1, request.assign.order)
        self.num_prefill_tokens += planned.num_tokens
        self.num_refreshes += request.block.index > 0 or not new_pages
        passes.append(Pass(request.slot, planned.spans, new_pages, request.span, planned.is_start))
        flight.append(request)

    # -- for gauges and leak checks --------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Gauges and counters, all plain numbers. A refresh is any prefill but a request's first."""
        return {
            "num_sequences": len(self._requests),
            "num_waiting": len(self._waiting),
            "num_running": len(self._active),
            "num_free_slots": len(self._free_slots),
            "num_pages": self.pages.num_pages,
            "num_free_pages": self.pages.num_free,
            "num_used_pages": self.pages.num_used,
            "num_leases": self.pages.num_leases,
            "num_evictions": self.pages.num_evictions,
            "budget_balance": self._budget.balance,
            "num_steps": self.num_steps,
            "num_passes": self.num_passes,
            "num_refreshes": self.num_refreshes,
            "num_blocks": self.num_blocks,
            "num_commits": self.num_commits,
            "num_prefill_tokens": self.num_prefill_tokens,
            "num_decode_tokens": self.num_decode_tokens,
            "num_cached_tokens": self.num_cached_tokens,
        }
