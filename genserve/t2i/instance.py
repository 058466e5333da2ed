"""One request's tasks: a graph, unrolled for the request's inputs (LegoDiffusion §4.3.1, "instantiated on arrival").

Owns which tasks there are and what each reads; must not know where tasks run. Loops are unrolled as soon as their
count is known, which may be when a node has computed it. Nodes that depend on the input `seed` exist once an image,
all others once. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NoReturn

from genserve.core.errors import ExecutionFailed, InvalidRequest
from genserve.t2i.graph import (
    Carried,
    Const,
    Edge,
    FromInput,
    FromLoop,
    FromNode,
    Item,
    Length,
    ListOf,
    Loop,
    LoopCount,
    LoopIndex,
    Node,
    edges,
    leaves,
)
from genserve.t2i.messages import Key
from genserve.t2i.outline import SEED, Outline, code_name

__all__ = [
    "SEED",
    "Instance",
    "Outline",
    "Preview",
    "Source",
    "Task",
    "Value",
    "code_name",
    "reads",
    "values_in",
]


# Of one request: beyond it, memory and the time of the loop are at stake. A thousand steps of 16 images are 80,000.
MAX_TASKS = 200_000


class Value:
    """What one output port of a task, or one input of a request, has or will have.

    places  space -> (key, references) of where its tensors lie; empty for small data, and while there are none.
    uses    consumers that have yet to read it, and whoever else wants it kept.
    """

    __slots__ = ("inline", "is_inline", "nbytes", "places", "port", "task", "uses")

    def __init__(self, task: Task | None, port: str) -> None:
        self.task, self.port = task, port
        self.inline: Any = None
        self.is_inline = False
        self.nbytes = 0
        self.places: dict[str, tuple[Key, Any]] = {}
        self.uses = 0

    def __repr__(self) -> str:
        return f"<{self.port} of {self.task}>"


Source = Value | Any  # a value, a list in which there are some, or the input itself, small data


class Task:
    """One call of a node. Structure is set here once; the ledger keeps its state in the rest.

    image     which image it is for; None if all of them share it.
    steps     the iteration of each enclosing loop.
    deferred  values that may come while it runs; `adapters` those of its patches, in their order.
    """

    __slots__ = (
        "adapters", "arrived", "consumers", "deferred", "depth", "eager", "errors", "flight", "id", "image", "inputs",
        "job", "misses", "node", "num_runs", "of_preview", "state", "steps", "values", "where_failed",
    )  # fmt: skip

    def __init__(self, id: int, node: Node, image: int | None, steps: tuple[int, ...]) -> None:
        self.id, self.node, self.image, self.steps = id, node, image, steps
        self.depth = 0
        self.inputs: list[tuple[str, Source]] = []
        self.eager: list[Value] = []
        self.deferred: list[Value] = []
        self.adapters: list[tuple[Value, ...]] = []  # of its patches: weights, and what they are called
        self.consumers: list[Task] = []
        self.values: dict[str, Value] = {}
        self.of_preview: Preview | None = None
        self.job: Any = None
        self.state = "waiting"  # waiting, flying, done
        self.flight: Any = None
        self.arrived: bool | None = None  # whether it ran with its late adapters
        self.where_failed: list[str] = []
        self.errors: list[str] = []
        self.misses = 0
        self.num_runs = 0

    def __repr__(self) -> str:
        return f"task {self.id} ({self.node.id})"


@dataclass(frozen=True, slots=True)
class Preview:
    """An intermediate picture: workflow output `output` of `image`, from what the loop carries after `step` steps."""

    image: int
    step: int
    output: str


class _Unknown(Exception):
    """What an edge refers to isn't there yet."""


