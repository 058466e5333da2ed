"""Two ControlNets at once are bit for bit what diffusers' pipelines make of them."""

from __future__ import annotations

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from genserve.core.errors import ConfigError, ModelNotFound
from genserve.t2i.workflows import FAMILIES, check, limits
from tests.t2i.models.driver import picture, render, saved_awake, stock

PIPELINES = {
    "sd15": (diffusers.StableDiffusionControlNetPipeline, diffusers.ControlNetModel, "image"),
    "sdxl": (diffusers.StableDiffusionXLControlNetPipeline, diffusers.ControlNetModel, "image"),
    "sd3": (diffusers.StableDiffusion3ControlNetPipeline, diffusers.SD3ControlNetModel, "control_image"),
    "flux": (diffusers.FluxControlNetPipeline, diffusers.FluxControlNetModel, "control_image"),
}


@pytest.mark.parametrize("family", PIPELINES)
def test_two_at_once(tiny, monkeypatch, family):
    """Of Stable Diffusion 3 the stock pipeline encodes the images in pairs, which gives other roundings: 1e-4."""
    if family == "sd3":
        monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    pipeline, cls, image_name = PIPELINES[family]
    folders = [tiny.controlnet(family, seed) for seed in (0, 1)]
    nets = [cls.from_pretrained(folder) for folder in folders]
    asked = {"prompt": "a red cat", "height": 64, "width": 64, "guidance_scale": 3.5}
    if family in ("sd3", "flux"):
        asked["max_sequence_length"] = 24
    images = [picture(2), picture(3)]
    image, latents = stock(
        pipeline.from_pretrained(tiny(family), controlnet=nets),
        **asked,
        **{image_name: images},
        num_inference_steps=2,
        controlnet_conditioning_scale=[0.8, 0.5],
    )
    graph = FAMILIES[family](tiny(family), controlnet=folders).to_graph()
    asked |= {"control_image": images[0], "control_image_2": images[1], "num_steps": 2, "seed": 5}
    ours, our_latents = render(graph, **asked, conditioning_scale=0.8, conditioning_scale_2=0.5)
    if family == "flux":
        latents = pipeline._unpack_latents(latents, 64, 64, 64 // our_latents.shape[-1])
    if family == "sd3":
        assert torch.allclose(our_latents, latents, atol=1e-4)
    else:
        assert torch.equal(our_latents, latents) and np.array_equal(ours, image)
    alone, _ = render(graph, **asked, conditioning_scale=0.8, conditioning_scale_2=0.0)
    assert not np.array_equal(alone, ours)


def test_what_does_not_go_together_is_refused(tiny, tmp_path):
    small = diffusers.SD3ControlNetModel.from_config(
        {**diffusers.SD3ControlNetModel.load_config(tiny.controlnet("sd3")), "num_layers": 1}
    )
    other = saved_awake(small, tmp_path)
    with pytest.raises(ConfigError, match=r"ControlNets with \d and with 1 residuals don't add up"):
        FAMILIES["sd3"](tiny("sd3"), controlnet=[tiny.controlnet("sd3"), other])
    with pytest.raises(ConfigError, match="more than 4"):
        FAMILIES["sd3"](tiny("sd3"), controlnet=[other] * 5)
    with pytest.raises(ConfigError, match="is a ControlNetModel; this family's are SD3ControlNetModels"):
        FAMILIES["sd3"](tiny("sd3"), controlnet=tiny.controlnet("sd15"))
    with pytest.raises(ConfigError, match="of the family sd15, not sdxl"):
        FAMILIES["sdxl"](tiny("sd15"))
    for nowhere in ("/nowhere/at/all", "nowhere"):
        with pytest.raises(ModelNotFound, match=f"no folder {nowhere}"):
            FAMILIES["sd3"](nowhere)
    assert limits("sd3", tiny("sd3"))["control_end_2"] == {"minimum": 0.0, "maximum": 1.0}
    (error,), _ = check("sd3", tiny("sd3"), {"control_start_2": 0.5, "control_end_2": 0.1})
    assert str(error) == "control_start_2: 0.5 is after control_end_2, 0.1"
    _, warnings = check("sd3", tiny("sd3"), {"conditioning_scale_2": 0})
    assert warnings == ("control_image_2 has no effect: conditioning_scale_2 is 0",)
