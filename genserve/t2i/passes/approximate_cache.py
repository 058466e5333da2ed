"""Approximate caching (Nirvana): a denoising loop begins with the latents of a similar prompt, and skips k of n steps.

Before the loop a `CacheLookup` takes the place of the first latents and of the loop's first step; in its body a
`CacheStore` keeps latents for later requests. Approximate, but for a prompt that has been there before, with the same
seed: until an entry goes, similar prompts begin with its latents, whatever their own seeds. `approx_cache` decides
what is similar. Each executor has a cache of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from genserve.core.errors import CompileError
from genserve.t2i.approx_cache import SKIPS
from genserve.t2i.graph import (
    Carried,
    Const,
    Edge,
    FromInput,
    FromNode,
    Graph,
    ListOf,
    Loop,
    LoopCount,
    LoopIndex,
    ModelSpec,
    Node,
    walk,
    walk_all,
)
from genserve.t2i.models.cache import CacheLookup, CacheStore


def apply(
    graph: Graph,
    latents: str = "latents",
    embedding: str = "prompt_embeds",
    condition: str = "schedule",
    controls: Sequence[str] = ("control", "control_latents"),
    skips: Sequence[tuple[float, float]] = SKIPS,
    max_entries: int = 1000,
) -> Graph:
    """The graph with its denoising loop behind a cache.

    `latents`: the name under which the loop carries them. `embedding`, `condition`: ports of the body's models at
    which prompts are told apart, and what else must be equal (there may be none). Raises `CompileError` if no loop
    is like that.
    """
    for position, item in enumerate(graph.nodes):
        if not isinstance(item, Loop):
            continue
        carried = next(
            (each for each in item.carried if each.name == latents and each.first is not None), None
        )
        prompt = _outer(item, embedding)
        if carried is not None and prompt and isinstance(carried.first, FromNode):
            equal: dict[str, Edge] = {
                "condition": next(iter(_outer(item, condition)), Const(None)),
                "controls": ListOf(tuple(edge for port in controls for edge in _outer(item, port))),
            }
            new = _behind(graph, item, carried.first, prompt[0], equal, latents, list(skips), max_entries)
            return replace(graph, nodes=(*graph.nodes[:position], *new, *graph.nodes[position + 1 :]))
    raise CompileError(
        f"approximate caching finds no loop that carries {latents!r} and uses {embedding!r} of a node before it"
    )


def _outer(loop: Loop, port: str) -> list[FromNode]:
    """What the body's models get at this port from nodes before the loop."""
    inside = {item.id for item in walk_all(loop.body)}
    given = (dict(node.inputs).get(port) for node in walk(loop.body))
    found = [edge for edge in given if isinstance(edge, FromNode) and edge.node not in inside]
    return list(dict.fromkeys(found))


def _behind(
    graph: Graph,
    loop: Loop,
    first_latents: Edge,
    prompt: FromNode,
    equal: dict[str, Edge],
    latents: str,
    skips: list[tuple[float, float]],
    max_entries: int,
) -> tuple[Node, Loop]:
    source = next(item for item in walk(graph.nodes) if item.id == prompt.node)
    kind = next(port.type for port in source.output_ports if port.name == prompt.port)
    params: dict[str, Any] = {
        "max_entries": max_entries,
        "num_embeddings": (kind.length or 1) if kind.kind in ("tensors", "list") else 0,
        "scope": _scope(loop),
        "skips": [list(pair) for pair in skips],
    }
    common: dict[str, Edge] = {"embedding": prompt, **equal}
    lookup = _node(
        CacheLookup(**params),
        f"{loop.id}_cache_lookup",
        {"latents": first_latents, **common, "num_steps": loop.count, "first": loop.first},
        loop.where,
    )
    store = _node(
        CacheStore(**params),
        f"{loop.id}_cache_store",
        {
            "latents": Carried(loop.id, latents),
            **common,
            "hit": FromNode(lookup.id, "hit"),
            "first": loop.first,
            "step": LoopIndex(loop.id),
            "num_steps": LoopCount(loop.id),
        },
        loop.where,
    )
    carried = tuple(
        replace(each, first=FromNode(lookup.id, "latents")) if each.name == latents else each
        for each in loop.carried
    )
    begun = FromNode(lookup.id, "first")
    return lookup, replace(loop, carried=carried, body=(store, *loop.body), first=begun)


def _scope(loop: Loop) -> str:
    """What makes two loops make the same latents: their models and adapters, and how they are wired.

    What they get from outside may differ, but for what the workflow fixes: that is how prompts differ.
    """
    parts = [
        (
            node.model.cls,
            node.model.params,
            [(patch.model.params, patch.scale) for patch in node.patches],
            [edge for _, edge in node.inputs if not isinstance(edge, FromInput)],
        )
        for node in walk(loop.body)
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _node(model: Any, id_: str, inputs: dict[str, Edge], where: str) -> Node:
    cls = type(model)
    spec = ModelSpec(f"{cls.__module__}:{cls.__qualname__}", tuple(sorted(model.params.items())), "")
    given = tuple((port.name, inputs[port.name]) for port in model.input_ports)
    return Node(id_, spec, given, tuple(model.input_ports), tuple(model.output_ports), where)
