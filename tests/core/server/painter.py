"""A `WorkflowClient` that paints: real PIL pictures from prompt, seed and step, without any model.

For what the HTTP front must do with any client; a client over models is `genserve.t2i`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image, ImageChops

from genserve.core.errors import Cancelled, DeadlineExceeded, ExecutionFailed, GenserveError
from genserve.core.server.gateway import ServedWorkflows
from genserve.core.workflows import (
    REQUIRED,
    InvokeRequest,
    PortType,
    Preview,
    Progress,
    Result,
    Update,
    WorkflowInfo,
    WorkflowInput,
)

TEXT, INT, FLOAT, PICTURE, JSON = (PortType(kind) for kind in ("text", "int", "float", "image", "json"))
SIZES = {"minimum": 16, "maximum": 128, "multiple_of": 8}


@dataclass(frozen=True, slots=True)
class Output:
    name: str
    type: PortType


def _info(name: str, *more: WorkflowInput, size: bool = True) -> WorkflowInfo:
    sizes = (WorkflowInput("height", INT, 32), WorkflowInput("width", INT, 32))
    return WorkflowInfo(
        name,
        (
            WorkflowInput("prompt", TEXT, REQUIRED, "What the picture shows."),
            WorkflowInput("negative_prompt", TEXT, ""),
            WorkflowInput("seed", INT, REQUIRED),
            WorkflowInput("num_steps", INT, 4),
            WorkflowInput("guidance_scale", FLOAT, 5.0),
            *(sizes if size else ()),
            *more,
        ),
        (Output("image", PICTURE), Output("words", INT)),
        family="painter",
        description=f"Paints: {name}.",
        loras=("outline", "dots"),
        limits={"height": SIZES, "width": SIZES, "num_steps": {"minimum": 1, "maximum": 50}},
    )


WORKFLOWS = {
    info.name: info
    for info in (
        _info("paint", WorkflowInput("scheduler", JSON, {})),
        _info("paint-edit", WorkflowInput("image", PICTURE, REQUIRED), WorkflowInput("strength", FLOAT, 0.5)),
        _info(
            "paint-inpaint",
            WorkflowInput("image", PICTURE, REQUIRED),
            WorkflowInput("mask", PICTURE, REQUIRED),
            WorkflowInput("strength", FLOAT, 0.5),
        ),
        _info(
            "paint-control",
            WorkflowInput("control_image", PICTURE, REQUIRED),
            WorkflowInput("conditioning_scale", FLOAT, 1.0),
        ),
    )
}


@dataclass
class Painter:
    """`step_s` is the time of a step. `failure` is raised in the middle of the next request."""

    step_s: float = 0.0
    failure: Exception | None = None
    num_steps_done: int = 0
    requests: list[InvokeRequest] = field(default_factory=list)
    live: dict[str, asyncio.Event] = field(default_factory=dict)

    def workflows(self) -> Mapping[str, WorkflowInfo]:
        return WORKFLOWS

    def invoke(self, request: InvokeRequest) -> AsyncIterator[Update]:
        self.requests.append(request)
        self.live[request.request_id] = asyncio.Event()
        return self._paint(request, self.live[request.request_id])

    def cancel(self, request_id: str) -> None:
        if request_id in self.live:
            self.live[request_id].set()

    async def stats(self) -> dict[str, float]:
        return {"num_requests": float(len(self.live)), "num_steps": float(self.num_steps_done)}

    async def aclose(self) -> None:
        for event in self.live.values():
            event.set()

    async def _paint(self, request: InvokeRequest, cancelled: asyncio.Event) -> AsyncIterator[Update]:
        info = WORKFLOWS[request.workflow]
        values = {declared.name: declared.default for declared in info.inputs} | dict(request.inputs)
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        num_steps, num_images = values["num_steps"], request.num_images
        total = 1 + num_images * num_steps
        try:
            yield Progress("text", 0, None, None, 1, total)
            for step in range(1, num_steps + 1):
                for image in range(num_images):
                    await asyncio.sleep(self.step_s)
                    if cancelled.is_set():
                        raise Cancelled("cancelled")
                    if request.deadline_s is not None and loop.time() - start_s > request.deadline_s:
                        raise DeadlineExceeded("the deadline passed")
                    if self.failure is not None:
                        failure, self.failure = self.failure, None
                        if isinstance(failure, GenserveError):
                            raise failure
                        raise ExecutionFailed(str(failure)) from failure
                    self.num_steps_done += 1
                    done = 1 + (step - 1) * num_images + image + 1
                    yield Progress("denoise", image, step, num_steps, done, total)
                    every = request.preview_every_steps
                    if every and step % every == 0 and step < num_steps:
                        yield Preview(image, step, painted(values, image, step, request))
            outputs = tuple(
                {"image": painted(values, i, num_steps, request), "words": len(values["prompt"].split())}
                for i in range(num_images)
            )
            warnings = ("negative_prompt has no effect",) if values["guidance_scale"] <= 1 else ()
            yield Result(outputs, {"workflow": info.name, "steps": num_steps}, warnings)
        finally:
            self.live.pop(request.request_id, None)


def painted(values: Mapping[str, Any], image: int, step: int, request: InvokeRequest) -> Image.Image:
    """One colour from prompt, seed and step, over what the given pictures say."""
    said = (
        values["prompt"],
        values["seed"] + image,
        step,
        [(lora.name, lora.scale) for lora in request.loras],
    )
    source = random.Random(hashlib.sha256(repr(said).encode()).digest())
    size = (values["width"], values["height"])
    flat = Image.new("RGB", size, tuple(source.randrange(256) for _ in range(3)))
    if "mask" in values:
        return Image.composite(flat, values["image"], values["mask"].convert("L"))
    if "image" in values:
        return Image.blend(values["image"], flat, values["strength"])
    if "control_image" in values:
        return ImageChops.lighter(flat, values["control_image"])
    return flat


def served_painter(painter: Painter, name: str = "painter", max_queued_images: int = 12) -> ServedWorkflows:
    return ServedWorkflows(name, 1_700_000_000, painter, max_queued_images=max_queued_images)
