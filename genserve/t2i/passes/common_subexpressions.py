"""Equal calls are made once: two encodings of one text are one node, and what each iteration would repeat is made
before the loop.

Models are functions of their inputs, so calls are equal if model, parameters, patches and inputs are. A call that is
moved out of a loop is made even if the loop has no iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from genserve.t2i.graph import (
    Carried,
    Edge,
    FromLoop,
    FromNode,
    Graph,
    Item,
    Loop,
    LoopCount,
    LoopIndex,
    Node,
    edges,
    map_edge,
    map_edges,
    map_graph,
    walk,
    walk_all,
)
from genserve.t2i.model import model_class


def apply(graph: Graph) -> Graph:
    """The graph with invariant calls outside their loops, and each of equal calls once."""
    graph = replace(graph, nodes=tuple(_hoisted(graph.nodes)))
    merged = _Merged()
    nodes = merged.items(graph.nodes)
    return map_graph(replace(graph, nodes=nodes), merged.now)


def is_pure(item: Node | Loop) -> bool:
    return all(model_class(node.model.cls).pure for node in walk((item,)))


def _hoisted(items: Sequence[Node | Loop]) -> list[Node | Loop]:
    """The items, each loop with its invariant calls before it."""
    found: list[Node | Loop] = []
    for item in items:
        if isinstance(item, Node):
            found.append(item)
            continue
        invariant: list[Node | Loop] = []
        varying: list[Node | Loop] = []
        own: set[str] = set()
        for inner in _hoisted(item.body):
            if is_pure(inner) and not any(_varies(edge, item.id, own) for edge in edges(inner)):
                invariant.append(map_edges(inner, lambda edge, loop=item: _outside(edge, loop)))  # type: ignore[misc]
            else:
                varying.append(inner)
                own |= {each.id for each in walk_all((inner,))}
        if not varying:  # a loop needs a body
            varying.append(invariant.pop())
        found += [*invariant, replace(item, body=tuple(varying))]
    return found


def _varies(edge: Edge, loop: str, own: set[str]) -> bool:
    match edge:
        case FromNode(node, _):
            return node in own
        case FromLoop(inner, _):
            return inner in own
        case Carried(around, _) | LoopIndex(around) | Item(_, around):
            return around == loop
    return False


def _outside(edge: Edge, loop: Loop) -> Edge:
    return loop.count if edge == LoopCount(loop.id) else edge


class _Merged:
    def __init__(self) -> None:
        self._same: dict[str, str] = {}  # id -> the id of the equal call before it
        self._seen: list[dict[str, str]] = []  # by depth: what a call is -> its id

    def now(self, edge: Edge) -> Edge:
        if isinstance(edge, FromNode) and edge.node in self._same:
            return FromNode(self._same[edge.node], edge.port)
        return edge

    def items(self, items: Sequence[Node | Loop]) -> tuple[Node | Loop, ...]:
        self._seen.append({})
        found: list[Node | Loop] = []
        for item in items:
            if isinstance(item, Loop):
                found.append(replace(item, body=self.items(item.body)))
                continue
            node = map_edges(item, self.now)
            assert isinstance(node, Node)
            what = self._what(node)
            earlier = next((seen[what] for seen in self._seen if what in seen), None)
            if earlier is not None and is_pure(node):
                self._same[node.id] = earlier
                continue
            self._seen[-1][what] = node.id
            found.append(node)
        self._seen.pop()
        return tuple(found)

    def _what(self, node: Node) -> str:
        inputs = tuple((port, map_edge(edge, self.now)) for port, edge in node.inputs)
        outputs = [port.name for port in node.output_ports]
        return repr((node.model.cls, node.model.params, inputs, outputs, node.patches))  # 1 is not 1.0 here
