"""A text-to-image workflow in Python: Stable Diffusion 3 node by node, with a ControlNet and a LoRA.

    python examples/t2i_workflow.py [--model FOLDER --controlnet FOLDER --lora FOLDER] [--output FOLDER]

The loop's body is recorded once and runs as often as a request's `num_steps` says. The ControlNet's residuals
travel to the transformer while both run. Three pictures are written: plain, with the ControlNet, and with both.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageDraw
from rich.console import Console
from rich.progress import Progress

from genserve.t2i.models.latents import LatentsGenerator
from genserve.t2i.models.lora import LoRA
from genserve.t2i.models.schedule import Denoise, Schedule
from genserve.t2i.models.sd3 import SD3ControlNet, SD3TextEncoder, SD3Transformer
from genserve.t2i.models.vae import VAE
from genserve.t2i.ports import IMAGE
from genserve.t2i.session import Session
from genserve.t2i.workflow import Workflow

PROMPT = "a large red star, blue background"


def layout_workflow(model: str, controlnet: str | None = None, lora: str | None = None) -> Workflow:
    """An image from a prompt; with `controlnet`, laid out as a control image shows."""
    parts = ["plain"] if controlnet is None else ["controlled"]
    with Workflow("_".join([*parts, *(["styled"] if lora else [])])) as wf:
        prompt = wf.add_input("prompt", str)
        seed = wf.add_input("seed", int)
        num_steps = wf.add_input("num_steps", int, default=20)
        guidance_scale = wf.add_input("guidance_scale", float, default=3.0)

        vae = VAE(model_path=model)
        encode = SD3TextEncoder(model_path=model)
        transformer = SD3Transformer(model_path=model)
        denoise = Denoise()
        if lora is not None:
            transformer.add_patch(LoRA(lora, scale=1.0))

        embeds = encode(prompt, max_sequence_length=20)
        negative = encode("", max_sequence_length=20)
        schedule, _, count = Schedule(model_path=model)(num_steps)
        latents = LatentsGenerator(model_path=model, size=64)(seed, schedule=schedule)
        residuals = None
        if controlnet is not None:
            net = SD3ControlNet(model_path=controlnet, transformer_path=model)
            control = vae(image=wf.add_input("control_image", IMAGE), mode="encode")

        for step in wf.loop(count):
            if controlnet is not None:
                residuals = net(
                    latents,
                    embeds,
                    control,
                    schedule,
                    negative_prompt_embeds=negative,
                    guidance_scale=guidance_scale,
                )
            noise = transformer(latents, embeds, residuals, negative, guidance_scale, schedule)
            latents = denoise(noise, latents, schedule, seed, step)
        wf.add_output(vae(latents, mode="decode"), "image")
    return wf


def silhouette() -> Image.Image:
    """A white star on black, at the right: what the ControlNet is to follow."""
    image = Image.new("RGB", (64, 64), "black")
    star = [
        (44, 10),
        (48, 24),
        (62, 24),
        (51, 33),
        (55, 47),
        (44, 38),
        (33, 47),
        (37, 33),
        (26, 24),
        (40, 24),
    ]
    ImageDraw.Draw(image).polygon(star, fill="white")
    return image


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-sd3")
    parser.add_argument("--controlnet", default="tiny-sd3-controlnet")
    parser.add_argument("--lora", default="tiny-sd3-lora-outline")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path())
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    console = Console(highlight=False)
    workflows = [
        layout_workflow(given.model),
        layout_workflow(given.model, given.controlnet),
        layout_workflow(given.model, given.controlnet, given.lora),
    ]
    # Two executors, so that ControlNet and transformer run at the same time; the workflows share their models.
    with (
        Session(num_executors=2, num_threads=2) as session,
        Progress(console=console, transient=True) as progress,
    ):
        for workflow in workflows:
            session.register(workflow)
            task = progress.add_task(workflow.name, total=None)
            inputs = {"prompt": given.prompt, "seed": given.seed}
            if "control_image" in workflow.inputs:
                inputs["control_image"] = silhouette()
            result = session.run(
                workflow.name,
                on_update=lambda update, task=task: progress.update(
                    task, completed=getattr(update, "done", None), total=getattr(update, "total", None)
                ),
                **inputs,
            )
            path = given.output / f"{workflow.name}.png"
            result.outputs[0]["image"].save(path)
            num_runs = sum(node["runs"] for node in result.receipt["nodes"].values())
            console.print(f"{path}: {num_runs} runs of {len(result.receipt['nodes'])} nodes")


if __name__ == "__main__":
    main()
