"""The variational autoencoder as one model with two ways to call it (LegoDiffusion Figure 7), one loaded copy.

    latents = vae(image=picture, mode="encode")
    picture = vae(latents, mode="decode")

Owns scaling and shifting between the autoencoder's latents and the denoiser's. Works for all families.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from genserve.core.errors import InvalidRequest
from genserve.t2i.model import Model
from genserve.t2i.models.checkpoint import patch_size, vae_scale_factor
from genserve.t2i.models.latents import LATENTS, normal, to_image, to_pixels
from genserve.t2i.ports import IMAGE

if TYPE_CHECKING:
    import torch


class VAE(Model):
    """Encodes a picture to latents, or decodes latents to a picture; a call has the one output of its `mode`.

    Encoding resizes to `height` x `width` where given, and samples the posterior with `seed` (as the pipelines do,
    the `draw`-th of the seed's, from 0), or takes its most likely value without one. `shift` false leaves the latents
    unshifted, as some ControlNets want the control image. `is_control`: a ControlNet's image, whose pixels the
    pipelines copy to another memory layout before, which rounds differently.
    """

    weights: ClassVar[tuple[str, ...]] = ("vae",)

    def setup_io(self) -> None:
        self.add_input("latents", LATENTS, default=None)
        self.add_input("image", IMAGE, default=None)
        self.add_input("mode", str, default="decode")
        self.add_input("height", int, default=None)
        self.add_input("width", int, default=None)
        self.add_input("seed", int, default=None)
        self.add_input("shift", bool, default=True)
        self.add_input("draw", int, default=0)
        self.add_input("is_control", bool, default=False)
        self.add_output("latents", LATENTS)
        self.add_output("image", IMAGE)

    def outputs_for(self, inputs: dict[str, Any]) -> tuple[str, ...]:
        mode = inputs.get("mode", "decode")
        if mode not in ("encode", "decode"):
            raise TypeError(f'mode is {mode!r}; it is "encode" or "decode"')
        return ("latents",) if mode == "encode" else ("image",)

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        import torch
        from diffusers import AutoencoderKL

        dtype = getattr(torch, self.params.get("dtype", "float32"))
        vae = AutoencoderKL.from_pretrained(model_path, subfolder="vae", torch_dtype=dtype)
        if dtype == torch.float16 and vae.config.force_upcast:
            vae = vae.to(dtype=torch.float32)
        return {"vae": vae.to(device).eval()}

    def execute(
        self,
        model_components: dict[str, Any],
        latents: torch.Tensor | None = None,
        image: torch.Tensor | None = None,
        mode: str = "decode",
        height: int | None = None,
        width: int | None = None,
        seed: int | None = None,
        shift: bool = True,
        draw: int = 0,
        is_control: bool = False,
    ) -> dict[str, Any]:
        vae = model_components["vae"]
        if mode == "encode":
            if image is None:
                raise InvalidRequest("image", "encoding needs one")
            path = self.params["model_path"]
            pixels = to_pixels(image, height, width, vae_scale_factor(path) * patch_size(path))
            if is_control:
                pixels = pixels.contiguous()
            return {"latents": encode(vae, pixels, seed, shift, draw).contiguous()}
        if latents is None:
            raise InvalidRequest("latents", "decoding needs them")
        return {"image": decode(vae, latents)}


def encode(
    vae: Any, pixels: torch.Tensor, seed: int | None = None, shift: bool = True, draw: int = 0
) -> torch.Tensor:
    """Latents of pixels (1 x 3 x height x width, -1 to 1), shifted and scaled as the denoiser knows them."""
    posterior = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist
    latents = posterior.mean
    if seed is not None:
        noise = normal(posterior.mean.shape, seed, draw, posterior.mean.dtype).to(vae.device)
        latents = posterior.mean + posterior.std * noise
    mean, std = _per_channel(vae, latents)
    if mean is not None:
        return (latents - mean) * vae.config.scaling_factor / std
    if shift and vae.config.shift_factor is not None:
        latents = latents - vae.config.shift_factor
    return latents * vae.config.scaling_factor


def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """A uint8 picture, height x width x 3, on the device of the autoencoder."""
    latents = latents.to(vae.device, vae.dtype).contiguous()  # as they come from another executor
    mean, std = _per_channel(vae, latents)
    if mean is not None:
        latents = latents * std / vae.config.scaling_factor + mean
    else:
        latents = latents / vae.config.scaling_factor
        if vae.config.shift_factor is not None:
            latents = latents + vae.config.shift_factor
    return to_image(vae.decode(latents, return_dict=False)[0]).to(vae.device)


def _per_channel(vae: Any, like: torch.Tensor) -> Any:
    """Mean and deviation of each channel, where the autoencoder has them (SDXL's descendants)."""
    import torch

    if vae.config.latents_mean is None or vae.config.latents_std is None:
        return None, None
    values = (vae.config.latents_mean, vae.config.latents_std)
    return [torch.tensor(value).view(1, -1, 1, 1).to(like.device, like.dtype) for value in values]
