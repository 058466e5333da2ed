"""What coordinator, workers and gateway say to each other. Small frozen data; tensors are named, never carried.

A value is known everywhere by its key: the number of the run that made it, and the port; or the request's id and
the name of its input. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from genserve.t2i.graph import Graph, ModelSpec

Key = tuple[Any, str]

# Ops of an executor's lane.
TASK = "task"
RELEASE = "release"
# Ops of its control lane, which stays free while a task runs.
ADAPTER = "adapter"
ARRIVE = "arrive"
GIVE_UP = "give_up"
# Ops of the coordinator's own store.
KEEP = "keep"

GATEWAY = "gateway"
COORDINATOR = "coordinator"


class Given(NamedTuple):
    """Input: small data."""

    value: Any


class Here(NamedTuple):
    """Input: in this space already, or made by a run before this one on the same lane."""

    key: Key


class There(NamedTuple):
    """Input: in another space, at `refs`; it is kept here too, under `key`."""

    key: Key
    refs: Any


class Later(NamedTuple):
    """Deferred input: appears in this space under `key` while the task runs."""

    key: Key
    kind: str
    length: int | None


class Several(NamedTuple):
    """Input: a list of inputs."""

    items: tuple[Any, ...]


class PatchUse(NamedTuple):
    """Adapter `identity`, loaded into `source`, whose tensors are called `names`, to be on with `scale`."""

    identity: str
    scale: float
    source: Here | There
    names: Given | Here | There


@dataclass(frozen=True, slots=True)
class ModelCode:
    """A model as a worker makes it. `pickled` is its class, where it can't be imported by name."""

    spec: ModelSpec
    pickled: bytes | None = None


@dataclass(frozen=True, slots=True)
class RunTask:
    """Execute a model.

    model    name of its code; `code` comes with its first use on a worker. `weights`: identity.
    outputs  what it declares, of which somebody reads `keep`: those stay under (run id, port).
    unload   identities that have to go first.
    release  values that nobody needs any more.
    """

    task: int
    node: str
    model: str
    weights: str
    inputs: tuple[tuple[str, Given | Here | There | Later | Several], ...]
    outputs: tuple[str, ...]
    keep: tuple[str, ...]
    patches: tuple[PatchUse, ...] = ()
    code: ModelCode | None = None
    unload: tuple[str, ...] = ()
    release: tuple[Key, ...] = ()
    run: int = 0


class Stored(NamedTuple):
    """Tensors of a value: their bytes, and references for other spaces (None: they can be had in their own only)."""

    nbytes: int
    refs: Any


@dataclass(frozen=True, slots=True)
class Ran:
    """A task is done. `values`: small data by port, or `Stored`, of ports that were to be kept; small data of all."""

    values: Mapping[str, Any]
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Missed:
    """Inputs weren't there (any more): nothing was executed, or to no avail."""

    keys: tuple[Key, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The model can't do what the request's `field` asks for."""

    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """The task was given up before its end."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """For `ARRIVE`: the value of a `Later` input exists now."""

    key: Key
    source: Given | There


@dataclass(frozen=True, slots=True)
class GiveUp:
    """For `GIVE_UP`: these runs shall end as soon as they can, or not begin."""

    runs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """For `KEEP`: copy these into the coordinator's own store, and release others."""

    sources: tuple[There, ...]
    release: tuple[Key, ...] = ()


# -- between gateway and coordinator -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """A compiled workflow under a name, with the codes of its models by name; it replaces one of that name."""

    name: str
    graph: Graph
    codes: Mapping[str, ModelCode]


@dataclass(frozen=True, slots=True)
class Forget:
    """No further request names this workflow."""

    name: str


@dataclass(frozen=True, slots=True)
class HeldInput:
    """An image of a request, in the coordinator's own space."""

    key: Key
    stored: Stored


@dataclass(frozen=True, slots=True)
class Arrive:
    """A request. `inputs`: small data, `HeldInput`s, or lists of them. `deadline_s` is on the loop's clock."""

    request_id: str
    workflow: str
    inputs: Mapping[str, Any]
    num_images: int = 1
    lora_max_late_steps: int = 0
    lora_arrival_steps: tuple[int, ...] | None = None
    preview_every_steps: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class Taken:
    """What `Finished` or `PreviewMade` named has been read."""

    request_id: str
    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class ExecutorLost:
    executor: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExecutorBack:
    """The executor is up (again), and empty."""

    executor: str


@dataclass(frozen=True, slots=True)
class ExecutorGone:
    """The executor won't come back."""

    executor: str


@dataclass(frozen=True, slots=True)
class TaskDone:
    """Progress; see `genserve.t2i.request.Progress`."""

    request_id: str
    node: str
    image: int
    step: int | None
    num_steps: int | None
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PreviewMade:
    """A picture lies under `key` in the coordinator's space until it is `Taken`."""

    request_id: str
    image: int
    step: int
    key: Key


@dataclass(frozen=True, slots=True)
class Finished:
    """`outputs[i]`: image i's, by name: small data, or the `Here` of what lies in the coordinator's space until it
    is `Taken`. `record` is the runtime's part of the receipt."""

    request_id: str
    outputs: tuple[Mapping[str, Any], ...]
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """Without a result. `kind`: the name of an error class of `core.errors`; `field`: of an `InvalidRequest`."""

    request_id: str
    kind: str
    reason: str
    field: str = ""
