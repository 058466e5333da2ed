"""Which ready task goes to which executor: policies, `plan(view) -> plan` over a frozen view (LegoDiffusion §5).

A policy decides nothing else: it keeps no state, so asking twice gives the same answer, and no room is an empty plan.
Here is the plain one: first come, first served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReadyTask:
    """A task that may be dispatched.

    order       of its request's arrival.
    depth       in the request's graph.
    model       identity; `model_bytes` 0 for one without weights.
    only        the one executor it can go to, as the runs before it there make its inputs; None for any.
    after       tasks that must be dispatched before it, be it in the same plan: they make its deferred inputs.
    input_bytes of its inputs, by the space in which they lie.
    not_on      executors on which it failed: any other is better.
    aside       it only loads an adapter, beside whatever the executor runs.
    """

    task: int
    order: int
    depth: int
    model: str
    model_bytes: int
    only: str | None = None
    after: tuple[int, ...] = ()
    input_bytes: Mapping[str, int] | None = None
    not_on: tuple[str, ...] = ()
    aside: bool = False


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """An executor that is up. `models`: loaded ones by identity, the least recently used first."""

    name: str
    space: str
    models: Mapping[str, int]
    budget_bytes: int | None
    num_flying: int


@dataclass(frozen=True, slots=True)
class View:
    """`tasks` by (order, depth, task). `num_ahead`: runs that may queue behind the running one of an executor."""

    now_s: float
    tasks: tuple[ReadyTask, ...]
    executors: tuple[ExecutorView, ...]
    num_ahead: int = 1


@dataclass(frozen=True, slots=True)
class Assignment:
    task: int
    executor: str


Plan = tuple[Assignment, ...]


class Policy(Protocol):
    def plan(self, view: View) -> Plan:
        """Assignments in the order of dispatch. Runs beyond `1 + num_ahead` on one executor are refused, and so is a
        task before those it comes `after`."""
        ...


class Fcfs:
    """By (arrival, depth); of the free executors the one that has the model, then the one that has the inputs.

    A task goes behind a running one only where its inputs are being made, where it loads nothing, and while no earlier
    task waits for a free executor: it would never see one.
    """

    def plan(self, view: View) -> Plan:
        flying = {executor.name: executor.num_flying for executor in view.executors}
        loaded = {executor.name: set(executor.models) for executor in view.executors}
        planned: list[Assignment] = []
        waiting = {task.task for task in view.tasks}
        num_ahead = view.num_ahead
        for task in view.tasks:
            if any(other in waiting for other in task.after):
                continue
            best: ExecutorView | None = None
            best_score: tuple[int, int, int, int] | None = None
            for executor in view.executors:
                if task.only is not None and executor.name != task.only:
                    continue
                has_model = not task.model_bytes or task.model in loaded[executor.name]
                if not task.aside:
                    num = flying[executor.name]
                    ahead = task.only is not None or bool(task.after)
                    if num > (num_ahead if ahead and (has_model or len(view.executors) == 1) else 0):
                        continue
                score = (
                    executor.name not in task.not_on,
                    has_model,
                    0 if task.input_bytes is None else task.input_bytes.get(executor.space, 0),
                    -flying[executor.name],
                )
                if best_score is None or score > best_score:
                    best, best_score = executor, score
            if best is None:
                if task.only is None:
                    num_ahead = 0
                continue
            planned.append(Assignment(task.task, best.name))
            waiting.discard(task.task)
            if not task.aside:
                flying[best.name] += 1
                if task.model_bytes:
                    loaded[best.name].add(task.model)
        return tuple(planned)
