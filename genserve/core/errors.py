"""The one error tree. Everything genserve raises on purpose is a `GenserveError`.

`core.server.http_errors` maps this tree to HTTP in one table; the library raises the same classes.
"""

from __future__ import annotations

from typing import Any


class GenserveError(Exception):
    """Root of the tree."""


class ConfigError(GenserveError):
    """A configuration, command line or model folder that cannot work."""


class CompileError(ConfigError):
    """A workflow that cannot be run. `node` and `port` say where in the graph, `where` which line wrote it."""

    def __init__(self, message: str, *, node: str = "", port: str = "", where: str = "") -> None:
        place = ".".join(part for part in (node, port) if part)
        super().__init__(": ".join(part for part in (where, place, message) if part))
        self.message, self.node, self.port, self.where = message, node, port, where

    def __reduce__(self) -> tuple[Any, ...]:
        return _compile_error, (self.message, self.node, self.port, self.where)


def _compile_error(message: str, node: str, port: str, where: str) -> CompileError:
    return CompileError(message, node=node, port=port, where=where)


class InvalidRequest(GenserveError, ValueError):
    """Bad input, found before any work started. `field` names the offending input field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.message)


class UnsupportedField(InvalidRequest):
    """A field that the server knows of but does not serve, or does not know at all."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested output do not fit the model's context or the KV pool."""


class UnknownWorker(InvalidRequest):
    """No worker of that name serves the model."""


class UnknownWorkflow(InvalidRequest):
    """No workflow of that name is served."""


class UnknownJob(InvalidRequest):
    """No job of that id, or it ended so long ago that nothing of it is kept."""


class ModelNotFound(GenserveError):
    """No model of that name is served (or can be fetched)."""


class Unauthorized(GenserveError):
    """Missing or wrong API key."""


class PayloadTooLarge(GenserveError):
    """A request body over the server's limit."""


class RequestTimeout(GenserveError):
    """The client did not send its request in time."""


class Overloaded(GenserveError):
    """The queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type, tuple[str, float]]:
        return type(self), (str(self), self.retry_after_s)


class Draining(GenserveError):
    """The server is shutting down and takes no new requests."""


class Cancelled(GenserveError):
    """The request was aborted by its client."""


class DeadlineExceeded(GenserveError):
    """The request's deadline passed before it finished."""


class ExecutorLost(GenserveError):
    """The executor (thread, process or Ray actor) that ran the work is gone."""


class ExecutionFailed(GenserveError):
    """The work itself raised; `str(error)` carries the cause."""


class TensorError(GenserveError):
    """A tensor in a store cannot be had."""


class StaleTensor(TensorError):
    """The reference outlived its tensor: the slot was reused, or its owner is gone or was started anew."""


class StoreFull(TensorError):
    """The store's byte budget does not hold the tensor, now or ever; the message says which."""


class TransferFailed(TensorError):
    """A copy from another process or machine broke off; trying again may succeed."""
