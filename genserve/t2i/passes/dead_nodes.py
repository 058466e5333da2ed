"""Calls whose results nobody uses are left out, and so are values that a loop carries for nobody."""

from __future__ import annotations

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
    leaves,
    walk_all,
)
from genserve.t2i.passes.common_subexpressions import is_pure


def apply(graph: Graph) -> Graph:
    """The graph with only what its outputs, and calls with an effect, need."""
    live = _Live(graph)
    return replace(graph, nodes=live.items(graph.nodes))


class _Live:
    def __init__(self, graph: Graph) -> None:
        self._items = {item.id: item for item in walk_all(graph.nodes)}
        self._around: dict[str, str] = {}
        self._ids: set[str] = set()
        self._carried: set[tuple[str, str]] = set()
        for item in self._items.values():
            if isinstance(item, Loop):
                self._around.update({inner.id: item.id for inner in item.body})
        for output in graph.outputs:
            self._use(output.edge)
        for item in self._items.values():
            if isinstance(item, Node) and not is_pure(item):
                self._keep(item.id)

    def _use(self, edge: Edge) -> None:
        for leaf in leaves(edge):
            match leaf:
                case FromNode(node, _):
                    self._keep(node)
                case FromLoop(loop, name) | Carried(loop, name):
                    self._keep(loop)
                    if (loop, name) not in self._carried:
                        self._carried.add((loop, name))
                        carried = next(each for each in self._loop(loop).carried if each.name == name)
                        if carried.first is not None:
                            self._use(carried.first)
                        self._use(carried.next)
                case LoopIndex(loop) | LoopCount(loop) | Item(_, loop):
                    self._keep(loop)

    def _loop(self, id_: str) -> Loop:
        loop = self._items[id_]
        assert isinstance(loop, Loop)
        return loop

    def _keep(self, id_: str) -> None:
        if id_ in self._ids:
            return
        self._ids.add(id_)
        item = self._items[id_]
        if id_ in self._around:
            self._keep(self._around[id_])
        if isinstance(item, Loop):
            self._use(item.count)
            self._use(item.first)
            return
        for _, edge in item.inputs:
            self._use(edge)
        for patch in item.patches:
            if patch.adapter is not None:
                self._use(patch.adapter)

    def items(self, items: tuple[Node | Loop, ...]) -> tuple[Node | Loop, ...]:
        found: list[Node | Loop] = []
        for item in items:
            if item.id not in self._ids:
                continue
            if isinstance(item, Node):
                found.append(item)
                continue
            body = self.items(item.body)
            if not body:  # a value that only moves through iterations: the loop needs some body
                found.append(item)
                continue
            carried = tuple(each for each in item.carried if (item.id, each.name) in self._carried)
            found.append(replace(item, body=body, carried=carried))
        return tuple(found)
