"""Stable Diffusion XL is bit for bit what diffusers' pipelines make of the same checkpoint and seed, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from genserve.core.errors import ConfigError
from genserve.t2i.models.latents import Guidance, normal
from genserve.t2i.models.lora import LoRA
from genserve.t2i.models.schedule import make_schedule
from genserve.t2i.models.sdxl import SDXLControlNet, SDXLSizes, SDXLTextEncoder, SDXLUNet
from genserve.t2i.models.vae import VAE
from genserve.t2i.workflows import sdxl
from tests.t2i.conftest import TinyFolders
from tests.t2i.models.against_diffusers import Ours, Theirs
from tests.t2i.models.driver import mask, picture, pixels, rendered_with_adapters, run_model

TEXT = "StableDiffusionXLPipeline"
IMAGE = "StableDiffusionXLImg2ImgPipeline"
INPAINT = "StableDiffusionXLInpaintPipeline"
CONTROL = "StableDiffusionXLControlNetPipeline"
PROMPT: dict[str, Any] = {"prompt": "a red circle", "negative_prompt": "a blue square"}
SIZE: dict[str, Any] = {"height": 32, "width": 48}


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours()


@pytest.fixture(scope="module")
def theirs(tiny: TinyFolders) -> Theirs:
    return Theirs(tiny("sdxl"))


@pytest.mark.parametrize(
    "texts",
    [
        PROMPT,
        {"prompt": "a red circle"},
        {"prompt": "a red circle", "negative_prompt": ""},
        {**PROMPT, "prompt_2": "in oil", "negative_prompt_2": "a photo"},
        {**PROMPT, "guidance_scale": 1.0},
    ],
)
def test_text_to_image(tiny: TinyFolders, ours: Ours, theirs: Theirs, texts: dict[str, Any]) -> None:
    made = ours(sdxl(tiny("sdxl")), **texts, **SIZE, seed=3, num_steps=3)
    assert made == theirs(TEXT, 3, **texts, **SIZE, num_inference_steps=3)
    assert made.image.shape == (32, 48, 3)
    assert made.image.float().std() > 20


def test_no_negative_prompt_is_not_an_empty_one(tiny: TinyFolders) -> None:
    encode = SDXLTextEncoder(model_path=tiny("sdxl"))
    absent, empty = (run_model(encode, prompt=prompt)["prompt_embeds"] for prompt in (None, ""))
    assert not absent[0].any()
    assert not absent[1].any()
    assert empty[0].any()
    assert [part.shape for part in absent] == [part.shape for part in empty] == [(1, 77, 32), (1, 16)]


def test_sizes_that_the_model_is_told(tiny: TinyFolders, ours: Ours, theirs: Theirs) -> None:
    inputs: dict[str, Any] = {**PROMPT, **SIZE}
    told: dict[str, Any] = {"original_height": 512, "original_width": 256, "crop_top": 32, "crop_left": 8}
    made = ours(sdxl(tiny("sdxl")), **inputs, **told, seed=3, num_steps=3)
    assert made == theirs(
        TEXT, 3, **inputs, num_inference_steps=3, original_size=(512, 256), crops_coords_top_left=(32, 8)
    )
    assert made != ours(sdxl(tiny("sdxl")), **inputs, seed=3, num_steps=3)
    assert run_model(SDXLSizes(), height=32, width=48) == [32, 48, 0, 0, 32, 48]


@pytest.mark.parametrize(
    "solver",
    [
        {"use_karras_sigmas": True},
        {"prediction_type": "v_prediction"},
        {"name": "DPMSolverMultistepScheduler", "use_karras_sigmas": True},
    ],
)
def test_other_solvers(tiny: TinyFolders, ours: Ours, theirs: Theirs, solver: dict[str, Any]) -> None:
    made = ours(sdxl(tiny("sdxl")), **PROMPT, **SIZE, seed=3, num_steps=4, scheduler=solver)
    assert made == theirs(TEXT, 3, solver, **PROMPT, **SIZE, num_inference_steps=4)
    assert made != ours(sdxl(tiny("sdxl")), **PROMPT, **SIZE, seed=3, num_steps=4)


def test_image_to_image(tiny: TinyFolders, ours: Ours, theirs: Theirs) -> None:
    square = {"height": 64, "width": 64}
    made = ours(
        sdxl(tiny("sdxl"), mode="image"),
        **PROMPT,
        **square,
        seed=3,
        num_steps=5,
        image=picture(),
        strength=0.6,
    )
    encoded = run_model(
        VAE(model_path=tiny("sdxl")), image=pixels(picture()), mode="encode", **square, seed=3
    ).contiguous()
    options: dict[str, Any] = {**PROMPT, "strength": 0.6, "num_inference_steps": 5, "guidance_scale": 5.0}
    assert made == theirs(IMAGE, 3, drawn=(1, 4, 8, 8), image=encoded, **options)
    # From a PIL image the pipeline computes in another memory format, whose convolutions round differently.
    assert made.distance(theirs(IMAGE, 3, image=picture(), **options)) < 5e-5


@pytest.mark.parametrize("strength", [0.6, 1.0])
def test_inpainting(tiny: TinyFolders, ours: Ours, theirs: Theirs, strength: float) -> None:
    inputs: dict[str, Any] = {
        **PROMPT,
        **SIZE,
        "strength": strength,
        "guidance_scale": 5.0,
        "image": picture(),
    }
    made = ours(sdxl(tiny("sdxl"), mode="inpaint"), **inputs, seed=3, num_steps=4, mask=mask())
    assert made == theirs(INPAINT, 3, **inputs, num_inference_steps=4, mask_image=mask())


@pytest.mark.parametrize("guess_mode", [False, True])
def test_controlnet(tiny: TinyFolders, ours: Ours, theirs: Theirs, guess_mode: bool) -> None:
    from diffusers import ControlNetModel

    inputs: dict[str, Any] = {**PROMPT, **SIZE, "guidance_scale": 5.0, "guess_mode": guess_mode}
    workflow = sdxl(tiny("sdxl"), controlnet=tiny.controlnet("sdxl"))
    control: dict[str, Any] = {"control_image": picture(1), "conditioning_scale": 0.8, "control_end": 0.7}
    made = ours(workflow, **inputs, **control, seed=3, num_steps=3)
    assert made == theirs(
        CONTROL,
        3,
        **inputs,
        num_inference_steps=3,
        image=picture(1),
        controlnet=ControlNetModel.from_pretrained(tiny.controlnet("sdxl")),
        controlnet_conditioning_scale=0.8,
        control_guidance_end=0.7,
    )
    assert made != ours(sdxl(tiny("sdxl")), **PROMPT, **SIZE, seed=3, num_steps=3)


def test_adapters(tiny: TinyFolders) -> None:
    from diffusers import StableDiffusionXLPipeline

    inputs: dict[str, Any] = {**PROMPT, **SIZE, "guidance_scale": 5.0}
    folder = tiny.lora("sdxl", alpha=8, text_encoders=True)
    graph = sdxl(tiny("sdxl"), loras=[LoRA(folder)]).to_graph()
    base, patched, after = rendered_with_adapters(graph, **inputs)
    assert torch.equal(base[1], after[1])
    assert not torch.allclose(base[1], patched[1], atol=0.1)

    theirs = Theirs(tiny("sdxl"))
    pipeline: Any = StableDiffusionXLPipeline(**theirs.parts)
    pipeline.load_lora_weights(folder)
    pipeline.fuse_lora(components=["unet", "text_encoder", "text_encoder_2"])
    # peft freezes the weights, and torch takes another kernel for linear layers with frozen ones.
    theirs.parts["unet"].requires_grad_(True)
    fused = theirs(TEXT, 5, **inputs, num_inference_steps=3)
    assert torch.equal(patched[1], fused.latents)
    assert torch.equal(torch.from_numpy(patched[0]), fused.image)


def test_split_guidance_is_close_to_the_fused_batch(tiny: TinyFolders) -> None:
    encode, unet = SDXLTextEncoder(model_path=tiny("sdxl")), SDXLUNet(model_path=tiny("sdxl"))
    cond = run_model(encode, prompt="a red circle")["prompt_embeds"]
    uncond = run_model(encode, prompt="a blue square")["prompt_embeds"]
    common: dict[str, Any] = {
        "latents": normal((1, 4, 4, 6), seed=1),
        "schedule": make_schedule(tiny("sdxl"), 4),
        "step": 1,
    }
    sizes, negative_sizes = [32, 48, 0, 0, 32, 48], [16, 24, 0, 0, 32, 48]
    pair: dict[str, Any] = {
        "negative_prompt_embeds": uncond,
        "negative_sizes": negative_sizes,
        "guidance_scale": 5.0,
    }
    net = SDXLControlNet(model_path=tiny.controlnet("sdxl"))
    control = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    residuals = run_model(
        net, **common, **pair, prompt_embeds=cond, sizes=sizes, control=control, num_steps=4
    )
    fused = run_model(unet, **common, **pair, **residuals, prompt_embeds=cond, sizes=sizes)
    halves = [
        run_model(unet, **common, **residuals, prompt_embeds=embeds, sizes=told, branch=branch)
        for branch, embeds, told in ((1, cond, sizes), (0, uncond, negative_sizes))
    ]
    split = run_model(Guidance(), cond=halves[0], uncond=halves[1], guidance_scale=5.0)
    # Rows of a batch of two and of one take other kernels.
    assert torch.allclose(split, fused, rtol=0, atol=2e-5)
    assert SDXLUNet.cfg.conditional == ("prompt_embeds", "sizes")


def test_what_a_prompt_loses_is_said_by_each_encoder(tiny: TinyFolders) -> None:
    encode = SDXLTextEncoder(model_path=tiny("sdxl"))
    warnings = run_model(encode, prompt="x" * 70 + "abcdefghi")["warnings"]
    assert len(warnings) == 2
    assert all("fghi" in warning for warning in warnings)


def test_refiners_are_refused(tiny: TinyFolders, tmp_path: Path) -> None:
    copytree(tiny("sdxl"), tmp_path / "refiner")
    index = tmp_path / "refiner/model_index.json"
    parts = json.loads(index.read_text())
    index.write_text(json.dumps({**parts, "text_encoder": [None, None]}))
    folder = str(tmp_path / "refiner")
    with pytest.raises(ConfigError, match="only base models"):
        SDXLTextEncoder(model_path=folder).load(folder, "cpu")
