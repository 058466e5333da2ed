"""The coordinator: a controller that runs workflows node by node on executors (LegoDiffusion §4.3).

A request's graph is unrolled when it arrives; a task is ready when its eager inputs are there; a policy says where
ready tasks go; when a task is done its consumers may have become ready, and inputs that nobody needs any more are
released. Failed tasks are executed again, and so are those that made what was lost, as far back as need be.

A deferred input may be made while its consumer runs. A consumer is dispatched only after the task that makes the
input was: each waits for earlier dispatches alone, so none holds the executor that its producer needs.

Owns all decisions but placement (`scheduler`); its books are in `ledger` and `job`. No torch, no clock, no asyncio.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from genserve.core.control import Done, Effect, Event, Failed, Message, Run, Send, Timer, WakeAt
from genserve.core.errors import ExecutionFailed
from genserve.t2i.instance import Outline, Task, Value, code_name, reads, values_in
from genserve.t2i.job import Job
from genserve.t2i.ledger import ExecutorState, Flight, Ledger, input_bytes, reachable
from genserve.t2i.messages import (
    ADAPTER,
    ARRIVE,
    GATEWAY,
    GIVE_UP,
    KEEP,
    RELEASE,
    TASK,
    Arrive,
    Arrived,
    Cancel,
    Ended,
    ExecutorBack,
    ExecutorGone,
    ExecutorLost,
    Finished,
    Given,
    GiveUp,
    Here,
    Keep,
    Key,
    Later,
    Missed,
    ModelCode,
    PatchUse,
    PreviewMade,
    Ran,
    Register,
    RunTask,
    Several,
    Skipped,
    Stored,
    Taken,
    TaskDone,
    There,
)
from genserve.t2i.scheduler import ExecutorView, Fcfs, Policy, ReadyTask, View

HOME = "home"

# An executor that is lost while it runs a task takes the task with it: so often, then the request gives up.
_MAX_LOSSES = 3
_MAX_MISSES = 20


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """An executor: the lane of its name, and the lane "name/io". Its tensors lie in `space`; executors in the
    coordinator's own process are in `HOME`. `budget_bytes` of weights (None: no limit)."""

    name: str
    space: str
    budget_bytes: int | None = None


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
        self._executors = {
            spec.name: ExecutorState(spec.name, spec.space, spec.budget_bytes) for spec in executors
        }
        self._policy = policy or Fcfs()
        self._home_lane = home_lane
        self._num_ahead = num_ahead
        self._keep_bytes = keep_bytes
        self._ledger = Ledger()
        self._workflows: dict[str, Outline] = {}
        self._codes: dict[str, ModelCode] = {}
        self._jobs: dict[str, Job] = {}
        self._ready: dict[int, tuple[Task, str | None]] = {}  # with the one executor it can go to
        self._runs: dict[int, Task | _HomeRun | None] = {}
        self._task_ids, self._run_ids, self._orders = count(), count(1), count()
        self._effects: list[Effect] = []
        self._news = False  # whether another plan may come out than the last one
        self._num: dict[str, int] = dict.fromkeys(
            ("num_requests", "num_tasks", "num_reruns", "num_failed_tasks", "num_finished", "num_cancelled"),
            0,
        )

    # -- facts -----------------------------------------------------------------------------------------

    def observe(self, event: Event, now: float) -> None:
        self._news = True
        if isinstance(event, Done):
            self._on_done(event)
        elif isinstance(event, Failed):
            self._on_failed(event)
        elif isinstance(event, Timer):
            job = self._jobs.get(event.tag)
            if job is not None and not job.finished:
                self._end(job, "DeadlineExceeded", "the request's deadline passed")
        else:
            self._on_message(event, now)

    def _on_message(self, message: Message, now: float) -> None:
        match message.body:
            case Arrive() as request:
                self._arrive(request)
            case Cancel(request_id):
                job = self._jobs.get(request_id)
                if job is not None:
                    self._num["num_cancelled"] += not job.finished
                    self._end(job, "Cancelled", "the request was cancelled")
            case Taken(request_id, keys):
                job = self._jobs.get(request_id)
                if job is not None:
                    for key in keys:
                        value = job.held.pop(key, None)
                        if value is not None:
                            self._let_go(value)
                    self._forget_if_over(job)
            case Register(name, graph, codes):
                self._workflows[name] = Outline.of(graph)
                self._codes.update(codes)
            case ExecutorLost(name, _):
                self._lose(self._executors[name])
            case ExecutorBack(name):
                executor = self._executors[name]
                self._lose(executor)
                executor.up = True
            case ExecutorGone(name):
                self._lose(self._executors[name])
                del self._executors[name]
                if not self._executors:
                    for job in list(self._jobs.values()):
                        self._end(job, "ExecutorLost", f"{name}, the last executor, is gone")
            case body:
                raise TypeError(f"the coordinator got a message it does not know: {type(body).__name__}")

    def _arrive(self, request: Arrive) -> None:
        self._num["num_requests"] += 1
        if not self._executors:
            self._effects.append(
                Send(GATEWAY, Ended(request.request_id, "ExecutorLost", "no executor is left"))
            )
            return
        outline = self._workflows[request.workflow]
        job = Job(next(self._orders), request, outline, HOME, self._task_ids, self._ledger.place)
        self._jobs[request.request_id] = job
        if request.deadline_s is not None:
            self._effects.append(WakeAt(request.deadline_s, request.request_id))
        self._advance(job)
        self._settle(job)

    def _advance(self, job: Job) -> None:
        try:
            tasks = job.advance()
        except ExecutionFailed as error:
            self._end(job, "ExecutionFailed", str(error))
            return
        for task in tasks:
            self._consider(task)
        if job.instance.is_complete:
            for task in job.instance.tasks:
                if task.state == "done":
                    for value in task.values.values():
                        if value.places and value.uses <= 0:
                            self._ledger.release(value)

    # -- how runs end ----------------------------------------------------------------------------------

    def _on_done(self, event: Done) -> None:
        run = self._runs.pop(event.run_id)
        if run is None or isinstance(run, _HomeRun):
            self._on_aside_done(event, run)
            return
        task, job = run, run.job
        flight = self._land(task, event.run_id)
        result = event.result
        if job.ending:
            self._drop_made(task, flight, result)
            self._forget_if_over(job)
        elif isinstance(result, Ran):
            self._complete(task, flight, result)
        elif isinstance(result, Missed):
            self._missed(task, flight, result)
        elif isinstance(result, Skipped):
            self._retry(task)
        else:
            raise TypeError(f"{task} ended with {type(result).__name__}")

    def _on_aside_done(self, event: Done, run: _HomeRun | None) -> None:
        for executor in self._executors.values():
            executor.flying.pop(event.run_id, None)
        if run is None:
            return
        job = run.job
        job.flights.discard(event.run_id)
        for (value, key), stored in zip(run.values, event.result, strict=True):
            if stored is None:  # it had gone
                if run.needed and not job.ending:
                    self._unreachable(value, run.spaces[key], key)
            elif job.ending or not job.is_wanted(value):
                self._ledger.release_key(HOME, key)
            else:
                self._ledger.place(value, HOME, key, stored.refs, stored.nbytes)
                if not run.needed:
                    value.uses += 1
                    for older in job.kept(value):
                        self._let_go(older)
        if job.ending:
            self._forget_if_over(job)
        else:
            self._settle(job)

    def _on_failed(self, event: Failed) -> None:
        run = self._runs.pop(event.run_id)
        for executor in self._executors.values():
            # The executor is gone before any of its runs is looked at.
            if event.lost and executor.up and event.lane in (executor.name, executor.io_lane):
                self._lose(executor)
        if isinstance(run, _HomeRun):
            run.job.flights.discard(event.run_id)
            if run.job.ending:
                self._forget_if_over(run.job)
            elif run.needed:
                self._end(run.job, "ExecutionFailed", f"outputs could not be fetched: {event.error}")
            return
        if run is None:
            for executor in self._executors.values():
                executor.flying.pop(event.run_id, None)
            return
        task, job = run, run.job
        flight = self._land(task, event.run_id)
        executor = flight.executor
        self._drop_made(task, flight, None)
        if job.ending:
            self._forget_if_over(job)
            return
        if event.lost:
            counts = executor.doomed == event.run_id
            if counts:
                executor.doomed = None
                task.errors.append(f"on {executor.name}: {event.error}")
                if len(task.errors) - len(task.where_failed) >= _MAX_LOSSES:
                    self._give_up(task, f"lost its executor {_MAX_LOSSES} times")
                    return
        elif not flight.given_up:
            self._num["num_failed_tasks"] += 1
            task.errors.append(f"on {executor.name}: {event.error}")
            task.where_failed.append(executor.name)
            if len(task.where_failed) >= 2:
                self._give_up(task, "failed twice")
                return
        self._retry(task)

    def _give_up(self, task: Task, what: str) -> None:
        where = f" ({task.node.where})" if task.node.where else ""
        self._end(task.job, "ExecutionFailed", f"{task.node.id}{where} {what}: {'; '.join(task.errors)}")

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
                self._ledger.release_key(flight.executor.space, key)
            if isinstance(result, Ran):
                for port in result.values:
                    self._ledger.release_key(flight.executor.space, (flight.run_id, port))

    def _complete(self, task: Task, flight: Flight, result: Ran) -> None:
        job, executor = task.job, flight.executor
        space, ledger = executor.space, self._ledger
        task.state = "done"
        self._num["num_tasks"] += 1
        if task.of_preview is None:
            job.num_undone -= 1
            executors = job.used.setdefault(task.node.id, {})
            executors[executor.name] = executors.get(executor.name, 0) + 1
        for value, key in flight.fetched:
            if value.uses > 0 and space not in value.places:
                ledger.place(value, space, key, None, value.nbytes)
            elif value.places.get(space, (None,))[0] != key:
                ledger.release_key(space, key)
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
            job.cache_hits.append({"node": task.node.id, "image": task.image, "hit": result.values["hit"]})
        if task in job.instance.deciders:
            self._advance(job)
            if job.ending:
                return
        for preview in job.previews_of(task) if job.preview_ends else ():
            self._consider(preview)
        self._tell_waiting(task, space)
        self._keep(task)
        for value in reads(task):
            self._let_go(value)
        for value in task.values.values():
            if value.places and not job.is_wanted(value):
                ledger.release(value)
        short = [
            value
            for value in task.values.values()
            if not value.is_inline and not value.places and job.is_wanted(value)
        ]
        if short:  # somebody has come to need it while this ran
            self._restore(short)
        for consumer in task.consumers:
            self._consider(consumer)
        if task.of_preview is None:
            self._report(task)
        self._settle(job)

    def _report(self, task: Task) -> None:
        job = task.job
        total = len(job.instance.tasks)
        step = num_steps = None
        if task.steps:
            loop = self._loop_of(task)
            first, end = job.instance.bounds(loop, task)
            step, num_steps = task.steps[-1] - first + 1, end - first
        self._effects.append(
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
                        self._aside(flight.executor.io_lane, ARRIVE, Arrived(key, source))

    def _keep(self, task: Task) -> None:
        """Copy what a loop carries, if its executor's end would be the end of it."""
        if self._home_lane is None or not task.steps:
            return
        carried = [
            value
            for port, value in task.values.items()
            if (task.node.id, port) in task.job.outline.carriers
            and value.places
            and HOME not in value.places
            and value.nbytes <= self._keep_bytes
        ]
        if carried:
            self._bring_home(task.job, carried, needed=False)

    def _bring_home(self, job: Job, values: Sequence[Value], needed: bool) -> None:
        run_id = next(self._run_ids)
        sources, pairs, spaces = [], [], {}
        for value in values:
            space, (key, refs) = next((s, p) for s, p in value.places.items() if p[1] is not None)
            sources.append(There(key, refs))
            pairs.append((value, key))
            spaces[key] = space
        assert self._home_lane is not None
        self._runs[run_id] = _HomeRun(job, tuple(pairs), spaces, needed)
        job.flights.add(run_id)
        release = self._ledger.take_released(HOME)
        self._effects.append(Run(self._home_lane, run_id, KEEP, Keep(tuple(sources), release)))

    def _missed(self, task: Task, flight: Flight, missed: Missed) -> None:
        if flight.executor.up:
            for _, key in flight.fetched:
                self._ledger.release_key(flight.executor.space, key)
        task.misses += 1
        if task.misses > _MAX_MISSES:
            task.errors.append(f"on {flight.executor.name}: {missed.reason}")
            self._give_up(task, "never found its inputs")
            return
        for key in missed.keys:
            value, space = flight.reads.get(key, (None, ""))
            if value is not None and space:
                self._unreachable(value, space, key)
        self._retry(task)

    def _unreachable(self, value: Value, space: str, key: Key) -> None:
        """It couldn't be had there."""
        if value.places.get(space, (None,))[0] == key:
            self._ledger.forget_place(value, space)
            self._ledger.release_key(space, key)
            self._restore([value])

    def _retry(self, task: Task) -> None:
        """The task is to run again. Who waits for it on an executor that it may need must not."""
        task.job.num_reruns += 1
        self._num["num_reruns"] += 1
        for consumer in task.consumers:
            flight: Flight | None = consumer.flight
            if (
                flight is not None
                and not flight.given_up
                and any(value.task is task for value in flight.awaits)
            ):
                flight.given_up = True
                self._aside(flight.executor.io_lane, GIVE_UP, GiveUp((flight.run_id,)))
            self._consider(consumer)
        self._consider(task)

    def _lose(self, executor: ExecutorState) -> None:
        if not executor.up:
            return
        executor.lost()
        if executor.space == HOME or any(
            other.up and other.space == executor.space for other in self._executors.values()
        ):
            return
        self._restore(self._ledger.lose(executor.space))

    def _restore(self, values: Iterable[Value]) -> None:
        """Have those made again that are needed and gone, and what they are made from (lineage)."""
        stack = list(values)
        again: list[Task] = []
        while stack:
            value = stack.pop()
            task = value.task
            if value.is_inline or task is None or task.state != "done" or task.job.ending:
                continue
            if value.places and not reachable(value, HOME):
                self._ledger.release(value)
            if value.places or not task.job.is_wanted(value):
                continue
            task.state = "waiting"
            task.job.num_undone += task.of_preview is None
            task.job.num_reruns += 1
            self._num["num_reruns"] += 1
            for read in reads(task):
                read.uses += 1
                stack.append(read)
            again.append(task)
        for task in again:
            self._consider(task)
            for consumer in task.consumers:
                self._consider(consumer)

    # -- the end of requests ---------------------------------------------------------------------------

    def _let_go(self, value: Value) -> None:
        value.uses -= 1
        if value.uses <= 0 and value.places:
            job = None if value.task is None else value.task.job
            if job is None or not job.is_wanted(value):
                self._ledger.release(value)

    def _settle(self, job: Job) -> None:
        """Hand over what is complete: previews, and in the end the outputs."""
        if job.ending or job.finished:
            return
        for task in list(job.previews):
            if task.state == "done" and task.of_preview is not None:
                value = next(iter(task.values.values()))
                if self._is_home(job, [value]):
                    job.previews.remove(task)
                    key = value.places[HOME][0]
                    job.held[key] = value
                    at = task.of_preview
                    self._effects.append(
                        Send(GATEWAY, PreviewMade(job.request.request_id, at.image, at.step, key))
                    )
        if job.num_undone or job.outputs is None:
            return
        wanted = [value for image in job.outputs for source in image.values() for value in values_in(source)]
        if not self._is_home(job, wanted):
            return
        job.finished = True
        self._num["num_finished"] += 1
        outputs = []
        for image in job.outputs:
            named: dict[str, Any] = {}
            for name, value in image.items():
                if type(value) is Value and not value.is_inline:
                    key = value.places[HOME][0]
                    job.held[key] = value
                    named[name] = Here(key)
                else:
                    named[name] = value.inline if type(value) is Value else value
            outputs.append(named)
        self._effects.append(
            Send(GATEWAY, Finished(job.request.request_id, tuple(outputs), self._record(job)))
        )
        self._stop_rest(job)
        self._forget_if_over(job)

    def _is_home(self, job: Job, values: Sequence[Value]) -> bool:
        """Whether all lie in the coordinator's space; if not, they are on the way."""
        away = [value for value in values if not value.is_inline and HOME not in value.places]
        if not away:
            return True
        on_the_way = {
            id(value)
            for run_id in job.flights
            if isinstance(run := self._runs.get(run_id), _HomeRun)
            for value, _ in run.values
        }
        missing = [value for value in dict.fromkeys(away) if id(value) not in on_the_way and value.places]
        if missing:
            self._bring_home(job, missing, needed=True)
        return False

    def _record(self, job: Job) -> dict[str, Any]:
        return {
            "nodes": {
                node: {
                    "model": job.outline.nodes[node].model.identity,
                    "executors": sorted(executors),
                    "runs": sum(executors.values()),
                    "batch_sizes": [1],
                }
                for node, executors in job.used.items()
            },
            "lora_arrival_steps": job.lora_arrival_steps(),
            "reexecutions": job.num_reruns,
            "cache_hits": job.cache_hits,
            "warnings": list(job.warnings),
        }

    def _end(self, job: Job, kind: str, reason: str) -> None:
        job.held.clear()
        if not job.ending:
            job.ending = True
            self._effects.append(Send(GATEWAY, Ended(job.request.request_id, kind, reason)))
            self._stop_rest(job)
        self._forget_if_over(job)

    def _stop_rest(self, job: Job) -> None:
        """Nothing more of it begins, and what runs ends as soon as it can."""
        if job.request.deadline_s is not None:
            self._effects.append(WakeAt(math.inf, job.request.request_id))
        runs: dict[str, list[int]] = {}
        for run_id in sorted(job.flights):
            task = self._runs.get(run_id)
            if isinstance(task, Task):
                flight: Flight = task.flight
                if not flight.aside:
                    flight.given_up = True
                    runs.setdefault(flight.executor.io_lane, []).append(run_id)
        for lane, run_ids in runs.items():
            self._aside(lane, GIVE_UP, GiveUp(tuple(run_ids)))
        for task_id in [task_id for task_id, (task, _) in self._ready.items() if task.job is job]:
            del self._ready[task_id]
        job.ending = job.ending or job.finished

    def _forget_if_over(self, job: Job) -> None:
        """Free what nobody has to read any more: all of it, once no run is at hand."""
        if not job.ending or job.flights:
            return
        kept = set(map(id, job.held.values()))
        for task in job.all_tasks():
            for value in task.values.values():
                if value.places and id(value) not in kept:
                    self._ledger.release(value)
        for value in job.given:
            if value.places and id(value) not in kept:
                self._ledger.release(value)
        if not job.held and self._jobs.get(job.request.request_id) is job:
            del self._jobs[job.request.request_id]

    # -- dispatch --------------------------------------------------------------------------------------

    def _consider(self, task: Task) -> None:
        """Whether the task may be dispatched, as far as its eager inputs go."""
        only = self._where(task)
        if only is None:
            self._ready.pop(task.id, None)
        else:
            self._ready[task.id] = task, only or None
            self._news = True

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
            if flight is None or flight.aside or not self._num_ahead or flight.given_up:
                return None
            if value.port not in flight.keep:
                return None
            if only and only != flight.executor.name:
                return None
            only = flight.executor.name
        if task.adapters and task.job.adapters_on(task) is None:
            return None
        return only

    def decide(self, now: float) -> Iterable[Effect]:
        while self._ready and self._news:
            self._news = False
            view = self._view(now)
            for assignment in self._policy.plan(view) if view.tasks and view.executors else ():
                task, only = self._ready.pop(assignment.task)
                executor = self._executors[assignment.executor]
                if only is not None and only != executor.name:
                    raise ValueError(f"the policy sent {task} to {executor.name}; its inputs are on {only}")
                self._dispatch(task, executor)
        self._tell_released()
        effects, self._effects = self._effects, []
        return effects

    def _view(self, now: float) -> View:
        tasks: list[ReadyTask] = []
        seen: set[int] = set()
        for task, only in sorted(self._ready.values(), key=_by_order):
            after = self._makers_to_come(task, seen) if task.deferred else []
            if after is None:
                continue
            seen.add(task.id)
            model = task.node.model
            tasks.append(
                ReadyTask(
                    task.id,
                    task.job.order,
                    task.depth,
                    task.job.outline.weights[task.node.id],
                    model.num_bytes,
                    only,
                    tuple(after),
                    input_bytes(task.eager),
                    tuple(task.where_failed),
                    task.node.id in task.job.outline.adapters,
                )
            )
        executors = tuple(
            ExecutorView(e.name, e.space, dict(e.models), e.budget_bytes, e.num_tasks)
            for e in self._executors.values()
            if e.up
        )
        return View(now, tuple(tasks), executors, self._num_ahead)

    def _makers_to_come(self, task: Task, ready: set[int]) -> list[int] | None:
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
        return after

    def _dispatch(self, task: Task, executor: ExecutorState) -> None:
        job = task.job
        run_id = next(self._run_ids)
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
            code = self._codes.get(name) or ModelCode(model)
        weights = job.outline.weights[task.node.id]
        unload = () if aside else executor.use(weights, model.num_bytes)
        keep = tuple(port for port, value in task.values.items() if job.is_wanted(value))
        flight.keep = keep
        task.state, task.flight = "flying", flight
        task.num_runs += 1
        job.num_runs += 1
        job.flights.add(run_id)
        self._runs[run_id] = task
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
            () if aside else self._ledger.take_released(executor.space),
            run_id,
        )
        if aside:
            self._effects.append(Run(executor.io_lane, run_id, ADAPTER, args))
        else:
            executor.flying[run_id] = task
            self._effects.append(Run(executor.name, run_id, TASK, args))
        for consumer in task.consumers:
            self._consider(consumer)

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

    def _aside(self, lane: str, op: str, args: Any) -> None:
        run_id = next(self._run_ids)
        self._runs[run_id] = None
        self._effects.append(Run(lane, run_id, op, args))

    def _tell_released(self) -> None:
        """Spaces in which nothing runs are told at once; others with the next run."""
        for space in self._ledger.spaces_to_tell():
            if space == HOME and self._home_lane is not None:
                keys = self._ledger.take_released(space)
                self._aside(self._home_lane, KEEP, Keep((), keys))
                continue
            executors = [e for e in self._executors.values() if e.up and e.space == space]
            idle = next((e for e in executors if not e.flying), None)
            if idle is not None:
                run_id = next(self._run_ids)
                self._runs[run_id] = None
                idle.flying[run_id] = None
                self._effects.append(Run(idle.name, run_id, RELEASE, self._ledger.take_released(space)))
            elif not executors and space != HOME:
                self._ledger.take_released(space)

    # -- figures ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        return {
            **self._num,
            "num_running": sum(not job.ending for job in self._jobs.values()),
            "num_held": len(self._jobs),
            "num_ready": len(self._ready),
            "num_values": self._ledger.num_values,
            "num_executors": sum(executor.up for executor in self._executors.values()),
            "num_models": sum(len(executor.models) for executor in self._executors.values()),
        }


def _by_order(entry: tuple[Task, str | None]) -> tuple[int, int, int]:
    task = entry[0]
    return task.job.order, task.depth, task.id


@dataclass(slots=True)
class _HomeRun:
    """Copies into the coordinator's own store. `needed`: somebody waits for them; else they are a reserve."""

    job: Job
    values: tuple[tuple[Value, Any], ...]
    spaces: Mapping[Any, str]
    needed: bool
