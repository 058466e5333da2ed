"""Flux.1, dev and schnell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genserve.t2i.model import ModelPatch
from genserve.t2i.models.flux import Flux, FluxControlNet, FluxTextEncoder, has_guidance, reads_pixels
from genserve.t2i.models.latents import Pixels
from genserve.t2i.models.lora_file import targets_text
from genserve.t2i.models.schedule import Denoise, Schedule
from genserve.t2i.models.vae import VAE
from genserve.t2i.passes.step_cache import cached
from genserve.t2i.workflow import Workflow
from genserve.t2i.workflows.control import ControlNets, added, control_inputs, paths, suffix
from genserve.t2i.workflows.limits import default_size, expect
from genserve.t2i.workflows.start import Mode, checkpoint, start, strength_input, workflow_name


def flux(
    model_path: str,
    controlnet: ControlNets = None,
    loras: Sequence[ModelPatch] = (),
    mode: Mode = "text",
    true_cfg: bool = False,
    dtype: str | None = None,
    step_cache: float | None = None,
) -> Workflow:
    """An image from a prompt (mode "text"), from an image too ("image"), or painted into one ("inpaint").

    `true_cfg`: with a negative prompt, which Flux wasn't made for; each step takes twice as long then.
    `dtype`: such as "bfloat16"; float32 by default. `step_cache`: leave out a step's blocks where the first one
    changes its input as before, but for this share (0.1, say); faster and approximate.
    """
    expect("flux", model_path)
    with Workflow(workflow_name("flux", mode, controlnet)) as wf:
        prompt = wf.add_input("prompt", str)
        prompt_2 = wf.add_input("prompt_2", str, default=None, description="For the T5 encoder")
        seed = wf.add_input("seed", int)
        num_steps = wf.add_input("num_steps", int, default=28 if has_guidance(model_path) else 4)
        height = wf.add_input("height", int, default=default_size(model_path))
        width = wf.add_input("width", int, default=default_size(model_path))
        max_length = wf.add_input(
            "max_sequence_length", int, default=512 if has_guidance(model_path) else 256, description="Of T5"
        )
        options = wf.add_input(
            "scheduler", dict, default=None, description="Such as {'use_karras_sigmas': true}"
        )
        strength = strength_input(wf, mode)
        guidance_scale: Any = 3.5
        if has_guidance(model_path):
            guidance_scale = wf.add_input("guidance_scale", float, default=3.5, description="An embedding")

        source = checkpoint(model_path, dtype)
        vae = VAE(**source)
        encode = FluxTextEncoder(**source)
        transformer = Flux(**source)
        denoise = Denoise()
        for lora in loras:
            transformer.add_patch(lora)
            if targets_text(lora.model_path):
                encode.add_patch(lora)

        embeds = encode(prompt, prompt_2, max_length)
        negative: Any = None
        true_cfg_scale: Any = 1.0
        if true_cfg:
            negative_prompt = wf.add_input("negative_prompt", str, default="")
            true_cfg_scale = wf.add_input("true_cfg_scale", float, default=1.0, description="Up to 1: none")
            negative = encode(negative_prompt, max_sequence_length=max_length)
        schedule, first, count = Schedule(model_path=model_path)(num_steps, height, width, strength, options)
        nets, controls, is_pixels, draw = [], [], [], 0
        for number, path in enumerate(paths(controlnet, "FluxControlNetModel")):
            nets.append(FluxControlNet(**checkpoint(path, dtype)))
            given = control_inputs(wf, number)
            control_mode = wf.add_input(
                f"control_mode{suffix(number)}", int, default=None, description="Of union ControlNets"
            )
            is_pixels.append(reads_pixels(path))
            if is_pixels[-1]:
                control = Pixels(**source)(given.image, height, width)
            else:
                control = vae(
                    image=given.image,
                    mode="encode",
                    height=height,
                    width=width,
                    seed=seed,
                    draw=draw,
                    is_control=True,
                )
                draw += 1  # the pipeline draws the control images' noise first
            controls.append((control, control_mode, given))
        begin = start(wf, mode, model_path, vae, seed, height, width, schedule, first, draw, dtype)

        latents = begin.latents
        for step in wf.loop(count, first=first):
            residuals = single_residuals = None
            for net, (control, control_mode, given) in zip(nets, controls, strict=True):
                more: Any = net(
                    latents,
                    embeds,
                    control,
                    schedule,
                    given.scale,
                    guidance_scale,
                    control_mode,
                    given.start,
                    given.end,
                    first=first,
                )
                double, single = more if net.has_single_blocks else (more, None)
                residuals, single_residuals = added(residuals, double), added(single_residuals, single)
            noise_pred = transformer(
                latents,
                embeds,
                residuals,
                single_residuals,
                negative,
                guidance_scale,
                true_cfg_scale,
                schedule,
                repeat_residuals=any(is_pixels),
            )
            latents = begin.keep(denoise(noise_pred, latents, schedule, seed, step))
        wf.add_output(vae(latents, mode="decode"), "image")
    return cached(wf, step_cache)
