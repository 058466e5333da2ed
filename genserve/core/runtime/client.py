"""How a front end reaches an engine, wherever the engine runs.

`EngineClient` has two implementations: a `LiveLoop` in this process, and one inside a Ray actor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from genserve.core.errors import GenserveError
from genserve.core.types import EngineInfo, Submit, TokenOutput

# What an engine tells in `EngineClient.stats`, for `/metrics`.
COUNTERS = {
    "num_steps": "Packed forward passes",
    "num_prefill_tokens": "Tokens computed by prefills",
    "num_decode_tokens": "Tokens computed by decodes",
    "num_cached_tokens": "Prompt tokens whose KV was found in the prefix cache",
    "num_preemptions": "Sequences put back into the queue for want of pages",
    "num_evictions": "Cached pages given to others",
    "num_passes": "Passes of single requests; a step packs several",
    "num_blocks": "Blocks denoised to their end",
    "num_commits": "Positions committed",
    "num_refreshes": "Prefills after a request's first",
    "num_restarts": "Requests begun again after their engine was lost or could not hand them over",
    "num_handed_over": "Requests whose KV was kept for another worker",
    "num_fetched": "Requests whose KV was fetched from another worker",
    "num_failed_fetches": "Copies of KV that broke off",
    "num_overflows": "Prefills taken by colocated workers because every prefill worker was overloaded",
}
LEVELS = {
    "up": "Whether the engine answers",
    "num_sequences": "Sequences in flight",
    "num_waiting": "Sequences that wait for a place, pages or budget",
    "num_running": "Sequences that hold a slot",
    "num_free_slots": "Slots that are free",
    "num_pages": "KV pages of the pool",
    "num_free_pages": "KV pages free or reclaimable",
    "num_used_pages": "KV pages in use",
    "num_leases": "Leases on KV pages",
    "num_streams": "Open output streams",
    "budget_balance": "Tokens in hand of the deficit budget, below zero a debt",
    "num_engines": "Engines that are up",
    "num_held": "Requests that engines hold",
    "num_held_pages": "KV pages that the dispatcher counts as taken",
    "num_queued": "Requests whose prefill waits for a worker",
    "num_prefilled": "Requests prefilled that wait for a worker to decode",
    "num_kept_pages": "KV pages that the dispatcher counts as kept for other workers",
    "num_staged": "Requests whose KV is kept for another worker",
    "num_staged_pages": "KV pages kept for other workers",
    "num_fetching": "Requests whose KV is being fetched",
    "num_outstanding_tokens": "Prefill tokens assigned and not yet computed",
    "tokens_per_forward": "Positions committed per step, since the start",
    "tokens_per_pass": "Positions committed per pass of a request, since the start",
    "passes_per_block": "Passes per block, since the start",
    "prefill_tokens_per_step": "Prefill tokens per step, since the start",
    "decode_tokens_per_step": "Decode tokens per step, since the start",
}


class EngineClient(Protocol):
    """One engine. All methods are called from one asyncio loop."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def failure(self) -> GenserveError | None:
        """Why the engine can serve no more; None while it can."""
        ...

    def submit(self, request: Submit) -> AsyncIterator[TokenOutput]:
        """Hand a sequence over, at once, and iterate over what it yields.

        `deadline_s` is on the clock of the caller's loop, wherever the engine runs.

        The sequence is queued when this returns, not at the first `anext`. The iterator ends after
        an output with `finish_reason`; if the engine is lost it raises `ExecutorLost`. Closing it
        early (`aclose`) does not abort: call `abort`.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop a sequence. Its iterator ends with finish reason "abort". Unknown ids are ignored."""
        ...

    def run_age_s(self) -> float:
        """For how long the oldest run at hand has been running, in this process; 0 if there is none."""
        ...

    async def stats(self) -> dict[str, float]:
        """Gauges and counters of the engine (for /metrics and leak checks)."""
        ...

    async def aclose(self) -> None:
        """Abort whatever still runs and free the engine."""
        ...
