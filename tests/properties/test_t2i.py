"""Random workflows under failures, lost executors, cancels and deadlines: every request ends, with the right result
or for a reason, and nothing is held afterwards."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genserve.t2i import messages as m
from genserve.t2i.graph import (
    Carried,
    CarriedValue,
    Const,
    FromInput,
    FromLoop,
    FromNode,
    Loop,
    LoopIndex,
    Patch,
)
from tests.t2i.cluster import Cluster, graph_of, mix, out
from tests.t2i.test_coordinator import Simulated


class Drawn:
    """A random graph, from a seeded generator."""

    def __init__(self, rng, name):
        self.rng, self.num = rng, 0
        self.adapters = []
        items, edges = self.body([FromInput("seed"), FromInput("x")], [], depth=0, num=rng.randint(2, 5))
        items = [*self.adapters, *items]
        nodes = [edge for edge in edges if isinstance(edge, FromNode | FromLoop)]
        outputs = {f"out{index}": edge for index, edge in enumerate(rng.sample(nodes, min(2, len(nodes))))}
        if rng.random() < 0.5 and isinstance(edges[-1], FromNode):
            outputs["image"] = edges[-1]
        self.graph = graph_of(*items, outputs=outputs, name=name)

    def fresh(self, kind):
        self.num += 1
        return f"{kind}{self.num}"

    def body(self, edges, loops, depth, num):
        rng, items, edges = self.rng, [], list(edges)
        for _ in range(num):
            if depth < 2 and rng.random() < (0.4 if depth == 0 else 0.15):
                items.append(self.loop(edges, loops, depth))
                edges += [FromLoop(items[-1].id, value.name) for value in items[-1].carried]
            else:
                items.append(self.node(edges))
                edges.append(out(items[-1].id))
        return items, edges

    def node(self, edges, below=None):
        rng = self.rng
        named = {f"p{index}": rng.choice(edges) for index in range(rng.randint(1, 3))}
        deferred = [port for port, edge in named.items() if isinstance(edge, FromNode) and rng.random() < 0.3]
        size = 0 if below else rng.choice([0, 0, 60, 100, 200])
        patches = ()
        if rng.random() < 0.15:
            self.adapters.append(mix(self.fresh("load"), file=Const(rng.randint(0, 9))))
            patches = (Patch(self.adapters[-1].model, 0.5, out(self.adapters[-1].id)),)
        return mix(self.fresh("n"), size, deferred, below, patches, **named)

    def loop(self, edges, loops, depth):
        rng, name = self.rng, self.fresh("loop")
        carried = [f"c{index}" for index in range(rng.randint(1, 2))]
        inner = [
            *rng.sample(edges, min(2, len(edges))),
            *(Carried(name, each) for each in carried),
            LoopIndex(name),
        ]
        items, after = self.body(inner, [*loops, name], depth + 1, rng.randint(1, 3))
        made = [edge for edge in after[len(inner) :]]
        return Loop(
            name,
            Const(rng.randint(0, 4 if depth == 0 else 2)),
            tuple(CarriedValue(each, rng.choice(edges), rng.choice(made)) for each in carried),
            tuple(items),
            first=Const(rng.choice([0, 0, 1])),
        )


def play(seed, num_requests=4, apart=True):
    rng = random.Random(seed)
    failing, killing = rng.random() < 0.5, apart and rng.random() < 0.6
    costs = [0.25 * rng.randint(1, 12) for _ in range(64)]
    cluster = Cluster(
        rng.randint(1, 3),
        apart,
        fails=lambda run: failing and rng.random() < 0.08,
        cost=lambda run: costs[run.run_id % 64],
    )
    graphs = [Drawn(rng, f"w{index}").graph for index in range(2)]
    run = Simulated(*graphs, cluster=cluster, num_ahead=rng.choice([0, 1, 1, 3]))
    asked = {}
    for index in range(num_requests):
        name, at_s = rng.choice(graphs).name, 0.25 * rng.randint(0, 40)
        fields = {"seed": rng.randint(0, 9), "x": rng.randint(0, 9)}
        asked[f"r{index}"] = name, fields
        run.ask(
            name, f"r{index}", at_s, num_images=rng.randint(1, 3), **fields,
            deadline_s=at_s + rng.randint(1, 60) if rng.random() < 0.2 else None,
            preview_every_steps=rng.choice([0, 0, 1, 2]),
        )  # fmt: skip
        if rng.random() < 0.3:
            run.post(m.Cancel(f"r{index}"), at_s + 0.25 * rng.randint(0, 80))
    now_s = 0.0
    for _ in range(rng.randint(1, 4) if killing else 0):
        at_s = now_s + 0.25 * rng.randint(1, 60) + 0.1
        now_s = at_s + 60
        run.run(at_s)
        name = rng.choice(run.cluster.specs).name
        run.cluster.kill(name)
        run.post(m.ExecutorLost(name, "killed"), at_s + rng.choice([0, 0.5]))
        run.run(at_s + 60)
        run.cluster.revive(name)
        run.post(m.ExecutorBack(name), at_s + 60)
    run.run()
    for request_id, (name, fields) in asked.items():
        if request_id in run.gateway.results:
            run.check(name, request_id, **fields)
        else:
            kind, reason = run.gateway.errors[request_id]
            assert kind in ("Cancelled", "DeadlineExceeded") or (
                kind == "ExecutionFailed"
                and (failing or killing)
                and ("twice" in reason or "3 times" in reason)
            ), (kind, reason)
    run.assert_empty()
    return run


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_every_request_ends_well_and_leaves_nothing(seed, apart):
    play(seed, apart=apart)


@pytest.mark.parametrize("seed", range(3))
def test_a_run_is_the_same_every_time(seed):
    assert play(seed).log == play(seed).log
