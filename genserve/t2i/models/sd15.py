"""Stable Diffusion 1.x: text encoder, UNet and ControlNet, as diffusers' pipelines run them."""

from __future__ import annotations

from typing import Any, ClassVar

from genserve.core.errors import ConfigError
from genserve.t2i.model import Model
from genserve.t2i.models import unet as unets
from genserve.t2i.models.text import TextEncoder, embeds, load_encoder
from genserve.t2i.ports import CfgPorts


class SD15TextEncoder(TextEncoder):
    """One CLIP encoder. The UNet sees its last hidden states; the pooled vector is for whoever compares prompts."""

    weights: ClassVar[tuple[str, ...]] = ("text_encoder",)
    takes_loras: ClassVar[bool] = True

    def setup_io(self) -> None:
        self.add_input("prompt", str)
        self.add_outputs()

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        import torch

        dtype = getattr(torch, self.params.get("dtype", "float32"))
        loaded = load_encoder(str(model_path), "text_encoder", dtype, device)
        if loaded is None:
            raise ConfigError(f"{model_path} has no text encoder")
        return {"text_encoder": loaded[0], "tokenizer": loaded[1]}

    def execute(self, model_components: dict[str, Any], prompt: str) -> dict[str, Any]:
        encoder = model_components["text_encoder"]
        ids, warnings = model_components["tokenizer"](prompt)
        out = encoder(ids.to(encoder.device))
        return embeds(out[0].to(encoder.dtype), out[1], warnings)


class SD15UNet(Model):
    """Predicts the noise (or velocity: the schedule knows) of latents. With negative embeddings and a scale above 1,
    one batch of both and guidance. `paint`: see `PaintInputs`. `branch`: see `CfgPorts`."""

    weights: ClassVar[tuple[str, ...]] = ("unet",)
    takes_loras: ClassVar[bool] = True
    cfg: ClassVar[CfgPorts] = CfgPorts(
        conditional=("prompt_embeds",),
        unconditional=("negative_prompt_embeds",),
        guidance="guidance_scale",
        output="noise_pred",
        branch="branch",
    )

    def setup_io(self) -> None:
        unets.add_unet_ports(self)

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        return unets.load_unet(self.params, device)

    def execute(self, model_components: dict[str, Any], **inputs: Any) -> dict[str, Any]:
        return {"noise_pred": unets.predict(model_components["unet"], **inputs)}


class SD15ControlNet(Model):
    """Residuals for the UNet from a control image. `guidance_start` and `guidance_end`: the share of the steps within
    which it takes part."""

    weights: ClassVar[tuple[str, ...]] = ("",)

    def setup_io(self) -> None:
        unets.add_controlnet_ports(self)

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        return unets.load_controlnet(self.params, device)

    def execute(self, model_components: dict[str, Any], **inputs: Any) -> dict[str, Any]:
        return unets.control(model_components["controlnet"], **inputs)
