"""A tiny random DiffusionGemma, for tests and for trying things out without a network.

Its weights are scaled so that passes settle: with wider ones, what a pass is told of the last one
magnifies rounding about eightfold a pass, and no two ways of summing would agree on the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from genserve.core.models.tiny import make_tiny_tokenizer

if TYPE_CHECKING:
    from transformers import DiffusionGemmaForBlockDiffusion

CANVAS_TOKENS = 16
VOCAB_SIZE = 300  # of the tiny tokenizer
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "sliding_window": 12,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 16,
}


def make_tiny_diffusion_gemma(seed: int = 0, **text: Any) -> DiffusionGemmaForBlockDiffusion:
    """A random model in evaluation mode, with a canvas of 16 tokens and settings under which passes vary.

    `text` overrides keys of the text config; a `canvas_length` among them is the model's.
    """
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

    canvas_length = text.pop("canvas_length", CANVAS_TOKENS)
    merged = {**_TEXT, "vocab_size": VOCAB_SIZE, **text}
    vocab_size = merged["vocab_size"]
    config = DiffusionGemmaConfig(
        text_config=merged,
        vision_config=_VISION,
        canvas_length=canvas_length,
        image_token_id=vocab_size - 3,
        boi_token_id=vocab_size - 2,
        eoi_token_id=vocab_size - 1,
    )
    model = DiffusionGemmaForBlockDiffusion(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.dim() == 1 and ("norm" in name or "scale" in name)
            parameter.copy_(noise * 0.1 + (1.0 if is_scale else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # encoder and decoder differ in these alone
                buffer.copy_(1 + 0.2 * torch.rand(1, generator=generator))
        model.model.decoder.embed_tokens.weight.mul_(5)
        model.model.decoder.self_conditioning.down_proj.weight.mul_(0.3)
    settings: Any = model.generation_config
    settings.eos_token_id, settings.pad_token_id = merged["eos_token_id"], merged["pad_token_id"]
    settings.max_denoising_steps, settings.t_min, settings.t_max = 16, 0.2, 0.8
    settings.stability_threshold, settings.confidence_threshold = 1, 0.6
    settings.sampler_config = EntropyBoundSamplerConfig(0.5)
    return model.eval().requires_grad_(False)


def write_tiny_diffusion_gemma(folder: str | Path, seed: int = 0, **text: Any) -> Path:
    """Save such a model, with a tokenizer and a chat template, as an ordinary folder; returns the folder."""
    folder = Path(folder)
    tokenizer = make_tiny_tokenizer(VOCAB_SIZE)
    make_tiny_diffusion_gemma(seed, **text).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
