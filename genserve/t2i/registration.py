"""What it takes to serve a workflow: compiled, checked against the executors' memory, its models' code collected.

Owns no state; must not know who executes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from genserve.core.errors import ConfigError, GenserveError
from genserve.t2i.client import Served
from genserve.t2i.compiler import compile_workflow
from genserve.t2i.graph import FromInput, Graph, ModelSpec, walk
from genserve.t2i.instance import code_name
from genserve.t2i.messages import ModelCode
from genserve.t2i.model import model_class
from genserve.t2i.passes import with_default
from genserve.t2i.request import LoraUse, WorkflowInfo
from genserve.t2i.workflow import Workflow
from genserve.t2i.workflows.limits import check, family_of, limits

# Inputs that a check takes for those of the checkpoint's own schedule.
_SOLVING = ("num_steps", "strength", "scheduler")


def registered(
    workflow: Workflow | Graph,
    *,
    budget_bytes: int | None = None,
    loras: Mapping[str, str] | None = None,
    family: str = "",
    description: str = "",
    passes: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Served, dict[str, ModelCode]]:
    """The workflow as a client serves it, and the codes of its models.

    `passes` come on top of those that every workflow gets, by name with their options: `{"cfg_split": {}}`,
    `{"step_cache": {"threshold": 0.2}}`; see `genserve.t2i.passes`.

    Raises `CompileError` for what is wrong with it, and `ConfigError` if a model exceeds `budget_bytes`.
    """
    chosen = with_default(passes or {})
    graph = compile_workflow(workflow, chosen).graph
    _check_budget(graph, budget_bytes)
    adapters = dict(loras or {})

    def with_loras(uses: tuple[LoraUse, ...]) -> tuple[Graph, Mapping[str, ModelCode]]:
        named = tuple((adapters[use.name], use.scale) for use in uses)
        patched = compile_workflow(workflow, chosen, loras=named).graph
        _check_budget(patched, budget_bytes)
        return patched, codes_of(patched)

    bounds, warn = _limits(workflow.to_graph() if isinstance(workflow, Workflow) else workflow)
    info = WorkflowInfo(graph.name, graph.inputs, graph.outputs, family, description, tuple(adapters), bounds)
    return Served(info, graph, with_loras, warn), codes_of(graph)


def _limits(graph: Graph) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], tuple[str, ...]]]:
    """What the graph's checkpoints can make, by the inputs that go to their nodes; and what to warn of, or refuse."""
    bounds: dict[str, Any] = {}
    fed: dict[tuple[str, str], set[str]] = {}
    for node in walk(graph.nodes):
        path = dict(node.model.params).get("model_path")
        family = None if path is None else _family_of(str(path))
        if family is None:
            continue
        known = limits(family, str(path))
        names = fed.setdefault((family, str(path)), set())
        for port, edge in node.inputs:
            if isinstance(edge, FromInput):
                names.add(edge.name)
                if port in known:
                    bounds.setdefault(edge.name, known[port])

    def warn(inputs: Mapping[str, Any]) -> tuple[str, ...]:
        told: dict[str, None] = {}
        for (family, path), names in fed.items():
            seen = {name: value for name, value in inputs.items() if name in names or name not in _SOLVING}
            problems, warnings = check(family, path, seen)
            if problems:
                raise problems[0]
            told.update(dict.fromkeys(warnings))
        return tuple(told)

    return bounds, warn


@functools.cache
def _family_of(path: str) -> str | None:
    try:
        return family_of(path)
    except GenserveError:  # a ControlNet, a text model: whoever loads it says what is wrong with it
        return None


def _check_budget(graph: Graph, budget_bytes: int | None) -> None:
    for node in walk(graph.nodes):
        if budget_bytes is not None and node.model.num_bytes > budget_bytes:
            raise ConfigError(
                f"{node.id} of workflow {graph.name} has {node.model.num_bytes:,} bytes of weights, more than an "
                f"executor may hold (weights_budget: {budget_bytes:,})"
            )


def codes_of(graph: Graph) -> dict[str, ModelCode]:
    """By name. Classes of a script travel pickled: other processes couldn't import them."""
    return {code_name(node.model): _code(node.model) for node in walk(graph.nodes)}


def _code(spec: ModelSpec) -> ModelCode:
    if spec.cls.partition(":")[0] != "__main__":
        return ModelCode(spec)
    import cloudpickle  # type: ignore[import-untyped]

    return ModelCode(spec, cloudpickle.dumps(model_class(spec.cls)))
