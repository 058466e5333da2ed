"""The compiled form of a workflow: an immutable graph of model nodes and rolled loops. Plain data.

Owns the records and walks over them; must not know how they came about (`workflow`, `passes`) or who
executes them (`instance`, `coordinator`). LegoDiffusion §4.2: nodes in topological order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from genserve.core.workflows import PortType, WorkflowInput
from genserve.t2i.ports import InputPort, OutputPort


@dataclass(frozen=True, slots=True)
class Const:
    """A value known at compile time: None (absent), text, number, bool, or JSON (dicts and lists)."""

    value: Any


@dataclass(frozen=True, slots=True)
class FromInput:
    """An input of the workflow."""

    name: str


@dataclass(frozen=True, slots=True)
class FromNode:
    """Output `port` of a node."""

    node: str
    port: str


@dataclass(frozen=True, slots=True)
class FromLoop:
    """The value that `name` has when the loop is over."""

    loop: str
    name: str


@dataclass(frozen=True, slots=True)
class Carried:
    """Inside a loop: the value that `name` has when this iteration begins."""

    loop: str
    name: str


@dataclass(frozen=True, slots=True)
class LoopIndex:
    """Inside a loop: the number of this iteration, from 0."""

    loop: str


@dataclass(frozen=True, slots=True)
class LoopCount:
    """Inside a loop: how many iterations there are."""

    loop: str


@dataclass(frozen=True, slots=True)
class Item:
    """Inside a loop over a list: this iteration's element of `source`."""

    source: FromInput
    loop: str


@dataclass(frozen=True, slots=True)
class Length:
    """The number of elements of a list input: the count of a loop over it."""

    source: FromInput


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of values, such as the residuals of several ControlNets."""

    items: tuple[Edge, ...]


Edge = Const | FromInput | FromNode | FromLoop | Carried | LoopIndex | LoopCount | Item | Length | ListOf


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which model a node calls, as data: enough for a worker to make the same `Model` again.

    cls       "module:Class".
    params    keyword arguments of the constructor, JSON values, sorted by name.
    identity  hash of class, parameters and the content of its files: equal identities share their weights.
    num_bytes of weights; 0 for a node without any.
    """

    cls: str
    params: tuple[tuple[str, Any], ...]
    identity: str
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Patch:
    """A weight-patching adapter on a node's model. `scale` multiplies its weights' difference.

    `adapter` is None as written; the LoRA pass makes it the edge to the node that loads the weights.
    """

    model: ModelSpec
    scale: float = 1.0
    adapter: Edge | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One call of a model.

    inputs   (port, edge), by the order of the declaration; ports at their default are Const edges.
    where    "file.py:12" of the user's call, for messages.
    """

    id: str
    model: ModelSpec
    inputs: tuple[tuple[str, Edge], ...]
    input_ports: tuple[InputPort, ...]
    output_ports: tuple[OutputPort, ...]
    where: str = ""
    patches: tuple[Patch, ...] = ()

    def port(self, name: str) -> InputPort:
        return next(port for port in self.input_ports if port.name == name)


@dataclass(frozen=True, slots=True)
class CarriedValue:
    """A value that an iteration hands to the next. `first` is an edge outside the loop (None: it is only a
    result, and the loop must run at least once), `next` one inside it."""

    name: str
    first: Edge | None
    next: Edge


@dataclass(frozen=True, slots=True)
class Loop:
    """`body` runs for the indexes from `first` to `count` - 1 (ints: edges outside, which nodes may make).

    Image-to-image and approximate caching skip the first iterations: then `carried` values begin at `first`.
    Body nodes may use outside edges too. `loop(n)` and ranges begin at 0.
    """

    id: str
    count: Edge
    carried: tuple[CarriedValue, ...]
    body: tuple[Node | Loop, ...]
    where: str = ""
    first: Edge = Const(0)


@dataclass(frozen=True, slots=True)
class WorkflowOutput:
    name: str
    type: PortType
    edge: Edge


@dataclass(frozen=True, slots=True)
class Graph:
    """A workflow. Node and loop ids are unique in all of it, loops' bodies included."""

    name: str
    inputs: tuple[WorkflowInput, ...]
    nodes: tuple[Node | Loop, ...]
    outputs: tuple[WorkflowOutput, ...]


def walk(items: Sequence[Node | Loop]) -> Iterator[Node]:
    """All nodes, those in loops too, in order."""
    for item in items:
        if isinstance(item, Loop):
            yield from walk(item.body)
        else:
            yield item


def walk_all(items: Sequence[Node | Loop]) -> Iterator[Node | Loop]:
    """All nodes and loops; a loop comes before its body."""
    for item in items:
        yield item
        if isinstance(item, Loop):
            yield from walk_all(item.body)


def leaves(edge: Edge) -> Iterator[Edge]:
    """The edge itself, or of a list its items'."""
    if isinstance(edge, ListOf):
        for item in edge.items:
            yield from leaves(item)
    else:
        yield edge


def edges(item: Node | Loop) -> Iterator[Edge]:
    """All edges that a node or a loop (its body included) uses; lists are taken apart."""
    if isinstance(item, Node):
        for _, edge in item.inputs:
            yield from leaves(edge)
        for patch in item.patches:
            if patch.adapter is not None:
                yield from leaves(patch.adapter)
        return
    yield from leaves(item.count)
    yield from leaves(item.first)
    for carried in item.carried:
        if carried.first is not None:
            yield from leaves(carried.first)
        yield from leaves(carried.next)
    for inner in item.body:
        yield from edges(inner)


def map_edge(edge: Edge, change: Callable[[Edge], Edge]) -> Edge:
    """`change` applied to the edge's leaves."""
    if isinstance(edge, ListOf):
        return ListOf(tuple(map_edge(item, change) for item in edge.items))
    return change(edge)


def map_edges(item: Node | Loop, change: Callable[[Edge], Edge]) -> Node | Loop:
    """The item with `change` applied to each edge that it or its body uses."""
    if isinstance(item, Node):
        return replace(
            item,
            inputs=tuple((port, map_edge(edge, change)) for port, edge in item.inputs),
            patches=tuple(
                patch if patch.adapter is None else replace(patch, adapter=map_edge(patch.adapter, change))
                for patch in item.patches
            ),
        )
    return replace(
        item,
        count=map_edge(item.count, change),
        first=map_edge(item.first, change),
        carried=tuple(
            replace(
                carried,
                first=None if carried.first is None else map_edge(carried.first, change),
                next=map_edge(carried.next, change),
            )
            for carried in item.carried
        ),
        body=tuple(map_edges(inner, change) for inner in item.body),
    )


def map_graph(graph: Graph, change: Callable[[Edge], Edge]) -> Graph:
    """The graph with `change` applied to every edge, its outputs' too."""
    return replace(
        graph,
        nodes=tuple(map_edges(item, change) for item in graph.nodes),
        outputs=tuple(replace(output, edge=map_edge(output.edge, change)) for output in graph.outputs),
    )
