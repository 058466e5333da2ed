"""Requests that go on after their answer: state, progress, events and results of jobs.

Owns how many finished jobs are kept, for how long and with how many bytes. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from genserve.core.errors import Cancelled, GenserveError, UnknownJob
from genserve.core.server.gateway import Lease
from genserve.core.server.http_errors import error_object
from genserve.core.server.pictures import data_url
from genserve.core.server.workflow_run import Invocation, WorkflowRun, encoded, result_object
from genserve.core.workflows import Preview, Progress, Result

_log = logging.getLogger("genserve.server")

Status = Literal["running", "succeeded", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Of finished jobs: their number, their results' and previews' bytes together, and their age."""

    max_jobs: int = 64
    max_bytes: int = 256 << 20
    max_age_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class JobEvent:
    """`id` counts from 1; `data` is JSON."""

    id: int
    kind: str
    data: str


@dataclass(slots=True, eq=False)
class Job:
    """One request. `events` holds all but previews of an image that a later one replaced."""

    id: str
    workflow: str
    created: int
    status: Status = "running"
    finished: int | None = None
    progress: dict[str, Any] | None = None
    result: str | None = None
    error: dict[str, Any] | None = None
    events: list[JobEvent] = field(default_factory=list)
    num_events: int = 0
    task: asyncio.Task[None] | None = None
    run: WorkflowRun | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_bytes(self) -> int:
        return len(self.result or "") + sum(len(event.data) for event in self.events)

    def to_json(self) -> str:
        """The job as `GET /v1/jobs/{id}` shows it."""
        shown = {
            "id": self.id,
            "object": "job",
            "workflow": self.workflow,
            "status": self.status,
            "created_at": self.created,
            "finished_at": self.finished,
            "progress": self.progress,
            "error": None if self.error is None else self.error["error"],
        }
        return f'{json.dumps(shown)[:-1]}, "result": {self.result or "null"}}}'


class Jobs:
    """The jobs of a server. `on_result` gets a model's name and how many images it has made; `clock` is in
    seconds, of any origin."""

    def __init__(
        self,
        limits: JobLimits | None = None,
        *,
        on_result: Callable[[str, int], None] = lambda model, num_images: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or JobLimits()
        self._on_result = on_result
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._ended: dict[str, float] = {}  # in the order of their ends

    def start(self, invocation: Invocation, lease: Lease) -> Job:
        """Begin a request; it holds `lease` until it ends. Errors of the request itself are raised here."""
        try:
            run = WorkflowRun(invocation)
        except BaseException:
            lease.__exit__()
            raise
        lease.work = run
        job = Job(invocation.request.request_id, invocation.info.name, int(time.time()), run=run)
        self._jobs[job.id] = job
        job.task = asyncio.ensure_future(self._follow(job, run, lease))
        return job

    def get(self, job_id: str) -> Job:
        """The job of that id; `UnknownJob` if it is not (or no longer) known."""
        self._forget_old()
        job = self._jobs.get(job_id)
        if job is None:
            limits = self.limits
            raise UnknownJob(
                "id",
                f"no job {job_id[:100]!r}; ended jobs are kept for {limits.max_age_s:g} s, the last "
                f"{limits.max_jobs} of them, {limits.max_bytes} bytes together at most",
            )
        return job

    def list(self) -> list[Job]:
        """Every known job, oldest first."""
        self._forget_old()
        return list(self._jobs.values())

    async def cancel(self, job_id: str) -> Job:
        """Stop a job, and wait until it has ended. One that has ended stays as it is."""
        job = self.get(job_id)
        if job.run is not None and job.task is not None:
            job.run.abort(Cancelled("the job was cancelled"))
            await asyncio.shield(job.task)
        return job

    async def remove(self, job_id: str) -> None:
        """Stop a job and forget it."""
        await self.cancel(job_id)
        self._jobs.pop(job_id, None)
        self._ended.pop(job_id, None)

    async def events(self, job: Job, after: int = 0) -> AsyncIterator[JobEvent]:
        """The events with ids above `after`, as they come, up to the last."""
        while True:
            changed = job.changed
            for event in job.events[bisect_right(job.events, after, key=lambda event: event.id) :]:
                after = event.id
                yield event
            if changed is job.changed:
                if job.status != "running":
                    return
                await changed.wait()

    async def _follow(self, job: Job, run: WorkflowRun, lease: Lease) -> None:
        with lease:
            try:
                async for update in run.updates():
                    if isinstance(update, Progress):
                        self._progress(job, update)
                    elif isinstance(update, Preview):
                        await self._preview(job, update)
                    elif isinstance(update, Result):
                        self._on_result(run.invocation.served.name, len(update.outputs))
                        job.result = json.dumps(await result_object(run.invocation, update))
                        self._end(
                            job,
                            "succeeded",
                            "done",
                            {"status": "succeeded", "warnings": list(update.warnings)},
                        )
            except Cancelled as error:
                job.error = error_object(error)
                self._end(job, "cancelled", "error", job.error)
            except Exception as error:
                if not isinstance(error, GenserveError):
                    _log.exception("job %s failed", job.id)
                job.error = error_object(error)
                self._end(job, "failed", "error", job.error)
            finally:
                job.run = None
                await run.aclose()

    def _progress(self, job: Job, update: Progress) -> None:
        job.progress = {
            "node": update.node,
            "image": update.image,
            "step": update.step,
            "num_steps": update.num_steps,
            "done": update.done,
            "total": update.total,
        }
        self._tell(job, "node" if update.step is None else "step", job.progress)

    async def _preview(self, job: Job, update: Preview) -> None:
        invocation = run_invocation(job)
        data = await encoded(invocation, update.picture)
        url = data_url(data, invocation.output_format)
        mark = f'{{"image": {update.image}, '
        job.events = [e for e in job.events if not (e.kind == "preview" and e.data.startswith(mark))]
        self._tell(job, "preview", {"image": update.image, "step": update.step, "picture": url})

    def _end(self, job: Job, status: Status, kind: str, data: dict[str, Any]) -> None:
        job.status = status
        job.finished = int(time.time())
        self._ended[job.id] = self._clock()
        self._tell(job, kind, data)
        self._forget_old()

    def _tell(self, job: Job, kind: str, data: Any) -> None:
        job.num_events += 1
        job.events.append(JobEvent(job.num_events, kind, json.dumps(data)))
        changed, job.changed = job.changed, asyncio.Event()
        changed.set()

    def _forget_old(self) -> None:
        limits, now = self.limits, self._clock()
        num_bytes = sum(self._jobs[job_id].num_bytes for job_id in self._ended)
        for job_id, ended in list(self._ended.items()):
            fits = len(self._ended) <= limits.max_jobs and num_bytes <= limits.max_bytes
            if fits and now - ended <= limits.max_age_s:
                return
            num_bytes -= self._jobs.pop(job_id).num_bytes
            del self._ended[job_id]


def run_invocation(job: Job) -> Invocation:
    assert job.run is not None
    return job.run.invocation
