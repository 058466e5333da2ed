"""Tiny random checkpoints of every family in the ordinary diffusers folder layout, built without a network.

Owns their sizes. Weights are random, so pictures mean nothing; but every part matters: zero convolutions of
ControlNets and the up matrices of adapters are drawn at random too, and decoders are scaled so that pictures
have contrast. Schedulers are configured as those of the real models. 8 pixels per latent, as always.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TINY_FAMILIES = ("sd15", "sd15-inpaint", "sdxl", "sd3", "sd35", "flux", "flux-schnell")

_SAMPLE_SIZE = 8
"""Latents are this wide by default: pictures of 64 x 64."""
_NOISING = {
    **{"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "trained_betas": None},
    **{"clip_sample": False, "set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1},
}
"""As the files of the real models say it: with fields of other solvers, which a change of the solver then finds."""


def build_tiny(family: str, folder: str | Path, seed: int = 0) -> Path:
    """Write a checkpoint of `family` (of `TINY_FAMILIES`) that its stock pipeline loads; return the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _PIPELINES[_known(family)](family)
    pipeline.save_pretrained(str(folder))
    return Path(folder)


def build_tiny_controlnet(family: str, folder: str | Path, seed: int = 0) -> Path:
    """Write a ControlNet for the checkpoints of `family`, with residuals that matter; return the folder."""
    import diffusers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        denoiser = _denoiser(_known(family))
        net: Any
        if family.startswith("sd3"):
            net = diffusers.SD3ControlNetModel.from_transformer(
                denoiser, num_layers=2, num_extra_conditioning_channels=0
            )
        elif family.startswith("flux"):
            net = diffusers.FluxControlNetModel.from_transformer(
                denoiser, num_layers=2, num_single_layers=1, attention_head_dim=16, num_attention_heads=2
            )
        else:
            net = diffusers.ControlNetModel.from_unet(
                denoiser, conditioning_embedding_out_channels=(4, 8, 8, 16)
            )
        for parameter in net.parameters():
            if parameter.dim() > 1 and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
    net.save_pretrained(str(folder))
    return Path(folder)


def build_tiny_lora(
    family: str,
    folder: str | Path,
    seed: int = 0,
    rank: int = 4,
    alpha: int | None = None,
    text_encoders: bool = False,
) -> Path:
    """Write an adapter for the checkpoints of `family` with the stock pipeline's own `save_lora_weights`.

    `alpha` is `rank` by default. `text_encoders`: of the CLIP text encoders too (sd15, sdxl). Returns the folder.
    """
    from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model

    targets = {"denoiser": ["to_k", "to_q", "to_v", "to_out.0"]}
    if family.startswith("sd3"):
        targets["denoiser"] += ["add_k_proj", "ff.net.0.proj"]
    elif family.startswith("flux"):
        targets["denoiser"] += ["proj_mlp", "norm1.linear"]
    else:
        targets["denoiser"] += ["conv1", "ff.net.2", "proj_in"]
    attention = ["q_proj", "k_proj", "v_proj", "out_proj"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts: dict[str, Any] = {"denoiser": _denoiser(_known(family))}
        if text_encoders:
            parts |= {name: _clip(projected=name != "text_encoder") for name in _lora_encoders(family)}
        saved: dict[str, Any] = {}
        for name, part in parts.items():
            config = LoraConfig(
                r=rank,
                lora_alpha=rank if alpha is None else alpha,
                target_modules=targets.get(name, attention),
                init_lora_weights=False,
            )
            inject_adapter_in_model(config, part)
            layers = get_peft_model_state_dict(part)
            for tensor in layers.values():
                torch.nn.init.normal_(tensor, std=0.2)
            argument = (
                ("transformer" if family.startswith(("sd3", "flux")) else "unet")
                if name == "denoiser"
                else name
            )
            saved[f"{argument}_lora_layers"] = layers
            saved[f"{argument}_lora_adapter_metadata"] = config.to_dict()
    _pipeline_class(family).save_lora_weights(str(folder), **saved)
    return Path(folder)


def _known(family: str) -> str:
    if family not in TINY_FAMILIES:
        raise ValueError(f"family {family!r} is unknown; there are: {', '.join(TINY_FAMILIES)}")
    return family


def _pipeline_class(family: str) -> Any:
    import diffusers

    if family.startswith("sd15"):
        return diffusers.StableDiffusionPipeline
    if family == "sdxl":
        return diffusers.StableDiffusionXLPipeline
    return diffusers.StableDiffusion3Pipeline if family.startswith("sd3") else diffusers.FluxPipeline


def _lora_encoders(family: str) -> tuple[str, ...]:
    if family.startswith("sd15"):
        return ("text_encoder",)
    if family == "sdxl":
        return ("text_encoder", "text_encoder_2")
    raise ValueError(f"text_encoders: adapters of {family!r} have none")


def _denoiser(family: str) -> Any:
    import diffusers

    if family.startswith("sd15"):
        return diffusers.UNet2DConditionModel(
            sample_size=_SAMPLE_SIZE,
            in_channels=9 if family.endswith("inpaint") else 4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=16,
            attention_head_dim=2,
        )
    if family == "sdxl":
        return diffusers.UNet2DConditionModel(
            sample_size=_SAMPLE_SIZE,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(8, 16),
            layers_per_block=1,
            norm_num_groups=4,
            cross_attention_dim=32,
            transformer_layers_per_block=(1, 2),
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 16,
        )
    if family.startswith("sd3"):
        is_35 = family == "sd35"
        return diffusers.SD3Transformer2DModel(
            sample_size=_SAMPLE_SIZE,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=32,
            dual_attention_layers=(0,) if is_35 else (),
            qk_norm="rms_norm" if is_35 else None,
        )
    flux: Any = diffusers.FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=family == "flux",
        axes_dims_rope=(4, 4, 8),
    )
    with torch.no_grad():  # else texts and adapters hardly show in three steps
        for parameter in flux.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
    return flux


