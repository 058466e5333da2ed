"""The coordinator in virtual time, against the reference interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from genserve.core.sim.simulator import Simulator
from genserve.t2i import messages as m
from genserve.t2i.graph import Const, FromInput, Patch
from genserve.t2i.reference import evaluate
from tests.t2i.cluster import Cluster, Gateway, denoising, graph_of, looked_up, mix, out, patched


class Simulated:
    """A coordinator over a cluster; `post` and `run` as the simulator's."""

    def __init__(self, *graphs, cluster=None, **options):
        self.cluster = cluster or Cluster()
        self.coordinator = self.cluster.coordinator(**options)
        self.log = []
        self.simulator = Simulator(
            {m.COORDINATOR: self.coordinator}, self.cluster, self.cluster, {m.GATEWAY: self._take}, self.log
        )
        self.gateway = Gateway(self.cluster, self.post)
        self.graphs = {graph.name: graph for graph in graphs}
        for graph in graphs:
            self.post(m.Register(graph.name, graph, {}))

    def _take(self, now, body):
        self.gateway(body)

    def post(self, body, at_s=0.0):
        self.simulator.post(m.COORDINATOR, body, at_s)

    def ask(self, name, request_id, at_s=0.0, **fields):
        inputs = {"seed": fields.pop("seed", 1), "x": fields.pop("x", 2)}
        self.post(m.Arrive(request_id, name, inputs, **fields), at_s)

    def run(self, before_s=float("inf")):
        return self.simulator.run(before_s)

    def check(self, name, request_id, seed=1, x=2):
        images, record = self.gateway.results[request_id]
        for index, image in enumerate(images):
            inputs = {"seed": seed + index, "x": x}
            assert image == evaluate(self.graphs[name], inputs, apply_patches=patched)
        return record

    def assert_empty(self):
        stats = self.coordinator.stats()
        assert (stats["num_held"], stats["num_values"], stats["num_ready"]) == (0, 0, 0)
        assert {name: space for name, space in self.cluster.spaces.items() if space} == {}


@pytest.mark.parametrize("apart", [True, False])
def test_a_request(apart):
    run = Simulated(denoising(), cluster=Cluster(apart=apart))
    run.ask("denoising", "r")
    run.run()
    run.check("denoising", "r")
    run.assert_empty()
    nodes = [node for node, _ in run.cluster.executed]
    assert len(nodes) == 3 + 3 * 3


@pytest.mark.parametrize("num_executors", [1, 2])
def test_deferred_inputs_overlap_on_two_executors_and_queue_on_one(num_executors):
    run = Simulated(denoising(Const(20)), cluster=Cluster(num_executors))
    run.ask("denoising", "r")
    end_s = run.run()
    run.check("denoising", "r")
    # Three nodes a step, of which two overlap.
    assert end_s == pytest.approx(20 * (2 if num_executors == 2 else 3), rel=0.35)
    if num_executors == 2:
        assert run.cluster.read_later == 20
    run.assert_empty()


def test_images_share_what_does_not_depend_on_the_seed():
    run = Simulated(denoising())
    run.ask("denoising", "r", num_images=3)
    run.run()
    record = run.check("denoising", "r")
    runs = {node: each["runs"] for node, each in record["nodes"].items()}
    assert runs == {"encode": 1, "draw": 3, "control": 9, "predict": 9, "solve": 9, "decode": 3}


def test_a_failed_node_runs_again_elsewhere_and_a_second_failure_ends_its_request_alone():
    failures = {"predict": 1}

    def fails(run):
        left = failures.get(run.args.node, 0)
        failures[run.args.node] = left - 1
        return left > 0

    run = Simulated(denoising(), cluster=Cluster(fails=fails))
    run.ask("denoising", "r")
    run.run()
    assert run.check("denoising", "r")["reexecutions"] >= 1
    failures["decode"] = 2
    run.ask("denoising", "bad", run.simulator.now_s)
    run.ask("denoising", "good", run.simulator.now_s, seed=5)
    run.run()
    kind, reason = run.gateway.errors["bad"]
    assert kind == "ExecutionFailed"
    assert "decode failed twice: on e" in reason and "made to fail; on e" in reason
    assert reason.count("on e0") == reason.count("on e1") == 1
    run.check("denoising", "good", seed=5)
    run.assert_empty()


def test_a_lost_executor_costs_a_step_or_two():
    graph = denoising(Const(20))
    plain = Simulated(graph)
    plain.ask("denoising", "r")
    plain.run()
    for at_s in (3.5, 17.6, 30.1):
        run = Simulated(graph)
        run.ask("denoising", "r")
        run.run(at_s)
        for name in ("e0", "e1"):
            run.cluster.kill(name)
            run.post(m.ExecutorLost(name, "killed"), at_s)
        run.run(at_s + 5)
        for name in ("e0", "e1"):
            run.cluster.revive(name)
            run.post(m.ExecutorBack(name), at_s + 5)
        run.run()
        run.check("denoising", "r")
        again = len(run.cluster.executed) - len(plain.cluster.executed)
        assert again <= 2 * 3 + 1, "what a step makes, and the text once more"
        run.assert_empty()


