"""Each pass: the results are equal, and the graph is the smaller, or split, one that was wanted."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest

from genserve.core.errors import CompileError, ConfigError
from genserve.t2i.compiler import compile_workflow
from genserve.t2i.graph import Carried, Const, FromNode, Loop, Node, walk, walk_all
from genserve.t2i.model import Model, ModelPatch
from genserve.t2i.passes import (
    DEFAULT,
    PASSES,
    approximate_cache,
    cfg_split,
    common_subexpressions,
    dead_nodes,
    find_pass,
    fold_constants,
    lora,
    step_cache,
)
from genserve.t2i.ports import JSON, LOOP_INDEX, CfgPorts, tensors
from genserve.t2i.reference import evaluate, run
from genserve.t2i.verify import verify
from genserve.t2i.workflow import Workflow
from tests.t2i.arithmetic import TENSOR, Add, Denoise, Half, LatentsGenerator, LoRA, Number, Step, TextEncoder
from tests.t2i.test_workflow import explicit, figure_7, figure_7_by_hand


def ids(graph):
    return [item.id for item in walk_all(graph.nodes)]


class Failing(Model):
    foldable = True

    def setup_io(self):
        self.add_input("n", int)
        self.add_output("n", int)

    def execute(self, model_components, n):
        raise ValueError("never")


# -- constant folding ------------------------------------------------------------------------------------


def constants():
    wf = Workflow("constants")
    n = wf.add_input("n", int)
    half = Half()
    quarter = half(half(12))
    latents = LatentsGenerator()(quarter)
    step = Step()
    for _ in wf.loop(half(8), first=half(2)):
        latents = step(latents, half(20), half(n))
    wf.add_output(latents, "latents")
    wf.add_output(quarter, "quarter")
    wf.add_output(TextEncoder()("constant"), "embeds")
    return wf.to_graph()


def test_folding():
    folded = fold_constants.apply(constants())
    verify(folded)
    assert ids(folded) == ["latents_generator", "loop", "half_6", "step", "text_encoder"]
    loop = next(item for item in folded.nodes if isinstance(item, Loop))
    assert (loop.count, loop.first) == (Const(4), Const(1))
    for n in (0, 7):
        assert evaluate(folded, {"n": n}) == evaluate(constants(), {"n": n})


def test_what_fails_is_not_folded():
    wf = Workflow("failing")
    wf.add_output(Failing()(3), "n")
    assert ids(fold_constants.apply(wf.to_graph())) == ["failing"]


def test_a_loop_whose_calls_are_all_constant_keeps_one():
    wf = Workflow("constant_loop")
    n = wf.add_input("n", int)
    value = None
    for _ in wf.loop(n):
        value = Half()(4)
    wf.add_output(value, "value")
    folded = fold_constants.apply(wf.to_graph())
    verify(folded)
    assert evaluate(folded, {"n": 3}) == {"value": 2}


# -- common sub-expressions --------------------------------------------------------------------------------


def repeated():
    wf = Workflow("repeated")
    n, prompt = wf.add_input("n", int), wf.add_input("prompt", str)
    once, twice, other = TextEncoder()(prompt), TextEncoder()(prompt), TextEncoder(model_path="x")(prompt)
    number = Number()
    wf.add_output([number(1), number(1), number(2)], "numbers")
    latents = LatentsGenerator()(n)
    add, step = Add(), Step()
    for _ in wf.loop(n):
        both = add(TextEncoder()(prompt), twice)
        latents = step(add(latents, both))
        latents = add(add(latents, once), add(latents, other))
        for _ in wf.loop(2):
            latents = add(latents, add(both, both))
    wf.add_output(latents, "latents")
    return wf.to_graph()


def test_equal_calls_are_one_and_invariant_ones_leave_the_loop():
    graph = repeated()
    merged = common_subexpressions.apply(graph)
    verify(merged)
    inputs = {"n": 5, "prompt": "a cat"}
    before, after = run(graph, inputs), run(merged, inputs)
    assert after.outputs == before.outputs
    assert before.num_calls["text_encoder_2"] == 1 and before.num_calls["text_encoder_4"] == 5
    encoders = {name: num for name, num in after.num_calls.items() if name.startswith("text_encoder")}
    assert encoders == {"text_encoder": 1, "text_encoder_3": 1}  # of two models
    assert after.num_calls["add"] == 1  # once + twice, out of the loop
    assert sum(name.startswith("number") for name in after.num_calls) == 2
    assert (sum(before.num_calls.values()), sum(after.num_calls.values())) == (62, 42)


def test_an_inner_loop_that_each_iteration_repeats_is_run_once():
    wf = Workflow("inner")
    n = wf.add_input("n", int)
    start = LatentsGenerator()(n)
    total, add, step = start, Add(), Step()
    for _ in wf.loop(n):
        x = start
        for _ in wf.loop(3):
            x = step(x)
        total = add(total, x)
    wf.add_output(total, "total")
    graph = wf.to_graph()
    merged = common_subexpressions.apply(graph)
    verify(merged)
    assert [type(item) for item in merged.nodes] == [Node, Loop, Loop]
    for n in (0, 4):
        assert evaluate(merged, {"n": n}) == evaluate(graph, {"n": n})


def test_the_number_of_iterations_does_not_vary():
    wf = Workflow("count")
    n = wf.add_input("n", int)
    latents = LatentsGenerator()(n)
    add, step = Add(), Step()
    for _ in wf.loop(n):
        latents = add(latents, step(latents, step=0))
        latents = add(latents, step(LatentsGenerator()(n), step=0))
    wf.add_output(latents, "latents")
    graph = wf.to_graph()
    merged = common_subexpressions.apply(graph)
    verify(merged)
    assert run(merged, {"n": 6}).num_calls["step_2"] == 1
    assert evaluate(merged, {"n": 6}) == evaluate(graph, {"n": 6})


def test_patched_and_plain_calls_are_not_equal():
    wf = Workflow("patched")
    latents = LatentsGenerator()(wf.add_input("n", int))
    encode = TextEncoder()
    plain = encode("x")
    encode.add_patch(LoRA("a"))
    first = encode("x")
    again = encode("x")
    wf.add_output([latents, plain, first, again], "all")
    assert ids(common_subexpressions.apply(wf.to_graph())) == [
        "latents_generator",
        "text_encoder",
        "text_encoder_2",
    ]


class Counter(Model):
    pure = False

    def setup_io(self):
        self.add_output("n", int)

    def execute(self, model_components):
        return {"n": 0}


def test_impure_calls_stay_as_they_are():
    wf = Workflow("impure")
    n = wf.add_input("n", int)
    Counter()()
    for _ in wf.loop(n):
        Counter()()
        Counter()()
    wf.add_output(Number()(n), "n")
    graph = wf.to_graph()
    assert common_subexpressions.apply(graph) == graph
    assert dead_nodes.apply(graph) == graph


# -- dead nodes ------------------------------------------------------------------------------------------


def test_dead_nodes_and_carried_values_go():
    wf = Workflow("dead")
    n = wf.add_input("n", int)
    latents = other = LatentsGenerator()(n)
    unused = LatentsGenerator()(7)
    add, step = Add(), Step()
    for _ in wf.loop(n):
        latents = step(latents)
        other = add(add(other, other), unused)
    for _ in wf.loop(n):
        add(latents, latents)
    Half()(n)
    wf.add_output(latents, "latents")
    graph = wf.to_graph()
    swept = dead_nodes.apply(graph)
    verify(swept)
    assert ids(swept) == ["latents_generator", "loop", "step"]
    assert [each.name for each in swept.nodes[1].carried] == ["latents"]
    assert evaluate(swept, {"n": 5}) == evaluate(graph, {"n": 5})


# -- LoRA ------------------------------------------------------------------------------------------------


class LoadNumber(Model):
    """The adapter is a number, which is its path."""

    def setup_io(self):
        self.add_output("weights", tensors())
        self.add_output("names", JSON)

    def execute(self, model_components):
        return {"weights": [float(self.params["model_path"])], "names": ["bias"]}


class Biased(Model):
    takes_loras = True

    def setup_io(self):
        self.add_input("x", TENSOR)
        self.add_output("x", TENSOR)

    def load(self, model_path, device):
        return {"bias": 0.0}

    def execute(self, model_components, x):
        return {"x": x + model_components["bias"]}


@contextmanager
def patched(components, adapters):
    bias = sum(scale * adapter["weights"][0] for adapter, scale in adapters)
    yield {**components, "bias": components["bias"] + bias}


def with_loras():
    wf = Workflow("loras")
    n = wf.add_input("n", int)
    x = LatentsGenerator()(n)
    biased = Biased()
    three, five = ModelPatch("3", scale=0.5), ModelPatch("5")
    x = biased(x)
    biased.add_patch(three)
    for _ in wf.loop(n):
        x = biased(x)
    biased.add_patch(five)
    x = biased(x)
    biased.rm_patch(three)
    x = biased(x)
    wf.add_output(x, "x")
    return wf.to_graph()


LOADER = f"{__name__}:LoadNumber"


def test_each_adapter_gets_one_node_that_waits_for_nothing():
    graph = lora.apply(with_loras(), LOADER)
    verify(graph)
    assert ids(graph)[:2] == ["load_lora", "load_lora_2"]
    edges = [[(p.adapter.node, p.adapter.port, p.scale) for p in node.patches] for node in walk(graph.nodes)]
    three, five = ("load_lora", "weights", 0.5), ("load_lora_2", "weights", 1.0)
    assert edges == [[], [], [], [], [three], [three, five], [five]]
    assert evaluate(graph, {"n": 4}, apply_patches=patched) == {"x": 4 + 4 * 1.5 + 6.5 + 5}
    assert lora.apply(graph, LOADER) == graph
    assert dead_nodes.apply(graph) == graph


def test_adapters_of_a_request_come_on_top_of_the_workflows():
    graph = lora.apply(lora.add_loras(with_loras(), [("100", 2.0)]), LOADER)
    verify(graph)
    assert evaluate(graph, {"n": 1}, apply_patches=patched) == {"x": 1 + 1.5 + 6.5 + 5 + 4 * 200}
    with pytest.raises(CompileError, match="no model of workflow 'explicit' takes adapters"):
        lora.add_loras(explicit(3).to_graph(), [("1", 1.0)])


def test_the_loading_node_is_that_of_the_families():
    graph = lora.apply(figure_7().to_graph())
    assert graph.nodes[0].model.cls == "genserve.t2i.models.lora:LoadLora"
    assert dict(graph.nodes[0].model.params) == {"model_path": "lora_path"}


# -- approximate caching -----------------------------------------------------------------------------------


class Denoiser(Model):
    """A step that depends on the prompt, and counts as work."""

    def setup_io(self):
        self.add_input("latents", TENSOR)
        self.add_input("prompt_embeds", tensors(2))
        self.add_input("schedule", dict, default=None)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_output("latents", TENSOR)

    def execute(self, model_components, latents, prompt_embeds, schedule, step):
        return {"latents": latents / 2 + prompt_embeds[0] + step}


class Angle(Model):
    """A prompt is an angle, its embedding a direction."""

    def setup_io(self):
        self.add_input("prompt", float)
        self.add_output("prompt_embeds", tensors(2))

    def execute(self, model_components, prompt):
        import math

        return {"prompt_embeds": [math.cos(prompt), math.sin(prompt)]}


def denoising():
    wf = Workflow("denoising")
    n, seed = wf.add_input("n", int), wf.add_input("seed", int)
    embeds = Angle()(wf.add_input("prompt", float))
    latents = LatentsGenerator()(seed)
    denoise = Denoiser()
    for _ in wf.loop(n):
        latents = denoise(latents, embeds)
    wf.add_output(latents, "latents")
    return wf.to_graph()


def test_a_prompt_seen_before_begins_where_it_was():
    graph = denoising()
    cached = approximate_cache.apply(graph)
    verify(cached)
    assert dead_nodes.apply(common_subexpressions.apply(cached)) == cached
    loaded: dict = {}
    inputs = {"n": 20, "seed": 3, "prompt": 1.0}
    first = run(cached, inputs, loaded=loaded)
    assert first.outputs == evaluate(graph, inputs)
    assert first.num_calls["denoiser"] == 20
    again = run(cached, inputs, loaded=loaded)
    assert again.outputs == first.outputs  # the very latents that it had made itself
    assert again.num_calls["denoiser"] == 10
    similar = run(cached, {**inputs, "seed": 8, "prompt": 1.5}, loaded=loaded)  # cosine 0.878
    assert similar.num_calls["denoiser"] == 14
    assert similar.outputs["latents"] == pytest.approx(
        evaluate(graph, {**inputs, "prompt": 1.5})["latents"], rel=0.01
    )
    for changed in ({"prompt": 2.5}, {"n": 19}):
        other = run(cached, {**inputs, **changed}, loaded=loaded)
        assert other.num_calls["denoiser"] == {**inputs, **changed}["n"]
        assert other.outputs == evaluate(graph, {**inputs, **changed})


def test_loops_without_a_prompt_are_told():
    with pytest.raises(CompileError, match="finds no loop that carries 'latents' and uses 'prompt_embeds'"):
        approximate_cache.apply(explicit(3).to_graph())


# -- guidance --------------------------------------------------------------------------------------------


class Guided(Model):
    cfg = CfgPorts(("embeds",), ("negative_embeds",), "guidance_scale", "noise_pred", "branch")

    def setup_io(self):
        self.add_input("latents", TENSOR)
        self.add_input("embeds", TENSOR)
        self.add_input("negative_embeds", TENSOR, default=None)
        self.add_input("guidance_scale", float, default=7.0)
        self.add_input("residuals", tensors(), deferred=True, default=None)
        self.add_input("branch", int, default=None)
        self.add_output("noise_pred", TENSOR)

    def execute(self, model_components, latents, embeds, negative_embeds, guidance_scale, residuals, branch):
        def predicted(embeds, branch):
            return latents / 2 + embeds + (residuals[branch] if residuals else 0)

        if negative_embeds is None or guidance_scale <= 1:
            return {"noise_pred": predicted(embeds, 1 if branch is None else branch)}
        cond, uncond = predicted(embeds, 1), predicted(negative_embeds, 0)
        return {"noise_pred": uncond + guidance_scale * (cond - uncond)}


class Pair(Model):
    def setup_io(self):
        self.add_input("latents", TENSOR)
        self.add_output("residuals", tensors(2))

    def execute(self, model_components, latents):
        return {"residuals": [latents / 4, latents / 8]}


def guided(scale=None):
    wf = Workflow("guided")
    n = wf.add_input("n", int)
    scale = wf.add_input("guidance_scale", float, default=7.0) if scale is None else scale
    encode, predict, denoise, pair = TextEncoder(), Guided(), Denoise(), Pair()
    embeds, negative = encode(wf.add_input("prompt", str)), encode("")
    latents = LatentsGenerator()(n)
    for _ in wf.loop(n):
        latents = denoise(predict(latents, embeds, negative, scale, pair(latents)), latents)
    wf.add_output(latents, "latents")
    return wf.to_graph()


def test_guidance_becomes_two_calls_and_a_node():
    graph = guided()
    split = cfg_split.apply(graph)
    verify(split)
    loop = next(item for item in split.nodes if isinstance(item, Loop))
    assert [node.id for node in loop.body] == [
        "pair",
        "guided_uncond",
        "guided_cond",
        "guided_guidance",
        "denoise",
    ]
    cond, uncond = dict(loop.body[2].inputs), dict(loop.body[1].inputs)
    assert (cond["embeds"], uncond["embeds"]) == (
        FromNode("text_encoder", "prompt_embeds"),
        FromNode("text_encoder_2", "prompt_embeds"),
    )
    assert cond["negative_embeds"] == uncond["negative_embeds"] == Const(None)
    for scale in (0.5, 1.0, 4.0):
        inputs = {"n": 6, "prompt": "a cat", "guidance_scale": scale}
        assert evaluate(split, inputs) == evaluate(graph, inputs)
    assert cfg_split.apply(split) == split


def test_without_guidance_nothing_is_split():
    graph = guided(scale=1.0)
    assert cfg_split.apply(graph) == graph
    wf = Workflow("unguided")
    latents = LatentsGenerator()(wf.add_input("n", int))
    wf.add_output(Guided()(latents, latents), "noise")
    assert cfg_split.apply(wf.to_graph()) == wf.to_graph()


# -- step cache --------------------------------------------------------------------------------------------


class Cached(Model):
    """Reuses its last output where its input has changed by no more than the threshold."""

    step_cache_ports = ("step_cache",)
    load_params = ()

    def setup_io(self):
        self.add_input("latents", TENSOR)
        self.is_cached = "step_cache_threshold" in self.params
        if self.is_cached:
            self.add_input("step_cache", tensors(2), default=None)
        self.add_output("noise_pred", TENSOR)
        if self.is_cached:
            self.add_output("step_cache", tensors(2))

    def execute(self, model_components, latents, step_cache=None):
        if not self.is_cached:
            return {"noise_pred": latents / 2}
        threshold = self.params["step_cache_threshold"]
        if step_cache is None or abs(step_cache[0] - latents) > threshold * abs(step_cache[0]):
            step_cache = [latents, latents / 2]
        return {"noise_pred": step_cache[1], "step_cache": step_cache}


def stepping():
    wf = Workflow("stepping")
    n = wf.add_input("n", int)
    predict, denoise = Cached(), Denoise()
    latents = LatentsGenerator()(n)
    predict(latents)
    for _ in wf.loop(n):
        latents = denoise(predict(latents), latents)
    wf.add_output(latents, "latents")
    return wf.to_graph()


def test_a_step_cache_is_a_value_that_the_loop_carries():
    graph = stepping()
    exact = step_cache.apply(graph, threshold=0)
    verify(exact)
    loop = next(item for item in exact.nodes if isinstance(item, Loop))
    assert [(each.name, each.first) for each in loop.carried][1] == ("cached_2_step_cache", Const(None))
    assert dict(loop.body[0].inputs)["step_cache"] == Carried("loop", "cached_2_step_cache")
    assert "step_cache" not in dict(exact.nodes[1].inputs)  # outside the loop
    assert evaluate(exact, {"n": 9}) == evaluate(graph, {"n": 9})
    rough = evaluate(step_cache.apply(graph, threshold=0.1), {"n": 9})
    assert rough != evaluate(graph, {"n": 9})
    assert rough["latents"] == pytest.approx(evaluate(graph, {"n": 9})["latents"], rel=0.05)
    assert step_cache.apply(exact, threshold=0.5) == exact
    with pytest.raises(CompileError, match="at least 0"):
        step_cache.apply(graph, threshold=-1)


# -- all of them -------------------------------------------------------------------------------------------


def unhashed(graph):
    return graph


def test_the_passes_together():
    compiled = compile_workflow(figure_7(), identify=unhashed)
    assert [stage.name for stage in compiled.stages] == ["written", *DEFAULT, "identified"]
    assert compiled.stage("written") == figure_7().to_graph()
    inputs = {"seed": 7, "prompt": "a cat", "num_denoising_steps": 5, "ref_image": 3.0}
    graph = compiled.graph
    assert ids(graph)[0] == "load_lora" and ids(compiled.stage("dead_nodes")) == ids(graph)
    inner = figure_7_by_hand(**inputs)
    without = compile_workflow(
        figure_7(), [name for name in DEFAULT if name != "lora"], identify=unhashed
    ).graph
    assert evaluate(without, inputs) == {"output_img": inner}


@pytest.mark.parametrize("make", [constants, repeated, guided, denoising, stepping])
def test_all_passes_at_once_keep_what_is_computed(make):
    steps = [
        fold_constants.apply,
        common_subexpressions.apply,
        *([approximate_cache.apply] if make is denoising else []),
        cfg_split.apply,
        partial(step_cache.apply, threshold=0),
        partial(lora.apply, loader=LOADER),
        dead_nodes.apply,
    ]
    graph = make()
    compiled = compile_workflow(graph, steps, identify=unhashed).graph
    inputs = {"n": 4, "prompt": 0.5 if make is denoising else "a cat", "seed": 3}
    inputs = {each.name: inputs[each.name] for each in graph.inputs if each.name in inputs}
    assert evaluate(compiled, inputs) == evaluate(graph, inputs)


def test_a_pass_that_breaks_the_graph_is_named():
    def breaking(graph):
        return type(graph)(graph.name, graph.inputs, graph.nodes[1:], graph.outputs)

    with pytest.raises(CompileError, match="pass 'breaking' has left a wrong graph"):
        compile_workflow(explicit(3), [breaking], identify=unhashed)


def test_unknown_passes_are_refused():
    with pytest.raises(ConfigError, match="no pass 'faster'; there are: fold_constants, "):
        compile_workflow(explicit(3), ["faster"], identify=unhashed)
    assert all(callable(find_pass(name)) for name in PASSES)
