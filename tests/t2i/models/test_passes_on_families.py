"""The ready-made workflows through the compiler: the default passes change nothing, splitting guidance roundings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genserve.t2i.compiler import compile_workflow
from genserve.t2i.graph import walk
from genserve.t2i.passes import DEFAULT
from genserve.t2i.serialize import graph_from_json, graph_to_json
from genserve.t2i.workflows import flux, sd3
from tests.t2i.models.driver import mask, picture, render

ASKED = {
    "prompt": "a red cat",
    "height": 64,
    "width": 64,
    "seed": 5,
    "num_steps": 3,
    "max_sequence_length": 24,
}


@pytest.mark.parametrize("family", [sd3, flux])
def test_the_default_passes_and_json_change_nothing(tiny, family):
    name = family.__name__
    workflow = family(tiny(name), controlnet=tiny.controlnet(name), mode="inpaint")
    compiled = compile_workflow(workflow, identify=lambda graph: graph).graph
    asked = {**ASKED, "image": picture(1), "mask": mask(), "control_image": picture(2), "strength": 0.7}
    image, latents = render(workflow.to_graph(), **asked)
    ours, our_latents = render(graph_from_json(graph_to_json(compiled)), **asked)
    assert torch.equal(our_latents, latents) and np.array_equal(ours, image)


@pytest.mark.parametrize("with_controlnet", [False, True])
def test_split_guidance_of_stable_diffusion_3(tiny, with_controlnet):
    """Halves are batches of one, rounded otherwise; each takes its row of the ControlNet's pair."""
    workflow = sd3(tiny("sd3"), controlnet=tiny.controlnet("sd3") if with_controlnet else None)
    split = compile_workflow(workflow, (*DEFAULT, "cfg_split"), identify=lambda graph: graph).graph
    ids = {node.id for node in walk(split.nodes)}
    assert {"sd3_transformer_cond", "sd3_transformer_uncond", "sd3_transformer_guidance"} <= ids
    for scale in (5.0, 1.0):
        asked = {**ASKED, "negative_prompt": "blurry", "guidance_scale": scale}
        if with_controlnet:
            asked["control_image"] = picture(2)
        _, whole = render(workflow.to_graph(), **asked)
        _, halves = render(split, **asked)
        assert torch.allclose(halves, whole, atol=1e-4)


def test_split_guidance_of_flux_is_the_same_bit_for_bit(tiny):
    workflow = flux(tiny("flux"), controlnet=tiny.controlnet("flux"), true_cfg=True)
    split = compile_workflow(workflow, (*DEFAULT, "cfg_split"), identify=lambda graph: graph).graph
    assert "flux_uncond" in {node.id for node in walk(split.nodes)}
    asked = {**ASKED, "negative_prompt": "blurry", "true_cfg_scale": 3.0, "control_image": picture(2)}
    assert torch.equal(render(split, **asked)[1], render(workflow.to_graph(), **asked)[1])
