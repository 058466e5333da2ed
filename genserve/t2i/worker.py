"""Executes nodes: one executor's models, and the work of its two lanes. (torch)

It blocks and knows of no request: a task says where its inputs are, and its outputs stay in the process's `Space`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from genserve.core.errors import ExecutionFailed, GenserveError, InvalidRequest, TensorError
from genserve.t2i.messages import (
    ADAPTER,
    ARRIVE,
    GIVE_UP,
    KEEP,
    RELEASE,
    TASK,
    Arrived,
    Given,
    GiveUp,
    Here,
    Keep,
    Key,
    Later,
    Missed,
    ModelCode,
    Ran,
    Refused,
    RunTask,
    Several,
    Skipped,
    Stored,
    There,
)
from genserve.t2i.model import Model, model_class
from genserve.t2i.models.lazy import LazyTensor, LazyTensors
from genserve.t2i.models.lora import Patcher
from genserve.t2i.models.lora_file import Adapter
from genserve.t2i.offload import HostMemory
from genserve.t2i.space import Space

logger = logging.getLogger(__name__)

# Of this process: libraries change global state while they build a model, and two at a time get each other's.
_LOADING = threading.Lock()


class _GivenUp(Exception):
    """Whoever waits for this run doesn't any more."""


class _NotHere(Exception):
    def __init__(self, key: Key, why: str) -> None:
        super().__init__(why)
        self.key = key


def make_model(code: ModelCode) -> Model:
    """The model, its class unpickled or imported by name; nothing is loaded."""
    if code.pickled is None:
        found = model_class(code.spec.cls)
    else:
        import cloudpickle  # type: ignore[import-untyped]

        found = cloudpickle.loads(code.pickled)
    model: Model = found(**dict(code.spec.params))
    return model


class Weights:
    """What a model has loaded: shared by all nodes of equal identity, and patched for one task at a time."""

    def __init__(self, components: dict[str, Any]) -> None:
        self.components = components
        self.patcher: Patcher | None = None


def _quietly(model: Model) -> contextlib.AbstractContextManager[None]:
    if not model.weights:
        return contextlib.nullcontext()
    from genserve.core.models.loading import quiet_transformers

    return quiet_transformers()


