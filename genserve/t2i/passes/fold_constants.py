"""Constant folding: calls whose inputs are all constants are made once, by the compiler.

Only of models that say they are `foldable`: plain Python, cheap, without weights. What they give must be data that
JSON can say. Text encodings of constant texts stay: they belong where tensors are.
"""

from __future__ import annotations

from typing import Any

from genserve.t2i.graph import Const, Edge, FromNode, Graph, Loop, ModelSpec, Node, map_edges, map_graph
from genserve.t2i.model import Model, model_class
from genserve.t2i.typecheck import as_json, is_json


def apply(graph: Graph) -> Graph:
    """The graph without calls of foldable models on constants alone."""
    values: dict[tuple[str, str], Any] = {}

    def known(edge: Edge) -> Edge:
        if isinstance(edge, FromNode) and (edge.node, edge.port) in values:
            return Const(values[edge.node, edge.port])
        return edge

    def kept(items: tuple[Node | Loop, ...]) -> list[Node | Loop]:
        found: list[Node | Loop] = []
        for item in items:
            item = map_edges(item, known)
            if isinstance(item, Loop):
                # A loop without calls is none; its last call stays.
                body = kept(item.body) or [item.body[-1]]
                found.append(map_edges(_with_body(item, body), known))
                continue
            outputs = _folded(item)
            if outputs is None:
                found.append(item)
            else:
                values.update({(item.id, port): value for port, value in outputs.items()})
        return found

    nodes = tuple(kept(graph.nodes))
    return map_graph(Graph(graph.name, graph.inputs, nodes, graph.outputs), known)


def _with_body(loop: Loop, body: list[Node | Loop]) -> Loop:
    return Loop(loop.id, loop.count, loop.carried, tuple(body), loop.where, loop.first)


def _folded(node: Node) -> dict[str, Any] | None:
    """The call's outputs; None if it isn't to be folded, or fails: then it fails when a request runs."""
    if node.patches or not all(isinstance(edge, Const) for _, edge in node.inputs):
        return None
    if not all(port.type.is_inline for port in node.output_ports):
        return None
    model = _foldable(node.model)
    if model is None:
        return None
    inputs = {port: edge.value for port, edge in node.inputs if isinstance(edge, Const)}
    try:
        outputs = model.execute({}, **inputs)
    except Exception:
        return None
    if not isinstance(outputs, dict) or not all(is_json(value) for value in outputs.values()):
        return None
    return {port: as_json(value) for port, value in outputs.items()}


def _foldable(spec: ModelSpec) -> Model | None:
    cls = model_class(spec.cls)
    return cls(**dict(spec.params)) if cls.foldable and not cls.weights else None
