"""Stable Diffusion 1.5 is bit for bit what diffusers' pipelines make of the same checkpoint and seed, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genserve.core.errors import ConfigError
from genserve.t2i.models.latents import Guidance, normal
from genserve.t2i.models.lazy import LazyTensor, LazyTensors
from genserve.t2i.models.lora import LoRA
from genserve.t2i.models.schedule import make_schedule
from genserve.t2i.models.sd15 import SD15ControlNet, SD15TextEncoder, SD15UNet
from genserve.t2i.models.vae import VAE
from genserve.t2i.workflows import sd15
from tests.t2i.conftest import TinyFolders
from tests.t2i.models.against_diffusers import Ours, Theirs
from tests.t2i.models.driver import mask, picture, pixels, rendered_with_adapters, run_model

TEXT = "StableDiffusionPipeline"
IMAGE = "StableDiffusionImg2ImgPipeline"
INPAINT = "StableDiffusionInpaintPipeline"
CONTROL = "StableDiffusionControlNetPipeline"
PROMPT: dict[str, Any] = {"prompt": "a red circle", "negative_prompt": "a blue square"}
SIZE: dict[str, Any] = {"height": 32, "width": 48}


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours()


@pytest.fixture(scope="module")
def theirs(tiny: TinyFolders) -> Theirs:
    return Theirs(tiny("sd15"))


@pytest.fixture(scope="module")
def controlnet(tiny: TinyFolders) -> Any:
    from diffusers import ControlNetModel

    return ControlNetModel.from_pretrained(tiny.controlnet("sd15"))


@pytest.mark.parametrize("guidance_scale", [7.5, 1.0])
def test_text_to_image(tiny: TinyFolders, ours: Ours, theirs: Theirs, guidance_scale: float) -> None:
    workflow = sd15(tiny("sd15"))
    made = ours(workflow, **PROMPT, **SIZE, seed=3, num_steps=4, guidance_scale=guidance_scale)
    assert made == theirs(TEXT, 3, **PROMPT, **SIZE, num_inference_steps=4, guidance_scale=guidance_scale)
    assert made.image.shape == (32, 48, 3)
    assert made.image.float().std() > 20
    assert made != ours(workflow, **PROMPT, **SIZE, seed=4, num_steps=4, guidance_scale=guidance_scale)


@pytest.mark.parametrize(
    "solver",
    [
        {"name": "DDIMScheduler"},
        {"name": "EulerDiscreteScheduler", "use_karras_sigmas": True},
        {"name": "DPMSolverMultistepScheduler"},
        {"name": "UniPCMultistepScheduler"},
        {"prediction_type": "v_prediction"},
    ],
)
def test_other_solvers(tiny: TinyFolders, ours: Ours, theirs: Theirs, solver: dict[str, Any]) -> None:
    made = ours(sd15(tiny("sd15")), **PROMPT, **SIZE, seed=3, num_steps=5, scheduler=solver)
    assert made == theirs(TEXT, 3, solver, **PROMPT, **SIZE, num_inference_steps=5)
    assert made != ours(sd15(tiny("sd15")), **PROMPT, **SIZE, seed=3, num_steps=5)


@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.parametrize("solver", [{}, {"name": "DDIMScheduler"}])
def test_image_to_image(
    tiny: TinyFolders, ours: Ours, theirs: Theirs, strength: float, solver: dict[str, Any]
) -> None:
    square = {"height": 64, "width": 64}
    made = ours(
        sd15(tiny("sd15"), mode="image"),
        **PROMPT,
        **square,
        seed=3,
        num_steps=5,
        image=picture(),
        strength=strength,
        scheduler=solver or None,
    )
    encoded = run_model(
        VAE(model_path=tiny("sd15")), image=pixels(picture()), mode="encode", **square, seed=3
    ).contiguous()
    options: dict[str, Any] = {**PROMPT, "strength": strength, "num_inference_steps": 5}
    assert made == theirs(IMAGE, 3, solver, drawn=(1, 4, 8, 8), image=encoded, **options)
    # From a PIL image the pipeline computes in another memory format, whose convolutions round differently.
    assert made.distance(theirs(IMAGE, 3, solver, image=picture(), **options)) < 5e-5


@pytest.mark.parametrize("checkpoint", ["sd15", "sd15-inpaint"])
@pytest.mark.parametrize("strength", [0.6, 1.0])
def test_inpainting(tiny: TinyFolders, ours: Ours, checkpoint: str, strength: float) -> None:
    made = ours(
        sd15(tiny(checkpoint), mode="inpaint"),
        **PROMPT,
        **SIZE,
        seed=3,
        num_steps=4,
        image=picture(),
        mask=mask(),
        strength=strength,
    )
    assert made == Theirs(tiny(checkpoint))(
        INPAINT,
        3,
        **PROMPT,
        **SIZE,
        num_inference_steps=4,
        image=picture(),
        mask_image=mask(),
        strength=strength,
    )


def test_a_checkpoint_for_inpainting_refuses_text_alone(tiny: TinyFolders, ours: Ours) -> None:
    with pytest.raises(ConfigError, match="needs an image and a mask"):
        ours(sd15(tiny("sd15-inpaint")), **PROMPT, **SIZE, seed=3, num_steps=2)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, {}),
        (
            {"conditioning_scale": 0.5, "control_start": 0.25, "control_end": 0.75},
            {
                "controlnet_conditioning_scale": 0.5,
                "control_guidance_start": 0.25,
                "control_guidance_end": 0.75,
            },
        ),
        ({"guess_mode": True, "guidance_scale": 3.0}, {"guess_mode": True, "guidance_scale": 3.0}),
        ({"guidance_scale": 1.0}, {"guidance_scale": 1.0}),
    ],
)
def test_controlnet(
    tiny: TinyFolders,
    ours: Ours,
    theirs: Theirs,
    controlnet: Any,
    options: dict[str, Any],
    same: dict[str, Any],
) -> None:
    workflow = sd15(tiny("sd15"), controlnet=tiny.controlnet("sd15"))
    made = ours(workflow, **PROMPT, **SIZE, seed=3, num_steps=4, control_image=picture(1), **options)
    assert made == theirs(
        CONTROL, 3, **PROMPT, **SIZE, num_inference_steps=4, controlnet=controlnet, image=picture(1), **same
    )
    without = {**options, "conditioning_scale": 0.0}
    assert made != ours(workflow, **PROMPT, **SIZE, seed=3, num_steps=4, control_image=picture(1), **without)


def test_adapters(tiny: TinyFolders) -> None:
    from diffusers import StableDiffusionPipeline

    folder = tiny.lora("sd15", alpha=8, text_encoders=True)
    graph = sd15(tiny("sd15"), loras=[LoRA(folder, 0.7)]).to_graph()
    base, patched, after = rendered_with_adapters(graph, **PROMPT, **SIZE)
    assert torch.equal(base[1], after[1])
    assert not torch.allclose(base[1], patched[1], atol=0.1)

    theirs = Theirs(tiny("sd15"))
    pipeline: Any = StableDiffusionPipeline(**theirs.parts, requires_safety_checker=False)
    pipeline.load_lora_weights(folder, adapter_name="a")
    pipeline.set_adapters(["a"], [0.7])
    pipeline.fuse_lora(components=["unet", "text_encoder"], adapter_names=["a"])
    # peft freezes the weights, and torch takes another kernel for linear layers with frozen ones.
    theirs.parts["unet"].requires_grad_(True)
    fused = theirs(TEXT, 5, **PROMPT, **SIZE, num_inference_steps=3)
    assert torch.equal(patched[1], fused.latents)
    assert torch.equal(torch.from_numpy(patched[0]), fused.image)


@pytest.fixture
def step(tiny: TinyFolders) -> dict[str, Any]:
    """The inputs of one step in the middle of denoising."""
    encode = SD15TextEncoder(model_path=tiny("sd15"))
    return {
        "latents": normal((1, 4, 8, 8), seed=1),
        "prompt_embeds": run_model(encode, prompt="a red circle")["prompt_embeds"],
        "negative_prompt_embeds": run_model(encode, prompt="")["prompt_embeds"],
        "guidance_scale": 7.5,
        "schedule": make_schedule(tiny("sd15"), 4),
        "step": 2,
    }


def test_residuals_are_fetched_where_they_are_used(tiny: TinyFolders, step: dict[str, Any]) -> None:
    unet = SD15UNet(model_path=tiny("sd15"))
    net = SD15ControlNet(model_path=tiny.controlnet("sd15"))
    residuals = run_model(net, **step, control=torch.rand(1, 3, 64, 64), num_steps=5)
    down, middle = residuals["down_residuals"], residuals["mid_residual"]
    assert net.output_ports[0].type.length == len(down)
    eager = run_model(unet, **step, down_residuals=down, mid_residual=middle)

    order: list[str] = []

    def note(name: str, value: torch.Tensor) -> torch.Tensor:
        order.append(name)
        return value

    module = unet.load(tiny("sd15"), "cpu")
    hooks = {"down": module["unet"].down_blocks[-1], "middle": module["unet"].mid_block}
    for name, block in hooks.items():
        block.register_forward_hook(lambda *_, name=name: order.append(f"{name} blocks ran"))
    with torch.no_grad():
        lazy = unet.execute(
            module,
            **step,
            down_residuals=LazyTensors(len(down), lambda index: note("down", down[index])),
            mid_residual=LazyTensor(lambda: note("middle", middle)),
        )["noise_pred"]
    assert torch.equal(lazy, eager)
    assert order == ["down blocks ran", *["down"] * len(down), "middle blocks ran", "middle"]
    assert not torch.equal(eager, run_model(unet, **step))


@pytest.mark.parametrize("with_control", [False, True])
def test_split_guidance_is_close_to_the_fused_batch(
    tiny: TinyFolders, step: dict[str, Any], with_control: bool
) -> None:
    unet = SD15UNet(model_path=tiny("sd15"))
    residuals: dict[str, Any] = {}
    if with_control:
        net = SD15ControlNet(model_path=tiny.controlnet("sd15"))
        residuals = run_model(net, **step, control=torch.rand(1, 3, 64, 64), num_steps=5)
    fused = run_model(unet, **step, **residuals)

    half = {name: step[name] for name in ("latents", "schedule", "step")}
    if residuals:  # as the runtime gives them
        down, middle = residuals["down_residuals"], residuals["mid_residual"]
        residuals = {
            "down_residuals": LazyTensors(len(down), down.__getitem__),
            "mid_residual": LazyTensor(lambda: middle),
        }
    cond = run_model(unet, **half, **residuals, prompt_embeds=step["prompt_embeds"], branch=1)
    uncond = run_model(unet, **half, **residuals, prompt_embeds=step["negative_prompt_embeds"], branch=0)
    split = run_model(Guidance(), cond=cond, uncond=uncond, guidance_scale=7.5)
    # Rows of a batch of two and of one take other kernels.
    assert torch.allclose(split, fused, rtol=0, atol=2e-5)
    assert SD15UNet.cfg.unconditional == ("negative_prompt_embeds",)


def test_what_a_prompt_loses_is_said(tiny: TinyFolders) -> None:
    encode = SD15TextEncoder(model_path=tiny("sd15"))
    assert run_model(encode, prompt="a red circle")["warnings"] == []
    long = run_model(encode, prompt="x" * 70 + "abcdefghi")
    assert len(long["warnings"]) == 1
    assert "fghi" in long["warnings"][0]
    assert "e" not in long["warnings"][0].partition(":")[2]
    assert long["prompt_embeds"][0].shape == (1, 77, 16)
