"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from collections.abc import Sequence

from genserve.t2i.model import ModelPatch
from genserve.t2i.models.lora_file import targets_text
from genserve.t2i.models.schedule import Denoise, Schedule
from genserve.t2i.models.sd3 import SD3ControlNet, SD3TextEncoder, SD3Transformer, control_vae_shift
from genserve.t2i.models.vae import VAE
from genserve.t2i.passes.step_cache import cached
from genserve.t2i.workflow import Workflow
from genserve.t2i.workflows.control import ControlNets, added, control_inputs, paths
from genserve.t2i.workflows.limits import default_size, expect
from genserve.t2i.workflows.start import Mode, checkpoint, start, strength_input, workflow_name


def sd3(
    model_path: str,
    controlnet: ControlNets = None,
    loras: Sequence[ModelPatch] = (),
    mode: Mode = "text",
    dtype: str | None = None,
    step_cache: float | None = None,
) -> Workflow:
    """An image from a prompt (mode "text"), from an image too ("image"), or painted into one ("inpaint").

    `dtype`: such as "bfloat16"; float32 by default. `step_cache`: leave out a step's blocks where the first one
    changes its input as before, but for this share (0.1, say); faster and approximate.
    """
    expect("sd3", model_path)
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
        shared = {"negative_prompt_embeds": negative, "guidance_scale": guidance_scale, "first": first}
        nets, controls = [], []
        for number, path in enumerate(paths(controlnet, "SD3ControlNetModel")):
            nets.append(SD3ControlNet(**checkpoint(path, dtype), transformer_path=model_path))
            given = control_inputs(wf, number)
            control = vae(
                image=given.image,
                mode="encode",
                height=height,
                width=width,
                shift=control_vae_shift(path),
                is_control=True,
            )
            controls.append((control, given))

        latents = begin.latents
        for step in wf.loop(count, first=first):
            residuals = None
            for net, (control, given) in zip(nets, controls, strict=True):
                more = net(
                    latents,
                    embeds,
                    control,
                    schedule,
                    given.scale,
                    guidance_start=given.start,
                    guidance_end=given.end,
                    **shared,
                )
                residuals = added(residuals, more)
            noise_pred = transformer(latents, embeds, residuals, negative, guidance_scale, schedule)
            latents = begin.keep(denoise(noise_pred, latents, schedule, seed, step))
        wf.add_output(vae(latents, mode="decode"), "image")
    return cached(wf, step_cache)
