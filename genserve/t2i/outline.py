"""What can be said of a graph before any request: where nodes are, which differ between images, what a preview repeats.

Owns the analysis; `instance` makes tasks of it. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256

from genserve.t2i.graph import (
    Carried,
    CarriedValue,
    Edge,
    FromInput,
    FromLoop,
    FromNode,
    Graph,
    ListOf,
    Loop,
    LoopCount,
    LoopIndex,
    ModelSpec,
    Node,
    edges,
)

SEED = "seed"


@dataclass(slots=True)
class Outline:
    """What can be said of a graph before any request: where things are, and which are made once an image."""

    graph: Graph
    nodes: dict[str, Node] = field(default_factory=dict)
    loops: dict[str, Loop] = field(default_factory=dict)
    around: dict[str, tuple[str, ...]] = field(default_factory=dict)  # enclosing loops of a node or loop
    per_image: set[str] = field(default_factory=set)
    carried: dict[tuple[str, str], CarriedValue] = field(default_factory=dict)
    deferred: dict[str, frozenset[str]] = field(default_factory=dict)  # ports of each node
    carriers: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)  # output -> carried value
    weights: dict[str, str] = field(default_factory=dict)  # node -> identity of what it loads
    codes: dict[str, str] = field(default_factory=dict)  # node -> name of its model's code
    adapters: set[str] = field(default_factory=set)  # nodes that only load what patches use
    cone: tuple[Node, ...] = ()  # from what the last loop carries to the images: what a preview repeats
    _varying: set[tuple[str, str]] = field(default_factory=set)  # carried values that differ between images

    @staticmethod
    def of(graph: Graph) -> Outline:
        outline = Outline(graph)
        outline._enter(graph.nodes, ())
        size = -1
        while size != len(outline.per_image) + len(outline._varying):
            size = len(outline.per_image) + len(outline._varying)
            outline._spread(graph.nodes, False)
        outline.cone = tuple(outline._cone())
        for (loop, name), value in outline.carried.items():
            if isinstance(value.next, FromNode):
                outline.carriers[value.next.node, value.next.port] = loop, name
        for node in outline.nodes.values():
            name = outline.codes[node.id] = code_name(node.model)
            outline.weights[node.id] = node.model.identity or name
            outline.adapters |= {
                patch.adapter.node for patch in node.patches if isinstance(patch.adapter, FromNode)
            }
        for node in outline.nodes.values():
            outline.adapters -= {edge.node for _, edge in node.inputs if isinstance(edge, FromNode)}
        return outline

    def _enter(self, items: tuple[Node | Loop, ...], around: tuple[str, ...]) -> None:
        for item in items:
            self.around[item.id] = around
            if isinstance(item, Loop):
                self.loops[item.id] = item
                for value in item.carried:
                    self.carried[item.id, value.name] = value
                self._enter(item.body, (*around, item.id))
            else:
                self.nodes[item.id] = item
                self.deferred[item.id] = frozenset(port.name for port in item.input_ports if port.deferred)

    def _spread(self, items: tuple[Node | Loop, ...], all_of_them: bool) -> None:
        for item in items:
            if isinstance(item, Loop):
                whole = all_of_them or self.varies(item.count) or self.varies(item.first)
                if whole:
                    self.per_image.add(item.id)
                self._spread(item.body, whole)
                for value in item.carried:
                    first = value.first is not None and self.varies(value.first)
                    if whole or first or self.varies(value.next):
                        self._varying.add((item.id, value.name))
            elif all_of_them or any(self.varies(edge) for edge in edges(item)):
                self.per_image.add(item.id)

    def varies(self, edge: Edge) -> bool:
        """Whether images of one request differ in it."""
        match edge:
            case FromInput(name):
                return name == SEED
            case FromNode(node, _):
                return node in self.per_image
            case FromLoop(loop, name) | Carried(loop, name):
                return (loop, name) in self._varying
            case LoopCount(loop) | LoopIndex(loop):
                return loop in self.per_image
            case ListOf(items):
                return any(self.varies(item) for item in items)
        return False

    def _cone(self) -> Iterator[Node]:
        """Outer nodes after the last loop that the image outputs need and that depend on it."""
        wanted = {
            output.edge.node
            for output in self.graph.outputs
            if output.type.kind == "image" and isinstance(output.edge, FromNode)
        }
        last = next((item for item in reversed(self.graph.nodes) if isinstance(item, Loop)), None)
        if last is None:
            return
        after = self.graph.nodes[self.graph.nodes.index(last) + 1 :]
        of_loop: set[str] = set()
        for node in after:
            assert isinstance(node, Node)
            if any(_is_after(edge, last.id, of_loop) for edge in edges(node)):
                of_loop.add(node.id)
        needed: list[Node] = []
        for node in reversed(after):
            if isinstance(node, Node) and node.id in wanted and node.id in of_loop:
                needed.append(node)
                wanted |= {edge.node for edge in edges(node) if isinstance(edge, FromNode)}
        yield from reversed(needed)


def _is_after(edge: Edge, loop: str, of_loop: set[str]) -> bool:
    if isinstance(edge, FromLoop):
        return edge.loop == loop
    return isinstance(edge, FromNode) and edge.node in of_loop


def code_name(spec: ModelSpec) -> str:
    """Models of equal class and parameters have the same; they may share weights with others."""
    return sha256(f"{spec.identity} {spec.cls} {spec.params!r}".encode()).hexdigest()[:16]
