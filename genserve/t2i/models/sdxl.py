"""Stable Diffusion XL: text encoders, UNet and ControlNet, as diffusers' pipelines run them.

Besides the prompt, the UNet is told the pooled prompt and six numbers: the size that a training image had, where it
was cropped, and the size that is wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from genserve.core.errors import ConfigError
from genserve.t2i.model import Model
from genserve.t2i.models import unet as unets
from genserve.t2i.models.checkpoint import read_config, vae_scale_factor
from genserve.t2i.models.text import TextEncoder, Tokenizer, embeds, load_encoder
from genserve.t2i.ports import JSON, CfgPorts

if TYPE_CHECKING:
    import torch


class SDXLTextEncoder(TextEncoder):
    """Two CLIP encoders. No prompt at all (None, as against "") gives zeros, where the checkpoint is so configured."""

    weights: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")
    content: ClassVar[tuple[str, ...]] = (*TextEncoder.content, "model_index.json")
    takes_loras: ClassVar[bool] = True

    def setup_io(self) -> None:
        self.add_input("prompt", str, default=None)
        self.add_input("prompt_2", str, default=None)
        self.add_outputs()

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        import torch

        index = read_config(str(model_path), "model_index.json")
        dtype = getattr(torch, self.params.get("dtype", "float32"))
        parts: dict[str, Any] = {"zeros": index.get("force_zeros_for_empty_prompt", True)}
        for name in self.weights:
            loaded = load_encoder(str(model_path), name, dtype, device)
            if loaded is None:
                raise ConfigError(f"{model_path} has no {name}: only base models of SDXL are supported")
            parts[name], parts[name.replace("text_encoder", "tokenizer")] = loaded
        return parts

    def execute(
        self, model_components: dict[str, Any], prompt: str | None = None, prompt_2: str | None = None
    ) -> dict[str, Any]:
        import torch

        one, two = model_components["text_encoder"], model_components["text_encoder_2"]
        first, _, warnings_1 = _encode(one, model_components["tokenizer"], prompt or "")
        second, pooled, warnings_2 = _encode(two, model_components["tokenizer_2"], prompt_2 or prompt or "")
        sequence = torch.cat([first, second], dim=-1).to(two.dtype)
        if prompt is None and model_components["zeros"]:
            return embeds(torch.zeros_like(sequence), torch.zeros_like(pooled), ())
        return embeds(sequence, pooled, [*warnings_1, *warnings_2])


def _encode(encoder: Any, tokenizer: Tokenizer, prompt: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    ids, warnings = tokenizer(prompt)
    out = encoder(ids.to(encoder.device), output_hidden_states=True)
    return out.hidden_states[-2], out[0], warnings


class SDXLSizes(Model):
    """The six numbers that the UNet is told; by default, that nothing was scaled nor cropped."""

    foldable: ClassVar[bool] = True

    def setup_io(self) -> None:
        self.add_input("height", int)
        self.add_input("width", int)
        self.add_input("original_height", int, default=None)
        self.add_input("original_width", int, default=None)
        self.add_input("crop_top", int, default=0)
        self.add_input("crop_left", int, default=0)
        self.add_input("target_height", int, default=None)
        self.add_input("target_width", int, default=None)
        self.add_output("sizes", JSON)

    def execute(
        self,
        model_components: dict[str, Any],
        height: int,
        width: int,
        original_height: int | None = None,
        original_width: int | None = None,
        crop_top: int = 0,
        crop_left: int = 0,
        target_height: int | None = None,
        target_width: int | None = None,
    ) -> dict[str, Any]:
        original = [original_height or height, original_width or width]
        target = [target_height or height, target_width or width]
        return {"sizes": [*original, crop_top, crop_left, *target]}


class SDXLUNet(Model):
    """Predicts the noise (or velocity: the schedule knows) of latents. With negative embeddings and a scale above 1,
    one batch of both and guidance. `sizes`: see `SDXLSizes`; `negative_sizes` are the same by default."""

    weights: ClassVar[tuple[str, ...]] = ("unet",)
    content: ClassVar[tuple[str, ...]] = ("vae/config.json",)
    takes_loras: ClassVar[bool] = True
    cfg: ClassVar[CfgPorts] = CfgPorts(
        conditional=("prompt_embeds", "sizes"),
        unconditional=("negative_prompt_embeds", "negative_sizes"),
        guidance="guidance_scale",
        output="noise_pred",
        branch="branch",
    )

    def setup_io(self) -> None:
        unets.add_unet_ports(self)
        self.add_input("sizes", JSON, default=None)
        self.add_input("negative_sizes", JSON, default=None)

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        return {**unets.load_unet(self.params, device), "scale": vae_scale_factor(str(model_path))}

    def execute(
        self,
        model_components: dict[str, Any],
        latents: torch.Tensor,
        prompt_embeds: unets.Embeds,
        negative_prompt_embeds: unets.Embeds | None = None,
        guidance_scale: float = 7.5,
        sizes: Sequence[int] | None = None,
        negative_sizes: Sequence[int] | None = None,
        **inputs: Any,
    ) -> dict[str, Any]:
        negative = negative_prompt_embeds if unets.is_guided(negative_prompt_embeds, guidance_scale) else None
        noise_pred = unets.predict(
            model_components["unet"],
            latents,
            prompt_embeds,
            negative_prompt_embeds=negative,
            guidance_scale=guidance_scale,
            added=_added(latents, model_components["scale"], prompt_embeds, negative, sizes, negative_sizes),
            **inputs,
        )
        return {"noise_pred": noise_pred}


class SDXLControlNet(Model):
    """Residuals for the UNet from a control image. `guidance_start` and `guidance_end`: the share of the steps within
    which it takes part."""

    weights: ClassVar[tuple[str, ...]] = ("",)

    def setup_io(self) -> None:
        unets.add_controlnet_ports(self)
        self.add_input("sizes", JSON, default=None)
        self.add_input("negative_sizes", JSON, default=None)

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        return unets.load_controlnet(self.params, device)

    def execute(
        self,
        model_components: dict[str, Any],
        latents: torch.Tensor,
        prompt_embeds: unets.Embeds,
        control: torch.Tensor,
        negative_prompt_embeds: unets.Embeds | None = None,
        guidance_scale: float = 7.5,
        guess_mode: bool = False,
        sizes: Sequence[int] | None = None,
        negative_sizes: Sequence[int] | None = None,
        **inputs: Any,
    ) -> dict[str, Any]:
        net = model_components["controlnet"]
        guess_mode = guess_mode or bool(net.config.global_pool_conditions)
        negative = negative_prompt_embeds if unets.is_guided(negative_prompt_embeds, guidance_scale) else None
        seen = None if guess_mode else negative
        scale = control.shape[-2] // latents.shape[-2]
        return unets.control(
            net,
            latents,
            prompt_embeds,
            control,
            negative_prompt_embeds=negative,
            guidance_scale=guidance_scale,
            guess_mode=guess_mode,
            added=_added(latents, scale, prompt_embeds, seen, sizes, negative_sizes),
            **inputs,
        )


def _added(
    latents: torch.Tensor,
    scale: int,
    prompt_embeds: unets.Embeds,
    negative: unets.Embeds | None,
    sizes: Sequence[int] | None,
    negative_sizes: Sequence[int] | None,
) -> dict[str, torch.Tensor]:
    """Pooled prompts and sizes, a row for each row of the batch."""
    import torch

    height, width = (side * scale for side in latents.shape[-2:])
    sizes = sizes or [height, width, 0, 0, height, width]
    pooled = prompt_embeds[1]
    rows, vectors = [sizes], [pooled]
    if negative is not None:
        rows, vectors = [negative_sizes or sizes, sizes], [negative[1], pooled]
    times = torch.tensor(rows, dtype=prompt_embeds[0].dtype).to(latents.device)
    return {"text_embeds": torch.cat(vectors), "time_ids": times}
