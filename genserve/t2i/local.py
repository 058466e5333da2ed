"""One request in this process, from a model's name to its pictures: what `genserve t2i` runs.

The same bodies as `/v1/images` take, and the same checks; no HTTP between.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from genserve.core.errors import ConfigError
from genserve.core.server.gateway import Gateway
from genserve.core.server.images_protocol import from_fields
from genserve.core.server.workflow_run import image_outputs
from genserve.core.server.workflow_schema import WorkflowBodies
from genserve.core.workflows import InvokeRequest, Result, Update, WorkflowClient
from genserve.t2i.catalogue import ImageModelConfig, identities, start_client, start_served
from genserve.t2i.receipt import Receipt

OnUpdate = Callable[[Update], None]


@dataclass(frozen=True, slots=True)
class Made:
    """The pictures of a request (PIL images), and the rest of its result."""

    pictures: tuple[Any, ...]
    result: Result


async def generate(
    config: ImageModelConfig, fields: Mapping[str, Any], on_update: OnUpdate = lambda update: None
) -> Made:
    """Make images as a body of `/v1/images` says; pictures among its fields are bytes of files."""
    served = await start_served(config)
    try:
        parsed = from_fields(
            Gateway([served]), WorkflowBodies(), dict(fields), f"local-{uuid.uuid4().hex}", strict=True
        )
        invocation = parsed.invocation
        with invocation.fields_as_sent():
            return await _run(served.client, invocation.request, on_update)
    finally:
        await served.client.aclose()


async def replay(
    config: ImageModelConfig,
    receipt: Receipt,
    pictures: Mapping[str, Any] | None = None,
    on_update: OnUpdate = lambda update: None,
) -> Made:
    """Make a receipt's images again. `ConfigError` if the workflow or one of its models is another than then."""
    request = receipt.request(f"replay-{uuid.uuid4().hex}", pictures)
    client = await start_client(config)
    try:
        if receipt.workflow not in client.workflows():
            there = ", ".join(client.workflows())
            raise ConfigError(
                f"{config.model} has no workflow {receipt.workflow!r} (there is: {there}); "
                "give the model, ControlNets and names of then"
            )
        info = client.workflows()[receipt.workflow]
        missing = [lora.name for lora in receipt.loras if lora.name not in info.loras]
        if missing:
            raise ConfigError(f"the receipt has an adapter {missing[0]!r}; say where it is")
        problems = receipt.other_models(identities(client.graph_of(receipt.workflow, receipt.loras)))
        if problems:
            raise ConfigError(f"not the models of the receipt: {'; '.join(problems)}")
        return await _run(client, request, on_update)
    finally:
        await client.aclose()


async def _run(client: WorkflowClient, request: InvokeRequest, on_update: OnUpdate) -> Made:
    output = image_outputs(client.workflows()[request.workflow])[0]
    async for update in client.invoke(request):
        on_update(update)
        if isinstance(update, Result):
            return Made(tuple(values[output] for values in update.outputs), update)
    raise ConfigError("the workflow ended without a result")
