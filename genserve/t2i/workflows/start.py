"""What denoising begins with, in each of the three modes: noise, or an image with noise, with or without a mask.

Owns the inputs `image`, `mask` and `strength`; the same for all families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from genserve.t2i.models.latents import AddNoise, InpaintBlend, InpaintMask, LatentsGenerator
from genserve.t2i.models.vae import VAE
from genserve.t2i.ports import IMAGE
from genserve.t2i.workflow import Workflow
from genserve.t2i.workflows.control import ControlNets

Mode = Literal["text", "image", "inpaint"]


def workflow_name(family: str, mode: Mode, controlnet: ControlNets) -> str:
    """Such as "sd3_inpaint_controlnet". Raises `ValueError`."""
    if mode not in ("text", "image", "inpaint"):
        raise ValueError(f'mode is {mode!r}; it is "text", "image" or "inpaint"')
    parts = [family, *([] if mode == "text" else [mode]), *(["controlnet"] if controlnet else [])]
    return "_".join(parts)


def checkpoint(model_path: str, dtype: str | None) -> dict[str, str]:
    """Parameters of a checkpoint's models: where they are, and in which dtype they run (None: float32)."""
    return {"model_path": model_path} | ({} if dtype is None else {"dtype": dtype})


def strength_input(wf: Workflow, mode: Mode) -> Any:
    """How much of the image is replaced; None in the mode "text"."""
    if mode == "text":
        return None
    return wf.add_input(
        "strength", float, default=0.6, description="How far to go from the image, above 0 to 1"
    )


@dataclass(frozen=True)
class Start:
    """The first latents; `keep` puts the image back outside the mask after each step (in the mode "inpaint")."""

    latents: Any
    image_latents: Any = None
    noise: Any = None
    mask: Any = None
    schedule: Any = None

    def keep(self, latents: Any) -> Any:
        if self.mask is None:
            return latents
        return InpaintBlend()(latents, self.image_latents, self.noise, self.mask, self.schedule)


def start(
    wf: Workflow,
    mode: Mode,
    model_path: str,
    vae: VAE,
    seed: Any,
    height: Any,
    width: Any,
    schedule: Any,
    first: Any,
    draw: int = 0,
    dtype: str | None = None,
) -> Start:
    """The first latents; `draw` is how many tensors the pipeline has drawn from the seed's generator before."""
    source = checkpoint(model_path, dtype)
    generator = LatentsGenerator(**source)
    if mode == "text":
        return Start(generator(seed, height, width, schedule, draw=draw))
    image = wf.add_input("image", IMAGE, description="What to change")
    image_latents = vae(image=image, mode="encode", height=height, width=width, seed=seed, draw=draw)
    noise = generator(seed, height, width, draw=draw + 1)
    latents = AddNoise()(image_latents, noise, schedule, first)
    if mode == "image":
        return Start(latents)
    mask = wf.add_input("mask", IMAGE, description="White where to paint, black where to keep")
    painted = InpaintMask(**source)(mask, height, width)
    return Start(latents, image_latents, noise, painted, schedule)
