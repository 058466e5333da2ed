"""Stable Diffusion 3 and 3.5: text encoder, transformer and ControlNet, as diffusers' pipelines run them.

Owns what the stock pipelines do around the unmodified modules; guidance is a fused batch of (negative, prompt),
as theirs. Everything else of the family (schedule, latents, autoencoder) is shared with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from genserve.core.errors import InvalidRequest
from genserve.core.models.registry import located
from genserve.t2i.model import Model
from genserve.t2i.models.checkpoint import read_config
from genserve.t2i.models.latents import LATENTS, guide, own_row
from genserve.t2i.models.lazy import map_tensors
from genserve.t2i.models.schedule import control_scale, schedule_or_default, timestep
from genserve.t2i.models.step_cache import THRESHOLD, StepCache, add_step_cache, step_hit
from genserve.t2i.models.text import EMBEDS, TextEncoder, Tokenizer, embeds, load_encoders
from genserve.t2i.ports import LOOP_COUNT, LOOP_INDEX, CfgPorts, tensors

if TYPE_CHECKING:
    import torch

Json = Mapping[str, Any]
Embeds = Sequence["torch.Tensor"]


class SD3TextEncoder(TextEncoder):
    """Two CLIP encoders and a T5 (which a checkpoint may lack: zeros stand for it)."""

    weights: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2", "text_encoder_3")
    content: ClassVar[tuple[str, ...]] = (
        "tokenizer",
        "tokenizer_2",
        "tokenizer_3",
        "transformer/config.json",
    )

    def setup_io(self) -> None:
        self.add_input("prompt", str)
        self.add_input("prompt_2", str, default=None)
        self.add_input("prompt_3", str, default=None)
        self.add_input("clip_skip", int, default=None)
        self.add_input("max_sequence_length", int, default=256)
        self.add_outputs()

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        import torch

        dtype = getattr(torch, self.params.get("dtype", "float32"))
        width = read_config(str(model_path), "transformer/config.json")["joint_attention_dim"]
        return {"width": width, **load_encoders(str(model_path), self.weights, dtype, device)}

    def execute(
        self,
        model_components: dict[str, Any],
        prompt: str,
        prompt_2: str | None = None,
        prompt_3: str | None = None,
        clip_skip: int | None = None,
        max_sequence_length: int = 256,
    ) -> dict[str, Any]:
        import torch

        parts = model_components
        first, pooled_1, warnings_1 = _clip(parts["text_encoder"], parts["tokenizer"], prompt, clip_skip)
        second, pooled_2, warnings_2 = _clip(
            parts["text_encoder_2"], parts["tokenizer_2"], prompt_2 or prompt, clip_skip
        )
        clip = torch.cat([first, second], dim=-1)
        warnings_3: list[str] = []
        if "text_encoder_3" not in parts:
            shape = (1, max_sequence_length, parts["width"])
            text = torch.zeros(shape, device=clip.device, dtype=clip.dtype)
        else:
            encoder = parts["text_encoder_3"]
            ids, warnings_3 = parts["tokenizer_3"](prompt_3 or prompt, max_sequence_length)
            text = encoder(ids.to(encoder.device))[0].to(encoder.dtype)
        clip = torch.nn.functional.pad(clip, (0, text.shape[-1] - clip.shape[-1]))
        return embeds(
            torch.cat([clip, text], dim=-2),
            torch.cat([pooled_1, pooled_2], dim=-1),
            [*warnings_1, *warnings_2, *warnings_3],
        )


def _clip(
    encoder: Any, tokenizer: Tokenizer, prompt: str, skip: int | None
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    ids, warnings = tokenizer(prompt)
    out = encoder(ids.to(encoder.device), output_hidden_states=True)
    return out.hidden_states[-((skip or 0) + 2)].to(encoder.dtype), out[0], warnings


class SD3Transformer(Model):
    """Predicts the velocity of latents. With negative embeddings and a scale above 1, one batch of both and guidance.

    `residuals`, a ControlNet's, are fetched by the blocks that add them. `branch`: see `CfgPorts`. With the
    parameter `step_cache_threshold` there are outputs `step_cache`, for a loop to carry, and `hit`: see its module.
    """

    weights: ClassVar[tuple[str, ...]] = ("transformer",)
    load_params: ClassVar[tuple[str, ...] | None] = ("dtype",)
    takes_loras: ClassVar[bool] = True
    step_cache_ports: ClassVar[tuple[str, ...]] = ("step_cache",)
    cfg: ClassVar[CfgPorts] = CfgPorts(
        conditional=("prompt_embeds",),
        unconditional=("negative_prompt_embeds",),
        guidance="guidance_scale",
        output="noise_pred",
        branch="branch",
    )

    def setup_io(self) -> None:
        self.add_input("latents", LATENTS)
        self.add_input("prompt_embeds", EMBEDS)
        self.add_input("residuals", tensors(), deferred=True, default=None)
        self.add_input("negative_prompt_embeds", EMBEDS, default=None)
        self.add_input("guidance_scale", float, default=7.0)
        self.add_input("schedule", dict, default=None)
        self.add_input("branch", int, default=None)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_input("num_steps", int, default=LOOP_COUNT)
        self.add_output("noise_pred", LATENTS)
        add_step_cache(self)

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        import torch
        from diffusers import SD3Transformer2DModel

        dtype = getattr(torch, self.params.get("dtype", "float32"))
        module = SD3Transformer2DModel.from_pretrained(model_path, subfolder="transformer", torch_dtype=dtype)
        return {"transformer": module.to(device).eval()}

    def execute(
        self,
        model_components: dict[str, Any],
        latents: torch.Tensor,
        prompt_embeds: Embeds,
        residuals: Sequence[torch.Tensor] | None = None,
        negative_prompt_embeds: Embeds | None = None,
        guidance_scale: float = 7.0,
        schedule: Json | None = None,
        branch: int | None = None,
        step: int = 0,
        num_steps: int | None = None,
        step_cache: Sequence[torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        schedule = schedule_or_default(schedule, self.params.get("model_path"), num_steps, latents)
        batch = guided_batch(latents, prompt_embeds, negative_prompt_embeds, guidance_scale)
        if residuals is not None and branch is not None:
            residuals = map_tensors(residuals, lambda pair: own_row(pair, branch))
        cached = StepCache(step_cache, self.params.get(THRESHOLD) or 0.0)
        noise_pred = cached.view(model_components["transformer"])(
            hidden_states=batch.latents,
            timestep=timestep(schedule, step).to(latents.device).expand(batch.latents.shape[0]),
            encoder_hidden_states=batch.sequence,
            pooled_projections=batch.pooled,
            block_controlnet_hidden_states=residuals,
            return_dict=False,
        )[0]
        if batch.is_guided:
            uncond, cond = noise_pred.chunk(2)
            noise_pred = guide(cond, uncond, guidance_scale)
        outputs = {
            "noise_pred": noise_pred,
            "step_cache": cached.state,
            "hit": step_hit(step, [cached]),
        }
        return {port.name: outputs[port.name] for port in self.output_ports}


class SD3ControlNet(Model):
    """Residuals for the transformer's blocks from a control image's latents.

    With negative embeddings and a scale above 1 they are rows of a (negative, prompt) pair. `guidance_start` and
    `guidance_end`: the share of the steps within which it takes part. Parameter `transformer_path`: the checkpoint
    whose position embedding ControlNets without their own share (SD3.5 Large's).
    """

    weights: ClassVar[tuple[str, ...]] = ("",)

    def setup_io(self) -> None:
        config = read_config(self.params["model_path"], "config.json")
        self.add_input("latents", LATENTS)
        self.add_input("prompt_embeds", EMBEDS)
        self.add_input("control_latents", LATENTS)
        self.add_input("schedule", dict)
        self.add_input("conditioning_scale", float, default=1.0)
        self.add_input("negative_prompt_embeds", EMBEDS, default=None)
        self.add_input("guidance_scale", float, default=7.0)
        self.add_input("guidance_start", float, default=0.0)
        self.add_input("guidance_end", float, default=1.0)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_input("num_steps", int, default=LOOP_COUNT)
        self.add_input("first", int, default=0)
        self.add_output("residuals", tensors(config.get("num_layers")))

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        import torch
        from diffusers import SD3ControlNetModel, SD3Transformer2DModel

        dtype = getattr(torch, self.params.get("dtype", "float32"))
        net: Any = SD3ControlNetModel.from_pretrained(model_path, torch_dtype=dtype)
        if not net.config.use_pos_embed:
            path = self.params.get("transformer_path")
            if path is None:
                raise InvalidRequest("transformer_path", "this ControlNet shares its transformer's positions")
            transformer = SD3Transformer2DModel.from_pretrained(located(path), subfolder="transformer")
            net.pos_embed = net._get_pos_embed_from_transformer(transformer).to(dtype)
        return {"controlnet": net.to(device).eval()}

    def execute(
        self,
        model_components: dict[str, Any],
        latents: torch.Tensor,
        prompt_embeds: Embeds,
        control_latents: torch.Tensor,
        schedule: Json,
        conditioning_scale: float = 1.0,
        negative_prompt_embeds: Embeds | None = None,
        guidance_scale: float = 7.0,
        guidance_start: float = 0.0,
        guidance_end: float = 1.0,
        step: int = 0,
        num_steps: int | None = None,
        first: int = 0,
    ) -> dict[str, Any]:
        import torch

        net = model_components["controlnet"]
        batch = guided_batch(latents, prompt_embeds, negative_prompt_embeds, guidance_scale)
        pooled = batch.pooled
        if net.config.force_zeros_for_pooled_projection:
            pooled = torch.zeros_like(pooled)
        residuals = net(
            hidden_states=batch.latents,
            timestep=timestep(schedule, step).to(latents.device).expand(batch.latents.shape[0]),
            encoder_hidden_states=batch.sequence if net.config.joint_attention_dim is not None else None,
            pooled_projections=pooled,
            controlnet_cond=torch.cat([control_latents] * batch.latents.shape[0]),
            conditioning_scale=control_scale(
                conditioning_scale, step - first, (num_steps or 1) - first, guidance_start, guidance_end
            ),
            return_dict=False,
        )[0]
        return {"residuals": list(residuals)}


def control_vae_shift(controlnet_path: str) -> bool:
    """Whether the control image's latents are shifted as the model's own are; InstantX's ControlNets say no."""
    return not read_config(controlnet_path, "config.json").get("force_zeros_for_pooled_projection", True)


@dataclass(frozen=True, slots=True)
class Batch:
    """What a model is called with: one row, or the pair (negative, prompt)."""

    latents: torch.Tensor
    sequence: torch.Tensor
    pooled: torch.Tensor
    is_guided: bool


def guided_batch(
    latents: torch.Tensor, prompt_embeds: Embeds, negative_prompt_embeds: Embeds | None, guidance_scale: float
) -> Batch:
    """One row of the prompt alone, or, where there is guidance, a pair of rows."""
    import torch

    sequence, pooled = prompt_embeds
    if negative_prompt_embeds is None or guidance_scale <= 1:
        return Batch(latents, sequence, pooled, False)
    negative_sequence, negative_pooled = negative_prompt_embeds
    return Batch(
        torch.cat([latents] * 2),
        torch.cat([negative_sequence, sequence]),
        torch.cat([negative_pooled, pooled]),
        True,
    )
