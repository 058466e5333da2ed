"""The error tree as HTTP: one table from error class to status, in OpenAI's error body.

Knows nothing of routes; `core.errors` owns the classes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from genserve.core import errors


@dataclass(frozen=True, slots=True)
class HttpForm:
    """How one class of errors looks to an HTTP client."""

    status: int
    type: str
    code: str | None


_TABLE: dict[type[errors.GenserveError], HttpForm] = {
    errors.UnsupportedField: HttpForm(400, "invalid_request_error", "unsupported_parameter"),
    errors.ContextLengthExceeded: HttpForm(400, "invalid_request_error", "context_length_exceeded"),
    errors.UnknownWorker: HttpForm(404, "invalid_request_error", "worker_not_found"),
    errors.UnknownWorkflow: HttpForm(404, "invalid_request_error", "workflow_not_found"),
    errors.UnknownJob: HttpForm(404, "invalid_request_error", "job_not_found"),
    errors.InvalidRequest: HttpForm(400, "invalid_request_error", "invalid_value"),
    errors.ModelNotFound: HttpForm(404, "invalid_request_error", "model_not_found"),
    errors.Unauthorized: HttpForm(401, "authentication_error", "invalid_api_key"),
    errors.RequestTimeout: HttpForm(408, "invalid_request_error", "request_timeout"),
    errors.PayloadTooLarge: HttpForm(413, "invalid_request_error", "payload_too_large"),
    errors.Overloaded: HttpForm(429, "rate_limit_error", "overloaded"),
    errors.Draining: HttpForm(503, "server_error", "draining"),
    errors.Cancelled: HttpForm(499, "server_error", "cancelled"),
    errors.DeadlineExceeded: HttpForm(504, "server_error", "deadline_exceeded"),
    errors.ExecutorLost: HttpForm(503, "server_error", "executor_lost"),
    errors.ExecutionFailed: HttpForm(500, "server_error", "execution_failed"),
    errors.ConfigError: HttpForm(500, "server_error", "configuration"),
}
_OTHER = HttpForm(500, "server_error", "internal_error")


def http_form(error: BaseException) -> HttpForm:
    """The table's row for `error`: that of the nearest class it inherits from."""
    for kind in type(error).__mro__:
        if kind in _TABLE:
            return _TABLE[kind]
    return _OTHER


def error_object(error: BaseException) -> dict[str, Any]:
    """OpenAI's error body. Errors from outside the tree say nothing of their inside."""
    form = http_form(error)
    known = isinstance(error, errors.GenserveError)
    param = error.field if isinstance(error, errors.InvalidRequest) else None
    if isinstance(error, errors.ModelNotFound):
        param = "model"
    message = str(error) if known else "internal error"
    return {"error": {"message": message, "type": form.type, "param": param, "code": form.code}}


def error_body(error: BaseException) -> bytes:
    """`error_object` as JSON bytes."""
    return json.dumps(error_object(error)).encode()


def error_headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    """Headers that belong to an error response, `content-length` aside."""
    headers = [(b"content-type", b"application/json")]
    if isinstance(error, errors.Overloaded):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    elif isinstance(error, errors.Draining):
        headers.append((b"retry-after", b"5"))
    elif isinstance(error, errors.Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    elif isinstance(error, errors.PayloadTooLarge | errors.RequestTimeout):
        headers.append((b"connection", b"close"))
    return headers


async def send_error(send: Any, error: BaseException) -> None:
    """Send a whole error response over ASGI."""
    body = error_body(error)
    headers = [*error_headers(error), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": http_form(error).status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
