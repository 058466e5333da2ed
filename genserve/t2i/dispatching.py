"""From ready tasks to runs on lanes: what the policy sees, and where a task finds its inputs. No torch."""

from __future__ import annotations

from typing import Any

from genserve.core.control import Run
from genserve.t2i.books import HOME, Books, Ready
from genserve.t2i.instance import Task, Value, code_name
from genserve.t2i.ledger import ExecutorState, Flight, input_bytes
from genserve.t2i.messages import (
    ADAPTER,
    KEEP,
    RELEASE,
    TASK,
    Given,
    Here,
    Keep,
    Later,
    ModelCode,
    PatchUse,
    RunTask,
    Several,
    There,
)
from genserve.t2i.scheduler import ExecutorView, Policy, ReadyTask, View


class Dispatching:
    def __init__(self, books: Books, policy: Policy) -> None:
        self._books, self._policy = books, policy

    def dispatch_ready(self, now: float) -> None:
        """Send ready tasks where the policy says."""
        books = self._books
        while books.ready and books.news:
            books.news = False
            view = self._view(now)
            for assignment in self._policy.plan(view) if view.tasks and view.executors else ():
                ready = books.ready.pop(assignment.task)
                executor = books.executors[assignment.executor]
                if ready.only is not None and ready.only != executor.name:
                    raise ValueError(
                        f"the policy sent {ready.task} to {executor.name}; its inputs are on {ready.only}"
                    )
                self._dispatch(ready.task, executor)

    def _view(self, now: float) -> View:
        tasks: list[ReadyTask] = []
        seen: set[int] = set()
        for ready in sorted(self._books.ready.values(), key=_by_order):
            after = self._makers_to_come(ready.task, seen) if ready.task.deferred else ()
            if after is None:
                continue
            seen.add(ready.task.id)
            if ready.view is None or ready.view.after != after:
                ready.view = _seen(ready, after)
            tasks.append(ready.view)
        executors = tuple(
            ExecutorView(e.name, e.space, dict(e.models), e.budget_bytes, e.num_tasks)
            for e in self._books.executors.values()
            if e.up
        )
        return View(now, tuple(tasks), executors, self._books.num_ahead)

    def _makers_to_come(self, task: Task, ready: set[int]) -> tuple[int, ...] | None:
        """Tasks that make its deferred inputs and have yet to be dispatched; None if one of them isn't `ready`."""
        after = []
        for value in task.deferred:
            producer = value.task
            if producer is None or producer.state == "done":
                continue
            if producer.state == "waiting":
                if producer.id not in ready:
                    return None
                after.append(producer.id)
            elif value.port not in producer.flight.keep or producer.flight.given_up:
                return None
        return tuple(after)

    def _dispatch(self, task: Task, executor: ExecutorState) -> None:
        job = task.job
        run_id = next(self._books.run_ids)
        aside = task.node.id in job.outline.adapters
        flight = Flight(run_id, executor, aside)
        inputs = tuple(
            (
                port,
                Given(source)
                if type(source) is not Value and type(source) is not list
                else self._input(source, flight, task, port),
            )
            for port, source in task.inputs
        )
        patches: tuple[PatchUse, ...] = ()
        if task.adapters:
            on = bool(job.adapters_on(task))
            job.record_adapters(task, on)
            if on:
                patches = tuple(
                    PatchUse(
                        patch.model.identity or code_name(patch.model),
                        patch.scale,
                        self._input(adapter[0], flight, task, ""),
                        self._names(adapter, flight),
                    )
                    for patch, adapter in zip(task.node.patches, task.adapters, strict=True)
                )
        model = task.node.model
        name, code = job.outline.codes[task.node.id], None
        if name not in executor.known:
            executor.known.add(name)
            code = self._books.codes.get(name) or ModelCode(model)
        weights = job.outline.weights[task.node.id]
        unload = () if aside else executor.use(weights, model.num_bytes)
        keep = tuple(port for port, value in task.values.items() if job.is_wanted(value))
        flight.keep = keep
        task.state, task.flight = "flying", flight
        task.num_runs += 1
        job.num_runs += 1
        job.flights.add(run_id)
        self._books.runs[run_id] = task
        args = RunTask(
            task.id,
            task.node.id,
            name,
            weights,
            inputs,
            tuple(task.values),
            keep,
            patches,
            code,
            unload,
            () if aside else self._books.ledger.take_released(executor.space),
            run_id,
        )
        if aside:
            self._books.effects.append(Run(executor.io_lane, run_id, ADAPTER, args))
        else:
            executor.flying[run_id] = task
            self._books.effects.append(Run(executor.name, run_id, TASK, args))
        for consumer in task.consumers:
            self._books.consider(consumer)

    def _names(self, adapter: tuple[Value, ...], flight: Flight) -> Any:
        """Thousands of names: sent once, not with each task."""
        if len(adapter) == 1:
            return Given(())
        names, space = adapter[1], flight.executor.space
        if space in names.places:
            return Here(names.places[space][0])
        key = next((key for key, _ in names.places.values()), None)
        if key is None:
            return Given(names.inline)
        flight.fetched.append((names, key))
        return There(key, names.inline)

    def _input(self, source: Any, flight: Flight, task: Task, port: str) -> Any:
        if type(source) is list:
            return Several(tuple(self._input(item, flight, task, port) for item in source))
        if type(source) is not Value:
            return Given(source)
        if source.is_inline:
            return Given(source.inline)
        space = flight.executor.space
        producer = source.task
        if producer is not None and producer.state != "done":
            made_by: Flight = producer.flight
            key = (made_by.run_id, source.port)
            declared = task.node.port(port)
            if declared.deferred:
                flight.awaits[source] = key
                flight.reads[key] = source, ""
                kind = declared.type.item or declared.type
                return Later(key, kind.kind, kind.length)
            flight.reads[key] = source, ""
            return Here(key)
        place = source.places.get(space)
        if place is not None:
            flight.reads[place[0]] = source, space
            return Here(place[0])
        where, (key, refs) = next((s, p) for s, p in source.places.items() if p[1] is not None)
        flight.reads[key] = source, where
        flight.fetched.append((source, key))
        return There(key, refs)

    def tell_released(self) -> None:
        """Spaces in which nothing runs are told at once; others with the next run."""
        for space in self._books.ledger.spaces_to_tell():
            if space == HOME and self._books.home_lane is not None:
                keys = self._books.ledger.take_released(space)
                self._books.aside(self._books.home_lane, KEEP, Keep((), keys))
                continue
            executors = [e for e in self._books.executors.values() if e.up and e.space == space]
            idle = next((e for e in executors if not e.flying), None)
            if idle is not None:
                run_id = next(self._books.run_ids)
                self._books.runs[run_id] = None
                idle.flying[run_id] = None
                self._books.effects.append(
                    Run(idle.name, run_id, RELEASE, self._books.ledger.take_released(space))
                )
            elif not executors and space != HOME:
                self._books.ledger.take_released(space)


def _seen(ready: Ready, after: tuple[int, ...]) -> ReadyTask:
    task = ready.task
    outline, model = task.job.outline, task.node.model
    return ReadyTask(
        task.id,
        task.job.order,
        task.depth,
        outline.weights[task.node.id],
        model.num_bytes,
        ready.only,
        after,
        input_bytes(task.eager),
        tuple(task.where_failed),
        task.node.id in outline.adapters,
    )


def _by_order(ready: Ready) -> tuple[int, int, int]:
    task = ready.task
    return task.job.order, task.depth, task.id
