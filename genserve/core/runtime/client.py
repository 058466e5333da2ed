"""How a front end reaches an engine, wherever the engine runs.

`EngineClient` has two implementations: a `LiveLoop` in this process, and one inside a Ray actor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from genserve.core.errors import GenserveError
from genserve.core.types import EngineInfo, Submit, TokenOutput

# Entries of `EngineClient.stats` that only grow; the others are levels.
COUNTER_STATS = frozenset(
    {
        *("num_steps", "num_preemptions", "num_evictions"),
        *("num_prefill_tokens", "num_decode_tokens", "num_cached_tokens"),
        *("num_passes", "num_blocks", "num_commits", "num_refreshes", "num_restarts"),
    }
)


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

    async def stats(self) -> dict[str, float]:
        """Gauges and counters of the engine (for /metrics and leak checks)."""
        ...

    async def aclose(self) -> None:
        """Abort whatever still runs and free the engine."""
        ...
