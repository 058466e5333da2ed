"""Every mistake in a workflow is told at once, with node, port and line."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from genserve.core.errors import CompileError, ConfigError
from genserve.t2i.graph import (
    Carried,
    CarriedValue,
    Const,
    FromInput,
    FromLoop,
    FromNode,
    Graph,
    Item,
    Length,
    Loop,
    LoopIndex,
    ModelSpec,
    Node,
    WorkflowInput,
    WorkflowOutput,
)
from genserve.t2i.model import Model
from genserve.t2i.ports import INT, REQUIRED, InputPort, OutputPort, list_of, tensor, tensors
from genserve.t2i.verify import verify
from genserve.t2i.workflow import Workflow
from tests.t2i.arithmetic import (
    Add,
    ControlNet,
    Flux,
    LatentsGenerator,
    LoRA,
    Multistep,
    Number,
    Shaped,
    Step,
    Sum,
    TextEncoder,
)


class Mute(Model):
    def setup_io(self):
        self.add_input("x", int)


class Reserved(Model):
    def setup_io(self):
        self.add_input("model_components", int)
        self.add_output("x", int)


class Twice(Model):
    def setup_io(self):
        self.add_input("x", int)
        self.add_input("x", int)
        self.add_output("y", int)


class WrongDefault(Model):
    def setup_io(self):
        self.add_input("x", int, default="three")
        self.add_output("y", int)


def shaped(out, **ins):
    return Shaped(ins={name: list(each) for name, each in ins.items()}, out=list(out))


def made(dtype, shape, source=None):
    """A tensor of this dtype and shape."""
    wf = Workflow.current()
    if source is None:
        source = LatentsGenerator()(wf.add_input(f"seed_{len(wf.inputs)}", int))
    return shaped((dtype, shape), x=(None, None))(source)


def other_workflow(wf, n):
    other = Workflow("other")
    m = other.add_input("m", int)
    with wf:
        Number()(m)


CASES = [
    (lambda wf, n: Add()(LatentsGenerator()(n)), "add.b: missing input"),
    (lambda wf, n: TextEncoder()(n), "text_encoder.prompt: wants text, got int"),
    (lambda wf, n: Number()("7"), "number.value: wants int, got '7'"),
    (lambda wf, n: Number()(True), "number.value: wants int, got True"),
    (lambda wf, n: Number()(None), "number.value: is not optional, got None"),
    (
        lambda wf, n: LatentsGenerator()(seed=n, sed=n),
        "latents_generator.sed: no input 'sed'; did you mean 'seed'?",
    ),
    (lambda wf, n: LatentsGenerator()(n, n), "latents_generator: takes 1 inputs (seed), got 2"),
    (lambda wf, n: LatentsGenerator()(n, seed=n), "latents_generator.seed: given twice"),
    (lambda wf, n: Add()(3.0, 4.0), "add.a: wants tensor, got 3.0"),
    (lambda wf, n: Add()(n, n), "add.a: wants tensor, got int"),
    (
        lambda wf, n: Step()(LatentsGenerator()(n)),
        "step.step: is filled by the enclosing loop, and there is none",
    ),
    (lambda wf, n: Sum()([n, 3]), "sum.terms: wants a list of values of this workflow, or one of constants"),
    (lambda wf, n: Sum()([n, LatentsGenerator()(n)]), "sum.terms: int and tensor in one place"),
    (lambda wf, n: Sum()([1, "x"]), "sum.terms: wants int, got 'x'"),
    (lambda wf, n: Sum()(n), "sum.terms: wants list of int, got int"),
    (lambda wf, n: Flux()(*[LatentsGenerator()(n)] * 3), "flux.controlnet_inputs: wants tensors, got tensor"),
    (other_workflow, "value of workflow 'other', and this is 'w'"),
    (lambda wf, n: Mute()(n), "mute: declares no output"),
    (lambda wf, n: Reserved()(n), "reserved.model_components: reserved names are"),
    (lambda wf, n: Twice()(n), "twice.x: declared twice"),
    (lambda wf, n: WrongDefault()(), "wrong_default.x: its default wants int, got 'three'"),
    (lambda wf, n: Number(path=object())(n), "number: parameter 'path' of Number must be plain data"),
    (lambda wf, n: wf.add_input("n", int), "input 'n' is declared twice (first at test_compile_errors.py:"),
    (lambda wf, n: wf.add_input("class", int), "no keyword"),
    (lambda wf, n: wf.add_input("_x", int), "not begin with _"),
    (lambda wf, n: wf.add_input("x", object), "input 'x': <class 'object'> is no type of a port"),
    (lambda wf, n: wf.add_input("x", int, default=1.5), "input 'x': wants int, got 1.5"),
    (lambda wf, n: wf.add_output(3, "x"), "output 'x': must be a value of this workflow, got 3"),
    (lambda wf, n: [wf.add_output(n, "x"), wf.add_output(n, "x")], "output 'x' is declared twice"),
    (lambda wf, n: wf.add_output(n, "1x"), "an output's name must be a Python identifier"),
    (lambda wf, n: wf.loop("n"), "n of a loop: wants int from 0, got 'n'"),
    (lambda wf, n: wf.loop(-1), "n of a loop: wants int from 0, got -1"),
    (lambda wf, n: wf.loop(LatentsGenerator()(n)), "n of a loop: wants int, got tensor"),
    (lambda wf, n: wf.loop(n, first=1.5), "first of a loop: wants int from 0, got 1.5"),
    (lambda wf, n: wf(n=n), "workflow 'w' is used inside itself"),
    (lambda wf, n: Workflow("a b"), "a workflow's name must be letters, digits"),
    # Shapes and dtypes: numbers contradict each other, names only fix what they meet.
    (
        lambda wf, n: shaped((None, None), x=("float16", None))(made("float32", None)),
        "shaped.x: wants dtype float16, got float32",
    ),
    (
        lambda wf, n: shaped((None, None), x=(None, ["b", 77, 768]))(made(None, ["b", 77, 1024])),
        "shaped.x: wants size 768 in axis 2, got [b, 77, 1024]",
    ),
    (
        lambda wf, n: shaped((None, None), x=(None, ["b", "c"]))(made(None, [1, 2, 3])),
        "shaped.x: wants the shape [b, c], got [1, 2, 3]",
    ),
    (
        lambda wf, n: shaped((None, None), x=(None, ["b", 4]), y=(None, ["b", 8]))(
            made(None, [2, 4]), made(None, [1, 8])
        ),
        "shaped.y: size 'b' in axis 0 is 2 in another input, got [1, 8]",
    ),
    (
        lambda wf, n: shaped((None, None), x=(None, [4, 8]))(
            shaped((None, ["b", 8]), x=(None, ["b", 4]))(made(None, [2, 4]))
        ),
        "shaped.x: wants size 4 in axis 0, got [2, 8]",
    ),
]


@pytest.mark.parametrize(("mistake", "message"), CASES, ids=[message[:40] for _, message in CASES])
def test_a_mistake_is_told_where_it_is_made(mistake, message):
    wf = Workflow("w")
    n = wf.add_input("n", int)
    with pytest.raises(CompileError) as error:
        mistake(wf, n)
    assert message in str(error.value)
    assert re.match(r"test_compile_errors.py:\d+: ", str(error.value))


def test_shapes_that_may_fit_are_let_through():
    wf = Workflow("w")
    unknown = made(None, ["b", "tokens", 768])
    shaped((None, None), x=(None, [2, 77, 768]))(unknown)
    shaped((None, None), x=(None, ["b", "b", 768]))(unknown)
    shaped((None, None), x=(None, ["b", 4]), y=(None, ["b", 8]))(made(None, [2, 4]), made(None, ["z", 8]))
    shaped((None, None), x=("float32", [1]))(made(None, None))
    wf.add_output(ControlNet()(unknown, unknown), "residuals")


def test_what_is_wrong_with_the_whole():
    wf = Workflow("w")
    n, _unused = wf.add_input("n", int), wf.add_input("unused", int)
    with pytest.raises(CompileError, match=r"test_compile_errors.py:\d+: workflow 'w' has no output"):
        wf.to_graph()
    wf.add_output(Number()(n), "n")
    with pytest.raises(CompileError, match=r"test_compile_errors.py:\d+: input 'unused' is not used"):
        wf.to_graph()


def test_a_class_inside_a_function_cannot_be_imported_by_a_worker():
    class Local(Number):
        pass

    wf = Workflow("w")
    with pytest.raises(CompileError, match=r"local: .*is defined inside a function"):
        Local()(wf.add_input("n", int))


@pytest.mark.parametrize("scale", [float("nan"), "1", True])
def test_a_patch_needs_a_finite_scale(scale):
    wf = Workflow("w")
    number = Number()
    number.add_patch(LoRA("x", scale))
    with pytest.raises(CompileError, match="the scale of patch 'x' must be a finite number"):
        number(wf.add_input("n", int))


def test_a_loop_must_hand_on_what_it_began_with():
    wf = Workflow("w")
    n = wf.add_input("n", int)
    value = n
    join = Shaped(ins={"x": [None, None]}, out=[None, None])
    generate = LatentsGenerator()
    latents = generate(n)
    for _ in wf.loop(n):
        value, _other = latents, value
        join(latents)
        Number()(1)
        wf.current()
    wf.add_output(value, "value")
    wf.to_graph()  # `value` is no carried value: nothing in the body uses it

    wf = Workflow("w")
    n = wf.add_input("n", int)
    x = made("float32", [2, 4], LatentsGenerator()(n))
    grow = shaped(("float32", [2, 8]), x=(None, [2, "c"]))
    for _ in wf.loop(n):
        x = grow(x)
    wf.add_output(x, "x")
    with pytest.raises(CompileError, match="a value is replaced by one of another type"):
        wf.to_graph()


def test_a_first_iteration_without_a_value_needs_an_optional_port():
    wf = Workflow("w")
    n = wf.add_input("n", int)
    latents = LatentsGenerator()(n)
    add, solve = Add(), Multistep()

    def body(history):
        for _ in wf.loop(n):
            add(latents, history)
            _, history = solve(latents, history)

    with pytest.raises(CompileError, match=r"add\.b: is not optional, got None"):
        body(None)


# Graphs that no author has written.

NUMBER = ModelSpec("tests.t2i.arithmetic:Number", (), "")
PORTS = {"input_ports": (InputPort("value", INT),), "output_ports": (OutputPort("value", INT),)}


def node(id_, edge, **changes):
    return Node(id_, NUMBER, (("value", edge),), **{**PORTS, **changes}, where=f"{id_}.py:1")


def graph(*nodes, output=FromNode("a", "value")):
    inputs = (
        WorkflowInput("n", INT, REQUIRED),
        WorkflowInput("maybe", INT, None),
        WorkflowInput("list", list_of(INT), REQUIRED),
    )
    return Graph("g", inputs, nodes, (WorkflowOutput("out", INT, output),))


def loop(*body, carried=(), count=Const(3), first=Const(0), id_="loop"):
    return Loop(id_, count, tuple(carried), body, "loop.py:1", first)


A = node("a", FromInput("n"))
BAD_GRAPHS = [
    (
        graph(node("a", FromNode("b", "value")), node("b", FromNode("a", "value"))),
        "a.value: a cycle: a -> b -> a",
    ),
    (graph(node("a", FromNode("a", "value"))), "a.value: a cycle: a -> a"),
    (
        graph(node("a", FromNode("b", "value")), node("b", Const(1))),
        "a.value: uses 'b', which comes after it",
    ),
    (graph(node("a", FromNode("z", "value"))), "a.value: no node or loop 'z'"),
    (graph(node("a", FromInput("z"))), "a.value: no workflow input 'z'"),
    (graph(A, node("b", FromNode("a", "sum"))), "b.value: no output of a 'sum'"),
    (graph(A, A), "a: two nodes or loops have this id"),
    (graph(A, output=FromNode("z", "value")), "output out: no node or loop 'z'"),
    (graph(node("a", FromInput("maybe"))), "a.value: is not optional, and may get None"),
    (graph(node("a", Const("x"))), "a.value: wants int, got 'x'"),
    (graph(node("a", Const({1}))), "is no constant that JSON can say"),
    (graph(node("a", Const(1), input_ports=())), "a.value: no input 'value'; there are: none"),
    (
        graph(node("a", Const(1), input_ports=(*PORTS["input_ports"], InputPort("b", INT)))),
        "a.b: missing input",
    ),
    (graph(node("a", LoopIndex("loop"))), "loop 'loop' is not around it"),
    (graph(node("a", Carried("loop", "x"))), "loop 'loop' is not around it"),
    (graph(A, loop(node("b", Carried("loop", "x")))), "b.value: no value carried by loop 'x'"),
    (graph(loop(A)), "output out: uses 'a', which is inside loop 'loop'"),
    (graph(loop(A), output=FromLoop("loop", "x")), "no result of loop 'x'"),
    (graph(A, loop()), "loop.py:1: loop: a loop without a body"),
    (graph(A, loop(node("b", Const(1)), count=Const("x"))), "loop.count: wants int, got 'x'"),
    (graph(A, loop(node("b", Const(1)), first=FromInput("list"))), "loop.first: wants int, got list of int"),
    (graph(A, loop(node("b", Item(FromInput("list"), "loop")))), "does not run over input 'list'"),
    (graph(A, loop(node("b", Const(1)), count=Length(FromInput("n")))), "input 'n' is no list"),
    (
        graph(A, loop(node("b", Carried("loop", "x")), carried=[CarriedValue("x", Const(None), Const(1))])),
        "b.value: is not optional, and may get None",
    ),
    (
        graph(
            A,
            loop(
                node("b", Const(1), output_ports=(OutputPort("value", tensor()),)),
                carried=[CarriedValue("x", Const(1), FromNode("b", "value"))],
            ),
        ),
        "loop: a value is replaced by one of another type: int and tensor",
    ),
    (
        graph(
            node("b", Const(1), output_ports=(OutputPort("value", tensors()),)), output=FromNode("b", "value")
        ),
        "output 'out' wants int, got tensors",
    ),
]


@pytest.mark.parametrize(("bad", "message"), BAD_GRAPHS, ids=[message[:40] for _, message in BAD_GRAPHS])
def test_the_verifier_finds(bad, message):
    with pytest.raises(CompileError) as error:
        verify(bad)
    assert message in str(error.value)


def test_the_verifier_accepts_its_own_examples():
    verify(graph(A))
    verify(
        graph(
            loop(
                node("b", Item(FromInput("list"), "loop")),
                node("c", Carried("loop", "x")),
                carried=[CarriedValue("x", FromInput("n"), FromNode("b", "value"))],
                count=Length(FromInput("list")),
            ),
            output=FromLoop("loop", "x"),
        )
    )


def test_a_cycle_in_json_is_told():
    wf = Workflow("w")
    wf.add_output(Number()(Number()(wf.add_input("n", int))), "n")
    document = json.loads(wf.to_json())
    document["graph"]["nodes"][0]["inputs"][0][1] = {"is": "FromNode", "node": "number_2", "port": "value"}
    with pytest.raises(CompileError, match=r"number\.value: a cycle: number -> number_2 -> number"):
        Workflow.from_json(json.dumps(document))


def test_compile_errors_travel_between_processes():
    error = CompileError("wrong", node="a", port="b", where="c.py:1")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "c.py:1: a.b: wrong"
    assert (again.node, again.port, again.where, again.message) == ("a", "b", "c.py:1", "wrong")
    assert isinstance(again, ConfigError)
