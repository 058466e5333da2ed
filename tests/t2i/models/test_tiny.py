"""The tiny checkpoints: stock pipelines load and run them, and each part of them shows in the picture."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from genserve.t2i.models.tiny import TINY_FAMILIES, build_tiny, build_tiny_controlnet, build_tiny_lora
from tests.t2i.conftest import TinyFolders

CONTROLNETS = {
    "sd15": ("ControlNetModel", "StableDiffusionControlNetPipeline", "image"),
    "sdxl": ("ControlNetModel", "StableDiffusionXLControlNetPipeline", "image"),
    "sd3": ("SD3ControlNetModel", "StableDiffusion3ControlNetPipeline", "control_image"),
    "sd35": ("SD3ControlNetModel", "StableDiffusion3ControlNetPipeline", "control_image"),
    "flux": ("FluxControlNetModel", "FluxControlNetPipeline", "control_image"),
    "flux-schnell": ("FluxControlNetModel", "FluxControlNetPipeline", "control_image"),
}


def run(pipeline, prompt: str = "a red circle", **options: Any):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=prompt,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        height=32,
        width=32,
        **options,
    ).images[0]


@pytest.mark.parametrize("family", list(CONTROLNETS))
def test_stock_pipelines_run_it_and_every_part_matters(tiny: TinyFolders, family: str) -> None:
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(tiny(family))
    modules = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    assert 100_000 < sum(p.numel() for part in modules for p in part.parameters()) < 250_000

    plain = run(pipeline)
    assert plain.std() > 0.1
    assert abs(plain - run(pipeline, "a blue square")).mean() > 0.01

    net_class, with_net, image_input = CONTROLNETS[family]
    net = getattr(diffusers, net_class).from_pretrained(tiny.controlnet(family))
    guided = getattr(diffusers, with_net)(controlnet=net, **_parts_for(with_net, pipeline))
    control: dict[str, Any] = {
        image_input: torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    }
    full = run(guided, controlnet_conditioning_scale=1.0, **control)
    none = run(guided, controlnet_conditioning_scale=0.0, **control)
    assert abs(full - none).mean() > 0.01

    pipeline.load_lora_weights(tiny.lora(family, alpha=8))
    assert abs(plain - run(pipeline)).mean() > 0.005


def _parts_for(name: str, pipeline) -> dict:
    import diffusers

    wanted = inspect.signature(getattr(diffusers, name).__init__).parameters
    parts = {key: part for key, part in pipeline.components.items() if key in wanted}
    return parts | ({"requires_safety_checker": False} if "requires_safety_checker" in wanted else {})


def test_schedulers_are_configured_as_the_real_ones(tiny: TinyFolders) -> None:
    def scheduler(family: str) -> dict:
        return json.loads(Path(tiny(family), "scheduler", "scheduler_config.json").read_text())

    assert scheduler("sd15")["_class_name"] == "PNDMScheduler"
    assert scheduler("sd15")["skip_prk_steps"]
    assert scheduler("sdxl")["_class_name"] == "EulerDiscreteScheduler"
    assert scheduler("sd3")["shift"] == 3.0
    assert scheduler("flux")["use_dynamic_shifting"]
    assert not scheduler("flux-schnell")["use_dynamic_shifting"]


def test_one_seed_is_one_checkpoint_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    same, again, other = (
        build_tiny("sd3", tmp_path / name, seed) for name, seed in zip("abc", (0, 0, 1), strict=True)
    )
    weights = [
        (f / "transformer/diffusion_pytorch_model.safetensors").read_bytes() for f in (same, again, other)
    ]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(before, torch.get_rng_state())


def test_an_adapter_says_its_alpha_and_can_patch_text_encoders(tmp_path: Path) -> None:
    from diffusers import StableDiffusionXLPipeline

    folder = build_tiny_lora("sdxl", tmp_path, rank=2, alpha=6, text_encoders=True)
    state, _, metadata = StableDiffusionXLPipeline.lora_state_dict(str(folder), return_lora_metadata=True)
    assert {key.split(".")[0] for key in state} == {"unet", "text_encoder", "text_encoder_2"}
    assert metadata["unet.lora_alpha"] == 6
    assert all(tensor.any() for tensor in state.values())


@pytest.mark.parametrize("build", [build_tiny, build_tiny_controlnet, build_tiny_lora])
def test_an_unknown_family_is_refused(build, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are: sd15"):
        build("sd9", tmp_path)
    assert "sd3" in TINY_FAMILIES