def _vae(latent_channels: int = 4, **config: Any) -> Any:
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=8 * _SAMPLE_SIZE,
        **config,
    )
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(2.0)
    return vae


def _clip(projected: bool) -> Any:
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=len(_clip_vocabulary()),
        hidden_size=16,
        intermediate_size=32,
        projection_dim=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
        hidden_act="gelu" if projected else "quick_gelu",
        initializer_range=0.1,
        initializer_factor=4.0,
    )
    cls = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    return cls(config).eval()


def _clip_vocabulary() -> dict[str, int]:
    """All bytes, as the last of a word and before; then the two marks."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    words = alphabet + [f"{letter}</w>" for letter in alphabet]
    return {word: index for index, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}


def _clip_tokenizer(pad: str = "<|endoftext|>") -> Any:
    from transformers import CLIPTokenizer

    return CLIPTokenizer(vocab=_clip_vocabulary(), merges=[], pad_token=pad, model_max_length=77)


def _t5_pieces() -> list[tuple[str, float]]:
    letters = [chr(code) for code in range(33, 127)]
    return [
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        ("▁", -2.0),
        *((letter, -4.0) for letter in letters),
    ]


def _t5() -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=len(_t5_pieces()),
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        use_cache=False,
    )
    return transformers.T5EncoderModel(config).eval()


def _t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    return T5Tokenizer(vocab=_t5_pieces(), extra_ids=0, model_max_length=512)


def _sd15(family: str) -> Any:
    from diffusers import PNDMScheduler

    return _pipeline_class(family)(
        unet=_denoiser(family),
        vae=_vae(scaling_factor=0.18215),
        text_encoder=_clip(projected=False),
        tokenizer=_clip_tokenizer(),
        scheduler=PNDMScheduler.from_config(_NOISING),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sdxl(family: str) -> Any:
    from diffusers import EulerDiscreteScheduler

    return _pipeline_class(family)(
        unet=_denoiser(family),
        vae=_vae(scaling_factor=0.13025),
        text_encoder=_clip(projected=False),
        text_encoder_2=_clip(projected=True),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(pad="!"),
        scheduler=EulerDiscreteScheduler.from_config({**_NOISING, "timestep_spacing": "leading"}),
    )


def _sd3(family: str) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return _pipeline_class(family)(
        transformer=_denoiser(family),
        vae=_vae(
            16, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False
        ),
        text_encoder=_clip(projected=True),
        text_encoder_2=_clip(projected=True),
        text_encoder_3=_t5(),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(pad="!"),
        tokenizer_3=_t5_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def _flux(family: str) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    dev = family == "flux"
    return _pipeline_class(family)(
        transformer=_denoiser(family),
        vae=_vae(
            16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False
        ),
        text_encoder=_clip(projected=False),
        text_encoder_2=_t5(),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_t5_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if dev else 1.0, use_dynamic_shifting=dev),
    )


_PIPELINES: dict[str, Callable[[str], Any]] = {
    "sd15": _sd15,
    "sd15-inpaint": _sd15,
    "sdxl": _sdxl,
    "sd3": _sd3,
    "sd35": _sd3,
    "flux": _flux,
    "flux-schnell": _flux,
}
