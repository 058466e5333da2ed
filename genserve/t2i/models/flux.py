"""Flux.1, dev and schnell: text encoder, transformer and ControlNet, as diffusers' pipelines run them.

Owns what the stock pipelines do around the unmodified modules. Latents are packed two by two into tokens here and
nowhere else. Guidance is an embedding (dev), nothing (schnell), or a second call with a negative prompt ("true").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from genserve.t2i.model import Model
from genserve.t2i.models import step_cache
from genserve.t2i.models.checkpoint import read_config
from genserve.t2i.models.latents import LATENTS, guide
from genserve.t2i.models.schedule import control_scale, schedule_or_default, timestep
from genserve.t2i.models.step_cache import THRESHOLD, StepCache
from genserve.t2i.models.text import EMBEDS, TextEncoder, embeds, load_encoders
from genserve.t2i.models.vae import VAE
from genserve.t2i.ports import LOOP_COUNT, LOOP_INDEX, CfgPorts, tensor, tensors

if TYPE_CHECKING:
    import torch

Json = Mapping[str, Any]
Embeds = Sequence["torch.Tensor"]

FluxVAE = VAE


class FluxTextEncoder(TextEncoder):
    """CLIP's pooled vector and T5's sequence."""

    weights: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")

    def setup_io(self) -> None:
        self.add_input("prompt", str)
        self.add_input("prompt_2", str, default=None)
        self.add_input("max_sequence_length", int, default=512)
        self.add_outputs()

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        import torch

        dtype = getattr(torch, self.params.get("dtype", "float32"))
        return load_encoders(str(model_path), self.weights, dtype, device)

    def execute(
        self,
        model_components: dict[str, Any],
        prompt: str,
        prompt_2: str | None = None,
        max_sequence_length: int = 512,
    ) -> dict[str, Any]:
        clip, t5 = model_components["text_encoder"], model_components["text_encoder_2"]
        ids, warnings = model_components["tokenizer"](prompt)
        pooled = clip(ids.to(clip.device), output_hidden_states=False).pooler_output.to(clip.dtype)
        ids, more = model_components["tokenizer_2"](prompt_2 or prompt, max_sequence_length)
        sequence = t5(ids.to(t5.device), output_hidden_states=False)[0].to(t5.dtype)
        return embeds(sequence, pooled, [*warnings, *more])


class Flux(Model):
    """Predicts the velocity of latents.

    `residuals` and `single_residuals`, a ControlNet's, are fetched by the blocks that add them. `repeat_residuals`:
    they are added in turn rather than each to a run of blocks (XLabs' ControlNets). With negative embeddings and a
    `true_cfg_scale` above 1 there is a second call, and guidance between the two. With the
    parameter `step_cache_threshold` there are outputs `step_cache`, for a loop to carry, and `hit`: see its module.
    """

    weights: ClassVar[tuple[str, ...]] = ("transformer",)
    load_params: ClassVar[tuple[str, ...] | None] = ("dtype",)
    takes_loras: ClassVar[bool] = True
    step_cache_ports: ClassVar[tuple[str, ...]] = ("step_cache",)
    cfg: ClassVar[CfgPorts] = CfgPorts(
        conditional=("prompt_embeds",),
        unconditional=("negative_prompt_embeds",),
        guidance="true_cfg_scale",
        output="noise_pred",
    )

    def setup_io(self) -> None:
        self.add_input("latents", LATENTS)
        self.add_input("prompt_embeds", EMBEDS)
        self.add_input("residuals", tensors(), deferred=True, default=None)
        self.add_input("single_residuals", tensors(), deferred=True, default=None)
        self.add_input("negative_prompt_embeds", EMBEDS, default=None)
        self.add_input("guidance_scale", float, default=3.5)
        self.add_input("true_cfg_scale", float, default=1.0)
        self.add_input("schedule", dict, default=None)
        self.add_input("repeat_residuals", bool, default=False)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_input("num_steps", int, default=LOOP_COUNT)
        self.add_output("noise_pred", LATENTS)
        step_cache.add_ports(self)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """As any call, but that both outputs of a ControlNet may be given as one."""
        if len(args) == 3:
            *args_before, inputs["residuals"] = args
            args = tuple(args_before)
        if isinstance(inputs.get("residuals"), tuple):
            inputs["residuals"], inputs["single_residuals"] = inputs["residuals"]
        return super().__call__(*args, **inputs)

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        import torch
        from diffusers import FluxTransformer2DModel

        dtype = getattr(torch, self.params.get("dtype", "float32"))
        module: Any = FluxTransformer2DModel.from_pretrained(
            model_path, subfolder="transformer", torch_dtype=dtype
        )
        return {"transformer": module.to(device).eval()}

    def execute(
        self,
        model_components: dict[str, Any],
        latents: torch.Tensor,
        prompt_embeds: Embeds,
        residuals: Sequence[torch.Tensor] | None = None,
        single_residuals: Sequence[torch.Tensor] | None = None,
        negative_prompt_embeds: Embeds | None = None,
        guidance_scale: float = 3.5,
        true_cfg_scale: float = 1.0,
        schedule: Json | None = None,
        repeat_residuals: bool = False,
        step: int = 0,
        num_steps: int | None = None,
        **state: Sequence[torch.Tensor] | None,
    ) -> dict[str, Any]:
        schedule = schedule_or_default(schedule, self.params.get("model_path"), num_steps, latents)
        transformer = model_components["transformer"]
        common = _common_inputs(transformer, latents, schedule, step, guidance_scale) | {
            "controlnet_block_samples": residuals or None,
            "controlnet_single_block_samples": single_residuals or None,
            "controlnet_blocks_repeat": repeat_residuals,
        }
        threshold, states = self.params.get(THRESHOLD) or 0.0, state.get("step_cache") or []
        half = len(states) if negative_prompt_embeds is None or true_cfg_scale <= 1 else len(states) // 2
        calls = [StepCache(states[:half], threshold)]
        noise_pred = calls[0].view(transformer)(**common, **_text_inputs(prompt_embeds))[0]
        if negative_prompt_embeds is not None and true_cfg_scale > 1:
            calls.append(StepCache(states[half:], threshold))
            negative = calls[1].view(transformer)(**common, **_text_inputs(negative_prompt_embeds))[0]
            noise_pred = guide(noise_pred, negative, true_cfg_scale)
        outputs = {
            "noise_pred": unpack(noise_pred, *latents.shape[-2:]),
            "step_cache": [tensor for call in calls for tensor in call.state],
            "hit": step_cache.hit(step, calls),
        }
        return {port.name: outputs[port.name] for port in self.output_ports}


class FluxControlNet(Model):
    """Residuals for the transformer's double blocks and, if it has such, its single blocks, from a control image:
    its latents, or its pixels where the ControlNet reads those itself (`reads_pixels`).

    `control_mode` chooses what a union ControlNet does. `guidance_start` and `guidance_end`: the share of the steps
    within which it takes part.
    """

    weights: ClassVar[tuple[str, ...]] = ("",)

    def setup_io(self) -> None:
        config = read_config(self.params["model_path"], "config.json")
        self.add_input("latents", LATENTS)
        self.add_input("prompt_embeds", EMBEDS)
        self.add_input(
            "control", tensor(shape=("batch", "control_channels", "control_height", "control_width"))
        )
        self.add_input("schedule", dict)
        self.add_input("conditioning_scale", float, default=1.0)
        self.add_input("guidance_scale", float, default=3.5)
        self.add_input("control_mode", int, default=None)
        self.add_input("guidance_start", float, default=0.0)
        self.add_input("guidance_end", float, default=1.0)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_input("num_steps", int, default=LOOP_COUNT)
        self.add_input("first", int, default=0)
        self.add_output("residuals", tensors(config.get("num_layers")))
        if self.has_single_blocks:
            self.add_output("single_residuals", tensors(config.get("num_single_layers")))

    @property
    def has_single_blocks(self) -> bool:
        """Whether a call gives residuals for single blocks as well, as its second output."""
        return bool(read_config(self.params["model_path"], "config.json").get("num_single_layers", 1))

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        import torch
        from diffusers import FluxControlNetModel

        dtype = getattr(torch, self.params.get("dtype", "float32"))
        net: Any = FluxControlNetModel.from_pretrained(model_path, torch_dtype=dtype)
        return {"controlnet": net.to(device).eval()}

    def execute(
        self,
        model_components: dict[str, Any],
        latents: torch.Tensor,
        prompt_embeds: Embeds,
        control: torch.Tensor,
        schedule: Json,
        conditioning_scale: float = 1.0,
        guidance_scale: float = 3.5,
        control_mode: int | None = None,
        guidance_start: float = 0.0,
        guidance_end: float = 1.0,
        step: int = 0,
        num_steps: int | None = None,
        first: int = 0,
    ) -> dict[str, Any]:
        import torch

        net = model_components["controlnet"]
        mode = None
        if control_mode is not None:
            mode = torch.full((latents.shape[0], 1), control_mode, device=latents.device)
        double, single = net(
            **_common_inputs(net, latents, schedule, step, guidance_scale),
            **_text_inputs(prompt_embeds),
            controlnet_cond=pack(control) if net.input_hint_block is None else control,
            controlnet_mode=mode,
            conditioning_scale=control_scale(
                conditioning_scale, step - first, (num_steps or 1) - first, guidance_start, guidance_end
            ),
        )
        outputs = {"residuals": double or [], "single_residuals": single or []}
        return {port.name: list(outputs[port.name]) for port in self.output_ports}


def reads_pixels(controlnet_path: str) -> bool:
    """Whether a ControlNet takes the control image's pixels rather than its latents."""
    return bool(read_config(controlnet_path, "config.json").get("conditioning_embedding_channels"))


def has_guidance(model_path: str) -> bool:
    """Whether the transformer is told a guidance scale: dev is, schnell isn't."""
    return bool(read_config(model_path, "transformer/config.json").get("guidance_embeds"))


def _common_inputs(
    module: Any, latents: torch.Tensor, schedule: Json, step: int, guidance_scale: float
) -> dict[str, Any]:
    import torch

    batch = latents.shape[0]
    guidance = None
    if module.config.guidance_embeds:
        guidance = torch.full([1], guidance_scale, device=latents.device, dtype=torch.float32).expand(batch)
    time = timestep(schedule, step).to(latents.device).expand(batch).to(latents.dtype)
    return {
        "hidden_states": pack(latents),
        "timestep": time / 1000,
        "guidance": guidance,
        "img_ids": _image_ids(latents),
        "return_dict": False,
    }


def _text_inputs(prompt_embeds: Embeds) -> dict[str, Any]:
    import torch

    sequence, pooled = prompt_embeds
    ids = torch.zeros(sequence.shape[1], 3, device=sequence.device, dtype=sequence.dtype)
    return {"encoder_hidden_states": sequence, "pooled_projections": pooled, "txt_ids": ids}


def _image_ids(latents: torch.Tensor) -> torch.Tensor:
    """Each token's row and column, in the last two of three numbers: tokens x 3."""
    import torch

    height, width = latents.shape[-2] // 2, latents.shape[-1] // 2
    ids = torch.zeros(height, width, 3)
    ids[..., 1] += torch.arange(height)[:, None]
    ids[..., 2] += torch.arange(width)[None, :]
    return ids.reshape(height * width, 3).to(latents.device, latents.dtype)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """Latents (batch x channels x height x width) as tokens of two by two: batch x tokens x 4 channels."""
    batch, channels, height, width = latents.shape
    squares = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return squares.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The reverse of `pack`."""
    batch, _, channels = tokens.shape
    squares = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return squares.reshape(batch, channels // 4, height, width)
