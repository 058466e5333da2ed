"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from collections.abc import Sequence

from genserve.t2i.model import ModelPatch
from genserve.t2i.models.lora_file import targets_text
from genserve.t2i.models.schedule import Denoise, Schedule
from genserve.t2i.models.sd3 import SD3ControlNet, SD3TextEncoder, SD3Transformer, control_vae_shift
from genserve.t2i.models.vae import VAE
from genserve.t2i.passes.step_cache import cached
from genserve.t2i.ports import IMAGE
from genserve.t2i.workflow import Workflow
from genserve.t2i.workflows.limits import default_size
from genserve.t2i.workflows.start import Mode, checkpoint, start, strength_input, workflow_name


def sd3(
    model_path: str,
    controlnet: str | None = None,
    loras: Sequence[ModelPatch] = (),
    mode: Mode = "text",
    dtype: str | None = None,
    step_cache: float | None = None,
) -> Workflow:
    """An image from a prompt (mode "text"), from an image too ("image"), or painted into one ("inpaint").

    `dtype`: such as "bfloat16"; float32 by default. `step_cache`: leave out a step's blocks where the first one
    changes its input as before, but for this share (0.1, say); faster and approximate.
    """
    with Workflow(workflow_name("sd3", mode, controlnet)) as wf:
        prompt = wf.add_input("prompt", str)
        prompt_2 = wf.add_input("prompt_2", str, default=None, description="For the second CLIP encoder")
        prompt_3 = wf.add_input("prompt_3", str, default=None, description="For the T5 encoder")
        negative_prompt = wf.add_input("negative_prompt", str, default="")
        guidance_scale = wf.add_input("guidance_scale", float, default=7.0, description="Up to 1: none")
        seed = wf.add_input("seed", int)
        num_steps = wf.add_input("num_steps", int, default=28 if mode == "text" else 50)
        height = wf.add_input("height", int, default=default_size(model_path))
        width = wf.add_input("width", int, default=default_size(model_path))
        clip_skip = wf.add_input("clip_skip", int, default=None)
        max_length = wf.add_input("max_sequence_length", int, default=256, description="Of the T5 encoder")
        options = wf.add_input("scheduler", dict, default=None, description="Such as {'shift': 1.5}")
        strength = strength_input(wf, mode)

        source = checkpoint(model_path, dtype)
        vae = VAE(**source)
        encode = SD3TextEncoder(**source)
        transformer = SD3Transformer(**source)
        denoise = Denoise()
        for lora in loras:
            transformer.add_patch(lora)
            if targets_text(lora.model_path):
                encode.add_patch(lora)

        embeds = encode(prompt, prompt_2, prompt_3, clip_skip, max_length)
        negative = encode(negative_prompt, max_sequence_length=max_length)
        schedule, first, count = Schedule(model_path=model_path)(num_steps, height, width, strength, options)
        begin = start(wf, mode, model_path, vae, seed, height, width, schedule, first, 0, dtype)
        if controlnet is not None:
            net = SD3ControlNet(**checkpoint(controlnet, dtype), transformer_path=model_path)
            control_image = wf.add_input("control_image", IMAGE)
            conditioning_scale = wf.add_input("conditioning_scale", float, default=1.0)
            control_start = wf.add_input(
                "control_start", float, default=0.0, description="Share of the steps"
            )
            control_end = wf.add_input("control_end", float, default=1.0, description="Share of the steps")
            shift = control_vae_shift(controlnet)
            control = vae(
                image=control_image, mode="encode", height=height, width=width, shift=shift, is_control=True
            )

        latents, residuals = begin.latents, None
        for step in wf.loop(count, first=first):
            if controlnet is not None:
                residuals = net(
                    latents,
                    embeds,
                    control,
                    schedule,
                    conditioning_scale,
                    negative_prompt_embeds=negative,
                    guidance_scale=guidance_scale,
                    guidance_start=control_start,
                    guidance_end=control_end,
                    first=first,
                )
            noise_pred = transformer(latents, embeds, residuals, negative, guidance_scale, schedule)
            latents = begin.keep(denoise(noise_pred, latents, schedule, seed, step))
        wf.add_output(vae(latents, mode="decode"), "image")
    return cached(wf, step_cache)
