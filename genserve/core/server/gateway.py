"""What is served, and what is in flight.

Owns the served models by name, the count of requests and sequences in flight, the limits on them,
and the drain at shutdown. Knows nothing of HTTP or of what a model family is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from genserve.core.errors import ConfigError, Draining, InvalidRequest, ModelNotFound, Overloaded
from genserve.core.runtime.completion import Completer, Completion
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import EngineInfo


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as the server shows it. `created` is in Unix seconds."""

    name: str
    created: int
    completer: Completer
    tokenizer: Tokenizer
    info: EngineInfo


class Lease:
    """A request's place in the server, held while it is in flight."""

    __slots__ = ("completion", "model", "num_sequences")

    def __init__(self, model: ServedModel, num_sequences: int) -> None:
        self.model = model
        self.num_sequences = num_sequences
        self.completion: Completion | None = None


class Gateway:
    """Admission to the served models.

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

    @contextmanager
    def admit(self, name: str, num_sequences: int) -> Iterator[Lease]:
        """A place for a request of `num_sequences`, given back on every way out."""
        if self._draining:
            raise Draining("the server is shutting down")
        model = self.model(name)
        limit = self._max_sequences[name]
        if num_sequences > limit:
            raise InvalidRequest(
                "n", f"{num_sequences} sequences in one request are more than the server's limit of {limit}"
            )
        if len(self._leases) >= self._max_requests:
            raise Overloaded(f"{len(self._leases)} requests are in flight, the server's limit")
        if self._num_sequences[name] + num_sequences > limit:
            raise Overloaded(f"the queue of model {name!r} is full ({limit} sequences)")
        lease = Lease(model, num_sequences)
        self._leases.add(lease)
        self._num_sequences[name] += num_sequences
        self._idle.clear()
        try:
            yield lease
        finally:
            self._leases.remove(lease)
            self._num_sequences[name] -= num_sequences
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
