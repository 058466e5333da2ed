"""What runs of a workflow cost, and what they yield, when nothing really runs: for the simulator.

Owns the arithmetic; the figures come from a profile. No torch.

Deviation: a consumer of a deferred input is priced by its own time alone, as a run's price is a function of the run;
what it would wait for a slower producer is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from genserve.core.control import Run
from genserve.t2i.books import HOME
from genserve.t2i.graph import Node, walk
from genserve.t2i.messages import ADAPTER, KEEP, TASK, Keep, Ran, RunTask, Stored, There
from genserve.t2i.outline import Outline

_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds and bytes.

    node_s        of a run by node id; `default_s` for others.
    output_bytes  by node id and port; `default_bytes` for others.
    values        small data by node id and port, such as the count of a loop.
    load_bytes_per_s, link_bytes_per_s  reading weights; copying tensors from another executor.
    overhead_s    of each run.
    """

    node_s: Mapping[str, float] = field(default_factory=dict)
    default_s: float = 0.01
    output_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    default_bytes: int = 64 << 10
    values: Mapping[tuple[str, str], Any] = field(default_factory=dict)
    load_bytes_per_s: float = 2e9
    link_bytes_per_s: float = 5e9
    overhead_s: float = 1e-4


class WorkflowCost:
    """`CostModel` and `OutcomeModel` of the coordinator's runs. One for each simulation: it knows what is loaded."""

    def __init__(self, outlines: Mapping[str, Outline], profile: Profile) -> None:
        self._profile = profile
        self._nodes: dict[str, Node] = {
            f"{outline.codes[node.id]} {node.id}": node
            for outline in outlines.values()
            for node in walk(outline.graph.nodes)
        }
        self._loaded: dict[str, set[str]] = {}
        self._bytes: dict[Any, int] = {}

    def price_s(self, run: Run) -> float:
        """Runs of a lane are priced in their order, so what is loaded by then is known."""
        profile = self._profile
        if run.op not in (TASK, ADAPTER):
            copied = run.args.sources if run.op == KEEP else ()
            return max(_LEAST_S, profile.overhead_s + self._copied(copied) / profile.link_bytes_per_s)
        task: RunTask = run.args
        node = self._nodes[f"{task.model} {task.node}"]
        price_s = profile.overhead_s + profile.node_s.get(task.node, profile.default_s)
        loaded = self._loaded.setdefault(run.lane, set())
        loaded.difference_update(task.unload)
        if node.model.num_bytes and task.weights not in loaded:
            loaded.add(task.weights)
            price_s += node.model.num_bytes / profile.load_bytes_per_s
        fetched = self._copied(source for _, source in task.inputs)
        for port in task.outputs:
            self._bytes[run.run_id, port] = self._size(task.node, port)
        return max(_LEAST_S, price_s + fetched / profile.link_bytes_per_s)

    def _size(self, node: str, port: str) -> int:
        return self._profile.output_bytes.get((node, port), self._profile.default_bytes)

    def _copied(self, sources: Any) -> int:
        return sum(self._bytes.get(source.key, 0) for source in sources if isinstance(source, There))

    def outcome(self, run: Run) -> Any:
        space = HOME if run.op == KEEP else run.lane.partition("/")[0]
        if run.op == KEEP:
            keep: Keep = run.args
            return [Stored(self._bytes.get(source.key, 0), space) for source in keep.sources]
        if run.op not in (TASK, ADAPTER):
            return None
        task: RunTask = run.args
        node = self._nodes[f"{task.model} {task.node}"]
        told: dict[str, Any] = {}
        for output in node.output_ports:
            if output.type.is_inline:
                told[output.name] = self._profile.values.get((task.node, output.name))
            elif output.name in task.keep:
                told[output.name] = Stored(self._size(task.node, output.name), space)
        return Ran(told)
