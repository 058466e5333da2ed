"""Workflows as an author writes them, and what they compute."""

from __future__ import annotations

import pytest

from genserve.core.errors import CompileError
from genserve.t2i.graph import FromInput, FromLoop, FromNode, Loop, LoopIndex, Node, walk
from genserve.t2i.reference import evaluate
from genserve.t2i.workflow import Workflow
from tests.t2i.arithmetic import (
    IMAGE as Image,
)
from tests.t2i.arithmetic import (
    Add,
    ControlNet,
    Denoise,
    Flux,
    FluxVAE,
    Half,
    LatentsGenerator,
    LoRA,
    Multistep,
    Number,
    Step,
    Sum,
    TextEncoder,
)


def figure_7() -> Workflow:
    """LegoDiffusion's Figure 7 as it is printed, with its dots filled in."""
    # create a workflow instance
    workflow = Workflow(name="flux_txt2img_workflow")
    # initialize models. All inherit the Model class
    latents_generator = LatentsGenerator()
    text_enc = TextEncoder(model_path="model_path")
    flux = Flux(model_path="model_path")
    controlnet = ControlNet(model_path="controlnet_path")
    lora = LoRA(model_path="lora_path")
    vae = FluxVAE(model_path="model_path")
    denoise = Denoise()
    # initialize input placeholders for the workflow
    seed = workflow.add_input(name="seed", data_type=int)
    prompt = workflow.add_input(name="prompt", data_type=str)
    num_denoising_steps = workflow.add_input(name="num_denoising_steps", data_type=int)
    ref_image = workflow.add_input(name="ref_image", data_type=Image)
    # add_patch() registers a LoRA adapter with the flux
    flux.add_patch(lora)
    # Invoke models and establish their I/O dependencies.
    # Model invocation is expressed via __call__().
    latents = latents_generator(seed)
    prompt_embeds = text_enc(prompt)
    ref_image = vae(image=ref_image, mode="encode")
    # Perform iterative denoising computation.
    for i in range(num_denoising_steps):  # noqa: B007
        controlnet_outputs = controlnet(latents, prompt_embeds, ref_image)
        noise_pred = flux(latents, prompt_embeds, controlnet_outputs)
        latents = denoise(noise_pred, latents)
    output_img = vae(latents, mode="decode")
    workflow.add_output(output_img, name="output_img")
    return workflow


def figure_7_by_hand(seed: int, prompt: str, num_denoising_steps: int, ref_image: float) -> float:
    latents, embeds = float(seed), float(len(prompt))
    for _ in range(num_denoising_steps):
        noise = latents * 0.5 + embeds + (latents / 2 + embeds + ref_image * 2)
        latents = latents - 0.125 * noise
    return -latents


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6, 11])
def test_the_papers_workflow_runs_as_written(num_steps):
    graph = figure_7().to_graph()
    inputs = {"seed": 7, "prompt": "a cat", "num_denoising_steps": num_steps, "ref_image": 3.0}
    assert evaluate(graph, inputs) == {"output_img": figure_7_by_hand(**inputs)}


def test_the_papers_workflow_is_one_rolled_loop():
    graph = figure_7().to_graph()
    assert [item.id for item in graph.nodes] == [
        "latents_generator",
        "text_encoder",
        "flux_vae",
        "loop",
        "flux_vae_2",
    ]
    loop = graph.nodes[3]
    assert isinstance(loop, Loop) and loop.count == FromInput("num_denoising_steps")
    assert [node.id for node in loop.body] == ["control_net", "flux", "denoise"]
    assert [(each.name, each.first, each.next) for each in loop.carried] == [
        ("latents", FromNode("latents_generator", "latents"), FromNode("denoise", "latents"))
    ]
    assert dict(graph.nodes[4].inputs)["latents"] == FromLoop("loop", "latents")
    flux = loop.body[1]
    assert flux.port("controlnet_inputs").deferred
    assert [(patch.model.cls, patch.scale) for patch in flux.patches] == [("tests.t2i.arithmetic:LoRA", 1.0)]
    assert flux.where.startswith("test_workflow.py:")
    assert dict(flux.model.params) == {"model_path": "model_path"}


def test_patches_hold_for_calls_recorded_while_they_are_on():
    wf = Workflow("patches")
    flux, lora = Flux(), LoRA("x", scale=0.5)
    x = wf.add_input("x", Image)
    x = FluxVAE()(image=x, mode="encode")
    flux.add_patch(lora)
    a = flux(x, x)
    flux.rm_patch(lora)
    b = flux(x, x)
    wf.add_output([a, b], "both")
    assert [len(node.patches) for node in walk(wf.to_graph().nodes)] == [0, 1, 0]
    assert evaluate(wf.to_graph(), {"x": 1.0}) == {"both": [3.0, 3.0]}


