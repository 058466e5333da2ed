"""What a front end and a runtime of workflows say to each other about one request. Plain data; images are PIL's.

A request names a registered workflow. Its inputs are those that the workflow declares; `seed` is one of them by
name, and `num_images` makes as many images, image i with seed `seed + i`, equal to a request of its own.
Knows nothing of how a workflow is written or run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Kind = Literal["tensor", "tensors", "image", "text", "int", "float", "bool", "json", "list"]

Size = int | str


@dataclass(frozen=True, slots=True)
class PortType:
    """What may travel through a port.

    tensor   one tensor; `dtype` (a torch dtype's name) and `shape` are None where anything goes.
    tensors  a sequence of tensors of unlike shapes, `length` long (None: unknown), such as a ControlNet's residuals.
    image    uint8, height x width x 3, in a store; PIL images at the edges.
    text, int, float, bool, json   small values, which travel inside messages. `json` is anything JSON can say.
    list     of `item`s.
    """

    kind: Kind
    dtype: str | None = None
    shape: tuple[Size, ...] | None = None
    length: int | None = None
    item: PortType | None = None

    @property
    def is_inline(self) -> bool:
        """Whether values are small data inside messages, rather than tensors in a store."""
        if self.kind == "list":
            assert self.item is not None
            return self.item.is_inline
        return self.kind in ("text", "int", "float", "bool", "json")


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"

    def __reduce__(self) -> str:  # one object, whichever process it came through
        return "REQUIRED"


REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class WorkflowInput:
    name: str
    type: PortType
    default: Any
    """REQUIRED, or the value of requests that give none."""
    description: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class LoraUse:
    """A registered adapter by name (or, in the library, a path), and its scale."""

    name: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class InvokeRequest:
    """One request.

    inputs       by name: text, numbers, PIL images, or lists of them. Missing ones take their defaults.
    num_images   how often the nodes that depend on `seed` run.
    loras        on top of the workflow's own.
    lora_max_late_steps  how many first steps may run before an adapter is there; 0 waits (LegoDiffusion §4.2).
    lora_arrival_steps   a replay: exactly this step of each image is the first with adapters.
    preview_every_steps  a preview of the latents after every so many steps; 0 makes none.
    deadline_s   seconds from now after which the request ends with `DeadlineExceeded`.
    """

    request_id: str
    workflow: str
    inputs: Mapping[str, Any]
    num_images: int = 1
    loras: tuple[LoraUse, ...] = ()
    lora_max_late_steps: int = 0
    lora_arrival_steps: tuple[int, ...] | None = None
    preview_every_steps: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A node has finished. `step` of `num_steps` is set inside loops; `done` of `total` counts all nodes."""

    node: str
    image: int
    step: int | None
    num_steps: int | None
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Preview:
    """What image `image` looks like after `step` steps: a PIL image of the output's size."""

    image: int
    step: int
    picture: Any


@dataclass(frozen=True, slots=True)
class Result:
    """The end. `outputs[i]` are image i's workflow outputs by name (PIL images, text, numbers, numpy arrays).

    `receipt` is JSON: enough to make the same again. `warnings` say what was not done as asked.
    """

    outputs: tuple[Mapping[str, Any], ...]
    receipt: Mapping[str, Any]
    warnings: tuple[str, ...] = ()


Update = Progress | Preview | Result


class Declared(Protocol):
    """A name and the type of its value."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> PortType: ...


@dataclass(frozen=True, slots=True)
class WorkflowInfo:
    """What a front end must know of a registered workflow to validate and describe requests."""

    name: str
    inputs: tuple[WorkflowInput, ...]
    outputs: tuple[Declared, ...]
    family: str = ""
    description: str = ""
    loras: tuple[str, ...] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Of inputs: {"height": {"minimum": 64, "maximum": 2048, "multiple_of": 16}, ...}."""


class WorkflowClient(Protocol):
    """Runs workflows; owned by one event loop. In this process or over Ray, the same."""

    def workflows(self) -> Mapping[str, WorkflowInfo]: ...

    def invoke(self, request: InvokeRequest) -> AsyncIterator[Update]:
        """Start at once. The last update is a `Result`; errors are raised (`InvalidRequest` here, before any work;
        `ExecutionFailed`, `Overloaded`, `DeadlineExceeded`, `Cancelled` from the iterator)."""
        ...

    def cancel(self, request_id: str) -> None:
        """Within a step everything of it is freed. Unknown ids are ignored."""
        ...

    async def stats(self) -> dict[str, float]: ...

    async def aclose(self) -> None: ...
