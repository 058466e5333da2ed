"""What is served, and what is in flight.

Owns the served models by name, the count of requests and sequences in flight, the limits on them,
and the drain at shutdown. Knows nothing of HTTP or of what a model family is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from genserve.core.errors import ConfigError, Draining, InvalidRequest, ModelNotFound, Overloaded
from genserve.core.metrics.recorder import Recorder
from genserve.core.runtime.completion import Completer, Completion
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import EngineInfo

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


class Lease:
    """A request's place in the server, from before its body is read; a context manager that gives it back.

    The sequences it takes later can be given back earlier: once the engine is done with them.
    """

    __slots__ = ("_gateway", "_model", "_num_sequences", "completion")

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._model = ""
        self._num_sequences = 0
        self.completion: Completion | None = None

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
        models: Sequence[ServedModel],
        *,
        max_inflight_requests: int = 1024,
        max_inflight_sequences: int | None = None,
    ) -> None:
        self._models = {model.name: model for model in models}
        if len(self._models) != len(models):
            raise ConfigError("two served models have the same name")
        self._max_requests = max_inflight_requests
        self._max_sequences = {
            name: max_inflight_sequences or model.info.max_queued_requests
            for name, model in self._models.items()
        }
        self._num_sequences = dict.fromkeys(self._models, 0)
        self._leases: set[Lease] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def models(self) -> list[ServedModel]:
        return list(self._models.values())

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
        """The served model of that name, or `ModelNotFound`."""
        found = self._models.get(name)
        if found is None:
            raise ModelNotFound(
                f"no model {name[:100]!r} is served here (there is: {', '.join(self._models)})"
            )
        return found

    def enter(self) -> Lease:
        """A place for one more request; the caller gives it back by leaving the lease's context."""
        if self._draining:
            raise Draining("the server is shutting down")
        if len(self._leases) >= self._max_requests:
            raise Overloaded(f"{len(self._leases)} requests are in flight, the server's limit")
        lease = Lease(self)
        self._leases.add(lease)
        self._idle.clear()
        return lease

    def _take(self, name: str, num_sequences: int) -> None:
        if self._draining:
            raise Draining("the server is shutting down")
        limit = self._max_sequences[self.model(name).name]
        if num_sequences > limit:
            raise InvalidRequest(
                "n", f"{num_sequences} sequences in one request are more than the server's limit of {limit}"
            )
        if self._num_sequences[name] + num_sequences > limit:
            raise Overloaded(f"the queue of model {name!r} is full ({limit} sequences)")
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
            if lease.completion is not None:
                lease.completion.abort(Draining("the server shut down before the request finished"))