def explicit(n, first=0) -> Workflow:
    wf = Workflow("explicit")
    latents = LatentsGenerator()(wf.add_input("seed", int, default=5))
    n = wf.add_input("n", int) if n is None else n
    step = Step()
    for _ in wf.loop(n, first=first):
        latents = step(latents)
    wf.add_output(latents, "latents")
    return wf


def stepped(latents: float, n: int, first: int = 0) -> float:
    for i in range(first, n):
        latents = latents * 2 + i + n / 100
    return latents


def test_an_explicit_loop_fills_index_and_count():
    assert evaluate(explicit(None).to_graph(), {"n": 9}) == {"latents": stepped(5.0, 9)}
    assert evaluate(explicit(4).to_graph(), {}) == {"latents": stepped(5.0, 4)}
    assert evaluate(explicit(4, 1).to_graph(), {"seed": 2}) == {"latents": stepped(2.0, 4, 1)}


def test_a_loop_that_begins_later_by_a_number_that_a_node_makes():
    wf = Workflow("image_to_image")
    n = wf.add_input("n", int)
    latents = LatentsGenerator()(n)
    step = Step()
    for i in wf.loop(n, first=Half()(n)):
        latents = step(latents, i)
    wf.add_output(latents, "latents")
    loop = wf.to_graph().nodes[2]
    assert loop.first == FromNode("half", "half")
    assert dict(loop.body[0].inputs)["step"] == LoopIndex("loop")
    assert evaluate(wf.to_graph(), {"n": 8}) == {"latents": stepped(8.0, 8, 4)}


def test_the_index_of_a_range_is_the_loops():
    wf = Workflow("ranged")
    n = wf.add_input("n", int)
    latents = LatentsGenerator()(n)
    step = Step()
    for i in range(n):
        j = i
        latents = step(latents, step=j, num_steps=n)
    wf.add_output(latents, "latents")
    assert evaluate(wf.to_graph(), {"n": 13}) == {"latents": stepped(13.0, 13)}


def test_two_successive_loops_one_from_the_other():
    wf = Workflow("two")
    n, m = wf.add_input("n", int), wf.add_input("m", int)
    latents = LatentsGenerator()(n)
    step, add = Step(), Add()
    for i in range(n):
        latents = step(latents, i)
    middle = latents
    for i in range(m):
        latents = add(step(latents, i), middle)
    wf.add_output(latents, "latents")
    graph = wf.to_graph()
    assert [item.id for item in graph.nodes] == ["latents_generator", "loop", "loop_2"]
    middle = stepped(3.0, 3)
    expected = middle
    for i in range(8):
        expected = expected * 2 + i + 8 / 100 + middle
    assert evaluate(graph, {"n": 3, "m": 8}) == {"latents": expected}


@pytest.mark.parametrize("ranged", [True, False])
def test_nested_loops(ranged):
    wf = Workflow("nested")
    n, m = wf.add_input("n", int), wf.add_input("m", int)
    total = latents = LatentsGenerator()(n)
    step, add = Step(), Add()
    if ranged:
        for i in range(n):
            for j in range(m):
                latents = step(latents, j, i)
            total = add(total, latents)
    else:
        for i in wf.loop(n):
            for j in wf.loop(m):
                latents = step(latents, j, i)
            total = add(total, latents)
    wf.add_output(total, "total")
    graph = wf.to_graph()
    assert [type(item) for item in graph.nodes] == [Node, Loop]
    assert [type(item) for item in graph.nodes[1].body] == [Loop, Node]
    for n, m in ((1, 1), (2, 3), (7, 8), (2, 0), (0, 2)):
        total = latents = float(n)
        for i in range(n):
            for j in range(m):
                latents = latents * 2 + j + i / 100
            total += latents
        assert evaluate(graph, {"n": n, "m": m}) == {"total": total}


def test_a_range_inside_an_explicit_loop_that_ends_with_it():
    wf = Workflow("mixed")
    n = wf.add_input("n", int)
    latents = LatentsGenerator()(n)
    step = Step()
    for _ in wf.loop(3):
        for j in range(n):
            latents = step(latents, j, n)
    wf.add_output(latents, "latents")
    expected = 4.0
    for _ in range(3):
        expected = stepped(expected, 4)
    assert evaluate(wf.to_graph(), {"n": 4}) == {"latents": expected}


def test_a_loop_over_a_list_input():
    wf = Workflow("listed")
    prompts = wf.add_input("prompts", list[str])
    latents = LatentsGenerator()(wf.add_input("seed", int))
    encode, add = TextEncoder(), Add()
    for prompt in prompts:
        latents = add(latents, encode(prompt))
    wf.add_output(latents, "latents")
    assert evaluate(wf.to_graph(), {"prompts": ["a", "bcd", "ef"], "seed": 1}) == {"latents": 7.0}
    assert evaluate(wf.to_graph(), {"prompts": [], "seed": 1}) == {"latents": 1.0}


