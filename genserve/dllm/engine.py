"""The controller of one diffusion worker: decodes and whole prefills packed into steps over paged KV.

Owns the worker's queue, its active requests, slots and page accounts, and each request's canvas; must
not know tensors, threads, clocks or other workers (Sangam §4.1, §4.3). One step is in flight at a time:
`decide` plans it (every active request, then prefills as the budget allows), `observe(Done)` folds its
commits in. KV that a cache drops with its block is given back at the block's end, and the next block's
prefill queues at the request's original place. Waiting requests that hold KV go first: what they hold
would otherwise block the memory that those before them wait for.

A request may be assigned for its block's prefill alone, and its KV then waits for another engine
(`dllm.exchange`); or it comes with KV to fetch, for which pages are leased before any prefill gets some.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator

from genserve.core.control import Done, Effect, Event, Failed, Message, Run, Send
from genserve.core.kv.blocks import NO_MATCH, KvPages, PrefixMatch
from genserve.core.scheduling.budget import PrefillNeed
from genserve.dllm.budget import BudgetState
from genserve.dllm.cache import LASTING, PlannedPass
from genserve.dllm.canvas import Block
from genserve.dllm.engine_request import EngineRequest
from genserve.dllm.exchange import MAX_FETCHES, Exchange
from genserve.dllm.limits import EngineLimits
from genserve.dllm.messages import Assign, Cancel, Ended, Handed, Progress, Report, Role, SetRole
from genserve.dllm.step import STEP, Admit, Denoised, Pass, StepArgs, StepResult

# Caches whose KV before the block is a function of the tokens alone, so that requests may share it.
_EXACT = ("block", "canvas")


class Engine:
    """The `Controller` of one worker. For a name that ends in -<n> its steps go to the lane `device-<n>`,
    and copies from and for other workers to `link-<n>`. It begins as a colocated one."""

    def __init__(self, name: str, limits: EngineLimits, dispatcher: str = "dispatcher") -> None:
        self.name = name
        self.limits = limits
        number = name.rpartition("-")[2]
        self.lane = f"device-{number}"
        self.exchange = Exchange(f"link-{number}", limits)
        self.role: Role = "colocated"
        self.pages = KvPages(limits.num_pages, limits.page_tokens, limits.prefix_cache)
        self._dispatcher = dispatcher
        self._policy = limits.budget_policy(self.role)
        self._budget = BudgetState()
        self._requests: dict[str, EngineRequest] = {}
        self._waiting: list[EngineRequest] = []
        self._active: dict[str, EngineRequest] = {}
        self._arriving: list[EngineRequest] = []
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._freed: list[int] = []
        self._admits: list[Admit] = []
        self._outbox: list[Progress] = []
        self._flight: list[EngineRequest] | None = None
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
            if event.lane == self.lane:
                self._on_step(event.result, now)
            else:
                self._on_link(self.exchange.ended(event.run_id), None, now)
        elif isinstance(event, Message):
            if isinstance(event.body, Assign):
                self._on_assign(event.body, now)
            elif isinstance(event.body, Cancel):
                self._on_cancel(event.body.request_id)
            elif isinstance(event.body, SetRole):
                self.role = event.body.role
                self._policy = self.limits.budget_policy(self.role)
                self._budget = BudgetState()
            else:
                raise TypeError(f"engine got a message it does not know: {type(event.body).__name__}")
        elif isinstance(event, Failed):
            if event.lost:
                # An engine lives in its device's process and is lost with it: nobody would be told here.
                raise TypeError(f"lane {event.lane} of {self.name} can't be lost alone")
            if event.lane == self.lane:
                self._on_failed(event)
            else:
                self._on_link(self.exchange.ended(event.run_id), event.error, now)

    def _on_assign(self, assign: Assign, now: float) -> None:
        if assign.request_id in self._requests:
            raise ValueError(f"request {assign.request_id!r} is here already")
        request = EngineRequest(assign, self.limits, now)
        block = request.block if assign.handed is not None else request.next_block(assign.block_index)
        num_pages = self.limits.pages_for(len(assign.ids), assign.params)
        if num_pages > self.pages.num_pages:
            error = f"the canvas needs {num_pages} pages, the KV pool has {self.pages.num_pages}"
            self._outbox.append(Progress(assign.request_id, assign.block_index, ended="error", error=error))
        elif block is None:
            self._outbox.append(Progress(assign.request_id, assign.block_index, ended="answer"))
        else:
            request.enter(block)
            self._requests[assign.request_id] = request
            insort(self._waiting if assign.handed is None else self._arriving, request)

    def _on_cancel(self, request_id: str) -> None:
        if self.exchange.let_go(request_id):
            self._outbox.append(Progress(request_id, -1, ended="cancelled"))
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
            if not request.cancelled and denoised.error is None:
                self._fold(request, denoised, now)
                continue
            self.exchange.discard(request, denoised.handover)
            if request.cancelled:
                self._end(request, "cancelled")
            else:
                self._end(request, "error", error=denoised.error)

    def _fold(self, request: EngineRequest, denoised: Denoised, now: float) -> None:
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
        handed: Handed | None = None
        error: str | None = None
        if request.assign.hand_over:
            handed = request.handed(denoised, following) if ended is None else None
            if handed is not None:
                self.exchange.keep(request, handed.handover)
            else:
                self.exchange.discard(request, denoised.handover)
            if ended is None and handed is None:
                ended, error = "transfer", "the KV of the prefill could not be kept"
        if ended is not None or handed is not None:
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
                error,
                waited_s,
                handed,
            )
        )

    def _enter(self, request: EngineRequest, block: Block, now: float) -> None:
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

    def _queue_refresh(self, request: EngineRequest, now: float) -> None:
        request.queued_s = now
        del self._active[request.request_id]
        request.key = (0, request.assign.order)
        insort(self._waiting, request)

    def _on_link(self, request: EngineRequest | None, error: str | None, now: float) -> None:
        """A copy has ended: go on with the request whose KV it was (None: it was for others)."""
        if request is None:
            return
        request.in_flight = False
        if error is not None:
            self.exchange.num_failed_fetches += 1
        if request.cancelled:
            self._end(request, "cancelled")
        elif error is None:
            self.exchange.num_fetched += 1
            self._arrived(request, now)
        elif request.num_fetches < MAX_FETCHES:
            request.in_flight = self.exchange.fetch(request)
        else:
            self._end(request, "transfer", error=error)

    def _arrived(self, request: EngineRequest, now: float) -> None:
        self._outbox.append(Progress(request.request_id, request.block.index, arrived=True))
        self._active[request.request_id] = request
        if request.passes.wants_refresh:
            self._queue_refresh(request, now)

    def _on_failed(self, event: Failed) -> None:
        flight, self._flight = self._flight or [], None
        for request in flight:
            request.in_flight = False
        for request in flight:
            if request.cancelled:
                self._end(request, "cancelled")
            else:
                self._end(request, "error", error=event.error)

    # -- endings -------------------------------------------------------------------------------

    def _end(self, request: EngineRequest, ended: Ended, error: str | None = None) -> None:
        self._forget(request)
        self._outbox.append(Progress(request.request_id, request.block.index, ended=ended, error=error))

    def _forget(self, request: EngineRequest) -> None:
        del self._requests[request.request_id]
        if request.request_id not in self._active:
            for queue in (self._waiting, self._arriving):
                if request in queue:
                    queue.remove(request)
        self.exchange.discard(request, None)
        self._leave_device(request)

    def _leave_device(self, request: EngineRequest) -> None:
        """Give back the slot and all pages, if it holds any."""
        self._active.pop(request.request_id, None)
        if request.lease is None:
            return
        request.lease.release()
        request.lease = None
        if request.num_pages_sent:  # the worker has heard of it
            self._freed.append(request.slot)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.num_pages_sent = 0
        request.key = (1, request.assign.order)

    # -- plans ---------------------------------------------------------------------------------

    def decide(self, now: float) -> Iterable[Effect]:
        self._seat_arriving(now)
        effects: list[Effect] = [*self.exchange.take_runs()]
        if self._flight is None and (self._active or self._waiting):
            passes, flight = self._plan_decodes()
            self._plan_prefills(passes, flight, now)
            if flight:
                effects.append(self._launch(passes, flight))
        if self._outbox:
            effects.append(Send(self._dispatcher, Report(self.name, tuple(self._outbox))))
            self._outbox.clear()
        return effects

    def _launch(self, passes: list[Pass], flight: list[EngineRequest]) -> Run:
        args = StepArgs(tuple(self._freed), tuple(self._admits), tuple(passes))
        self._freed.clear()
        self._admits.clear()
        self._flight = flight
        self._run_id += 1
        self.num_steps += 1
        self.num_passes += len(passes)
        return Run(self.lane, self._run_id, STEP, args)

    def _plan_decodes(self) -> tuple[list[Pass], list[EngineRequest]]:
        """Every active request runs, whatever it costs."""
        passes: list[Pass] = []
        flight: list[EngineRequest] = []
        num_tokens = 0
        for request in self._active.values():
            num_tokens += self._pass(request, passes, flight)
        self._decode_tokens = num_tokens
        self.num_decode_tokens += num_tokens
        return passes, flight

    def _plan_prefills(self, passes: list[Pass], flight: list[EngineRequest], now: float) -> None:
        room = self.pages.num_free
        staging = self.exchange.staging.num_free
        slots = len(self._free_slots)
        # What has been prefilled elsewhere and finds no room here goes before further prefills.
        kv_is_awaited = bool(self._arriving)
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
            nonlocal room, slots, staging
            request = need.key
            assert isinstance(request, EngineRequest)
            if request.lease is not None:
                return True
            match = matches[request.request_id]
            wanted = self._num_pages(request) - len(match.pages) + match.num_free_pages
            wanted_staging = self.exchange.num_pages(request)
            if kv_is_awaited or slots < 1 or wanted > room or wanted_staging > staging:
                return False
            room -= wanted
            staging -= wanted_staging
            slots -= 1
            return True

        plan = self._policy.plan(self._budget, self._decode_tokens, needs(), has_room)
        self._budget = plan.state
        for position, grant in enumerate(plan.grants):
            request = grant.key
            assert isinstance(request, EngineRequest)
            if request.lease is None and not self._admit(request, matches[request.request_id]):
                del self._waiting[:position]
                return
            self._active[request.request_id] = request
            request.waited_s = now - request.queued_s
            self._prefill(request, passes, flight)
        del self._waiting[: len(plan.grants)]

    def _match(self, request: EngineRequest) -> PrefixMatch:
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

    def _num_pages(self, request: EngineRequest) -> int:
        return self.limits.pages_for(len(request.canvas), request.params)

    def _admit(self, request: EngineRequest, match: PrefixMatch) -> bool:
        """Lease pages for the whole canvas, and a slot. Admissions before it may have moved the cache."""
        if match.pages:
            match = self._match(request)
            request.passes.begin(request.block, len(match.pages) * self.limits.page_tokens)
        lease = self.pages.open(match)
        if not lease.grow_to(self._num_pages(request) * self.limits.page_tokens):
            lease.release()
            return False
        if not self.exchange.reserve(request):
            lease.release()
            return False
        request.lease = lease
        request.slot = self._free_slots.pop()
        self.num_cached_tokens += lease.num_cached_tokens
        return True

    def _prefill(self, request: EngineRequest, passes: list[Pass], flight: list[EngineRequest]) -> None:
        self.num_refreshes += request.block.index > 0 or request.num_pages_sent > 0
        self.num_prefill_tokens += self._pass(request, passes, flight)
        request.key = (1, request.assign.order)

    def _pass(self, request: EngineRequest, passes: list[Pass], flight: list[EngineRequest]) -> int:
        """Add the request's next pass to the step, with whatever the worker lacks for it; its tokens."""
        planned: PlannedPass = request.passes.next(request.canvas)
        new_pages: tuple[int, ...] = ()
        if request.num_pages_sent == 0:
            lease = request.lease
            assert lease is not None
            new_pages = tuple(lease.pages)
            request.num_pages_sent = len(new_pages)
            self._admits.append(request.admit())
        request.planned = planned
        request.in_flight = True
        hand_over = request.assign.hand_over
        passes.append(Pass(request.slot, planned.spans, new_pages, request.span, planned.is_start, hand_over))
        flight.append(request)
        return planned.num_tokens

    def _seat_arriving(self, now: float) -> None:
        """Lease pages for requests whose KV waits elsewhere, the oldest first, and have it fetched."""
        while self._arriving and self._free_slots and self._admit(self._arriving[0], NO_MATCH):
            request = self._arriving.pop(0)
            request.in_flight = self.exchange.fetch(request)
            if not request.in_flight:
                self._arrived(request, now)

    # -- for gauges and leak checks --------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Gauges and counters, all plain numbers. A refresh is any prefill but a request's first."""
        return {
            **self.exchange.stats(),
            "num_sequences": len(self._requests),
            "num_waiting": len(self._waiting) + len(self._arriving),
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
