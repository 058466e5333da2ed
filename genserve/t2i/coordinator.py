"""The coordinator: a controller that runs workflows node by node on executors (LegoDiffusion §4.3).

A request's graph is unrolled when it arrives; a task is ready when its eager inputs are there; a policy says where
ready tasks go; when a task is done its consumers may have become ready, and inputs that nobody needs any more are
released. Failed tasks are executed again, and so are those that made what was lost, as far back as need be.

A deferred input may be made while its consumer runs. A consumer is dispatched only after the task that makes the
input was: each waits for earlier dispatches alone, so none holds the executor that its producer needs.

Owns all decisions but placement (`scheduler`); its books are in `ledger` and `job`. No torch, no clock, no asyncio.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from genserve.core.control import Done, Effect, Event, Failed, Message, Send, Timer, WakeAt
from genserve.core.errors import ExecutionFailed, InvalidRequest
from genserve.t2i.books import HOME, Books, ExecutorSpec, HomeRun
from genserve.t2i.dispatching import Dispatching
from genserve.t2i.endings import Endings
from genserve.t2i.instance import Outline, Task, reads
from genserve.t2i.job import Job
from genserve.t2i.ledger import Flight
from genserve.t2i.messages import (
    ARRIVE,
    GATEWAY,
    Arrive,
    Arrived,
    Cancel,
    Ended,
    ExecutorBack,
    ExecutorGone,
    ExecutorLost,
    Forget,
    Given,
    Missed,
    Ran,
    Refused,
    Register,
    Skipped,
    Stored,
    Taken,
    TaskDone,
    There,
)
from genserve.t2i.recovery import Recovery
from genserve.t2i.scheduler import Fcfs, Policy

__all__ = ["HOME", "Coordinator", "ExecutorSpec"]

# An executor that is lost while it runs a task takes the task with it: so often, then the request gives up.
_MAX_LOSSES = 3


class Coordinator:
    """`num_ahead`: tasks that may queue behind the running one of an executor, which hides the way there and back.

    home_lane   lane of the coordinator's own store; None where all executors share it.
    keep_bytes  carried values up to this size are copied there, so that a loop can go on without its executor.
    """

    def __init__(
        self,
        executors: Sequence[ExecutorSpec],
        policy: Policy | None = None,
        *,
        home_lane: str | None = None,
        num_ahead: int = 1,
        keep_bytes: int = 64 << 20,
    ) -> None:
        self._books = Books(executors, home_lane, num_ahead, keep_bytes)
        self._endings = Endings(self._books)
        self._recovery = Recovery(self._books, self._endings)
        self._dispatching = Dispatching(self._books, policy or Fcfs())

    def decide(self, now: float) -> Iterable[Effect]:
        self._dispatching.dispatch_ready(now)
        self._dispatching.tell_released()
        books = self._books
        effects, books.effects = books.effects, []
        return effects

    def stats(self) -> dict[str, float]:
        return self._books.stats()

    def observe(self, event: Event, now: float) -> None:
        self._books.news = True
        if isinstance(event, Done):
            self._on_done(event)
        elif isinstance(event, Failed):
            self._on_failed(event)
        elif isinstance(event, Timer):
            job = self._books.jobs.get(event.tag)
            if job is not None and not job.finished:
                self._endings.end(job, "DeadlineExceeded", "the request's deadline passed")
        else:
            self._on_message(event, now)

    def _on_message(self, message: Message, now: float) -> None:
        match message.body:
            case Arrive() as request:
                self._arrive(request)
            case Cancel(request_id):
                job = self._books.jobs.get(request_id)
                if job is not None:
                    self._books.num["num_cancelled"] += not job.finished
                    self._endings.end(job, "Cancelled", "the request was cancelled")
            case Taken(request_id, keys):
                job = self._books.jobs.get(request_id)
                if job is not None:
                    for key in keys:
                        value = job.held.pop(key, None)
                        if value is not None:
                            self._books.let_go(value)
                    self._endings.forget_if_over(job)
            case Register(name, graph, codes):
                self._books.workflows[name] = Outline.of(graph)
                self._books.codes.update(codes)
            case Forget(name):
                self._books.workflows.pop(name, None)
            case ExecutorLost(name, _):
                self._recovery.lose(self._books.executors[name])
            case ExecutorBack(name):
                executor = self._books.executors[name]
                self._recovery.lose(executor)
                executor.up = True
            case ExecutorGone(name):
                self._recovery.lose(self._books.executors[name])
                del self._books.executors[name]
                if not self._books.executors:
                    for job in list(self._books.jobs.values()):
                        self._endings.end(job, "ExecutorLost", f"{name}, the last executor, is gone")
            case body:
                raise TypeError(f"the coordinator got a message it does not know: {type(body).__name__}")

    def _arrive(self, request: Arrive) -> None:
        self._books.num["num_requests"] += 1
        if not self._books.executors:
            self._books.effects.append(
                Send(GATEWAY, Ended(request.request_id, "ExecutorLost", "no executor is left"))
            )
            return
        outline = self._books.workflows[request.workflow]
        job = Job(
            next(self._books.orders), request, outline, HOME, self._books.task_ids, self._books.ledger.place
        )
        self._books.jobs[request.request_id] = job
        if request.deadline_s is not None:
            self._books.effects.append(WakeAt(request.deadline_s, request.request_id))
        self._advance(job)
        self._endings.settle(job)

    def _advance(self, job: Job) -> None:
        try:
            tasks = job.advance()
        except ExecutionFailed as error:
            self._endings.end(job, "ExecutionFailed", str(error))
            return
        except InvalidRequest as error:
            self._endings.end(job, "InvalidRequest", error.message, error.field)
            return
        for task in tasks:
            self._books.consider(task)
        if job.instance.is_complete:
            for task in job.instance.tasks:
                if task.state == "done":
                    for value in task.values.values():
                        if value.places and value.uses <= 0:
                            self._books.ledger.release(value)

    def _on_done(self, event: Done) -> None:
        run = self._books.runs.pop(event.run_id)
        if run is None or isinstance(run, HomeRun):
            self._on_aside_done(event, run)
            return
        task, job = run, run.job
        flight = self._land(task, event.run_id)
        result = event.result
        if job.ending:
            self._drop_made(task, flight, result)
            self._endings.forget_if_over(job)
        elif isinstance(result, Ran):
            self._complete(task, flight, result)
        elif isinstance(result, Missed):
            self._recovery.missed(task, flight, result)
        elif isinstance(result, Refused):
            self._endings.end(job, "InvalidRequest", result.reason, result.field)
        elif isinstance(result, Skipped):
            self._recovery.retry(task)
        else:
            raise TypeError(f"{task} ended with {type(result).__name__}")

    def _on_aside_done(self, event: Done, run: HomeRun | None) -> None:
        for executor in self._books.executors.values():
            executor.flying.pop(event.run_id, None)
        if run is None:
            return
        job = run.job
        job.flights.discard(event.run_id)
        decided: Task | None = None
        for (value, key), stored in zip(run.values, event.result, strict=True):
            if stored is None:  # it had gone
                if run.needed and not job.ending:
                    self._recovery.unreachable(value, run.spaces[key], key)
            elif job.ending or not job.is_wanted(value):
                self._books.ledger.release_key(HOME, key)
            else:
                self._books.ledger.place(value, HOME, key, stored.refs, stored.nbytes)
                if value.task in job.instance.deciders:
                    value.uses += 1  # to the end of the request
                    decided = value.task
                elif not run.needed:
                    value.uses += 1
                    for older in job.kept(value):
                        self._books.let_go(older)
        if decided is not None and not job.ending:
            job.decided.add(decided)
            self._advance(job)
        if job.ending:
            self._endings.forget_if_over(job)
        else:
            self._endings.settle(job)

    def _on_failed(self, event: Failed) -> None:
        run = self._books.runs.pop(event.run_id)
        for executor in self._books.executors.values():
            # The executor is gone before any of its runs is looked at.
            if event.lost and executor.up and event.lane in (executor.name, executor.io_lane):
                self._recovery.lose(executor)
        if isinstance(run, HomeRun):
            run.job.flights.discard(event.run_id)
            if run.job.ending:
                self._endings.forget_if_over(run.job)
            elif run.needed:
                self._endings.end(run.job, "ExecutionFailed", f"outputs could not be fetched: {event.error}")
            return
        if run is None:
            for executor in self._books.executors.values():
                executor.flying.pop(event.run_id, None)
            return
        task, job = run, run.job
        flight = self._land(task, event.run_id)
        executor = flight.executor
        self._drop_made(task, flight, None)
        if job.ending:
            self._endings.forget_if_over(job)
            return
        if event.lost:
            counts = executor.doomed == event.run_id
            if counts:
                executor.doomed = None
                task.errors.append(f"on {executor.name}: {event.error}")
                if len(task.errors) - len(task.where_failed) >= _MAX_LOSSES:
                    self._recovery.give_up(task, f"lost its executor {_MAX_LOSSES} times")
                    return
        elif not flight.given_up:
            self._books.num["num_failed_tasks"] += 1
            task.errors.append(f"on {executor.name}: {event.error}")
            task.where_failed.append(executor.name)
            if len(task.where_failed) >= 2:
                self._recovery.give_up(task, "failed twice")
                return
        self._recovery.retry(task)

    def _land(self, task: Task, run_id: int) -> Flight:
        flight: Flight = task.flight
        task.flight = None
        task.state = "waiting"
        flight.executor.flying.pop(run_id, None)
        task.job.flights.discard(run_id)
        return flight

    def _drop_made(self, task: Task, flight: Flight, result: Any) -> None:
        """Whatever the run left in its space isn't needed."""
        if flight.executor.up:
            for _, key in flight.fetched:
                self._books.ledger.release_key(flight.executor.space, key)
            if isinstance(result, Ran):
                for port in result.values:
                    self._books.ledger.release_key(flight.executor.space, (flight.run_id, port))

    def _complete(self, task: Task, flight: Flight, result: Ran) -> None:
        job, executor = task.job, flight.executor
        space, ledger = executor.space, self._books.ledger
        task.state = "done"
        self._books.num["num_tasks"] += 1
        if task.of_preview is None:
            job.num_undone -= 1
            executors = job.used.setdefault(task.node.id, {})
            executors[executor.name] = executors.get(executor.name, 0) + 1
        for value, key in flight.fetched:
            if value.uses > 0 and space not in value.places:
                ledger.place(value, space, key, None, value.nbytes)
            elif value.places.get(space, (None,))[0] != key:
                ledger.release_key(space, key)
        if task in job.decided and self._decides_otherwise(task, result):
            self._drop_made(task, flight, result)
            self._recovery.give_up(task, "ran again and gave another answer than the one that was acted upon")
            return
        for port, made in result.values.items():
            value = task.values[port]
            stored = type(made) is Stored
            if not stored:
                value.inline, value.is_inline = made, True
            if port in flight.keep:
                if stored:
                    ledger.place(value, space, (flight.run_id, port), made.refs, made.nbytes)
                else:
                    ledger.place(value, space, (flight.run_id, port), None, 0)
        for warning in result.values.get("warnings") or ():
            job.warnings[str(warning)] = None
        if result.values.get("hit") is not None:
            job.cache_hits[task] = result.values["hit"]
        if task in job.instance.deciders and not self._secure(task):
            job.decided.add(task)
            self._advance(job)
            if job.ending:
                return
        for preview in job.previews_of(task) if job.preview_ends else ():
            self._books.consider(preview)
        self._tell_waiting(task, space)
        self._keep(task)
        for value in reads(task):
            self._books.let_go(value)
        for value in task.values.values():
            if value.places and not job.is_wanted(value):
                ledger.release(value)
        short = [
            value
            for value in task.values.values()
            if not value.is_inline and not value.places and job.is_wanted(value)
        ]
        if short:  # somebody has come to need it while this ran
            self._recovery.restore(short)
        for consumer in task.consumers:
            self._books.consider(consumer)
        if task.of_preview is None:
            self._report(task)
        self._endings.settle(job)

    def _decides_otherwise(self, task: Task, result: Ran) -> bool:
        """Of a task that made a loop's bounds, and runs once more."""
        return any(
            value.is_inline and port in result.values and result.values[port] != value.inline
            for port, value in task.values.items()
        )

    def _secure(self, task: Task) -> bool:
        """Begin to copy what a decider made beside its decision, if its executor's end would be the end of it.

        A cache that is asked again, elsewhere, may answer otherwise, when loops have been unrolled as it said first.
        """
        if self._books.home_lane is None:
            return False
        away = [
            value
            for value in task.values.values()
            if not value.is_inline and value.places and HOME not in value.places
        ]
        if away:
            self._endings.bring_home(task.job, away, needed=True)
        return bool(away)

    def _report(self, task: Task) -> None:
        job = task.job
        total = len(job.instance.tasks)
        step = num_steps = None
        if task.steps:
            loop = self._loop_of(task)
            first, end = job.instance.bounds(loop, task)
            step, num_steps = task.steps[-1] - first + 1, end - first
        self._books.effects.append(
            Send(
                GATEWAY,
                TaskDone(
                    job.request.request_id,
                    task.node.id,
                    task.image or 0,
                    step,
                    num_steps,
                    total - job.num_undone,
                    total,
                ),
            )
        )

    def _loop_of(self, task: Task) -> str:
        around: tuple[str, ...] = task.job.outline.around[task.node.id]
        return around[-1]

    def _tell_waiting(self, task: Task, space: str) -> None:
        """Consumers in other spaces that run already, waiting for this task's outputs."""
        for consumer in task.consumers:
            flight: Flight | None = consumer.flight
            if flight is None or flight.given_up or not flight.awaits:
                continue
            for value, key in list(flight.awaits.items()):
                if value.task is task:
                    del flight.awaits[value]
                    if flight.executor.space != space:
                        place = value.places.get(space)
                        source: Given | There
                        if value.is_inline:
                            source = Given(value.inline)
                        else:
                            source = There(key, None if place is None else place[1])
                            flight.reads[key] = value, space
                        flight.fetched.append((value, key))
                        self._books.aside(flight.executor.io_lane, ARRIVE, Arrived(key, source))

    def _keep(self, task: Task) -> None:
        """Copy what a loop carries, if its executor's end would be the end of it."""
        if self._books.home_lane is None or not task.steps:
            return
        carried = [
            value
            for port, value in task.values.items()
            if (task.node.id, port) in task.job.outline.carriers
            and value.places
            and not value.is_inline
            and HOME not in value.places
            and value.nbytes <= self._books.keep_bytes
        ]
        if carried:
            self._endings.bring_home(task.job, carried, needed=False)
