"""Nodes around the denoiser that own no weights: first latents, noise, guidance, masks, pixels.

Latents in graphs are never packed: batch x channels x height x width, batch 1. Random numbers come from the CPU's
generator, so that an image doesn't depend on the device, in the order in which the diffusers pipelines draw them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from genserve.t2i.model import Model
from genserve.t2i.models import schedule as schedules
from genserve.t2i.models.checkpoint import latent_channels, vae_scale_factor
from genserve.t2i.ports import IMAGE, LOOP_INDEX, tensor, tensors

if TYPE_CHECKING:
    import torch

Json = Mapping[str, Any]
LATENTS = tensor(shape=("batch", "channels", "height", "width"))


def normal(shape: Sequence[int], seed: int, draw: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The `draw`-th (from 0) tensor of `shape` of standard normal numbers from a generator with `seed`, on the CPU."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for _ in range(draw):
        torch.randn(tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator, dtype=dtype)


class _OnDevice(Model):
    """A node without weights which makes tensors: on its worker's device."""

    content: ClassVar[tuple[str, ...]] = ("vae/config.json",)

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        return {"device": device}


class LatentsGenerator(_OnDevice):
    """The latents that denoising begins with: unit noise, times the first sigma where the solver wants that.

    Channels, scale and size come from `model_path`, or from the parameters `channels`, `scale` and `size` (pixels).
    `draw`: how many tensors of this shape the pipeline draws from the same generator before (image-to-image: 1,
    for the posterior of the image's encoding).
    """

    def setup_io(self) -> None:
        self.add_input("seed", int)
        self.add_input("height", int, default=None)
        self.add_input("width", int, default=None)
        self.add_input("schedule", dict, default=None)
        self.add_input("draw", int, default=0)
        self.add_output("latents", LATENTS)

    def execute(
        self,
        model_components: dict[str, Any],
        seed: int,
        height: int | None = None,
        width: int | None = None,
        schedule: Json | None = None,
        draw: int = 0,
    ) -> dict[str, Any]:
        import torch

        path = self.params.get("model_path")
        scale = self.params.get("scale") or (vae_scale_factor(path) if path else 8)
        channels = self.params.get("channels") or (latent_channels(path) if path else 16)
        size = self.params.get("size", 1024)
        shape = (1, channels, (height or size) // scale, (width or size) // scale)
        noise = normal(shape, seed, draw, getattr(torch, self.params.get("dtype", "float32")))
        noise = noise.to(model_components.get("device", "cpu"))
        return {"latents": noise if schedule is None else noise * schedules.init_noise_sigma(schedule)}


class AddNoise(Model):
    """The latents of an image as they are when step `first` of the schedule begins: the start of image-to-image."""

    def setup_io(self) -> None:
        self.add_input("latents", LATENTS)
        self.add_input("noise", LATENTS)
        self.add_input("schedule", dict)
        self.add_input("first", int, default=0)
        self.add_output("latents", LATENTS)

    def execute(
        self,
        model_components: dict[str, Any],
        latents: torch.Tensor,
        noise: torch.Tensor,
        schedule: Json,
        first: int = 0,
    ) -> dict[str, Any]:
        return {"latents": schedules.add_noise(schedule, first, latents, noise)}


class Guidance(Model):
    """Classifier-free guidance: uncond + scale * (cond - uncond). A scale of at most 1 is no guidance: `cond`."""

    def setup_io(self) -> None:
        self.add_input("cond", LATENTS)
        self.add_input("uncond", LATENTS)
        self.add_input("guidance_scale", float)
        self.add_output("noise_pred", LATENTS)

    def execute(
        self,
        model_components: dict[str, Any],
        cond: torch.Tensor,
        uncond: torch.Tensor,
        guidance_scale: float,
    ) -> dict[str, Any]:
        return {"noise_pred": guide(cond, uncond, guidance_scale) if guidance_scale > 1 else cond}


def guide(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
    return uncond + scale * (cond - uncond)


class InpaintMask(_OnDevice):
    """An image's mask in the size of latents, batch x 1 x height x width: 1 where white (to be painted), else 0."""

    def setup_io(self) -> None:
        self.add_input("image", IMAGE)
        self.add_input("height", int)
        self.add_input("width", int)
        self.add_output("mask", tensor(shape=("batch", 1, "height", "width")))

    def execute(
        self, model_components: dict[str, Any], image: torch.Tensor, height: int, width: int
    ) -> dict[str, Any]:
        import torch

        scale = vae_scale_factor(self.params["model_path"])
        pixels = to_pixels(
            image, height, width, scale, do_normalize=False, do_binarize=True, do_convert_grayscale=True
        )
        mask = torch.nn.functional.interpolate(pixels, size=(height // scale, width // scale))
        mask = mask.to(getattr(torch, self.params.get("dtype", "float32")))
        return {"mask": mask.to(model_components.get("device", "cpu"))}


class InpaintBlend(Model):
    """After a step: outside the mask, the image itself with as much noise as the next step expects (none at the end)."""

    def setup_io(self) -> None:
        self.add_input("latents", LATENTS)
        self.add_input("image_latents", LATENTS)
        self.add_input("noise", LATENTS)
        self.add_input("mask", tensor())
        self.add_input("schedule", dict)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_output("latents", LATENTS)

    def execute(
        self,
        model_components: dict[str, Any],
        latents: torch.Tensor,
        image_latents: torch.Tensor,
        noise: torch.Tensor,
        mask: torch.Tensor,
        schedule: Json,
        step: int = 0,
    ) -> dict[str, Any]:
        kept = image_latents
        if step + 1 < schedules.num_iterations(schedule):
            kept = schedules.add_noise(schedule, step + 1, image_latents, noise)
        return {"latents": (1 - mask) * kept + mask * latents}


class Sum(Model):
    """The residuals of two ControlNets as one: the sums, item by item."""

    def setup_io(self) -> None:
        self.add_input("first", tensors())
        self.add_input("second", tensors())
        self.add_output("residuals", tensors())

    def execute(
        self,
        model_components: dict[str, Any],
        first: Sequence[torch.Tensor],
        second: Sequence[torch.Tensor],
    ) -> dict[str, Any]:
        if len(first) != len(second):
            raise ValueError(f"residuals of unlike ControlNets: {len(first)} and {len(second)}")
        return {"residuals": [one + other for one, other in zip(first, second, strict=True)]}


class TensorSum(Model):
    """The sum of two tensors, such as what two ControlNets have for a UNet's middle block."""

    def setup_io(self) -> None:
        self.add_input("first", tensor())
        self.add_input("second", tensor())
        self.add_output("sum", tensor())

    def execute(
        self, model_components: dict[str, Any], first: torch.Tensor, second: torch.Tensor
    ) -> dict[str, Any]:
        return {"sum": first + second}


class Pixels(_OnDevice):
    """An image as the tensor that models see: batch x channels x height x width, resized, -1 to 1 or (param
    `normalize` false, as ControlNets of UNets want it) 0 to 1."""

    def setup_io(self) -> None:
        self.add_input("image", IMAGE)
        self.add_input("height", int, default=None)
        self.add_input("width", int, default=None)
        self.add_output("pixels", tensor(shape=("batch", 3, "height", "width")))

    def execute(
        self,
        model_components: dict[str, Any],
        image: torch.Tensor,
        height: int | None = None,
        width: int | None = None,
    ) -> dict[str, Any]:
        import torch

        path, normalize = self.params.get("model_path"), self.params.get("normalize", True)
        scale = vae_scale_factor(path) if path else 8
        pixels = to_pixels(image, height, width, scale, do_normalize=normalize, do_convert_rgb=True)
        pixels = pixels.to(getattr(torch, self.params.get("dtype", "float32")))
        # In order of its axes, as everything is that travels between nodes: another order rounds differently.
        return {"pixels": pixels.to(model_components.get("device", "cpu")).contiguous()}


def to_pixels(
    image: torch.Tensor, height: int | None = None, width: int | None = None, scale: int = 8, **config: Any
) -> torch.Tensor:
    """A uint8 image (height x width x 3) as diffusers' image processor prepares it: float32, batch x channels x
    height x width, on the CPU. Without a size it keeps its own, down to a multiple of `scale`."""
    from diffusers.image_processor import VaeImageProcessor
    from PIL import Image

    picture = Image.fromarray(image.cpu().numpy())
    return VaeImageProcessor(vae_scale_factor=scale, **config).preprocess(picture, height, width)


def to_image(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels of a decoder (1 x 3 x height x width, -1 to 1) as a uint8 image, height x width x 3, on the CPU."""
    import torch
    from diffusers.image_processor import VaeImageProcessor

    unit = VaeImageProcessor().postprocess(pixels, output_type="np")[0]
    return torch.from_numpy((unit * 255).round().astype("uint8"))


def own_row(pair: torch.Tensor, branch: int) -> torch.Tensor:
    """The row of one branch of a pair (negative, prompt); all of it where there is no pair."""
    return pair[branch : branch + 1] if pair.shape[0] == 2 else pair
