"""Graphs unrolled into tasks."""

from __future__ import annotations

import pytest

from genserve.core.errors import ExecutionFailed, InvalidRequest
from genserve.t2i.graph import (
    Carried,
    CarriedValue,
    Const,
    FromInput,
    FromLoop,
    Item,
    Length,
    Loop,
    LoopCount,
    LoopIndex,
)
from genserve.t2i.instance import Instance, Outline, Value, reads
from tests.t2i.cluster import denoising, graph_of, mix, out


def unrolled(graph, num_images=1, **inputs):
    instance = Instance(Outline.of(graph), {"seed": 5, "x": 1, **inputs}, num_images)
    return instance, instance.advance()


def places(tasks):
    return [(task.node.id, task.image, task.steps) for task in tasks]


def test_loops_are_unrolled_and_steps_chained():
    instance, tasks = unrolled(denoising(Const(2)))
    assert instance.is_complete
    assert places(tasks) == [
        ("encode", None, ()), ("draw", 0, ()),
        ("control", 0, (0,)), ("predict", 0, (0,)), ("solve", 0, (0,)),
        ("control", 0, (1,)), ("predict", 0, (1,)), ("solve", 0, (1,)),
        ("decode", 0, ()),
    ]  # fmt: skip
    by_place = {place: task for place, task in zip(places(tasks), tasks, strict=True)}
    first, second = by_place["predict", 0, (0,)], by_place["predict", 0, (1,)]
    assert dict(first.inputs)["a"] is by_place["draw", 0, ()].values["out"]
    assert dict(second.inputs)["a"] is by_place["solve", 0, (0,)].values["out"]
    assert second.deferred == [by_place["control", 0, (1,)].values["out"]]
    assert [task.depth for task in tasks] == [0, 0, 1, 2, 3, 4, 5, 6, 7]
    # Of the text: two denoiser calls.
    assert by_place["encode", None, ()].values["out"].uses == 2


def test_what_depends_on_the_seed_is_there_once_an_image_with_seeds_counted_up():
    _, tasks = unrolled(denoising(Const(1)), num_images=3)
    assert [task.image for task in tasks if task.node.id == "encode"] == [None]
    draws = [task for task in tasks if task.node.id == "draw"]
    assert [dict(task.inputs)["seed"] for task in draws] == [5, 6, 7]
    assert [dict(task.inputs)["a"].task.image for task in tasks if task.node.id == "predict"] == [0, 1, 2]


def test_no_iterations_first_iterations_index_and_count():
    _, tasks = unrolled(denoising(Const(0)))
    assert [task.node.id for task in tasks] == ["encode", "draw", "decode"]
    assert dict(tasks[-1].inputs)["a"] is tasks[1].values["out"]
    graph = denoising(Const(5), first=Const(3))
    _, tasks = unrolled(graph)
    assert [dict(task.inputs)["step"] for task in tasks if task.node.id == "control"] == [3, 4]
    only_result = graph_of(
        Loop(
            "l", FromInput("x"), (CarriedValue("c", None, out("n")),),
            (mix("n", i=LoopIndex("l"), n=LoopCount("l")),), "file.py:3",
        ),
        outputs={"o": FromLoop("l", "c")},
    )  # fmt: skip
    _, tasks = unrolled(only_result, x=2)
    assert [dict(task.inputs) for task in tasks] == [{"i": 0, "n": 2}, {"i": 1, "n": 2}]
    with pytest.raises(ExecutionFailed, match=r"file.py:3.*runs no iteration"):
        unrolled(only_result, x=0)
    with pytest.raises(InvalidRequest, match=r"x: .*not a whole number"):
        unrolled(only_result, x=-1)
    with pytest.raises(InvalidRequest, match=r"x: .*10{9} steps: too many"):
        unrolled(only_result, x=10**9)


def test_a_count_that_a_node_makes_unrolls_when_it_is_known():
    graph = denoising(out("count"))
    graph = graph_of(mix("count", below=9, x=FromInput("x")), *graph.nodes, outputs={"image": out("decode")})
    instance, tasks = unrolled(graph)
    assert [task.node.id for task in tasks] == ["count", "encode", "draw"]
    assert instance.deciders == {tasks[0]} and not instance.is_complete
    assert {("encode", "out"), ("draw", "out")} <= instance.wanted
    tasks[0].values["out"].inline, tasks[0].values["out"].is_inline = 2, True
    assert len(instance.advance()) == 7 and instance.is_complete and instance.wanted == set()


def test_loops_over_lists_and_nested_loops():
    graph = graph_of(
        Loop(
            "outer", Length(FromInput("list")), (CarriedValue("c", FromInput("x"), FromLoop("inner", "d")),),
            (
                mix("head", a=Item(FromInput("list"), "outer"), b=Carried("outer", "c")),
                Loop(
                    "inner", LoopIndex("outer"), (CarriedValue("d", out("head"), out("leaf")),),
                    (mix("leaf", a=Carried("inner", "d"), i=LoopIndex("inner"), o=LoopIndex("outer")),),
                ),
            ),
        ),
        outputs={"o": FromLoop("outer", "c")},
        inputs=("seed", "x", "list"),
    )  # fmt: skip
    instance, tasks = unrolled(graph, list=["a", "b", "c"])
    heads = [task for task in tasks if task.node.id == "head"]
    assert [dict(task.inputs)["a"] for task in heads] == ["a", "b", "c"]
    leaves = sorted(task.steps for task in tasks if task.node.id == "leaf")
    assert leaves == [(1, 0), (2, 0), (2, 1)]
    assert dict(heads[1].inputs)["b"] is heads[0].values["out"], "no inner iteration in the first outer one"
    last = next(task for task in tasks if task.steps == (2, 1))
    assert instance.outputs(0) == {"o": last.values["out"]}


def test_every_value_counts_its_readers():
    _, tasks = unrolled(denoising(Const(3)), num_images=2)
    for task in tasks:
        for value in task.values.values():
            readers = sum(value in list(reads(other)) for other in tasks)
            assert value.uses == readers and isinstance(value, Value)
            assert len([c for c in task.consumers if value in list(reads(c))]) == readers
