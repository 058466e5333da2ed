"""How Stable Diffusion 1.x and XL begin to paint into an image; their pipelines differ from the others' in that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genserve.t2i.models.latents import InpaintBlend, InpaintMask
from genserve.t2i.models.paint import PaintInputs, PaintStart, paints
from genserve.t2i.models.vae import VAE
from genserve.t2i.ports import IMAGE
from genserve.t2i.workflow import Workflow


@dataclass(frozen=True)
class Painting:
    """The first latents, and what a UNet made for inpainting sees. `keep` puts back what is outside the mask after
    each step of other UNets."""

    latents: Any
    paint: Any = None
    blend: tuple[Any, ...] | None = None

    def keep(self, latents: Any) -> Any:
        return latents if self.blend is None else InpaintBlend()(latents, *self.blend)


def begin_painting(
    wf: Workflow,
    model_path: str,
    vae: VAE,
    seed: Any,
    height: Any,
    width: Any,
    schedule: Any,
    first: Any,
    strength: Any,
) -> Painting:
    """Declares the inputs `image` and `mask`."""
    image = wf.add_input("image", IMAGE, description="What to change")
    mask = wf.add_input("mask", IMAGE, description="White where to paint, black where to keep")
    image_latents = vae(image=image, mode="encode", height=height, width=width, seed=seed)
    latents, noise, draw = PaintStart(model_path=model_path)(image_latents, seed, schedule, first, strength)
    if paints(model_path):
        paint = PaintInputs(model_path=model_path)(image, mask, height, width, seed, draw)
        return Painting(latents, paint=paint)
    small = InpaintMask(model_path=model_path)(mask, height, width)
    return Painting(latents, blend=(image_latents, noise, small, schedule))
