"""The engines, who waits for them, and which takes whom: colocated routing and Sangam's Algorithm 2.

Owns the ledgers, the queue of prefills, the queue of requests prefilled elsewhere that wait to decode, and
the roles of the engines; must not know what a request's passes do, or clients.

Without prefill workers every block is routed by `routing`. With them (Sangam §4.2) a block's prefill goes
to the least loaded prefill worker with fewer than `overload_tokens` outstanding and memory to keep the KV;
its KV then moves to the colocated worker with the fewest requests, for which memory is reserved before
any overflow gets some. When no prefill worker can take it, the least loaded colocated one under the
same threshold prefills and decodes; else it waits, and all behind it. An `overload_tokens` of None
never overflows: static disaggregation. Only requests whose KV dies with their block come back to be
routed; KV never moves at a block's end.
Deviation: if one of the two pools has nobody left, the engines of the other do both.
Deviation: a request whose KV could not be handed over, or is more than a worker may keep for others, is
    prefilled where it decodes, whatever the threshold.
Deviation: "free KV" of a prefill worker is room to keep the KV until it is fetched; its own pages are
    taken by prefills of a step only, which wait at the worker.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence

from genserve.core.control import Effect, Send
from genserve.core.errors import ConfigError
from genserve.dllm.cache import LASTING
from genserve.dllm.ledger import EngineLedger, Held
from genserve.dllm.limits import EngineLimits
from genserve.dllm.messages import Assign, Cancel, ChangeRole, Drained, Role, RoleChanged, SetRole
from genserve.dllm.routing import EngineView, Routing, choose, least_busy, least_loaded
from genserve.dllm.tracked import TrackedRequest

MEMBERSHIP = "membership"  # whom drained engines and changed roles are told


def engine_roles(num_workers: int, num_prefill_workers: int = 0) -> dict[str, Role]:
    """Names and roles of a deployment's engines: the first ones prefill. `ConfigError` if nobody decodes."""
    if num_prefill_workers >= num_workers:
        raise ConfigError(
            f"num_prefill_workers: {num_prefill_workers} of {num_workers} workers leave none to decode"
        )
    return {
        f"engine-{index}": "prefill" if index < num_prefill_workers else "colocated"
        for index in range(num_workers)
    }


