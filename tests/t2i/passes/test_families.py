"""The passes on a real family: a tiny Stable Diffusion 3 with ControlNet and LoRA, in the reference interpreter."""

from __future__ import annotations

import pytest
import torch

from genserve.t2i.compiler import compile_workflow
from genserve.t2i.graph import walk
from genserve.t2i.models.lora import LoRA
from genserve.t2i.passes import DEFAULT
from genserve.t2i.reference import run
from genserve.t2i.workflows import sd3

INPUTS = {
    "prompt": "a red cat",
    "seed": 3,
    "num_steps": 6,
    "height": 32,
    "width": 32,
    "control_image": torch.arange(32 * 32 * 3, dtype=torch.uint8).reshape(32, 32, 3),
}


@pytest.fixture(scope="module")
def workflow(tiny):
    return sd3(tiny("sd3"), controlnet=tiny.controlnet("sd3"))


@pytest.fixture(scope="module")
def loaded():
    return {}


@pytest.fixture(scope="module")
def image(workflow, loaded):
    return evaluated(workflow.to_graph(), loaded).outputs["image"]


def evaluated(graph, loaded, **inputs):
    with torch.no_grad():
        return run(graph, {**INPUTS, **inputs}, loaded=loaded)


def difference(one, other) -> int:
    return int((one.int() - other.int()).abs().max())


def test_what_always_runs_changes_no_bit(workflow, loaded, image):
    assert difference(evaluated(compile_workflow(workflow).graph, loaded).outputs["image"], image) == 0


def test_split_guidance_is_rounded_apart_at_most(workflow, loaded, image):
    done = evaluated(compile_workflow(workflow, ["cfg_split", *DEFAULT]).graph, loaded)
    assert done.num_calls["sd3_transformer_uncond"] == done.num_calls["sd3_transformer_cond"] == 6
    assert difference(done.outputs["image"], image) <= 1


def test_a_cached_prompt_skips_half_of_the_steps_and_changes_no_bit(workflow, loaded, image):
    graph = compile_workflow(workflow, ["approximate_cache", *DEFAULT]).graph
    first, again = (evaluated(graph, loaded) for _ in range(2))
    assert (first.num_calls["sd3_transformer"], again.num_calls["sd3_transformer"]) == (6, 3)
    assert difference(first.outputs["image"], image) == difference(again.outputs["image"], image) == 0
    other = evaluated(graph, loaded, control_image=255 - INPUTS["control_image"])
    assert other.num_calls["sd3_transformer"] == 6


def test_models_over_the_same_files_share_what_they_load(tiny, workflow):
    graph = compile_workflow(sd3(tiny("sd3"), loras=[LoRA(tiny.lora("sd3"))])).graph
    other = compile_workflow(workflow).graph
    ids = [
        {node.model.identity for node in walk(each.nodes) if node.model.num_bytes} for each in (graph, other)
    ]
    assert len(ids[0]) == 3 and ids[0] < ids[1]  # text encoders, transformer, autoencoder; and the ControlNet
    assert "" not in {node.model.identity for node in walk(graph.nodes)}