def test_a_history_that_begins_absent_and_one_of_two_steps():
    wf = Workflow("history")
    n = wf.add_input("n", int)
    latents = LatentsGenerator()(n)
    solve, add = Multistep(), Add()
    history = None
    before = older = latents
    for _ in wf.loop(n):
        older, before = before, latents
        latents, history = solve(latents, history)
        latents = add(latents, older)
    wf.add_output(latents, "latents")
    wf.add_output(history, "history")
    wf.add_output(before, "before")
    for n in (1, 2, 3, 9):
        latents, history = float(n), None
        before = older = latents
        for _ in range(n):
            older, before = before, latents
            latents, history = latents + 1 + (history or 0) / 2 + older, latents
        assert evaluate(wf.to_graph(), {"n": n}) == {
            "latents": latents,
            "history": history,
            "before": before,
        }


def test_other_values_of_the_body_can_be_used_after_the_loop():
    wf = Workflow("others")
    n = wf.add_input("n", int)
    latents = LatentsGenerator()(n)
    step, add = Step(), Add()
    for i in range(n):
        doubled = add(latents, latents)
        latents = step(doubled, i, 0)
    wf.add_output(doubled, "doubled")
    graph = wf.to_graph()
    assert [(each.name, each.first) for each in graph.nodes[1].carried][1] == ("sum", None)
    assert evaluate(graph, {"n": 2}) == {"doubled": 16.0}


def test_lists_of_values():
    wf = Workflow("lists")
    n = wf.add_input("n", int)
    number = Number()
    half = Half()
    count = n
    for _ in wf.loop(3):
        count = Sum()([count, number(1), half(n)])
    wf.add_output(Sum()([count, count]), "total")
    wf.add_output([count, n], "list")
    assert evaluate(wf.to_graph(), {"n": 4}) == {"total": 26, "list": [13, 4]}


def test_a_workflow_inside_another():
    inner = explicit(None)
    wf = Workflow("outer")
    m = wf.add_input("m", int)
    once = inner(n=m, seed=1)
    twice = inner(n=3)
    wf.add_output(Add()(once, twice), "latents")
    graph = wf.to_graph()
    assert [item.id for item in graph.nodes] == [
        "explicit/latents_generator",
        "explicit/loop",
        "explicit/latents_generator_2",
        "explicit/loop_2",
        "add",
    ]
    assert evaluate(graph, {"m": 5}) == {"latents": stepped(1.0, 5) + stepped(5.0, 3)}


def test_a_workflow_takes_inputs_by_place_and_is_called_what_it_is_named_last():
    inner = Workflow.from_json(explicit(None).to_json())
    inner.name = "renamed"
    wf = Workflow("outer")
    wf.add_output(inner(1, wf.add_input("m", int)), "latents")
    graph = wf.to_graph()
    assert [item.id for item in graph.nodes] == ["renamed/latents_generator", "renamed/loop"]
    assert evaluate(graph, {"m": 5}) == {"latents": stepped(1.0, 5)}
    with pytest.raises(CompileError, match="renamed: takes"):
        inner(1, 2, 3, 4, 5)


@pytest.mark.parametrize("ranged", [True, False])
def test_a_workflow_with_a_loop_inside_a_loop(ranged):
    with Workflow("inner") as inner:
        latents = inner.add_input("latents", LatentsGenerator().output_ports[0].type)
        n = inner.add_input("n", int)
        history = None
        for _ in inner.loop(n):
            latents, history = Multistep()(latents, history)
        inner.add_output(latents, "latents")
    wf = Workflow("outer")
    n = wf.add_input("n", int)
    latents = LatentsGenerator()(n)
    if ranged:
        for i in range(n):
            latents = inner(latents=latents, n=i)
    else:
        for i in wf.loop(n):
            latents = inner(latents=latents, n=i)
    wf.add_output(latents, "latents")
    expected = 9.0
    for i in range(9):
        history = None
        for _ in range(i):
            expected, history = expected + 1 + (history or 0) / 2, expected
    assert evaluate(wf.to_graph(), {"n": 9}) == {"latents": expected}


def test_the_scope_is_the_newest_workflow_or_that_of_with():
    first = Workflow("first")
    with Workflow("second") as second:
        assert Workflow.current() is second
        with first:
            assert Workflow.current() is first
        assert Workflow.current() is second
    assert Workflow.current() is first
    third = Workflow("third")
    assert Workflow.current() is third


def test_calls_through_functions_of_the_author():
    wf = Workflow("functions")
    n = wf.add_input("n", int)
    step = Step()

    def twice(latents):
        return step(step(latents, num_steps=0), num_steps=0)

    def denoised(latents):
        for _ in range(n):
            latents = twice(latents)
        return latents

    wf.add_output(denoised(LatentsGenerator()(n)), "latents")
    assert len(wf.to_graph().nodes[1].body) == 2
    assert evaluate(wf.to_graph(), {"n": 2}) == {"latents": ((2.0 * 2) * 2 * 2 + 1) * 2 + 1}


def test_outside_a_workflow():
    import contextvars

    with pytest.raises(CompileError, match="outside a workflow"):
        contextvars.Context().run(lambda: Number()())