class T2iWorker:
    """`device`: where models run and tensors are. `wait_s`: how long a deferred input may take at most.
    `host_bytes`: of unloaded models that are kept in host memory, where the device has its own.

    One thread performs the tasks of its lane, another one the ops of its control lane.
    """

    def __init__(self, space: Space, device: str = "cpu", wait_s: float = 600.0, host_bytes: int = 0) -> None:
        self._space = space
        self._device = device
        self._wait_s = wait_s
        self._codes: dict[str, ModelCode] = {}
        self._models: dict[str, Model] = {}
        self._weights: dict[str, Weights] = {}
        self._host = HostMemory(host_bytes) if host_bytes and device != "cpu" else None
        self._given_up: set[int] = set()
        self._lock = threading.Lock()  # of what both lanes change
        self._failed_arrivals: dict[Key, str] = {}
        self._ops: dict[str, Callable[[Any], Any]] = {
            TASK: self._task,
            ADAPTER: self._tried,  # nobody gives up what runs there
            RELEASE: space.release,
            ARRIVE: self._arrive,
            GIVE_UP: self._give_up,
        }

    def perform(self, op: str, args: Any) -> Any:
        return self._ops[op](args)

    # -- tasks -----------------------------------------------------------------------------------------

    def _task(self, run: RunTask) -> Ran | Missed | Refused | Skipped:
        try:
            return self._tried(run)
        finally:
            if self._given_up:
                with self._lock:
                    # Runs of the lane come in their order: earlier ones were over when they were given up.
                    self._given_up = {other for other in self._given_up if other > run.run}

    def _tried(self, run: RunTask) -> Ran | Missed | Refused | Skipped:
        if run.release:
            self._space.release(run.release)
        if run.code is not None:
            self._codes[run.model] = run.code
        for identity in run.unload:
            self._unload(identity)
        try:
            if run.run in self._given_up:
                return Skipped()
            return self._execute(run)
        except _GivenUp:
            return Skipped()
        except _NotHere as error:
            return Missed((error.key,), str(error))
        except InvalidRequest as error:
            return Refused(error.field, error.message)

    def _execute(self, run: RunTask) -> Ran:
        space = self._space
        inputs: dict[str, Any] = {}
        values = space.values
        for port, source in run.inputs:
            if type(source) is Given:
                inputs[port] = source.value
            elif type(source) is Here and source.key in values:
                inputs[port] = values[source.key]
            else:
                inputs[port] = self._input(source, run)
        model = self._models.get(run.model)
        if model is None:
            model = self._models[run.model] = self._made(run.model)
        weights = self._weights.get(run.weights)
        if weights is None:
            weights = self._weights[run.weights] = self._loaded(model, run.weights)
        begin_s = time.perf_counter()
        with torch.no_grad():
            if run.patches or weights.patcher is not None:
                self._patch(weights, run)
            made = model.execute(weights.components, **inputs)
        duration_s = time.perf_counter() - begin_s
        if not isinstance(made, dict) or made.keys() != set(run.outputs):
            found = sorted(made) if isinstance(made, dict) else type(made).__name__
            raise ExecutionFailed(f"{run.node} must return a dict of {', '.join(run.outputs)}, not {found}")
        told: dict[str, Any] = {}
        for port, value in made.items():
            if port in run.keep:
                told[port] = space.put((run.run, port), value)
            elif not _has_tensors(value):
                told[port] = value
        return Ran(told, duration_s)

    def _input(self, source: Any, run: RunTask) -> Any:
        if type(source) is Given:
            return source.value
        if type(source) is Several:
            return [self._input(item, run) for item in source.items]
        if type(source) is Later:
            return self._lazy(source, run)
        key = source.key
        if key in self._space:
            return self._space.get(key)
        if type(source) is Here:
            raise _NotHere(key, f"{key} isn't here")
        try:
            return self._space.fetch(key, source.refs, self._device)
        except (TensorError, TimeoutError) as error:
            raise _NotHere(key, f"{type(error).__name__}: {error}") from error

    def _lazy(self, source: Later, run: RunTask) -> Any:
        key = source.key
        if key in self._space:
            return self._space.get(key)

        def stopped() -> Exception | None:
            if run.run in self._given_up:
                return _GivenUp()
            failed = self._failed_arrivals.pop(key, None)
            return None if failed is None else _NotHere(key, failed)

        def fetch() -> Any:
            return self._space.wait(key, stopped, self._wait_s)

        if source.kind == "tensor" or source.kind == "image":
            return LazyTensor(fetch)
        if source.kind == "tensors" and source.length is not None:
            return LazyTensors(source.length, lambda index: fetch()[index])
        return fetch()

    # -- models ----------------------------------------------------------------------------------------

    def _made(self, name: str) -> Model:
        code = self._codes.get(name)
        if code is None:
            raise ExecutionFailed(f"the code of model {name} was never sent here")
        return make_model(code)

    def _unload(self, identity: str) -> None:
        weights = self._weights.pop(identity, None)
        if weights is not None and self._host is not None:
            if weights.patcher is not None:  # its pristine copies would stay on the device
                weights.patcher.restore(weights.components)
                weights.patcher = None
            self._host.keep(identity, weights, weights.components)

    def _loaded(self, model: Model, identity: str) -> Weights:
        if self._host is not None:
            kept: Weights | None = self._host.take(identity, self._device)
            if kept is not None:
                return kept
        with _LOADING, torch.no_grad(), _quietly(model):
            return Weights(model.load(model.location, self._device))

    def _patch(self, weights: Weights, run: RunTask) -> None:
        """Have exactly `run.patches` on the model's weights."""
        if weights.patcher is None:
            weights.patcher = Patcher()
        adapters = [
            (
                Adapter(
                    use.identity, tuple(self._input(use.names, run)), tuple(self._input(use.source, run))
                ),
                use.scale,
            )
            for use in run.patches
        ]
        weights.patcher.apply(weights.components, adapters)

    # -- the control lane ------------------------------------------------------------------------------

    def _arrive(self, arrived: Arrived) -> None:
        source = arrived.source
        if type(source) is Given:
            self._space.add(arrived.key, source.value)
            return
        try:
            self._space.fetch(arrived.key, source.refs, self._device)  # type: ignore[union-attr]
        except (TensorError, TimeoutError) as error:
            self._failed_arrivals[arrived.key] = f"{type(error).__name__}: {error}"
            self._space.interrupt()

    def _give_up(self, runs: GiveUp) -> None:
        with self._lock:
            self._given_up.update(runs.runs)
        self._space.interrupt()

    def stats(self) -> dict[str, float]:
        return {**self._space.stats(), "num_loaded": len(self._weights), "num_given_up": len(self._given_up)}


class Keeper:
    """The coordinator's own store: copies what would be lost with an executor, and what the gateway hands out."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def perform(self, op: str, keep: Keep) -> list[Stored | None]:
        assert op == KEEP, op
        self._space.release(keep.release)
        return [self._copied(source) for source in keep.sources]

    def _copied(self, source: There) -> Stored | None:
        try:
            value = self._space.fetch(source.key, source.refs, "cpu")
            stored: Stored = self._space.put(source.key, value)
            return stored
        except GenserveError as error:
            logger.warning("%s could not be copied: %s", source.key, error)
            self._space.release((source.key,))
            return None


def _has_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, list | tuple):
        return any(_has_tensors(item) for item in value)
    return isinstance(value, dict) and any(_has_tensors(item) for item in value.values())
