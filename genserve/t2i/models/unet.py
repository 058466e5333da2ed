"""What the families with a UNet (Stable Diffusion 1.x and XL) have in common: denoiser and ControlNet.

Owns how diffusers' pipelines call the two modules: one row of the prompt, or, with guidance, a batch of (negative,
prompt). Must not know what else a family tells its UNet: that comes in as `added`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from genserve.core.errors import ConfigError
from genserve.t2i.model import Model
from genserve.t2i.models.checkpoint import read_config
from genserve.t2i.models.latents import LATENTS, guide, own_row
from genserve.t2i.models.lazy import LazyTensor, map_tensors
from genserve.t2i.models.schedule import control_scale, scale_input, timestep
from genserve.t2i.models.text import EMBEDS
from genserve.t2i.ports import LOOP_COUNT, LOOP_INDEX, tensor, tensors

if TYPE_CHECKING:
    import torch

Json = Mapping[str, Any]
Embeds = Sequence["torch.Tensor"]
PIXELS = tensor(shape=("batch", 3, "height", "width"))
PAINT_CHANNELS = 9
"""Input channels of UNets made for inpainting: see `paint`."""


def add_unet_ports(model: Model) -> None:
    """The ports of a denoiser, in the order of positional arguments; families add theirs after."""
    model.add_input("latents", LATENTS)
    model.add_input("prompt_embeds", EMBEDS)
    model.add_input("down_residuals", tensors(), deferred=True, default=None)
    model.add_input("mid_residual", tensor(), deferred=True, default=None)
    model.add_input("negative_prompt_embeds", EMBEDS, default=None)
    model.add_input("guidance_scale", float, default=7.5)
    model.add_input("schedule", dict)
    model.add_input("paint", tensor(), default=None)
    model.add_input("branch", int, default=None)
    model.add_input("step", int, default=LOOP_INDEX)
    model.add_output("noise_pred", LATENTS)


def load_unet(params: Mapping[str, Any], device: str) -> dict[str, Any]:
    import torch
    from diffusers import UNet2DConditionModel

    dtype = getattr(torch, params.get("dtype", "float32"))
    path = params["model_path"]
    unet: Any = UNet2DConditionModel.from_pretrained(path, subfolder="unet", torch_dtype=dtype)
    if unet.config.time_cond_proj_dim is not None:
        raise ConfigError(f"{path}: UNets that are told the guidance scale (LCM) aren't supported")
    return {"unet": unet.to(device).eval()}


def predict(
    unet: Any,
    latents: torch.Tensor,
    prompt_embeds: Embeds,
    down_residuals: Sequence[torch.Tensor] | None = None,
    mid_residual: torch.Tensor | None = None,
    negative_prompt_embeds: Embeds | None = None,
    guidance_scale: float = 7.5,
    *,
    schedule: Json,
    paint: torch.Tensor | None = None,
    branch: int | None = None,
    step: int = 0,
    added: dict[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The UNet's prediction, guided where there are negative embeddings and a scale above 1.

    `added` has a row for each row of the batch. Residuals may be lazy: they are fetched after the down blocks and
    after the middle one.
    """
    import torch

    guided = is_guided(negative_prompt_embeds, guidance_scale)
    inputs, sequence = batch(latents, prompt_embeds, negative_prompt_embeds, guided, schedule, step)
    if unet.config.in_channels == PAINT_CHANNELS:
        if paint is None:
            raise ConfigError("this checkpoint is for inpainting: it needs an image and a mask")
        inputs = torch.cat([inputs, paint.expand(inputs.shape[0], -1, -1, -1)], dim=1).contiguous()
    if branch is not None and down_residuals is not None and mid_residual is not None:
        down_residuals = map_tensors(down_residuals, lambda pair: own_row(pair, branch))
        mid_residual = _map_tensor(mid_residual, branch)
    noise_pred: torch.Tensor = unet(
        inputs,
        timestep(schedule, step),
        encoder_hidden_states=sequence,
        down_block_additional_residuals=down_residuals,
        mid_block_additional_residual=mid_residual,
        added_cond_kwargs=added,
        return_dict=False,
    )[0]
    if not guided:
        return noise_pred
    uncond, cond = noise_pred.chunk(2)
    return guide(cond, uncond, guidance_scale)


