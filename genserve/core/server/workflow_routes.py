"""Routes of `/v1/workflows`, `/v1/jobs` and `/openapi.json`: what is served, running it, following and ending it.

Bodies are `workflow_schema`'s, jobs `jobs`'s. A request with `background: true`, or with the header
`Prefer: respond-async`, is answered at once with its job.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from typing import Any

from fastapi import FastAPI, Request
from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from genserve.core.errors import InvalidRequest
from genserve.core.server import sse
from genserve.core.server.gateway import Gateway, Lease
from genserve.core.server.http_metrics import HttpMetrics
from genserve.core.server.jobs import Job, Jobs
from genserve.core.server.openapi import document
from genserve.core.server.workflow_run import Invocation, WorkflowRun, result_object
from genserve.core.server.workflow_schema import InvokeOptions, WorkflowBodies, describe, lora_uses
from genserve.core.workflows import InvokeRequest

_INLINE_PARSE_BYTES = 4096  # bodies with a picture are parsed in a thread


def add_workflow_routes(
    app: FastAPI, gateway: Gateway, metrics: HttpMetrics, bodies: WorkflowBodies, jobs: Jobs
) -> None:
    """Put the routes on `app`."""

    @app.get("/v1/workflows")
    async def workflows() -> Response:
        data = [{**describe(info), "model": served.name} for served, info in gateway.workflows()]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/workflows/{name}")
    async def one_workflow(name: str) -> Response:
        served, info = gateway.workflow(name)
        return JSONResponse({**describe(info, bodies.of(info)), "model": served.name})

    @app.post("/v1/workflows/{name}/invoke")
    async def invoke(request: Request, name: str) -> Response:
        gateway.workflow(name)
        data = await request.body()
        request_id = f"job-{uuid.uuid4().hex}"
        arguments = (gateway, bodies, name, data, request_id)
        if len(data) <= _INLINE_PARSE_BYTES:
            options, invocation = _parsed(*arguments)
        else:
            options, invocation = await asyncio.to_thread(_parsed, *arguments)
        request.scope["genserve.model"] = invocation.served.name
        lease: Lease = request.scope["genserve.lease"]
        preferred = "respond-async" in request.headers.get("prefer", "")
        if not (options.background or preferred):
            return InvokeResponse(lease, metrics, invocation)
        lease.take_sequences(invocation.served.name, invocation.request.num_images)
        job = jobs.start(invocation, lease.outlive())
        headers = {"location": f"/v1/jobs/{job.id}"}
        if preferred:
            headers["preference-applied"] = "respond-async"
        return _shown(job, 202, headers)

    @app.get("/v1/jobs")
    async def all_jobs() -> Response:
        data = [_without_result(job) for job in jobs.list()]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/jobs/{job_id}")
    async def one_job(job_id: str) -> Response:
        return _shown(jobs.get(job_id))

    @app.post("/v1/jobs/{job_id}/cancel")
    async def cancel(job_id: str) -> Response:
        return _shown(await jobs.cancel(job_id))

    @app.delete("/v1/jobs/{job_id}")
    async def remove(job_id: str) -> Response:
        await jobs.remove(job_id)
        return JSONResponse({"id": job_id, "object": "job", "deleted": True})

    @app.get("/v1/jobs/{job_id}/events")
    async def events(request: Request, job_id: str) -> Response:
        job = jobs.get(job_id)
        last = request.headers.get("last-event-id", "0")
        if not (last.isdecimal() and len(last) < 16):
            raise InvalidRequest("Last-Event-ID", f"must be the number of an event, not {last[:40]!r}")
        if job.status != "running" and int(last) >= job.num_events:
            return Response(status_code=204)  # tells an EventSource not to come again
        return EventsResponse(jobs, job, int(last))

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JSONResponse(document([(info, bodies.of(info)) for _, info in gateway.workflows()]))


def _parsed(
    gateway: Gateway, bodies: WorkflowBodies, name: str, data: bytes, request_id: str
) -> tuple[InvokeOptions, Invocation]:
    try:
        fields = from_json(data or b"{}", allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("body", f"is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("body", "must be a JSON object")
    served, info = gateway.workflow(name)
    options, inputs = bodies.of(info).parse(fields)
    request = InvokeRequest(
        request_id,
        info.name,
        inputs,
        num_images=options.n,
        loras=lora_uses(options.loras, info),
        lora_max_late_steps=options.lora_max_late_steps,
        preview_every_steps=options.preview_every_steps,
        deadline_s=options.deadline_s,
    )
    names = {"num_images": "n"} | {declared.name: f"inputs.{declared.name}" for declared in info.inputs}
    return options, Invocation(
        served, info, request, options.output_format, options.output_compression, names
    ).with_seed()


class InvokeResponse(Response):
    """Runs one workflow and answers with its result. When the client goes, all stops."""

    def __init__(self, lease: Lease, metrics: HttpMetrics, invocation: Invocation) -> None:
        super().__init__()
        self._lease = lease
        self._metrics = metrics
        self._invocation = invocation

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not await sse.until_disconnect(receive, self._run(scope, receive, send)):
            self._metrics.disconnects.labels(self._invocation.served.name).inc()

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        name = self._invocation.served.name
        self._lease.take_sequences(name, self._invocation.request.num_images)
        with (
            self._metrics.inflight.labels(name).track_inprogress(),
            self._metrics.latency_s.labels(name).time(),
        ):
            run = WorkflowRun(self._invocation)
            self._lease.work = run
            try:
                result = await run.result()
            finally:
                await run.aclose()
                self._lease.release_sequences()
            self._metrics.observe_images(name, len(result.outputs))
            response = JSONResponse(await result_object(self._invocation, result))
            response.headers["x-request-id"] = self._invocation.request.request_id
            await response(scope, receive, send)


class EventsResponse(Response):
    """A job's events, from `after` on, until the last of them. The job does not wait for its readers."""

    def __init__(self, jobs: Jobs, job: Job, after: int) -> None:
        super().__init__()
        self._jobs = jobs
        self._job = job
        self._after = after

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await sse.until_disconnect(receive, self._run(send))

    async def _run(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": sse.SSE_HEADERS})
        async for event in self._jobs.events(self._job, self._after):
            body = sse.event(event.data, event.kind, event.id)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _without_result(job: Job) -> dict[str, Any]:
    return {key: value for key, value in json.loads(job.to_json()).items() if key != "result"}


def _shown(job: Job, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(job.to_json(), status, headers, media_type="application/json")