def test_what_a_cache_said_holds_when_its_executor_is_lost():
    images = {evaluate(looked_up(lane), {"seed": 1, "x": 2})["image"] for lane in ("e0", "e1")}
    assert len(images) == 2
    for at_s in [0.3 + 0.25 * index for index in range(24)]:
        for name in ("e0", "e1"):
            run = Simulated(looked_up())
            run.ask("looked_up", "r")
            run.run(at_s)
            run.cluster.kill(name)
            run.post(m.ExecutorLost(name, "killed"), at_s)
            run.run()
            assert not run.gateway.errors
            assert run.gateway.results["r"][0][0]["image"] in images
            run.assert_empty()


def test_requests_end_when_the_last_executor_is_gone():
    run = Simulated(denoising(), cluster=Cluster(1))
    run.ask("denoising", "r")
    run.run(4.5)
    run.cluster.kill("e0")
    run.post(m.ExecutorLost("e0", "killed"), 4.5)
    run.post(m.ExecutorGone("e0"), 20.0)
    run.ask("denoising", "late", 30.0)
    run.run()
    assert {kind for kind, _ in run.gateway.errors.values()} == {"ExecutorLost"}
    run.assert_empty()


def test_cancel_and_deadline_in_every_state():
    num_cancelled = 0
    for at in range(0, 60):
        run = Simulated(denoising())
        run.ask("denoising", "cancelled", num_images=2, preview_every_steps=1)
        run.ask("denoising", "late", deadline_s=at / 4)
        run.ask("denoising", "stays", seed=9)
        run.post(m.Cancel("cancelled"), at / 4 + 0.01)
        run.run()
        run.check("denoising", "stays", seed=9)
        if "cancelled" in run.gateway.errors:
            num_cancelled += 1
            assert run.gateway.errors["cancelled"][0] == "Cancelled"
        else:
            run.check("denoising", "cancelled")
        ended = run.gateway.errors.get("late")
        assert ended is None or ended[0] == "DeadlineExceeded"
        run.assert_empty()
    assert 30 < num_cancelled < 60


def test_previews_are_what_decoding_then_would_give():
    run = Simulated(denoising(Const(5)), denoising(Const(2), name="short"))
    run.ask("denoising", "r", num_images=2, preview_every_steps=2)
    run.run()
    run.check("denoising", "r")
    previews = run.gateway.previews["r"]
    assert previews.keys() == {(image, step) for image in (0, 1) for step in (2, 4)}
    for image in (0, 1):
        assert previews[image, 2] == evaluate(run.graphs["short"], {"seed": 1 + image, "x": 2})["image"]
    run.assert_empty()


def test_models_are_unloaded_when_their_room_is_needed():
    run = Simulated(denoising(num_bytes=120), cluster=Cluster(1))
    run.ask("denoising", "r")
    run.run()
    run.check("denoising", "r")
    run.assert_empty()


def with_adapter(steps=6, load_s=1.0):
    graph = denoising(Const(steps))
    adapter = Patch(replace(mix("lora").model), 0.5, out("load"))
    loop = graph.nodes[2]
    body = tuple(replace(node, patches=(adapter,)) if node.id == "predict" else node for node in loop.body)
    return replace(
        graph,
        nodes=(mix("load", x=Const("file")), *graph.nodes[:2], replace(loop, body=body), *graph.nodes[3:]),
    )


def asked_late(load_s, **fields):
    cluster = Cluster(cost=lambda run: load_s if run.args.node == "load" else 1.0)
    run = Simulated(with_adapter(), cluster=cluster)
    run.ask("denoising", "r", **fields)
    run.run()
    run.assert_empty()
    images, record = run.gateway.results["r"]
    return images, record["lora_arrival_steps"]


def test_adapters_may_come_late_and_the_step_is_recorded_and_can_be_pinned():
    on_time, steps = asked_late(0.25)
    assert steps == [0]
    waited, steps = asked_late(30.0)
    assert steps == [0] and waited == on_time
    late, steps = asked_late(7.0, lora_max_late_steps=4)
    assert 0 < steps[0] < 4 and late != on_time
    again, pinned = asked_late(0.25, lora_arrival_steps=tuple(steps))
    assert pinned == steps and again == late
    bounded, steps = asked_late(60.0, lora_max_late_steps=2)
    assert steps == [2]
    assert asked_late(1.0, lora_arrival_steps=(2,))[0] == bounded


def test_loops_without_iterations_and_counts_that_nodes_make():
    counted = denoising(out("count"), first=out("begin"), name="counted")
    counted = replace(
        counted,
        nodes=(
            mix("count", below=5, x=FromInput("x")),
            mix("begin", below=3, y=FromInput("x")),
            *counted.nodes,
        ),
    )
    run = Simulated(counted, denoising(Const(0), name="none"))
    for index in range(12):
        run.ask("counted", f"c{index}", x=index)
    run.ask("none", "n", num_images=2)
    run.run()
    for index in range(12):
        run.check("counted", f"c{index}", x=index)
    run.check("none", "n")
    run.assert_empty()


def test_an_output_that_is_an_input_or_a_constant():
    graph = graph_of(
        mix("a", x=FromInput("x")), outputs={"seed": FromInput("seed"), "one": Const(1), "a": out("a")}
    )
    run = Simulated(graph)
    run.ask("mixed", "r", num_images=2)
    run.run()
    run.check("mixed", "r")
    run.assert_empty()
