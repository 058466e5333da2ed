"""Routes of `/v1/images`: a request for pictures over HTTP, whole or as server-sent events.

Owns the order of things: parse, admit, run, encode, answer, give back. What a body means is `images_protocol`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from genserve.core.errors import GenserveError, InvalidRequest
from genserve.core.server import sse
from genserve.core.server.gateway import Gateway, Lease
from genserve.core.server.http_errors import error_object, http_form
from genserve.core.server.http_metrics import HttpMetrics
from genserve.core.server.images_protocol import ParsedImages, edit, generation
from genserve.core.server.outbox import Outbox
from genserve.core.server.pictures import base64_of
from genserve.core.server.responses import dumps
from genserve.core.server.workflow_run import (
    WorkflowRun,
    encoded,
    image_outputs,
    receipt_of,
)
from genserve.core.server.workflow_schema import WorkflowBodies
from genserve.core.workflows import Preview, Result

_INLINE_PARSE_BYTES = 4096  # bodies with a picture are parsed in a thread
_MAX_HELD_BYTES = 64 << 20  # of one stream of pictures
# Image models do not count tokens; the client's types want the object.
_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"text_tokens": 0, "image_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}


def add_image_routes(
    app: FastAPI, gateway: Gateway, metrics: HttpMetrics, bodies: WorkflowBodies, max_part_bytes: int
) -> None:
    """Put the routes on `app`. A form's fields and files are `max_part_bytes` each, at most."""

    @app.post("/v1/images/generations")
    async def generations(request: Request) -> Response:
        data = await request.body()
        request_id = f"img-{uuid.uuid4().hex}"
        if len(data) <= _INLINE_PARSE_BYTES:
            parsed = generation(gateway, bodies, data, request_id)
        else:
            parsed = await asyncio.to_thread(generation, gateway, bodies, data, request_id)
        return ImagesResponse(request.scope["genserve.lease"], metrics, parsed, "image_generation")

    @app.post("/v1/images/edits")
    async def edits(request: Request) -> Response:
        kind = request.headers.get("content-type", "")
        if not kind.startswith("multipart/form-data"):
            raise InvalidRequest("body", "must be multipart/form-data, with the picture as a file")
        async with request.form(max_files=8, max_fields=64, max_part_size=max_part_bytes) as form:
            items: list[tuple[str, str | bytes]] = [
                (key, value if isinstance(value, str) else await value.read())
                for key, value in form.multi_items()
            ]
        parsed = await asyncio.to_thread(edit, gateway, bodies, items, f"img-{uuid.uuid4().hex}")
        return ImagesResponse(request.scope["genserve.lease"], metrics, parsed, "image_edit")


class ImagesResponse(Response):
    """Runs one request for pictures and answers it, streaming or whole. When the client goes, all stops."""

    def __init__(self, lease: Lease, metrics: HttpMetrics, parsed: ParsedImages, event: str) -> None:
        super().__init__()
        self._lease = lease
        self._metrics = metrics
        self._options = parsed.options
        self._invocation = parsed.invocation
        if self._options.stream and self._options.partial_images:
            self._invocation = parsed.with_previews()
        self._output = image_outputs(self._invocation.info)[0]
        self._event = event
        self._created = int(time.time())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["genserve.model"] = self._invocation.served.name
        self._scope = scope
        if not await sse.until_disconnect(receive, self._run(send)):
            self._metrics.disconnects.labels(self._invocation.served.name).inc()

    async def _run(self, send: Any) -> None:
        name = self._invocation.served.name
        self._lease.take_sequences(name, self._invocation.request.num_images)
        with (
            self._metrics.inflight.labels(name).track_inprogress(),
            self._metrics.latency_s.labels(name).time(),
        ):
            run = WorkflowRun(self._invocation)
            self._lease.work = run
            try:
                await (self._stream if self._options.stream else self._whole)(send, run)
            finally:
                await run.aclose()
                self._lease.release_sequences()

    async def _whole(self, send: Any, run: WorkflowRun) -> None:
        result = await run.result()
        self._lease.release_sequences()
        self._metrics.observe_images(self._invocation.served.name, len(result.outputs))
        data = []
        for index in range(len(result.outputs)):
            picture = await self._picture(result, index)
            data.append({"b64_json": base64_of(picture), **self._seed(index)})
        body = {
            "created": self._created,
            "background": "opaque",
            "data": data,
            "output_format": self._options.output_format,
            "size": self._size(result),
            "usage": _USAGE,
            "warnings": list(result.warnings),
            "receipt": result.receipt,
        }
        content = dumps(body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(content)),
            (b"x-request-id", self._invocation.request.request_id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _stream(self, send: Any, run: WorkflowRun) -> None:
        # Errors before the first update still get their own status; later ones become an event.
        name = self._invocation.served.name
        updates = run.updates()
        update = await anext(updates)
        headers = [*sse.SSE_HEADERS, (b"x-request-id", self._invocation.request.request_id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        num_shown = [0] * self._invocation.request.num_images
        async with Outbox(self._scope, send, max_held_bytes=_MAX_HELD_BYTES) as outbox:
            try:
                while not isinstance(update, Result):
                    if isinstance(update, Preview) and num_shown[update.image] < self._options.partial_images:
                        await outbox.write(await self._partial(update, num_shown[update.image]))
                        num_shown[update.image] += 1
                    update = await anext(updates)
                self._lease.release_sequences()
                self._metrics.observe_images(name, len(update.outputs))
                for index in range(len(update.outputs)):
                    await outbox.write(await self._completed(update, index))
                await outbox.finish(b"")
            except Exception as error:
                known = isinstance(error, GenserveError)
                code = http_form(error).code or "" if known else "internal_error"
                self._metrics.stream_errors.labels(name, code).inc()
                self._lease.release_sequences()
                await outbox.finish(sse.event(dumps(error_object(error)), "error"))
                if not known:
                    raise

    async def _partial(self, preview: Preview, number: int) -> bytes:
        data = await encoded(self._invocation, preview.picture)
        body = {
            **self._head("partial_image", data, preview.picture),
            "partial_image_index": number,
            "image_index": preview.image,
            "step": preview.step,
        }
        return sse.event(dumps(body), body["type"])

    async def _completed(self, result: Result, index: int) -> bytes:
        data = await self._picture(result, index)
        body = {
            **self._head("completed", data, result.outputs[index][self._output]),
            "usage": _USAGE,
            "image_index": index,
            **self._seed(index),
            "warnings": list(result.warnings),
            "receipt": result.receipt,
        }
        return sse.event(dumps(body), body["type"])

    def _head(self, kind: str, data: bytes, picture: Any) -> dict[str, Any]:
        return {
            "type": f"{self._event}.{kind}",
            "b64_json": base64_of(data),
            "background": "opaque",
            "created_at": int(time.time()),
            "output_format": self._options.output_format,
            "quality": "auto",
            "size": "{}x{}".format(*picture.size),
        }

    async def _picture(self, result: Result, index: int) -> bytes:
        picture = result.outputs[index][self._output]
        return await encoded(self._invocation, picture, receipt_of(result, index))

    def _seed(self, index: int) -> dict[str, int]:
        seeds = self._invocation.seeds
        return {} if seeds is None else {"seed": seeds[index]}

    def _size(self, result: Result) -> str:
        return "{}x{}".format(*result.outputs[0][self._output].size)
