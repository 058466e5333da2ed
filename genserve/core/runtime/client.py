"""How a front end reaches an engine, wherever the engine runs.

`EngineClient` has two implementations: a `LiveLoop` in this process, and one inside a Ray actor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from genserve.core.types import EngineInfo, Submit, TokenOutput


class EngineClient(Protocol):
    """One engine. All methods are called from one asyncio loop."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: Submit) -> AsyncIterator[TokenOutput]:
        """Hand a sequence over, at once, and iterate over what it yields.

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