def is_guided(negative: Embeds | None, guidance_scale: float) -> bool:
    return negative is not None and guidance_scale > 1


def batch(
    latents: torch.Tensor,
    prompt_embeds: Embeds,
    negative: Embeds | None,
    guided: bool,
    schedule: Json,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled latents and text sequences: one row, or the pair (negative, prompt)."""
    import torch

    # Convolutions round differently in another memory format, which a tensor loses on its way to another executor.
    inputs = scale_input(schedule, step, latents).contiguous()
    if not guided or negative is None:
        return inputs, prompt_embeds[0]
    return torch.cat([inputs] * 2), torch.cat([negative[0], prompt_embeds[0]])


def _map_tensor(mid: Any, branch: int) -> Any:
    if isinstance(mid, LazyTensor):
        return LazyTensor(lambda: own_row(mid.get(), branch))
    return own_row(mid, branch)


def add_controlnet_ports(model: Model) -> None:
    """The ports of a ControlNet of a UNet; families add theirs after. `control` is pixels from 0 to 1."""
    model.add_input("latents", LATENTS)
    model.add_input("prompt_embeds", EMBEDS)
    model.add_input("control", PIXELS)
    model.add_input("schedule", dict)
    model.add_input("conditioning_scale", float, default=1.0)
    model.add_input("negative_prompt_embeds", EMBEDS, default=None)
    model.add_input("guidance_scale", float, default=7.5)
    model.add_input("guidance_start", float, default=0.0)
    model.add_input("guidance_end", float, default=1.0)
    model.add_input("guess_mode", bool, default=False)
    model.add_input("step", int, default=LOOP_INDEX)
    model.add_input("num_steps", int, default=LOOP_COUNT)
    model.add_input("first", int, default=0)
    model.add_output("down_residuals", tensors(num_down_residuals(model.params["model_path"])))
    model.add_output("mid_residual", tensor())


def num_down_residuals(controlnet_path: str) -> int | None:
    """How many tensors a ControlNet has for the down blocks; None if its folder doesn't say."""
    config = read_config(controlnet_path, "config.json")
    channels, layers = config.get("block_out_channels"), config.get("layers_per_block")
    if not isinstance(channels, list) or not isinstance(layers, int):
        return None
    return len(channels) * (layers + 1)  # the first convolution, and a downsampler in all blocks but the last


def load_controlnet(params: Mapping[str, Any], device: str) -> dict[str, Any]:
    import torch
    from diffusers import ControlNetModel

    dtype = getattr(torch, params.get("dtype", "float32"))
    net: Any = ControlNetModel.from_pretrained(params["model_path"], torch_dtype=dtype)
    return {"controlnet": net.to(device).eval()}


def control(
    net: Any,
    latents: torch.Tensor,
    prompt_embeds: Embeds,
    control: torch.Tensor,
    schedule: Json,
    conditioning_scale: float = 1.0,
    negative_prompt_embeds: Embeds | None = None,
    guidance_scale: float = 7.5,
    guidance_start: float = 0.0,
    guidance_end: float = 1.0,
    guess_mode: bool = False,
    step: int = 0,
    num_steps: int | None = None,
    first: int = 0,
    added: dict[str, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """A ControlNet's residuals: of a pair of rows where there is guidance.

    `guess_mode`: it sees the prompt's row alone, and doesn't change the negative one. `added` has a row for each row
    that it sees.
    """
    import torch

    guess_mode = guess_mode or bool(net.config.global_pool_conditions)
    guided = is_guided(negative_prompt_embeds, guidance_scale)
    pair = guided and not guess_mode
    inputs, sequence = batch(latents, prompt_embeds, negative_prompt_embeds, pair, schedule, step)
    down, mid = net(
        inputs,
        timestep(schedule, step),
        encoder_hidden_states=sequence,
        controlnet_cond=torch.cat([control.contiguous()] * inputs.shape[0]),
        conditioning_scale=control_scale(
            conditioning_scale, step - first, (num_steps or 1) - first, guidance_start, guidance_end
        ),
        guess_mode=guess_mode,
        added_cond_kwargs=added,
        return_dict=False,
    )
    if guided and guess_mode:
        down = [torch.cat([torch.zeros_like(each), each]) for each in down]
        mid = torch.cat([torch.zeros_like(mid), mid])
    return {"down_residuals": list(down), "mid_residual": mid}
