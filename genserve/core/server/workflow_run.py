"""One request for a workflow, from a validated body to its result as JSON or files.

Owns seeds of requests without one, errors that name fields as the client sent them, and stopping the work
whenever its reader leaves. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from genserve.core.errors import Cancelled, ExecutionFailed, GenserveError, InvalidRequest
from genserve.core.server.gateway import ServedWorkflows
from genserve.core.server.pictures import OutputFormat, data_url, encode
from genserve.core.workflows import InvokeRequest, Result, Update, WorkflowInfo

_SEED_BITS = 32  # of drawn seeds: short enough to copy, exact in every JSON reader


@dataclass(frozen=True, slots=True)
class Invocation:
    """A request that has been validated. `field_names` are those of the client, of inputs it calls otherwise."""

    served: ServedWorkflows
    info: WorkflowInfo
    request: InvokeRequest
    output_format: OutputFormat = "png"
    quality: int | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_steps(self) -> int | None:
        """The steps of each image, where the workflow has such an input."""
        value = self.value("num_steps")
        return value if isinstance(value, int) else None

    @property
    def seeds(self) -> list[int] | None:
        """The seed of each image; None for a workflow without one."""
        seed = self.value("seed")
        return [seed + i for i in range(self.request.num_images)] if isinstance(seed, int) else None

    def value(self, name: str) -> Any:
        """What the request says of an input, or its default."""
        if name in self.request.inputs:
            return self.request.inputs[name]
        return next((declared.default for declared in self.info.inputs if declared.name == name), None)

    def with_seed(self) -> Invocation:
        """The same with a seed of its own, if the workflow takes one and nobody has said which."""
        declared = {declared.name: declared.default for declared in self.info.inputs}
        if "seed" not in declared or isinstance(self.value("seed"), int):
            return self
        inputs = {**self.request.inputs, "seed": secrets.randbits(_SEED_BITS)}
        return replace(self, request=replace(self.request, inputs=inputs))

    @contextmanager
    def fields_as_sent(self) -> Iterator[None]:
        """Errors inside name inputs as the workflow does; outside, as the client."""
        try:
            yield
        except InvalidRequest as error:
            name = error.field.removeprefix("inputs.")
            sent = self.field_names.get(name)
            if sent is None:
                raise
            raise type(error)(sent, error.message) from None


class WorkflowRun:
    """A request in flight: iterate over its updates, `abort` it from elsewhere, and close it at the end.

    Made on the client's event loop; the work begins at once.
    """

    def __init__(self, invocation: Invocation) -> None:
        self.invocation = invocation
        self._client = invocation.served.client
        self._error: GenserveError | None = None
        self._ended = False
        with invocation.fields_as_sent():
            self._updates = self._client.invoke(invocation.request)

    async def updates(self) -> AsyncIterator[Update]:
        """What the client tells, up to the `Result`; `ExecutionFailed` if it ends without one."""
        try:
            with self.invocation.fields_as_sent():
                async for update in self._updates:
                    if self._error is not None:
                        raise self._error
                    self._ended = isinstance(update, Result)
                    yield update
                    if self._ended:
                        return
        except Cancelled:
            self._ended = True
            if self._error is not None:
                raise self._error from None
            raise
        if self._error is not None:
            raise self._error
        raise ExecutionFailed("the workflow ended without a result")

    async def result(self) -> Result:
        async for update in self.updates():
            if isinstance(update, Result):
                return update
        raise ExecutionFailed("the workflow ended without a result")

    def abort(self, error: GenserveError) -> None:
        """End the work; the reader gets `error`."""
        if not self._ended:
            self._error = error
            self._client.cancel(self.invocation.request.request_id)

    async def aclose(self) -> None:
        """Stop what still runs and free it. Safe to call twice."""
        if not self._ended:
            self._ended = True
            self._client.cancel(self.invocation.request.request_id)
        close = getattr(self._updates, "aclose", None)
        if close is not None:
            await close()


def image_outputs(info: WorkflowInfo) -> list[str]:
    return [output.name for output in info.outputs if output.type.kind == "image"]


async def encoded(invocation: Invocation, picture: Any, receipt: str = "") -> bytes:
    """A picture in the format that was asked for. Encoding happens in a thread."""
    return await asyncio.to_thread(encode, picture, invocation.output_format, invocation.quality, receipt)


def receipt_of(result: Result, image: int) -> str:
    """The text that image `image` carries: the receipt of its whole request, and which image it is."""
    return json.dumps({**result.receipt, "image": image})


async def result_object(invocation: Invocation, result: Result) -> dict[str, Any]:
    """A result as JSON: an object of outputs for each image, pictures as data URLs."""
    outputs = []
    for index, values in enumerate(result.outputs):
        receipt = receipt_of(result, index)
        outputs.append({name: await _shown(invocation, value, receipt) for name, value in values.items()})
    return {
        "id": invocation.request.request_id,
        "object": "workflow.result",
        "workflow": invocation.info.name,
        "outputs": outputs,
        "seeds": invocation.seeds,
        "warnings": list(result.warnings),
        "receipt": result.receipt,
    }


async def _shown(invocation: Invocation, value: Any, receipt: str) -> Any:
    if hasattr(value, "convert") and hasattr(value, "size"):
        return data_url(await encoded(invocation, value, receipt), invocation.output_format)
    if isinstance(value, list | tuple):
        return [await _shown(invocation, item, receipt) for item in value]
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        import base64

        shape = list(value.shape)
        return {
            "dtype": str(value.dtype),
            "shape": shape,
            "base64": base64.b64encode(value.tobytes()).decode(),
        }
    return value
