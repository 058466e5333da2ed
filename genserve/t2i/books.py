"""The coordinator's state: requests, executors, runs at hand, what is ready; and the small changes that all parts make.

Decides nothing. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from genserve.core.control import Effect, Run
from genserve.t2i.instance import Outline, Task, Value
from genserve.t2i.job import Job
from genserve.t2i.ledger import ExecutorState, Flight, Ledger
from genserve.t2i.messages import ModelCode
from genserve.t2i.scheduler import ReadyTask

HOME = "home"


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """An executor: the lane of its name, and the lane "name/io". Its tensors lie in `space`; executors in the
    coordinator's own process are in `HOME`. `budget_bytes` of weights (None: no limit)."""

    name: str
    space: str
    budget_bytes: int | None = None


@dataclass(slots=True)
class HomeRun:
    """Copies into the coordinator's own store. `needed`: somebody waits for them; else they are a reserve."""

    job: Job
    values: tuple[tuple[Value, Any], ...]
    spaces: Mapping[Any, str]
    needed: bool


@dataclass(slots=True)
class Ready:
    """A task whose eager inputs are there or on their way; `only`: the one executor it can go to. `view` is what the
    policy sees, once made."""

    task: Task
    only: str | None
    view: ReadyTask | None = None


class Books:
    """See `Coordinator` for the arguments. `runs` and `ready` are by run id and task id."""

    def __init__(
        self, executors: Sequence[ExecutorSpec], home_lane: str | None, num_ahead: int, keep_bytes: int
    ) -> None:
        self.executors = {
            spec.name: ExecutorState(spec.name, spec.space, spec.budget_bytes) for spec in executors
        }
        self.home_lane, self.num_ahead, self.keep_bytes = home_lane, num_ahead, keep_bytes
        self.ledger = Ledger()
        self.workflows: dict[str, Outline] = {}
        self.codes: dict[str, ModelCode] = {}
        self.jobs: dict[str, Job] = {}
        self.ready: dict[int, Ready] = {}
        self.runs: dict[int, Task | HomeRun | None] = {}
        self.task_ids, self.run_ids, self.orders = count(), count(1), count()
        self.effects: list[Effect] = []
        self.news = False  # whether another plan may come out than the last one
        self.num: dict[str, int] = dict.fromkeys(
            ("num_requests", "num_tasks", "num_reruns", "num_failed_tasks", "num_finished", "num_cancelled"),
            0,
        )

    def aside(self, lane: str, op: str, args: Any) -> None:
        run_id = next(self.run_ids)
        self.runs[run_id] = None
        self.effects.append(Run(lane, run_id, op, args))

    def consider(self, task: Task) -> None:
        """Whether the task may be dispatched, as far as its eager inputs go."""
        only = self._where(task)
        if only is None:
            self.ready.pop(task.id, None)
        else:
            self.ready[task.id] = Ready(task, only or None)
            self.news = True

    def _where(self, task: Task) -> str | None:
        """The one executor to which the task can go, "" for any, None: it has to wait."""
        if task.state != "waiting" or task.job.ending:
            return None
        only = ""
        for value in task.eager:
            producer = value.task
            if producer is None or producer.state == "done":
                continue
            flight: Flight | None = producer.flight
            if flight is None or flight.aside or not self.num_ahead or flight.given_up:
                return None
            if value.port not in flight.keep:
                return None
            if only and only != flight.executor.name:
                return None
            only = flight.executor.name
        if task.adapters and task.job.adapters_on(task) is None:
            return None
        return only

    def let_go(self, value: Value) -> None:
        value.uses -= 1
        if value.uses <= 0 and value.places:
            job = None if value.task is None else value.task.job
            if job is None or not job.is_wanted(value):
                self.ledger.release(value)

    def stats(self) -> dict[str, float]:
        return {
            **self.num,
            "num_running": sum(not job.ending for job in self.jobs.values()),
            "num_held": len(self.jobs),
            "num_ready": len(self.ready),
            "num_values": self.ledger.num_values,
            "num_executors": sum(executor.up for executor in self.executors.values()),
            "num_workflows": len(self.workflows),
            "num_models": sum(len(executor.models) for executor in self.executors.values()),
        }
