"""What is served, and what is in flight.

Owns the served models by name, the count of requests, sequences and images in flight, the limits on them,
and the drain at shutdown. Knows nothing of HTTP or of what a model family is, but that one makes text and
another runs workflows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from genserve.core.errors import (
    ConfigError,
    Draining,
    GenserveError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    UnknownWorkflow,
)
from genserve.core.metrics.recorder import Recorder
from genserve.core.runtime.completion import Completer
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import EngineInfo
from genserve.core.workflows import WorkflowClient, WorkflowInfo

if TYPE_CHECKING:
    from pydantic import BaseModel

    from genserve.core.runtime.membership import Membership


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as the server shows it. `created` is in Unix seconds.

    `options_model` names the fields that its family takes in a request's body beyond the common ones.
    `recorder` holds instruments of its controllers, for `/metrics`. `membership` is for operators; None where
    the workers are what they are.
    """

    name: str
    created: int
    completer: Completer
    tokenizer: Tokenizer
    info: EngineInfo
    options_model: type[BaseModel] | None = None
    recorder: Recorder | None = None
    membership: Membership | None = None


@dataclass(frozen=True, slots=True)
class ServedWorkflows:
    """One model that makes images, as the server shows it: workflows behind one client.

    At most `max_queued_images` of its images are in flight.
    """

    name: str
    created: int
    client: WorkflowClient
    family: str = "t2i"
    max_queued_images: int = 64


class Abortable(Protocol):
    """Work in flight, which a shutdown ends."""

    def abort(self, error: GenserveError) -> None: ...


class Lease:
    """A request's place in the server, from before its body is read; a context manager that gives it back.

    The sequences (or images) it takes later can be given back earlier: once the engine is done with them.
    `work` is what is running for it.
    """

    __slots__ = ("_gateway", "_model", "_num_sequences", "work")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._model = ""
        self._num_sequences = 0
        self.work: Abortable | None = None

    def outlive(self) -> Lease:
        """A place for work that goes on after the answer: what this one holds is the new one's."""
        heir = self._gateway._inherit()
        heir._model, heir._num_sequences = self._model, self._num_sequences
        self._num_sequences = 0
        return heir

    def take_sequences(self, name: str, num_sequences: int) -> None:
        """Places for the sequences of this request, or the error that says why not."""
        self._gateway._take(name, num_sequences)
        self._model, self._num_sequences = name, num_sequences

    def release_sequences(self) -> None:
        """Give the sequences back. Safe to call twice."""
        if self._num_sequences:
            self._gateway._give_back(self._model, self._num_sequences)
            self._num_sequences = 0

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release_sequences()
        self._gateway._leave(self)


