"""How requests end: with their outputs in the coordinator's own space, or without, and everything freed. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from genserve.core.control import Run, Send, WakeAt
from genserve.t2i.books import HOME, Books, HomeRun
from genserve.t2i.instance import Task, Value, values_in
from genserve.t2i.job import Job
from genserve.t2i.ledger import Flight
from genserve.t2i.messages import (
    GATEWAY,
    GIVE_UP,
    KEEP,
    Ended,
    Finished,
    GiveUp,
    Here,
    Keep,
    PreviewMade,
    There,
)


class Endings:
    def __init__(self, books: Books) -> None:
        self._books = books

    def settle(self, job: Job) -> None:
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
                    self._books.effects.append(
                        Send(GATEWAY, PreviewMade(job.request.request_id, at.image, at.step, key))
                    )
        if job.num_undone or job.outputs is None:
            return
        wanted = [value for image in job.outputs for source in image.values() for value in values_in(source)]
        if not self._is_home(job, wanted):
            return
        job.finished = True
        self._books.num["num_finished"] += 1
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
        self._books.effects.append(
            Send(GATEWAY, Finished(job.request.request_id, tuple(outputs), self._record(job)))
        )
        self.stop_rest(job)
        self.forget_if_over(job)

    def _is_home(self, job: Job, values: Sequence[Value]) -> bool:
        """Whether all lie in the coordinator's space; if not, they are on the way."""
        away = [value for value in values if not value.is_inline and HOME not in value.places]
        if not away:
            return True
        on_the_way = {
            id(value)
            for run_id in job.flights
            if isinstance(run := self._books.runs.get(run_id), HomeRun)
            for value, _ in run.values
        }
        missing = [value for value in dict.fromkeys(away) if id(value) not in on_the_way and value.places]
        if missing:
            self.bring_home(job, missing, needed=True)
        return False

    def bring_home(self, job: Job, values: Sequence[Value], needed: bool) -> None:
        run_id = next(self._books.run_ids)
        sources, pairs, spaces = [], [], {}
        for value in values:
            space, (key, refs) = next((s, p) for s, p in value.places.items() if p[1] is not None)
            sources.append(There(key, refs))
            pairs.append((value, key))
            spaces[key] = space
        assert self._books.home_lane is not None
        self._books.runs[run_id] = HomeRun(job, tuple(pairs), spaces, needed)
        job.flights.add(run_id)
        release = self._books.ledger.take_released(HOME)
        self._books.effects.append(Run(self._books.home_lane, run_id, KEEP, Keep(tuple(sources), release)))

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
            "cache_hits": [
                {"node": task.node.id, "image": task.image, "hit": hit}
                for task, hit in job.cache_hits.items()
            ],
            "warnings": list(job.warnings),
        }

    def end(self, job: Job, kind: str, reason: str, field: str = "") -> None:
        job.held.clear()
        if not job.ending:
            job.ending = True
            self._books.effects.append(Send(GATEWAY, Ended(job.request.request_id, kind, reason, field)))
            self.stop_rest(job)
        self.forget_if_over(job)

    def stop_rest(self, job: Job) -> None:
        """Nothing more of it begins, and what runs ends as soon as it can."""
        if job.request.deadline_s is not None:
            self._books.effects.append(WakeAt(math.inf, job.request.request_id))
        runs: dict[str, list[int]] = {}
        for run_id in sorted(job.flights):
            task = self._books.runs.get(run_id)
            if isinstance(task, Task):
                flight: Flight = task.flight
                if not flight.aside:
                    flight.given_up = True
                    runs.setdefault(flight.executor.io_lane, []).append(run_id)
        for lane, run_ids in runs.items():
            self._books.aside(lane, GIVE_UP, GiveUp(tuple(run_ids)))
        for task_id in [task_id for task_id, ready in self._books.ready.items() if ready.task.job is job]:
            del self._books.ready[task_id]
        job.ending = job.ending or job.finished

    def forget_if_over(self, job: Job) -> None:
        """Free what nobody has to read any more: all of it, once no run is at hand."""
        if not job.ending or job.flights:
            return
        kept = set(map(id, job.held.values()))
        for task in job.all_tasks():
            for value in task.values.values():
                if value.places and id(value) not in kept:
                    self._books.ledger.release(value)
        for value in job.given:
            if value.places and id(value) not in kept:
                self._books.ledger.release(value)
        if not job.held and self._books.jobs.get(job.request.request_id) is job:
            del self._books.jobs[job.request.request_id]
