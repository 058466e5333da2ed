"""From a workflow to what the runtime executes: passes in order, each result verified (LegoDiffusion §4.2).

Owns the order and the stages; knows neither what a pass does nor how content is hashed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from genserve.core.errors import CompileError
from genserve.t2i.graph import Graph
from genserve.t2i.identity import identified
from genserve.t2i.passes import DEFAULT, Pass, find_pass, name_of
from genserve.t2i.passes.lora import add_loras
from genserve.t2i.verify import verify
from genserve.t2i.workflow import Workflow


@dataclass(frozen=True, slots=True)
class Stage:
    """The graph as it is after `name`: "written", a pass, or "identified"."""

    name: str
    graph: Graph


@dataclass(frozen=True, slots=True)
class Compiled:
    """A workflow, compiled, with all its stages."""

    stages: tuple[Stage, ...]

    @property
    def graph(self) -> Graph:
        """What the runtime executes."""
        return self.stages[-1].graph

    def stage(self, name: str) -> Graph:
        """The graph after the (last) stage of that name. Raises `KeyError`."""
        return {stage.name: stage.graph for stage in self.stages}[name]


def compile_workflow(
    workflow: Workflow | Graph,
    passes: Sequence[str | Pass] = DEFAULT,
    *,
    loras: Sequence[tuple[str, float]] = (),
    identify: Callable[[Graph], Graph] | None = None,
) -> Compiled:
    """Run `passes`, names of `genserve.t2i.passes` or functions such as `partial(step_cache.apply, threshold=0.2)`.

    `loras`: adapters (path, scale) on top of the workflow's own. `identify` finds the models' identities at the end;
    by default `identity.identified`, which reads their files. Raises `CompileError`, and `ConfigError` for what is no
    pass or no model.
    """
    graph = workflow.to_graph() if isinstance(workflow, Workflow) else workflow
    verify(graph)
    stages = [Stage("written", graph)]
    steps: list[tuple[str, Callable[[Graph], Graph]]] = []
    if loras:
        steps.append(("loras", functools.partial(add_loras, loras=loras)))
    steps += [(name_of(each), find_pass(each) if isinstance(each, str) else each) for each in passes]
    steps.append(("identified", identify or identified))
    for name, step in steps:
        graph = step(graph)
        try:
            verify(graph)
        except CompileError as error:
            raise CompileError(
                f"pass {name!r} has left a wrong graph: {error.message}",
                node=error.node,
                port=error.port,
                where=error.where,
            ) from error
        stages.append(Stage(name, graph))
    return Compiled(tuple(stages))
