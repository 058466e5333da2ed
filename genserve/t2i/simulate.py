"""Composition root of simulated workflow serving: the product's own coordinator on a virtual clock.

Requests of graphs in, when each ended out. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from genserve.core.dispatch import LogEntry
from genserve.core.sim.simulator import Simulator
from genserve.t2i.books import ExecutorSpec
from genserve.t2i.coordinator import Coordinator
from genserve.t2i.cost import Profile, WorkflowCost
from genserve.t2i.graph import Graph
from genserve.t2i.messages import (
    COORDINATOR,
    GATEWAY,
    Arrive,
    Ended,
    Finished,
    Here,
    PreviewMade,
    Register,
    Taken,
)
from genserve.t2i.outline import Outline
from genserve.t2i.scheduler import Policy

HOME_LANE = "home"


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request that arrives at `at_s`. `deadline_s` is on the same clock."""

    at_s: float
    request_id: str
    workflow: str
    inputs: Mapping[str, Any]
    num_images: int = 1
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedEnd:
    """`error` is empty for a request with a result; `record` the runtime's part of its receipt."""

    request_id: str
    arrived_s: float
    ended_s: float
    error: str = ""
    record: Mapping[str, Any] | None = None

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.arrived_s


def simulate(
    graphs: Iterable[Graph],
    requests: Sequence[SimulatedRequest],
    profile: Profile,
    *,
    num_executors: int = 1,
    budget_bytes: int | None = None,
    policy: Policy | None = None,
    log: list[LogEntry] | None = None,
) -> list[SimulatedEnd]:
    """How requests fare on so many executors, each a process of its own; in the order of their ends."""
    graphs = list(graphs)
    names = [f"executor-{index}" for index in range(num_executors)]
    specs = [ExecutorSpec(name, name, budget_bytes) for name in names]
    coordinator = Coordinator(specs, policy, home_lane=HOME_LANE)
    cost = WorkflowCost({graph.name: Outline.of(graph) for graph in graphs}, profile)
    arrived = {request.request_id: request.at_s for request in requests}
    ends: list[SimulatedEnd] = []

    def take(now: float, body: Any) -> None:
        match body:
            case Finished(request_id, outputs, record):
                ends.append(SimulatedEnd(request_id, arrived[request_id], now, record=record))
                keys = {value.key for image in outputs for value in image.values() if isinstance(value, Here)}
                simulator.post(COORDINATOR, Taken(request_id, tuple(sorted(keys))), now, GATEWAY)
            case Ended(request_id, kind, reason):
                ends.append(SimulatedEnd(request_id, arrived[request_id], now, f"{kind}: {reason}"))
            case PreviewMade(request_id, _, _, key):
                simulator.post(COORDINATOR, Taken(request_id, (key,)), now, GATEWAY)

    simulator = Simulator({COORDINATOR: coordinator}, cost, cost, {GATEWAY: take}, log)
    for graph in graphs:
        simulator.post(COORDINATOR, Register(graph.name, graph, {}))
    for request in requests:
        arrive = Arrive(
            request.request_id,
            request.workflow,
            request.inputs,
            request.num_images,
            deadline_s=request.deadline_s,
        )
        simulator.post(COORDINATOR, arrive, request.at_s)
    simulator.run()
    return ends