class Instance:
    """The tasks of one request. `given` are its inputs: values, or small data as it is.

    `advance` makes what can be made; call it again when a task of `deciders` is done.
    """

    def __init__(
        self, outline: Outline, given: Mapping[str, Any], num_images: int, ids: Iterator[int] | None = None
    ) -> None:
        self.outline = outline
        self.num_images = num_images
        self.deciders: set[Task] = set()
        self.tasks: list[Task] = []
        self._given = given
        self._ids = ids if ids is not None else count()
        self._by_place: dict[tuple[str, tuple[int, ...], int | None], Task] = {}
        # Of an unrolled loop: its first iteration, and the end.
        self._ranges: dict[tuple[str, tuple[int, ...], int | None], tuple[int, int]] = {}
        self._pending: list[tuple[Node | Loop, tuple[int, ...], int | None]] = []
        self._queue(outline.graph.nodes, (), None)
        self.wanted: set[tuple[str, str]] = set()

    @property
    def is_complete(self) -> bool:
        """Whether all tasks are known."""
        return not self._pending

    def _queue(self, items: tuple[Node | Loop, ...], steps: tuple[int, ...], image: int | None) -> None:
        for item in items:
            if image is None and item.id in self.outline.per_image:
                self._pending.extend((item, steps, index) for index in range(self.num_images))
            else:
                self._pending.append((item, steps, image))

    def advance(self) -> list[Task]:
        """The tasks that have become known, producers first."""
        begin = len(self.tasks)
        self.deciders.clear()
        progress = True
        while progress and self._pending:
            pending, self._pending = self._pending, []
            stuck: list[tuple[Node | Loop, tuple[int, ...], int | None]] = []
            progress = False
            for item, steps, image in pending:
                try:
                    if isinstance(item, Loop):
                        self._unroll(item, steps, image)
                    else:
                        self._make(item, steps, image)
                    progress = True
                except _Unknown:
                    stuck.append((item, steps, image))
            self._pending = stuck + self._pending
        self.wanted = {pair for item, _, _ in self._pending for pair in self._reads(item)}
        return self.tasks[begin:]

    def _unroll(self, loop: Loop, steps: tuple[int, ...], image: int | None) -> None:
        first = self._number(loop, "first", loop.first, steps, image)
        end = self._number(loop, "count", loop.count, steps, image)
        self._ranges[loop.id, steps, image] = first, max(first, end)
        if end <= first and any(value.first is None for value in loop.carried):
            names = ", ".join(value.name for value in loop.carried if value.first is None)
            raise ExecutionFailed(
                f"{loop.id} ({loop.where}) runs no iteration, but its result {names} is made by one"
            )
        num_tasks = len(self.tasks) + len(self._pending) + max(0, end - first) * max(1, len(loop.body))
        if num_tasks > MAX_TASKS:
            self._refuse(loop.count, f"{loop.id} ({loop.where}) would take {end - first} steps: too many")
        for index in range(first, end):
            self._queue(loop.body, (*steps, index), image)

    def _number(self, loop: Loop, what: str, edge: Edge, steps: tuple[int, ...], image: int | None) -> int:
        source = self._resolve(edge, steps, image)
        if isinstance(source, Value):
            if not source.is_inline:
                if source.task is not None:
                    self.deciders.add(source.task)
                raise _Unknown
            source = source.inline
        if type(source) is not int or source < 0:
            self._refuse(
                edge, f"{what} of {loop.id} ({loop.where}) is {source!r}, not a whole number from 0 on"
            )
        return int(source)

    def _refuse(self, edge: Edge, what: str) -> NoReturn:
        if isinstance(edge, FromInput):
            raise InvalidRequest(edge.name, what)
        raise ExecutionFailed(what)

    def _make(
        self, node: Node, steps: tuple[int, ...], image: int | None, preview: Preview | None = None
    ) -> Task:
        task = Task(0, node, image, steps)
        lazy = self.outline.deferred[node.id]
        for port, edge in node.inputs:
            source = self._resolve(edge, steps, image, preview)
            task.inputs.append((port, source))
            if type(source) is Value:
                (task.deferred if port in lazy else task.eager).append(source)
            elif type(source) is list:
                (task.deferred if port in lazy else task.eager).extend(values_in(source))
        for patch in node.patches:
            source = None if patch.adapter is None else self._resolve(patch.adapter, steps, image)
            if not isinstance(source, Value) or source.task is None:
                raise ExecutionFailed(f"{node.id} ({node.where}): no node loads its adapter")
            names = source.task.values.get("names")
            task.adapters.append((source,) if names is None else (source, names))
        task.id = next(self._ids)
        task.of_preview = preview
        for output in node.output_ports:
            task.values[output.name] = Value(task, output.name)
        for value in reads(task):
            value.uses += 1
            producer = value.task
            if producer is not None:
                task.depth = max(task.depth, producer.depth + 1)
                if not producer.consumers or producer.consumers[-1] is not task:
                    producer.consumers.append(task)
        if preview is None:
            self._by_place[node.id, steps, image] = task
            self.tasks.append(task)
        return task

    def _resolve(
        self, edge: Edge, steps: tuple[int, ...], image: int | None, preview: Preview | None = None
    ) -> Source:
        outline = self.outline
        while True:
            if type(edge) is Const:
                return edge.value
            if type(edge) is FromNode:
                node = edge.node
                place = (
                    node,
                    steps[: len(outline.around[node])],
                    image if node in outline.per_image else None,
                )
                task = self._by_place.get(place)
                if task is None:
                    raise _Unknown
                return task.values[edge.port]
            if type(edge) is FromInput:
                if edge.name == SEED and image is not None:
                    return self._given[SEED] + image
                return self._given[edge.name]
            if type(edge) is Item:
                return self._given[edge.source.name][steps[len(outline.around[edge.loop])]]
            if type(edge) is Length:
                return len(self._given[edge.source.name])
            if type(edge) is ListOf:
                return [self._resolve(item, steps, image, preview) for item in edge.items]
            assert isinstance(edge, Carried | FromLoop | LoopIndex | LoopCount)
            loop = edge.loop
            level = len(outline.around[loop])
            if type(edge) is LoopIndex:
                return steps[level]
            first, end = self._range(loop, steps[:level], image)
            if type(edge) is LoopCount:
                return end
            assert isinstance(edge, Carried | FromLoop)
            value = outline.carried[loop, edge.name]
            if type(edge) is Carried:
                before = steps[level]
            else:
                before = end
                if preview is not None and loop == self._preview_loop:
                    before = first + preview.step
            if before == first:
                assert value.first is not None
                edge, steps = value.first, steps[:level]
            else:
                edge, steps = value.next, (*steps[:level], before - 1)

    def _range(self, loop: str, steps: tuple[int, ...], image: int | None) -> tuple[int, int]:
        found = self._ranges.get((loop, steps, image if loop in self.outline.per_image else None))
        if found is None:
            raise _Unknown
        return found

    def bounds(self, loop: str, task: Task) -> tuple[int, int]:
        """First iteration and end of the innermost loop around `task`."""
        return self._range(loop, task.steps[:-1], task.image)

    def _reads(self, item: Node | Loop) -> Iterator[tuple[str, str]]:
        """Outputs of nodes that `item` may turn out to read."""
        stack = list(edges(item))
        seen: set[int] = set()
        while stack:
            edge = stack.pop()
            if isinstance(edge, FromNode):
                yield edge.node, edge.port
            elif isinstance(edge, FromLoop | Carried):
                value = self.outline.carried[edge.loop, edge.name]
                if id(value) not in seen:
                    seen.add(id(value))
                    for further in (value.first, value.next):
                        stack += () if further is None else leaves(further)

    # -- results ---------------------------------------------------------------------------------------

    def outputs(self, image: int) -> dict[str, Source]:
        """The workflow's outputs for an image. Only when the instance is complete."""
        return {
            output.name: self._resolve(output.edge, (), image if self.outline.varies(output.edge) else None)
            for output in self.outline.graph.outputs
        }

    @property
    def _preview_loop(self) -> str:
        return next(item.id for item in reversed(self.outline.graph.nodes) if isinstance(item, Loop))

    def preview_ends(self, every: int) -> dict[Task, list[tuple[int, int]]]:
        """Previews that could be made: the task that ends each, with (image, step)."""
        outline = self.outline
        ends: dict[Task, list[tuple[int, int]]] = {}
        if not outline.cone:
            return ends
        loop = self._preview_loop
        names = {
            edge.name
            for node in outline.cone
            for edge in edges(node)
            if isinstance(edge, FromLoop) and edge.loop == loop
        }
        for image in range(self.num_images):
            first, end = self._range(loop, (), image)
            for step in range(every, end - first, every):
                for name in names:
                    try:
                        source = self._resolve(outline.carried[loop, name].next, (first + step - 1,), image)
                    except _Unknown:
                        continue
                    if isinstance(source, Value) and source.task is not None:
                        ends.setdefault(source.task, []).append((image, step))
        return ends

    def preview(self, image: int, step: int) -> list[Task]:
        """Tasks that make a picture of what the last loop carries after `step` steps."""
        made: list[Task] = []
        own: dict[str, Task] = {}
        output = next(o for o in self.outline.graph.outputs if o.type.kind == "image")
        label = Preview(image, step, output.name)
        hidden = self._by_place
        # Nodes of the cone read each other's copies, and all others' originals.
        self._by_place = dict(hidden)
        try:
            for node in self.outline.cone:
                at = image if node.id in self.outline.per_image else None
                task = self._make(node, (), at, label)
                own[node.id] = task
                self._by_place[node.id, (), at] = task
                made.append(task)
        finally:
            self._by_place = hidden
        return made


def values_in(source: Source) -> Iterator[Value]:
    """The values that an input is, or is made of."""
    if type(source) is Value:
        yield source
    elif type(source) is list:
        for item in source:
            yield from values_in(item)


def reads(task: Task) -> Iterator[Value]:
    """Every value that the task reads, once."""
    seen: set[int] = set()
    for value in chain(task.eager, task.deferred, *task.adapters):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
