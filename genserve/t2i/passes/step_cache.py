"""Step caching: a denoiser that finds its first block's output little changed reuses the rest of the last step's.

Of models that declare `step_cache_ports`, in loops. What they keep from step to step becomes values that the loop
carries, so nothing is hidden in a model, and requests cannot disturb each other. Approximate unless `threshold` is 0.
"""

from __future__ import annotations

from dataclasses import replace

from genserve.core.errors import CompileError
from genserve.t2i.graph import Carried, CarriedValue, Const, FromNode, Graph, Loop, Node
from genserve.t2i.model import model_class
from genserve.t2i.workflow import Workflow

PARAM = "step_cache_threshold"


def apply(graph: Graph, threshold: float = 0.1) -> Graph:
    """The graph with step caches. `threshold`: relative change of the first block's output up to which it is reused."""
    if threshold < 0:
        raise CompileError(f"the threshold of a step cache must be at least 0, got {threshold:g}")
    return replace(
        graph,
        nodes=tuple(_loop(item, threshold) if isinstance(item, Loop) else item for item in graph.nodes),
    )


def cached(workflow: Workflow, threshold: float | None) -> Workflow:
    """A workflow with step caches, as any other to be used; the workflow itself where there is no threshold."""
    return workflow if threshold is None else Workflow.from_graph(apply(workflow.to_graph(), threshold))


def _loop(loop: Loop, threshold: float) -> Loop:
    carried = list(loop.carried)
    body: list[Node | Loop] = []
    for item in loop.body:
        if isinstance(item, Loop):
            body.append(_loop(item, threshold))
            continue
        ports = model_class(item.model.cls).step_cache_ports
        if not ports or PARAM in dict(item.model.params):
            body.append(item)
            continue
        names = {port: f"{item.id}_{port}" for port in ports}
        carried += [CarriedValue(names[port], Const(None), FromNode(item.id, port)) for port in ports]
        body.append(_cached(item, threshold, {port: Carried(loop.id, names[port]) for port in ports}))
    return replace(loop, carried=tuple(carried), body=tuple(body))


def _cached(node: Node, threshold: float, kept: dict[str, Carried]) -> Node:
    params = tuple(sorted((*node.model.params, (PARAM, float(threshold)))))
    model = model_class(node.model.cls)(**dict(params))
    given = dict(node.inputs) | kept
    without = {port.name for port in model_class(node.model.cls)(**dict(node.model.params)).output_ports}
    outputs = [port for port in model.output_ports if port.name not in without or port in node.output_ports]
    return replace(
        node,
        model=replace(node.model, params=params),
        inputs=tuple((port.name, given[port.name]) for port in model.input_ports),
        input_ports=tuple(model.input_ports),
        output_ports=tuple(outputs),
    )
