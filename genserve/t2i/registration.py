"""What it takes to serve a workflow: compiled, checked against the executors' memory, its models' code collected.

Owns no state; must not know who executes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from genserve.core.errors import ConfigError
from genserve.t2i.client import Served
from genserve.t2i.compiler import compile_workflow
from genserve.t2i.graph import Graph, ModelSpec, walk
from genserve.t2i.instance import code_name
from genserve.t2i.messages import ModelCode
from genserve.t2i.model import model_class
from genserve.t2i.passes import with_default
from genserve.t2i.request import LoraUse, WorkflowInfo
from genserve.t2i.workflow import Workflow


def registered(
    workflow: Workflow | Graph,
    *,
    budget_bytes: int | None = None,
    loras: Mapping[str, str] | None = None,
    limits: Mapping[str, Any] | None = None,
    family: str = "",
    description: str = "",
    warn: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None,
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

    info = WorkflowInfo(
        graph.name, graph.inputs, graph.outputs, family, description, tuple(adapters), dict(limits or {})
    )
    return Served(info, graph, with_loras, warn or (lambda inputs: ())), codes_of(graph)


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
