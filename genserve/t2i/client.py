"""The gateway side of workflows: requests go in, updates come out (`WorkflowClient`).

Owns the streams of requests in flight and the receipts. What decides is the coordinator; it runs on this client's
event loop, and executors are reached from there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import genserve.core.errors as errors
from genserve.core.dispatch import LogEntry
from genserve.core.errors import ExecutionFailed, GenserveError, InvalidRequest, Overloaded
from genserve.core.runtime.loop import Executor, LiveLoop
from genserve.t2i.coordinator import Coordinator
from genserve.t2i.graph import Graph
from genserve.t2i.inputs import checked_inputs, picture_tensor, told
from genserve.t2i.instance import SEED
from genserve.t2i.messages import (
    COORDINATOR,
    GATEWAY,
    Arrive,
    Cancel,
    Ended,
    Finished,
    Forget,
    HeldInput,
    Here,
    ModelCode,
    PreviewMade,
    Register,
    Stored,
    Taken,
    TaskDone,
)
from genserve.t2i.ports import IMAGE, PortType
from genserve.t2i.receipt import VERSION, noted
from genserve.t2i.request import InvokeRequest, LoraUse, Preview, Progress, Result, Update, WorkflowInfo

if TYPE_CHECKING:
    from genserve.t2i.space import Space

logger = logging.getLogger(__name__)

# Workflows with adapters on top that are kept compiled: scales are any number, so requests can name any number.
_MAX_VARIANTS = 64


@dataclass(frozen=True, slots=True)
class Served:
    """A registered workflow. `with_loras` gives its graph with adapters on top, and the codes of the models in it."""

    info: WorkflowInfo
    graph: Graph
    with_loras: Callable[[tuple[LoraUse, ...]], tuple[Graph, Mapping[str, ModelCode]]]
    warn: Callable[[Mapping[str, Any]], tuple[str, ...]] = field(default=lambda inputs: ())


class UpdateStream:
    """Updates of one request, in order. One consumer, on the event loop's thread. Leaving it early cancels."""

    def __init__(self, on_left: Callable[[], None]) -> None:
        self._items: deque[Update | GenserveError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._on_left = on_left

    def put(self, item: Update | GenserveError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> UpdateStream:
        return self

    async def __anext__(self) -> Update:
        if self._ended:
            raise StopAsyncIteration
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._items.popleft()
        self._ended = isinstance(item, GenserveError | Result)
        if isinstance(item, GenserveError):
            raise item
        return item

    async def aclose(self) -> None:
        """Nothing more will be read: the request is cancelled if it still runs."""
        if not self._ended:
            self._ended = True
            self._on_left()


@dataclass(slots=True)
class _Open:
    request: InvokeRequest
    served: Served
    inputs: Mapping[str, Any]
    stream: UpdateStream
    warnings: tuple[str, ...]


class LocalWorkflows:
    """`WorkflowClient` over a coordinator on this event loop. Build it inside a running loop.

    `space` is the coordinator's own. `facts` go into every receipt. `closed` frees what else there is once the
    executors have ended.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        executors: Mapping[str, Executor],
        space: Space,
        *,
        max_queued_requests: int = 256,
        max_images: int = 16,
        facts: Mapping[str, Any] | None = None,
        log: list[LogEntry] | None = None,
        closed: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._coordinator = coordinator
        self.executors = dict(executors)
        self._space = space
        self._max_queued, self._max_images = max_queued_requests, max_images
        self._facts = dict(facts or {})
        self._closed = closed
        self._served: dict[str, Served] = {}
        self._variants: OrderedDict[str, None] = OrderedDict()  # the least recently used first
        self._numbers = itertools.count()
        self._open: dict[str, _Open] = {}
        self._failure: GenserveError | None = None
        self._aio = asyncio.get_running_loop()
        self._loop = LiveLoop(
            {COORDINATOR: coordinator}, executors, {GATEWAY: self._take}, log, on_fatal=self._on_fatal
        )

    # -- workflows -------------------------------------------------------------------------------------

    def serve(self, served: Served, codes: Mapping[str, ModelCode]) -> None:
        """From now on requests may name the workflow; one of the same name is replaced."""
        name = served.info.name
        self._served[name] = served
        for variant in [each for each in self._variants if each.partition("\n")[0] == name]:
            self._forget(variant)
        self._loop.post(COORDINATOR, Register(name, served.graph, codes), GATEWAY)

    def workflows(self) -> Mapping[str, WorkflowInfo]:
        return {name: served.info for name, served in self._served.items()}

    def graph_of(self, workflow: str, loras: tuple[LoraUse, ...] = ()) -> Graph:
        """What a request for the workflow with these adapters runs."""
        served = self._served[workflow]
        return served.with_loras(loras)[0] if loras else served.graph

    def note(self, **facts: Any) -> None:
        """Further facts for every receipt."""
        self._facts.update(facts)

    def post(self, body: Any) -> None:
        """Tell the coordinator what happens to executors."""
        if self._loop.fatal is None:
            self._loop.post(COORDINATOR, body, "executors")

    # -- requests --------------------------------------------------------------------------------------

    def invoke(self, request: InvokeRequest) -> UpdateStream:
        served = self._served.get(request.workflow)
        if served is None:
            raise errors.ModelNotFound(
                f"no workflow {request.workflow[:100]!r} (there is: {', '.join(self._served) or 'none'})"
            )
        if request.request_id in self._open:
            raise InvalidRequest("request_id", f"{request.request_id!r} is already in use")
        inputs = checked_inputs(request, served.info, self._max_images)
        name = self._variant(served, request.loras)
        stream = UpdateStream(lambda: self.cancel(request.request_id))
        if self._failure is not None:
            stream.put(self._failure)
            return stream
        if len(self._open) >= self._max_queued:
            stream.put(Overloaded(f"{len(self._open)} requests are in flight (max_queued_requests)"))
            return stream
        opened = _Open(request, served, inputs, stream, tuple(served.warn(inputs)))
        owner, made = f"input-{next(self._numbers)}", list[Any]()
        try:
            held = {
                key: self._held(owner, key, value, self._type_of(served, key), made)
                for key, value in inputs.items()
            }
        except BaseException as error:
            self._space.release(made)
            if isinstance(error, InvalidRequest) or not isinstance(error, GenserveError):
                raise
            stream.put(error)  # no room for its pictures
            return stream
        self._open[request.request_id] = opened
        deadline_s = None if request.deadline_s is None else self._aio.time() + request.deadline_s
        self._loop.post(
            COORDINATOR,
            Arrive(
                request.request_id,
                name,
                held,
                request.num_images,
                request.lora_max_late_steps,
                request.lora_arrival_steps,
                request.preview_every_steps,
                deadline_s,
            ),
            GATEWAY,
        )
        return stream

    def _variant(self, served: Served, loras: tuple[LoraUse, ...]) -> str:
        """The name under which the coordinator knows the workflow with these adapters on top."""
        if not loras:
            return served.info.name
        for lora in loras:
            if lora.name not in served.info.loras:
                known = ", ".join(served.info.loras) or "none"
                raise InvalidRequest("loras", f"no adapter {lora.name[:100]!r} (there is: {known})")
        name = "\n".join((served.info.name, *(f"{lora.name}\t{lora.scale!r}" for lora in loras)))
        if name in self._variants:
            self._variants.move_to_end(name)
            return name
        graph, codes = served.with_loras(loras)
        self._variants[name] = None
        self._loop.post(COORDINATOR, Register(name, graph, codes), GATEWAY)
        if len(self._variants) > _MAX_VARIANTS:
            self._forget(next(iter(self._variants)))
        return name

    def _forget(self, variant: str) -> None:
        """Requests that have arrived keep their own."""
        del self._variants[variant]
        self._loop.post(COORDINATOR, Forget(variant), GATEWAY)

    def _type_of(self, served: Served, name: str) -> PortType:
        return next(each.type for each in served.info.inputs if each.name == name)

    def _held(self, owner: str, name: str, value: Any, type: PortType, made: list[Any]) -> Any:
        if value is None or type.is_inline:
            return value
        if type.kind == "list":
            assert type.item is not None
            return [
                self._held(owner, f"{name}[{index}]", item, type.item, made)
                for index, item in enumerate(value)
            ]
        key = owner, name
        try:
            picture = picture_tensor(value)
        except OSError as error:  # pictures are read when they are first needed
            raise InvalidRequest(name, f"is a broken picture: {error}") from error
        stored = self._space.put(key, picture)
        made.append(key)
        assert isinstance(stored, Stored)
        return HeldInput(key, stored)

    def cancel(self, request_id: str) -> None:
        if request_id in self._open and self._loop.fatal is None:
            self._loop.post(COORDINATOR, Cancel(request_id), GATEWAY)

    # -- what comes back -------------------------------------------------------------------------------

    def _take(self, body: Any) -> None:
        opened = self._open.get(body.request_id)
        match body:
            case TaskDone():
                if opened is not None:
                    opened.stream.put(
                        Progress(body.node, body.image, body.step, body.num_steps, body.done, body.total)
                    )
            case PreviewMade():
                if opened is not None:
                    picture = told(self._space.get(body.key), IMAGE)
                    opened.stream.put(Preview(body.image, body.step, picture))
                self._loop.post(COORDINATOR, Taken(body.request_id, (body.key,)), GATEWAY)
            case Finished():
                self._finish(body, self._open.pop(body.request_id, None))
            case Ended():
                if opened is not None:
                    del self._open[body.request_id]
                    kind = getattr(errors, body.kind, ExecutionFailed)
                    arguments = (body.field, body.reason) if body.field else (body.reason,)
                    opened.stream.put(kind(*arguments))

    def _finish(self, body: Finished, opened: _Open | None) -> None:
        keys = tuple(value.key for image in body.outputs for item in image.values() for value in _heres(item))
        if opened is not None:
            types = {output.name: output.type for output in opened.served.graph.outputs}
            try:
                outputs = tuple(
                    {name: told(self._read(value), types[name]) for name, value in image.items()}
                    for image in body.outputs
                )
                receipt = self._receipt(opened, body.record, outputs)
            except Exception as error:
                logger.exception("the result of %s could not be handed out", body.request_id)
                opened.stream.put(
                    ExecutionFailed(f"the result could not be read: {type(error).__name__}: {error}")
                )
            else:
                warnings = dict.fromkeys((*opened.warnings, *body.record["warnings"]))
                opened.stream.put(Result(outputs, receipt, tuple(warnings)))
        if keys:
            self._loop.post(COORDINATOR, Taken(body.request_id, keys), GATEWAY)

    def _read(self, value: Any) -> Any:
        if isinstance(value, Here):
            return self._space.get(value.key)
        return [self._read(item) for item in value] if isinstance(value, list) else value

    def _receipt(
        self, opened: _Open, record: Mapping[str, Any], outputs: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        request = opened.request
        seed = opened.inputs.get(SEED)
        return {
            "version": VERSION,
            "workflow": request.workflow,
            "request_id": request.request_id,
            "inputs": {name: noted(value) for name, value in opened.inputs.items()},
            "num_images": request.num_images,
            "seeds": None if seed is None else [seed + index for index in range(request.num_images)],
            "loras": [{"name": lora.name, "scale": lora.scale} for lora in request.loras],
            "lora_max_late_steps": request.lora_max_late_steps,
            **record,
            **self._facts,
            "outputs": [{name: noted(value) for name, value in image.items()} for image in outputs],
        }

    # -- the rest --------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, float]:
        return {
            **self._coordinator.stats(),
            **{f"home_{name}": figure for name, figure in self._space.stats().items()},
            "num_streams": len(self._open),
        }

    async def aclose(self) -> None:
        self._fail_all(ExecutionFailed("the runtime was closed"))
        await self._loop.aclose()
        if self._closed is not None:
            await self._closed()
        self._space.close()

    def _on_fatal(self, error: BaseException) -> None:
        logger.error("the coordinator failed", exc_info=error)
        self._fail_all(ExecutionFailed(f"the coordinator failed: {type(error).__name__}: {error}"))

    def _fail_all(self, error: GenserveError) -> None:
        self._failure = self._failure or error
        opened, self._open = self._open, {}
        for each in opened.values():
            each.stream.put(error)


def _heres(value: Any) -> list[Here]:
    if isinstance(value, Here):
        return [value]
    return [here for item in value for here in _heres(item)] if isinstance(value, list) else []
