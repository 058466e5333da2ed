"""The FastAPI application: routes, and the life of one completion request over HTTP.

Owns the order of things: parse, admit, tokenize, submit, answer, give back. Knows nothing of what
family a model is of, nor of how an engine works.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from genserve.core.errors import GenserveError, InvalidRequest
from genserve.core.runtime.choice import ChoiceDelta, CompletionRequest
from genserve.core.runtime.completion import Completion
from genserve.core.server import sse
from genserve.core.server.auth import ApiKeyAuth
from genserve.core.server.body_limit import Admission, BodyLimit
from genserve.core.server.engine_metrics import EngineMetrics
from genserve.core.server.gateway import Gateway, Lease, ServedModel, ServedWorkflows
from genserve.core.server.http_errors import error_body, error_headers, error_object, http_form
from genserve.core.server.http_metrics import CountRequests, HttpMetrics
from genserve.core.server.images import add_image_routes
from genserve.core.server.jobs import JobLimits, Jobs
from genserve.core.server.outbox import Outbox
from genserve.core.server.protocol import ChatRequest, CompletionsRequest, parse
from genserve.core.server.responses import ChatFormat, CompletionsFormat, ResponseFormat, dumps
from genserve.core.server.workers import add_worker_routes
from genserve.core.server.workflow_routes import add_workflow_routes
from genserve.core.server.workflow_schema import WorkflowBodies

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from pydantic import BaseModel

_Body = TypeVar("_Body", ChatRequest, CompletionsRequest)
_Result = TypeVar("_Result")

DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_MAX_IMAGE_BODY_BYTES = 32 << 20
DEFAULT_BODY_TIMEOUT_S = 30.0
_INLINE_TOKENIZE_CHARS = (
    8_192  # of a whole request; more is tokenized in a thread: it would stall every stream
)
_INLINE_PARSE_BYTES = 65_536  # likewise
_MESSAGE_CHARS = 32  # what a message costs beyond its content


def create_app(
    gateway: Gateway,
    *,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    max_image_body_bytes: int = DEFAULT_MAX_IMAGE_BODY_BYTES,
    job_limits: JobLimits | None = None,
    body_timeout_s: float = DEFAULT_BODY_TIMEOUT_S,
    registry: CollectorRegistry | None = None,
) -> FastAPI:
    """The application over `gateway`; HTTP and engine instruments go into `registry`, which `/metrics` exposes."""
    metrics = HttpMetrics(registry)
    engine_metrics = EngineMetrics(
        [model.completer.engine for model in gateway.models],
        metrics.registry,
        {model.name: model.recorder for model in gateway.models if model.recorder is not None},
        {model.name: model.client for model in gateway.image_models},
    )
    app = FastAPI(title="genserve", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gateway = gateway
    app.state.metrics = metrics
    app.add_middleware(
        BodyLimit,
        max_body_bytes=max_body_bytes,
        max_image_body_bytes=max_image_body_bytes,
        timeout_s=body_timeout_s,
    )
    app.add_middleware(Admission, gateway=gateway)
    app.add_middleware(ApiKeyAuth, api_keys=tuple(api_keys))
    app.add_middleware(CountRequests, metrics=metrics)
    app.add_exception_handler(GenserveError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)

    def options_of(name: str) -> type[BaseModel] | None:
        return gateway.model(name).options_model

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await _parsed(ChatRequest, request, options_of)
        model = gateway.model(body.model)
        messages = [message.for_template() for message in body.messages]
        num_chars = sum(len(message["content"]) + _MESSAGE_CHARS for message in messages)

        async def prompts() -> list[tuple[list[int], str | None]]:
            return [(await _off_loop(num_chars, model.tokenizer.apply_chat_template, messages), None)]

        lease = request.scope["genserve.lease"]
        return CompletionResponse(lease, metrics, model, body, 1, prompts, ChatFormat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _parsed(CompletionsRequest, request, options_of)
        model = gateway.model(body.model)

        def encode(prompt: str | list[int]) -> tuple[list[int], str | None]:
            return (model.tokenizer.encode(prompt), prompt) if isinstance(prompt, str) else (prompt, None)

        async def prompts() -> list[tuple[list[int], str | None]]:
            num_chars = sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str))
            return await _off_loop(num_chars, lambda texts: [encode(text) for text in texts], body.prompt)

        lease = request.scope["genserve.lease"]
        return CompletionResponse(lease, metrics, model, body, len(body.prompt), prompts, CompletionsFormat)

    @app.get("/v1/models")
    async def models() -> Response:
        served: list[ServedModel | ServedWorkflows] = [*gateway.models, *gateway.image_models]
        return JSONResponse({"object": "list", "data": [_model_object(model) for model in served]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        images = {model.name: model for model in gateway.image_models}
        return JSONResponse(_model_object(images.get(name) or gateway.model(name)))

    add_worker_routes(app, gateway)
    bodies = WorkflowBodies()
    add_image_routes(app, gateway, metrics, bodies, max_image_body_bytes)
    add_workflow_routes(app, gateway, metrics, bodies, Jobs(job_limits, on_result=metrics.observe_images))

    @app.get("/health")
    async def health() -> Response:
        if gateway.is_draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        lost = {m.name: str(error) for m in gateway.models if (error := m.completer.engine.failure)}
        if lost:
            return JSONResponse({"status": "engine lost", "models": lost}, status_code=503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def prometheus() -> Response:
        await engine_metrics.refresh()
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


class CompletionResponse(Response):
    """Runs one completion request and answers it, streaming or whole. When the client goes, all stops."""

    def __init__(
        self,
        lease: Lease,
        metrics: HttpMetrics,
        model: ServedModel,
        body: ChatRequest | CompletionsRequest,
        num_prompts: int,
        prompts: Callable[[], Any],
        response_format: type[ChatFormat] | type[CompletionsFormat],
    ) -> None:
        super().__init__()
        self._lease = lease
        self._metrics = metrics
        self._model = model
        self._body = body
        self._sampling = body.to_sampling(model.info)
        self._num_sequences = num_prompts * body.n
        self._prompts = prompts
        self._id = uuid.uuid4().hex
        self._include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._format: ResponseFormat = response_format(
            self._id, int(time.time()), model.name, model.tokenizer, body.stream and self._include_usage
        )
        self._start_s = time.monotonic()
        self._first_s: float | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope["genserve.model"] = self._model.name
        self._scope = scope
        if not await sse.until_disconnect(receive, self._run(send)):
            self._metrics.disconnects.labels(self._model.name).inc()

    async def _run(self, send: Any) -> None:
        name = self._model.name
        self._lease.take_sequences(name, self._num_sequences)
        inflight = self._metrics.inflight.labels(name)
        inflight.inc()
        try:
            requests = await self._requests()
            async with self._completion(requests) as completion:
                self._lease.work = completion
                try:
                    await (self._stream if self._body.stream else self._whole)(send, completion)
                finally:
                    self._metrics.generation_tokens.labels(name).inc(completion.usage.completion_tokens)
        finally:
            inflight.dec()
            self._lease.release_sequences()

    async def _requests(self) -> list[CompletionRequest]:
        body = self._body
        is_chat = isinstance(body, ChatRequest)
        grammar = self._sampling.grammar
        if grammar is not None:
            with self._fields_as_sent():
                await asyncio.to_thread(self._model.completer.check_grammar, grammar)
        return [
            CompletionRequest(
                request_id=self._id,
                prompt_token_ids=tuple(token_ids),
                sampling=self._sampling,
                n=body.n,
                stop=tuple(body.stop),
                echo=not is_chat and body.echo,  # type: ignore[union-attr]
                prompt_text=text,
                continues_prompt=not is_chat,
                options=body.options,
                include_unmasking=body.include_unmasking,
            )
            for token_ids, text in await self._prompts()
        ]

    def _completion(self, requests: list[CompletionRequest]) -> Completion:
        with self._fields_as_sent():
            return self._model.completer.complete(*requests)

    @contextmanager
    def _fields_as_sent(self) -> Iterator[None]:
        """Errors inside name fields as core records do; outside, as this body does."""
        try:
            yield
        except InvalidRequest as error:
            name = self._body.field_names().get(error.field)
            if name is None:
                raise
            raise type(error)(name, error.message) from None

    async def _whole(self, send: Any, completion: Completion) -> None:
        deltas: list[ChoiceDelta] = []
        async for delta in completion:
            if self._first_s is None:
                self._first_s = time.monotonic()
            deltas.append(delta)
        self._lease.release_sequences()
        body = self._format.body(deltas, self._num_sequences, completion.usage)
        self._record(completion)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self._id.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Any, completion: Completion) -> None:
        # Errors before the first output still get their own status; later ones become an event.
        chunk = self._format.chunk
        delta = await anext(completion)
        self._first_s = time.monotonic()
        headers = [*sse.SSE_HEADERS, (b"x-request-id", self._id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        head = self._format.opening(self._num_sequences) + chunk(delta)
        async with Outbox(self._scope, send) as outbox:
            if head:
                await outbox.write(head)
            try:
                async for delta in completion:
                    data = chunk(delta)
                    if data:
                        await outbox.write(data)
            except Exception as error:
                tail = sse.event(dumps(error_object(error)))
                if not isinstance(error, GenserveError):
                    self._metrics.stream_errors.labels(self._model.name, "internal_error").inc()
                    await outbox.finish(tail)
                    raise
                self._metrics.stream_errors.labels(self._model.name, http_form(error).code or "").inc()
            else:
                tail = self._format.usage_chunk(completion.usage) if self._include_usage else b""
                tail += sse.DONE
                self._record(completion)
            self._lease.release_sequences()
            await outbox.finish(tail)

    def _record(self, completion: Completion) -> None:
        usage = completion.usage
        self._metrics.observe_completion(
            self._model.name,
            start_s=self._start_s,
            first_s=self._first_s,
            end_s=time.monotonic(),
            prompt_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            num_sequences=self._num_sequences,
        )


async def _parsed(
    kind: type[_Body], request: Request, options_of: Callable[[str], type[BaseModel] | None]
) -> _Body:
    data = await request.body()
    if len(data) <= _INLINE_PARSE_BYTES:
        return parse(kind, data, options_of)
    return await asyncio.to_thread(parse, kind, data, options_of)


async def _off_loop(num_chars: int, function: Callable[[Any], _Result], argument: Any) -> _Result:
    if num_chars <= _INLINE_TOKENIZE_CHARS:
        return function(argument)
    return await asyncio.to_thread(function, argument)


def _model_object(model: ServedModel | ServedWorkflows) -> dict[str, Any]:
    if isinstance(model, ServedWorkflows):
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "genserve",
            "family": model.family,
            "workflows": list(model.client.workflows()),
        }
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "genserve",
        "family": model.info.family,
        "max_context_tokens": model.info.max_context_tokens,
    }


async def _on_error(request: Request, error: Exception) -> Response:
    response = Response(error_body(error), http_form(error).status)
    response.raw_headers.extend(error_headers(error))
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "internal error"
    message = f"{detail}: {request.method} {request.url.path}"
    headers = getattr(error, "headers", None)
    kind = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": kind}, status, headers=headers)


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
