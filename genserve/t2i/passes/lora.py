"""LoRA (LegoDiffusion §4.2): for each adapter a node that loads it, which nothing else waits for.

The calls that are patched get the edge to its weights, `FromNode(<loading node>, "weights")`; "names" of the same
node says whose they are. Whether a call waits for an adapter or runs without it while it is on its way is decided
when the call is dispatched.

Deviation: the paper puts a check node behind each denoiser call; the coordinator's dispatch is that check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from genserve.core.errors import CompileError
from genserve.t2i.graph import FromNode, Graph, Loop, ModelSpec, Node, Patch, walk, walk_all
from genserve.t2i.model import model_class

LOADER = "genserve.t2i.models.lora:LoadLora"
PATCH = "genserve.t2i.models.lora:LoRA"


def apply(graph: Graph, loader: str = LOADER) -> Graph:
    """The graph with a loading node for each adapter that has none yet. `loader`: the model that loads."""
    taken = {item.id for item in walk_all(graph.nodes)}
    loaders: dict[str, Node] = {}
    for node in walk(graph.nodes):
        for patch in node.patches:
            key = repr(patch.model)
            if patch.adapter is None and key not in loaders:
                loaders[key] = _loading(patch, loader, taken, node.where)

    def patched(patch: Patch) -> Patch:
        found = loaders.get(repr(patch.model))
        if patch.adapter is not None or found is None:
            return patch
        return replace(patch, adapter=FromNode(found.id, "weights"))

    def rewritten(item: Node | Loop) -> Node | Loop:
        if isinstance(item, Loop):
            return replace(item, body=tuple(map(rewritten, item.body)))
        return replace(item, patches=tuple(map(patched, item.patches)))

    return replace(graph, nodes=(*loaders.values(), *map(rewritten, graph.nodes)))


def _loading(patch: Patch, loader: str, taken: set[str], where: str) -> Node:
    id_, number = "load_lora", 2
    while id_ in taken:
        id_, number = f"load_lora_{number}", number + 1
    taken.add(id_)
    model = model_class(loader)(**dict(patch.model.params))
    spec = ModelSpec(loader, patch.model.params, patch.model.identity)
    return Node(id_, spec, (), tuple(model.input_ports), tuple(model.output_ports), where)


def add_loras(graph: Graph, loras: Sequence[tuple[str, float]]) -> Graph:
    """The graph with adapters (path, scale) on top of its own, on every call of a model that takes them.

    Raises `CompileError` if there is none.
    """
    patches = tuple(Patch(ModelSpec(PATCH, (("model_path", path),), ""), scale) for path, scale in loras)
    num_patched = 0

    def rewritten(item: Node | Loop) -> Node | Loop:
        nonlocal num_patched
        if isinstance(item, Loop):
            return replace(item, body=tuple(map(rewritten, item.body)))
        if not model_class(item.model.cls).takes_loras:
            return item
        num_patched += 1
        return replace(item, patches=(*item.patches, *patches))

    changed = replace(graph, nodes=tuple(map(rewritten, graph.nodes)))
    if patches and not num_patched:
        raise CompileError(f"no model of workflow {graph.name!r} takes adapters")
    return changed
