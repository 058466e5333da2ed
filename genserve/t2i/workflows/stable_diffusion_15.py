"""Stable Diffusion 1.x."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genserve.t2i.model import ModelPatch
from genserve.t2i.models.latents import Pixels
from genserve.t2i.models.schedule import MultistepDenoise, Schedule
from genserve.t2i.models.sd15 import SD15ControlNet, SD15TextEncoder, SD15UNet
from genserve.t2i.models.vae import VAE
from genserve.t2i.workflow import Workflow
from genserve.t2i.workflows.control import ControlNets, added, control_inputs, paths
from genserve.t2i.workflows.limits import default_size, expect
from genserve.t2i.workflows.painting import Painting, begin_painting
from genserve.t2i.workflows.start import Mode, start, strength_input, workflow_name


def sd15(
    model_path: str, controlnet: ControlNets = None, loras: Sequence[ModelPatch] = (), mode: Mode = "text"
) -> Workflow:
    """An image from a prompt (mode "text"), from an image too ("image"), or painted into one ("inpaint")."""
    expect("sd15", model_path)
    with Workflow(workflow_name("sd15", mode, controlnet)) as wf:
        prompt = wf.add_input("prompt", str)
        negative_prompt = wf.add_input("negative_prompt", str, default="")
        guidance_scale = wf.add_input("guidance_scale", float, default=7.5, description="Up to 1: none")
        seed = wf.add_input("seed", int)
        num_steps = wf.add_input("num_steps", int, default=50)
        height = wf.add_input("height", int, default=default_size(model_path))
        width = wf.add_input("width", int, default=default_size(model_path))
        options = wf.add_input(
            "scheduler", dict, default=None, description="Such as {'name': 'DDIMScheduler'}"
        )
        strength = strength_input(wf, mode)

        vae = VAE(model_path=model_path)
        encode = SD15TextEncoder(model_path=model_path)
        unet = SD15UNet(model_path=model_path)
        denoise = MultistepDenoise()
        for lora in loras:
            encode.add_patch(lora)
            unet.add_patch(lora)

        embeds = encode(prompt)
        negative = encode(negative_prompt)
        schedule, first, count = Schedule(model_path=model_path)(num_steps, height, width, strength, options)
        if mode == "inpaint":
            begin = begin_painting(wf, model_path, vae, seed, height, width, schedule, first, strength)
        else:
            begin = Painting(start(wf, mode, model_path, vae, seed, height, width, schedule, first).latents)
        nets, controls = [], []
        for number, path in enumerate(paths(controlnet, "ControlNetModel")):
            nets.append(SD15ControlNet(model_path=path))
            given = control_inputs(wf, number)
            control = Pixels(model_path=model_path, normalize=False)(given.image, height, width)
            controls.append((control, given))
        guess_mode: Any = False
        if nets:
            guess_mode = wf.add_input("guess_mode", bool, default=False, description="As if without a prompt")

        latents: Any = begin.latents
        history = None
        for step in wf.loop(count, first=first):
            down = middle = None
            for net, (control, given) in zip(nets, controls, strict=True):
                more_down, more_middle = net(
                    latents,
                    embeds,
                    control,
                    schedule,
                    given.scale,
                    negative,
                    guidance_scale,
                    given.start,
                    given.end,
                    guess_mode,
                    first=first,
                )
                down, middle = added(down, more_down), added(middle, more_middle)
            noise_pred = unet(latents, embeds, down, middle, negative, guidance_scale, schedule, begin.paint)
            latents, history = denoise(noise_pred, latents, history, schedule, seed, step)
            latents = begin.keep(latents)
        wf.add_output(vae(latents, mode="decode"), "image")
    return wf
