"""Graphs as JSON: the same again, and nothing else."""

from __future__ import annotations

import json

import pytest

from genserve.core.errors import CompileError
from genserve.t2i.graph import Graph
from genserve.t2i.reference import evaluate
from genserve.t2i.workflow import Workflow
from tests.t2i import test_workflow as written
from tests.t2i.arithmetic import Number, Step, TextEncoder


def everything() -> Workflow:
    """A workflow with every kind of edge, default and type."""
    wf = Workflow("everything")
    prompts = wf.add_input("prompts", list[str], default=["a", "b"], description="Some.")
    scale = wf.add_input("scale", float, default=1)
    extra = wf.add_input("extra", dict, default=None)
    latents = TextEncoder(options={"deep": [1, 2.5, None, True]})("const")
    for _ in prompts:
        for i in wf.loop(3, first=1):
            latents = Step()(latents, i)
    wf.add_output([latents, latents], "latents")
    wf.add_output([scale], "scale")
    wf.add_output(extra, "extra")
    return wf


@pytest.mark.parametrize("make", [written.figure_7, everything])
def test_round_trip(make):
    workflow = make()
    text = workflow.to_json()
    again = Workflow.from_json(text)
    assert again.to_graph() == workflow.to_graph()
    assert repr(again.to_graph()) == repr(workflow.to_graph())  # 1 is not 1.0
    assert again.to_json() == text
    assert json.loads(text)["version"] == 1


def test_what_was_read_runs_and_can_be_used_inside():
    inner = Workflow.from_json(written.explicit(None).to_json())
    assert evaluate(inner.to_graph(), {"n": 3}) == {"latents": written.stepped(5.0, 3)}
    wf = Workflow("outer")
    wf.add_output(inner(n=wf.add_input("n", int)), "latents")
    assert evaluate(wf.to_graph(), {"n": 3}) == {"latents": written.stepped(5.0, 3)}
    with pytest.raises(CompileError, match="finished"):
        inner.add_input("more", int)


def test_reading_does_not_change_the_scope():
    wf = Workflow("current")
    Workflow.from_json(written.explicit(2).to_json())
    assert Workflow.current() is not wf  # `explicit` made one
    wf = Workflow("current")
    text = Workflow.from_graph(written.explicit(2).to_graph()).to_json()
    wf = Workflow("current")
    Workflow.from_json(text)
    assert Workflow.current() is wf


def broken(change) -> str:
    document = json.loads(written.figure_7().to_json())
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=2), "version 2"),
        (lambda d: d.update(format="x"), '"format" must be'),
        (lambda d: d.update(more=1), "unknown or missing keys"),
        (lambda d: d["graph"].update(colour="red"), "graph.colour: unknown key"),
        (lambda d: d["graph"]["nodes"][0].pop("where"), "graph.nodes.0.where: missing"),
        (lambda d: d["graph"]["nodes"][0].update({"is": "Knot"}), '"is" must be one of Node, Loop'),
        (lambda d: d["graph"]["inputs"][0].update(name=3), "graph.inputs.0.name: expected str, got 3"),
        (lambda d: d["graph"]["inputs"][0]["type"].update(kind="thing"), "no 'thing'; there are: tensor"),
        (lambda d: d["graph"]["inputs"][0].update(default={"mark": "WHAT"}), "expected a value or a mark"),
        (lambda d: d["graph"]["nodes"][0].update(inputs=[["seed"]]), "expected a list"),
        (lambda d: d["graph"]["nodes"][1].update(id="latents_generator"), "this id"),
    ],
)
def test_anything_else_is_refused(change, message):
    with pytest.raises(CompileError) as error:
        Workflow.from_json(broken(change))
    assert message in str(error.value)


def test_no_json_is_refused():
    with pytest.raises(CompileError, match="no JSON"):
        Workflow.from_json("{")
    with pytest.raises(CompileError, match="no workflow"):
        Workflow.from_json("[]")


def test_a_graph_equals_only_itself():
    wf = Workflow("w")
    wf.add_output(Number()(wf.add_input("n", int)), "n")
    assert isinstance(wf.to_graph(), Graph) and wf.to_graph() != written.explicit(2).to_graph()
