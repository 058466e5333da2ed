"""Painting into an image with a UNet: of those made for it (nine input channels), and of all others.

Owns what such a UNet sees besides the latents, and the first latents, with random numbers drawn in the order of
diffusers' pipelines. `InpaintBlend`, for all others, is in `latents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from genserve.t2i.model import Model
from genserve.t2i.models.checkpoint import denoiser_config, vae_scale_factor
from genserve.t2i.models.latents import LATENTS, normal, to_pixels
from genserve.t2i.models.schedule import add_noise, init_noise_sigma
from genserve.t2i.models.unet import PAINT_CHANNELS
from genserve.t2i.models.vae import VAE, encode
from genserve.t2i.ports import IMAGE, tensor

if TYPE_CHECKING:
    import torch

Json = Mapping[str, Any]


def paints(model_path: str) -> bool:
    """Whether the checkpoint's UNet was made for inpainting."""
    return bool(denoiser_config(model_path).get("in_channels") == PAINT_CHANNELS)


class PaintInputs(VAE):
    """What UNets for inpainting see besides the latents: the mask, and the image with grey where it is to be painted.

    Batch x 5 x height x width. `draw`: which of the seed's draws the encoding samples its posterior with.
    """

    load_key: ClassVar[str] = "genserve.t2i.models.vae:VAE"

    def setup_io(self) -> None:
        self.add_input("image", IMAGE)
        self.add_input("mask", IMAGE)
        self.add_input("height", int)
        self.add_input("width", int)
        self.add_input("seed", int)
        self.add_input("draw", int, default=0)
        self.add_output("paint", tensor(shape=("batch", 5, "latent_height", "latent_width")))

    def outputs_for(self, inputs: dict[str, Any]) -> tuple[str, ...]:
        return ("paint",)

    def execute(  # type: ignore[override]  # inputs are those of setup_io
        self,
        model_components: dict[str, Any],
        image: torch.Tensor,
        mask: torch.Tensor,
        height: int,
        width: int,
        seed: int,
        draw: int = 0,
    ) -> dict[str, Any]:
        import torch

        vae, scale = model_components["vae"], vae_scale_factor(self.params["model_path"])
        binary = to_pixels(
            mask, height, width, scale, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )
        masked = to_pixels(image, height, width, scale) * (binary < 0.5)
        small = torch.nn.functional.interpolate(binary, size=(height // scale, width // scale))
        latents = encode(vae, masked, seed, draw=draw)
        return {"paint": torch.cat([small.to(latents.device, latents.dtype), latents], dim=1)}


class PaintStart(Model):
    """The first latents of inpainting: noise alone at a strength of 1, else the image with noise.

    Numbers are drawn in the order of the pipelines: those of a UNet for inpainting don't encode the image where the
    start is noise alone. `draw` is how many tensors have been drawn from the seed's generator after this.
    """

    content: ClassVar[tuple[str, ...]] = ("unet/config.json",)

    def setup_io(self) -> None:
        self.add_input("image_latents", LATENTS)
        self.add_input("seed", int)
        self.add_input("schedule", dict)
        self.add_input("first", int)
        self.add_input("strength", float)
        self.add_output("latents", LATENTS)
        self.add_output("noise", LATENTS)
        self.add_output("draw", int)

    def execute(
        self,
        model_components: dict[str, Any],
        image_latents: torch.Tensor,
        seed: int,
        schedule: Json,
        first: int,
        strength: float,
    ) -> dict[str, Any]:
        pure = strength == 1
        draw = 0 if pure and paints(self.params["model_path"]) else 1
        noise = normal(image_latents.shape, seed, draw, image_latents.dtype).to(image_latents.device)
        if pure:
            latents = noise * init_noise_sigma(schedule)
        else:
            latents = add_noise(schedule, first, image_latents, noise)
        return {"latents": latents, "noise": noise, "draw": draw + 1}
