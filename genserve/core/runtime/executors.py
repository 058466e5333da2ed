"""Executors in this process. The one over a Ray actor is in `core.runtime.ray_executor`."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from genserve.core.control import Done, Failed, Run
from genserve.core.cost import CostModel, OutcomeModel

logger = logging.getLogger(__name__)

Report = Callable[[Done | Failed], None]


class Worker(Protocol):
    """Does the work of a lane, blocking. Holds whatever it needs: torch, models, page storage."""

    def perform(self, op: str, args: Any) -> Any: ...


class ThreadExecutor:
    """One lane on one thread of this process. A raised exception becomes `Failed`, never more."""

    def __init__(self, worker: Worker, name: str = "lane") -> None:
        self._worker = worker
        self._aio = asyncio.get_running_loop()
        self._closing = False
        self._runs: queue.SimpleQueue[tuple[Run, Report] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"genserve-{name}", daemon=True)
        self._thread.start()

    def submit(self, run: Run, report: Report) -> None:
        self._runs.put((run, report))

    async def aclose(self) -> None:
        self._closing = True
        if self._thread.is_alive():
            self._runs.put(None)
            await self._aio.run_in_executor(None, self._thread.join)

    def _work(self) -> None:
        while (item := self._runs.get()) is not None:
            if self._closing:
                return
            run, report = item
            event: Done | Failed
            try:
                event = Done(run.lane, run.run_id, self._worker.perform(run.op, run.args))
            except Exception as error:
                logger.exception("run %d (%s) failed on lane %s", run.run_id, run.op, run.lane)
                event = Failed(run.lane, run.run_id, f"{type(error).__name__}: {error}")
            try:
                self._aio.call_soon_threadsafe(report, event)
            except RuntimeError:  # the event loop is gone: nobody is left to tell
                return


class ModelledExecutor:
    """Performs nothing: takes a `CostModel`'s time and yields an `OutcomeModel`'s result.

    On an event loop with a virtual clock this is the simulator's twin (`tests/conformance`).
    """

    def __init__(self, cost: CostModel, outcome: OutcomeModel) -> None:
        self._cost = cost
        self._outcome = outcome
        self._aio = asyncio.get_running_loop()
        self._lane_free_s: dict[str, float] = {}

    def submit(self, run: Run, report: Report) -> None:
        end_s = max(self._aio.time(), self._lane_free_s.get(run.lane, 0.0)) + self._cost.price_s(run)
        self._lane_free_s[run.lane] = end_s
        self._aio.call_at(end_s, self._finish, run, report)

    def _finish(self, run: Run, report: Report) -> None:
        result = self._outcome.outcome(run)
        report(result if isinstance(result, Done | Failed) else Done(run.lane, run.run_id, result))

    async def aclose(self) -> None:
        return None
