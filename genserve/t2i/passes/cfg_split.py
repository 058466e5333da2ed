"""Classifier-free guidance as two calls, which may run at the same time on two executors, and a node that joins them.

Of models that declare `cfg`. The halves are batches of one where the model makes a batch of two, so results may be
rounded differently (bf16: 5e-2 of latents of scale 4.6). Both halves are made even where a request's guidance turns
out to be none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from genserve.t2i.graph import (
    Const,
    Edge,
    FromNode,
    Graph,
    Loop,
    ModelSpec,
    Node,
    edges,
    leaves,
    map_graph,
    walk_all,
)
from genserve.t2i.model import model_class
from genserve.t2i.ports import CfgPorts

GUIDANCE = "genserve.t2i.models.latents:Guidance"


def apply(graph: Graph, guidance: str = GUIDANCE) -> Graph:
    """The graph with guided calls split. `guidance`: the model (cond, uncond, guidance_scale) that joins."""
    used = {edge for item in graph.nodes for edge in edges(item) if isinstance(edge, FromNode)}
    used |= {edge for out in graph.outputs for edge in leaves(out.edge) if isinstance(edge, FromNode)}
    taken = {item.id for item in walk_all(graph.nodes)}
    joined: dict[FromNode, Edge] = {}
    join = model_class(guidance)()

    def split(items: tuple[Node | Loop, ...]) -> tuple[Node | Loop, ...]:
        found: list[Node | Loop] = []
        for item in items:
            if isinstance(item, Loop):
                found.append(replace(item, body=split(item.body)))
                continue
            cfg: CfgPorts | None = model_class(item.model.cls).cfg
            others = {edge for edge in used if edge.node == item.id and cfg and edge.port != cfg.output}
            if cfg is None or others or not _is_guided(item, cfg) or f"{item.id}_guidance" in taken:
                found.append(item)
                continue
            cond, uncond = _half(item, cfg, 1), _half(item, cfg, 0)
            inputs: tuple[tuple[str, Edge], ...] = (
                ("cond", FromNode(cond.id, cfg.output)),
                ("uncond", FromNode(uncond.id, cfg.output)),
                ("guidance_scale", dict(item.inputs)[cfg.guidance]),
            )
            node = Node(
                f"{item.id}_guidance",
                ModelSpec(guidance, (), ""),
                inputs,
                tuple(join.input_ports),
                tuple(join.output_ports),
                item.where,
            )
            joined[FromNode(item.id, cfg.output)] = FromNode(node.id, join.output_ports[0].name)
            found += [uncond, cond, node]
        return tuple(found)

    changed = replace(graph, nodes=split(graph.nodes))
    return map_graph(changed, lambda edge: joined.get(edge, edge) if isinstance(edge, FromNode) else edge)


def _is_guided(node: Node, cfg: CfgPorts) -> bool:
    given: dict[str, Any] = dict(node.inputs)
    scale = given[cfg.guidance]
    if isinstance(scale, Const) and (scale.value is None or scale.value <= 1):
        return False
    return all(given[port] != Const(None) for port in cfg.unconditional)


def _half(node: Node, cfg: CfgPorts, branch: int) -> Node:
    given = dict(node.inputs)
    if branch == 0:
        given.update({to: given[port] for to, port in zip(cfg.conditional, cfg.unconditional, strict=True)})
    given.update({port: Const(None) for port in cfg.unconditional})
    if cfg.branch is not None:
        given[cfg.branch] = Const(branch)
    return replace(node, id=f"{node.id}_{('uncond', 'cond')[branch]}", inputs=tuple(given.items()))