class Pool:
    """The engines by name and role. Its effects collect until they are taken."""

    def __init__(
        self,
        engines: Mapping[str, Role],
        limits: EngineLimits,
        routing: Routing,
        overload_tokens: int | None,
    ) -> None:
        if not engines:
            raise ValueError("a dispatcher needs at least one engine")
        self.limits = limits
        self._routing = routing
        self._overload_tokens = math.inf if overload_tokens is None else overload_tokens
        self._may_overflow = overload_tokens is not None
        self.engines = {name: EngineLedger(name, role) for name, role in engines.items()}
        self._last = self._last_decoder = -1
        self._queue: list[TrackedRequest] = []
        self._prefilled: list[TrackedRequest] = []
        self._effects: list[Effect] = [
            Send(name, SetRole(role)) for name, role in engines.items() if role != "colocated"
        ]
        self.num_overflows = 0

    @property
    def hands_over(self) -> bool:
        """Whether some engine only prefills."""
        return any(engine.role == "prefill" for engine in self.engines.values())

    # -- who waits -------------------------------------------------------------------------------

    def enqueue(self, request: TrackedRequest, now: float) -> None:
        """Its next block waits to be prefilled."""
        request.queued_s = now
        insort(self._queue, request)

    def prefilled(self, request: TrackedRequest, now: float) -> None:
        """Its KV waits at `request.source` for an engine to decode."""
        request.queued_s = now
        insort(self._prefilled, request)

    def leave(self, request: TrackedRequest) -> None:
        """Whoever has it, or keeps KV of it, is told to drop it. Pages count until the engine says they are free."""
        if request.engine is not None:
            self._drop(request.engine, request.key)
            request.engine = None
        else:
            for queue in (self._queue, self._prefilled):
                if request in queue:
                    queue.remove(request)
        self.forget_source(request)

    def forget_source(self, request: TrackedRequest) -> None:
        """The engine that prefilled it need not keep its KV any longer."""
        source, request.source, request.handed = request.source, None, None
        if source is not None:
            self._drop(source, request.source_key)

    def _drop(self, engine: EngineLedger, key: str) -> None:
        engine.held[key].request = None
        self._effects.append(Send(engine.name, Cancel(key)))

    # -- who is there ----------------------------------------------------------------------------

    def lost(self, name: str) -> list[TrackedRequest]:
        """Forget the engine's holdings; returns the requests that nobody has now, in order.

        Of those the ones with a `source` can still be decoded from the KV that it keeps.
        """
        engine = self.engines.get(name)
        if engine is None:
            return []
        orphans: list[TrackedRequest] = []
        for key, held in engine.held.items():
            request = held.request
            if request is None:
                continue
            if key != request.source_key:
                request.engine = None
                orphans.append(request)
                continue
            request.source = request.handed = None
            if request.engine is None:
                self._prefilled.remove(request)
                orphans.append(request)
            # Else whoever fetches from the lost engine may succeed all the same, and says so if not.
        engine.forget_all()
        return sorted(orphans)

    def back(self, name: str) -> None:
        engine = self.engines.get(name)
        if engine is not None:
            engine.alive = True
            self._effects.append(Send(name, SetRole(engine.role)))

    def join(self, name: str, role: Role) -> None:
        self.engines[name] = EngineLedger(name, role)
        self._effects.append(Send(name, SetRole(role)))

    def drain(self, name: str) -> None:
        self.engines[name].leaving = True

    def change_role(self, change: ChangeRole) -> None:
        engine = self.engines[change.engine]
        engine.leaving, engine.becomes = True, change.role

    def _settle_leaving(self) -> None:
        for engine in [engine for engine in self.engines.values() if engine.leaving and not engine.held]:
            if engine.becomes is None:
                del self.engines[engine.name]
                self._effects.append(Send(MEMBERSHIP, Drained(engine.name)))
                continue
            engine.role, engine.becomes, engine.leaving = engine.becomes, None, False
            self._effects.append(Send(engine.name, SetRole(engine.role)))
            self._effects.append(Send(MEMBERSHIP, RoleChanged(engine.name, engine.role)))

    # -- who takes whom --------------------------------------------------------------------------

    def take_effects(self, now: float) -> list[Effect]:
        """Assign what can be assigned; what to tell the engines since the last time."""
        self._settle_leaving()
        if self._queue or self._prefilled:
            self._place_all(now)
        effects, self._effects = self._effects, []
        return effects

    def _place_all(self, now: float) -> None:
        engines = list(self.engines.values())
        open_engines = [engine for engine in engines if engine.is_open]
        prefillers = [engine for engine in open_engines if engine.role == "prefill"]
        others = [engine for engine in open_engines if engine.role == "colocated"]
        num_placed = 0
        for request in self._prefilled:
            if not self._place_prefilled(request, others or open_engines, now):
                break
            num_placed += 1
        del self._prefilled[:num_placed]
        is_hybrid = bool(prefillers and others)
        num_placed = 0
        for request in self._queue:
            if is_hybrid:
                placed = self._place_hybrid(request, prefillers, others, now)
            else:
                placed = self._place_colocated(request, engines, now)
            if not placed:
                break
            num_placed += 1
        del self._queue[:num_placed]

    def _place_prefilled(self, request: TrackedRequest, engines: Sequence[EngineLedger], now: float) -> bool:
        limits, num_pages = self.limits, self._num_pages(request)
        views = [engine.reserving_view(num_pages, limits) for engine in engines]
        chosen = least_busy(views, self._last_decoder)
        if chosen is None:
            return False
        self._last_decoder = chosen
        self._assign(request, engines[chosen], Held(request, num_pages, 0), now)
        return True

    def _place_hybrid(
        self,
        request: TrackedRequest,
        prefillers: Sequence[EngineLedger],
        others: Sequence[EngineLedger],
        now: float,
    ) -> bool:
        limits, params = self.limits, request.params
        num_pages, num_tokens = self._num_pages(request), self._num_tokens(request)
        num_staged = limits.staged_pages_for(len(request.canvas), params)
        chosen = None
        if not request.stays_whole:
            views = [engine.staging_view(num_staged, limits) for engine in prefillers]
            chosen = self._least_loaded(views)
        if chosen is not None:
            held = Held(request, num_pages, num_tokens, num_staged)
            self._assign(request, prefillers[chosen], held, now, hand_over=True)
            return True
        never_fits = request.stays_whole or num_staged > limits.staging_pages
        if not (self._may_overflow or never_fits) or self._prefilled:
            return False
        views = [engine.reserving_view(num_pages, limits) for engine in others]
        chosen = self._least_loaded(views) if not never_fits else least_loaded(views, self._last)
        if chosen is None:
            return False
        self.num_overflows += 1
        self._assign(request, others[chosen], Held(request, num_pages, num_tokens), now)
        return True

    def _least_loaded(self, views: Sequence[EngineView]) -> int | None:
        chosen = least_loaded(views, self._last, self._overload_tokens)
        if chosen is not None:
            self._last = chosen
        return chosen

    def _place_colocated(self, request: TrackedRequest, engines: Sequence[EngineLedger], now: float) -> bool:
        num_pages = self._num_pages(request)
        views = [engine.view(request.order, num_pages, self.limits) for engine in engines]
        chosen = choose(self._routing, views, self._last)
        if chosen is None:
            return False
        self._last = chosen
        held = Held(request, num_pages, self._num_tokens(request))
        self._assign(request, engines[chosen], held, now, stays=len(engines) == 1)
        return True

    def _num_pages(self, request: TrackedRequest) -> int:
        return self.limits.pages_for(len(request.canvas), request.params)

    def _num_tokens(self, request: TrackedRequest) -> int:
        return (2 if request.params.cfg_scale > 0 else 1) * len(request.canvas)

    def _assign(
        self,
        request: TrackedRequest,
        engine: EngineLedger,
        held: Held,
        now: float,
        *,
        hand_over: bool = False,
        stays: bool = False,
    ) -> None:
        handed = request.handed
        request.new_key()
        if handed is None:
            request.waited_s += now - request.queued_s
        request.engine = engine
        engine.take(request.key, held)
        canvas, params = request.canvas, request.params
        assign = Assign(
            request.key,
            request.order,
            tuple(canvas.ids),
            canvas.prompt_len,
            canvas.answer_end,
            request.block.index,
            stays or self._routing == "sticky" or params.cache in LASTING,
            request.sampling,
            params,
            hand_over,
            handed,
        )
        self._effects.append(Send(engine.name, assign))

    # -- for gauges and leak checks --------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        engines = self.engines.values()
        return {
            "num_engines": sum([engine.alive for engine in engines]),
            "num_queued": len(self._queue),
            "num_prefilled": len(self._prefilled),
            "num_overflows": self.num_overflows,
            "num_held": sum([len(engine.held) for engine in engines]),
            "num_held_pages": sum([engine.num_pages for engine in engines]),
            "num_kept_pages": sum([engine.num_staged_pages for engine in engines]),
            "num_outstanding_tokens": sum([engine.outstanding_tokens for engine in engines]),
        }