class Gateway:
    """Admission to the served models.

    A request enters before its body is read, and takes its sequences once it is known what it asks for.
    At most `max_inflight_sequences` sequences a model (None: what its engine will queue) and
    `max_inflight_requests` requests in all are in flight; more are `Overloaded`.
    """

    def __init__(
        self,
        models: Sequence[ServedModel | ServedWorkflows],
        *,
        max_inflight_requests: int = 1024,
        max_inflight_sequences: int | None = None,
    ) -> None:
        self._models = {model.name: model for model in models if isinstance(model, ServedModel)}
        self._image_models = {model.name: model for model in models if isinstance(model, ServedWorkflows)}
        if len(self._models.keys() | self._image_models.keys()) != len(models):
            raise ConfigError("two served models have the same name")
        self._workflows: dict[str, ServedWorkflows] = {}
        for served in self._image_models.values():
            for name in served.client.workflows():
                other = self._workflows.setdefault(name, served)
                if other is not served:
                    raise ConfigError(f"{other.name} and {served.name} both have a workflow {name!r}")
        self._max_requests = max_inflight_requests
        limits = {name: model.info.max_queued_requests for name, model in self._models.items()}
        limits |= {name: model.max_queued_images for name, model in self._image_models.items()}
        self._max_sequences = {name: max_inflight_sequences or limit for name, limit in limits.items()}
        self._num_sequences = dict.fromkeys(limits, 0)
        self._leases: set[Lease] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def models(self) -> list[ServedModel]:
        return list(self._models.values())

    @property
    def image_models(self) -> list[ServedWorkflows]:
        return list(self._image_models.values())

    @property
    def is_draining(self) -> bool:
        return self._draining

    @property
    def num_inflight_requests(self) -> int:
        return len(self._leases)

    @property
    def max_inflight_requests(self) -> int:
        return self._max_requests

    def num_inflight_sequences(self, name: str) -> int:
        return self._num_sequences[name]

    def model(self, name: str) -> ServedModel:
        """The served language model of that name, or `ModelNotFound`; `InvalidRequest` if it makes images."""
        found = self._models.get(name)
        if found is not None:
            return found
        if name in self._image_models:
            raise InvalidRequest(
                "model", f"{name!r} makes images: POST /v1/images/generations, /v1/workflows"
            )
        raise self._not_found(name)

    def image_model(self, name: str | None) -> ServedWorkflows:
        """The served model that makes images of that name, or with a workflow of that name, or the only one.

        Errors like those of `model`.
        """
        if name is None:
            if len(self._image_models) == 1:
                return next(iter(self._image_models.values()))
            if self._image_models:
                raise InvalidRequest("model", f"name one of the models: {', '.join(self._image_models)}")
            raise ModelNotFound("no model that makes images is served here")
        found = self._image_models.get(name) or self._workflows.get(name)
        if found is not None:
            return found
        if name in self._models:
            raise InvalidRequest("model", f"{name!r} is a language model: POST /v1/chat/completions")
        raise self._not_found(name)

    def workflows(self) -> list[tuple[ServedWorkflows, WorkflowInfo]]:
        """Every served workflow, with the model that it belongs to."""
        return [
            (served, info)
            for served in self._image_models.values()
            for info in served.client.workflows().values()
        ]

    def workflow(self, name: str) -> tuple[ServedWorkflows, WorkflowInfo]:
        """The workflow of that name, or `UnknownWorkflow`."""
        served = self._workflows.get(name)
        if served is None:
            there = ", ".join(self._workflows) or "none"
            raise UnknownWorkflow(
                "workflow", f"no workflow {name[:100]!r} is served here (there is: {there})"
            )
        return served, served.client.workflows()[name]

    def _not_found(self, name: str) -> ModelNotFound:
        there = ", ".join([*self._models, *self._image_models])
        return ModelNotFound(f"no model {name[:100]!r} is served here (there is: {there})")

    def enter(self) -> Lease:
        """A place for one more request; the caller gives it back by leaving the lease's context."""
        if self._draining:
            raise Draining("the server is shutting down")
        if len(self._leases) >= self._max_requests:
            raise Overloaded(f"{len(self._leases)} requests are in flight, the server's limit")
        return self._inherit()

    def _inherit(self) -> Lease:
        lease = Lease(self)
        self._leases.add(lease)
        self._idle.clear()
        return lease

    def _take(self, name: str, num_sequences: int) -> None:
        if self._draining:
            raise Draining("the server is shutting down")
        limit = self._max_sequences[name]
        what = "images" if name in self._image_models else "sequences"
        if num_sequences > limit:
            raise InvalidRequest(
                "n", f"{num_sequences} {what} in one request are more than the server's limit of {limit}"
            )
        if self._num_sequences[name] + num_sequences > limit:
            raise Overloaded(f"the queue of model {name!r} is full ({limit} {what})")
        self._num_sequences[name] += num_sequences

    def _give_back(self, name: str, num_sequences: int) -> None:
        self._num_sequences[name] -= num_sequences

    def _leave(self, lease: Lease) -> None:
        self._leases.remove(lease)
        if not self._leases:
            self._idle.set()

    def begin_drain(self) -> None:
        """Take no new requests from now on; those in flight go on."""
        self._draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests, wait for those in flight; at the timeout end them with `Draining`.

        True if all finished by themselves.
        """
        self.begin_drain()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
            return True
        except TimeoutError:
            self.abort_all()
            return False

    def abort_all(self) -> None:
        """End every request in flight with `Draining`."""
        for lease in self._leases:
            if lease.work is not None:
                lease.work.abort(Draining("the server shut down before the request finished"))
