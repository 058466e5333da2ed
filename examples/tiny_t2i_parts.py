"""The parts of the tiny Stable Diffusion 3 and its folder: what their sizes are and how they are put together.

Knows nothing of training. Everything is a stock class of diffusers and transformers.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tiny_t2i_data as data
import torch
from torch import Tensor, nn

CLIP_TOKENS, T5_TOKENS = 20, 20  # places for tokens of a prompt
CLIP_WIDTH, T5_WIDTH = 64, 128
NUM_LATENT_CHANNELS, LATENT_SIDE = 4, data.SIDE // 4


@dataclass(slots=True)
class Parts:
    """The trainable parts of the pipeline and its tokenizers."""

    vae: Any
    transformer: Any
    text_encoder: Any
    text_encoder_2: Any
    text_encoder_3: Any
    tokenizer: Any
    tokenizer_2: Any
    tokenizer_3: Any

    def modules(self) -> dict[str, nn.Module]:
        """The parts that have weights, by their names in the folder."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: part for name, part in named if isinstance(part, nn.Module)}


def make_vae() -> Any:
    """An autoencoder with a fourth of the pixels' side, its scaling still to be measured."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 48, 64),
        layers_per_block=1,
        latent_channels=NUM_LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=data.SIDE,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def make_clip_tokenizer() -> Any:
    """Byte-level pairs in which each word of the prompts is one token."""
    from tokenizers import Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    learned = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learned.pre_tokenizer = WhitespaceSplit()
    trainer = trainers.BpeTrainer(vocab_size=10_000, end_of_word_suffix="</w>", show_progress=False)
    learned.train_from_iterator(sorted({word.lower() for word in data.words()}), trainer)
    merges: Any = [tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    tokens = [*letters, *(letter + "</w>" for letter in letters), *(a + b for a, b in merges)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    for token in ("<|startoftext|>", "<|endoftext|>"):
        vocab[token] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CLIP_TOKENS)


def make_t5_tokenizer() -> Any:
    """Pieces for each word of the prompts, and letters for the others."""
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    words = sorted({word for word in data.words() if word.isalpha()})
    pieces += [("▁" + word, -1.0 - 0.01 * index) for index, word in enumerate(words)]
    pieces += [(chr(code), -8.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=256)


def make_parts(vae: Any, width: int = 160, num_layers: int = 4) -> Parts:
    """Untrained parts around `vae`; the heads are 32 wide."""
    from diffusers import SD3Transformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    clip, t5 = make_clip_tokenizer(), make_t5_tokenizer()
    clip_config = {
        "vocab_size": len(clip),
        "hidden_size": CLIP_WIDTH,
        "intermediate_size": 2 * CLIP_WIDTH,
        "projection_dim": CLIP_WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": CLIP_TOKENS,
        "bos_token_id": clip.bos_token_id,
        "eos_token_id": clip.eos_token_id,
        "pad_token_id": clip.pad_token_id,
    }
    t5_config = T5Config(
        vocab_size=len(t5),
        d_model=T5_WIDTH,
        d_kv=32,
        num_heads=4,
        d_ff=192,
        num_layers=2,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        pad_token_id=t5.pad_token_id,
        eos_token_id=t5.eos_token_id,
    )
    transformer = SD3Transformer2DModel(
        sample_size=LATENT_SIDE,
        patch_size=2,
        in_channels=NUM_LATENT_CHANNELS,
        out_channels=NUM_LATENT_CHANNELS,
        num_layers=num_layers,
        attention_head_dim=32,
        num_attention_heads=width // 32,
        joint_attention_dim=T5_WIDTH,
        caption_projection_dim=width,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=2 * LATENT_SIDE,
    )
    return Parts(
        vae,
        transformer,
        CLIPTextModelWithProjection(CLIPTextConfig(**clip_config, hidden_act="quick_gelu")),
        CLIPTextModelWithProjection(CLIPTextConfig(**clip_config, hidden_act="gelu")),
        T5EncoderModel(t5_config),
        clip,
        make_clip_tokenizer(),
        t5,
    )


class PlainAttention:
    """The joint attention of the transformer's blocks without a fused kernel, whose backward pass is slow on CPUs."""

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """What the stock processor gives: the pictures' and the prompts' part of the result."""
        num_rows, num_patches, _width = hidden_states.shape

        def heads(own: nn.Module, added: nn.Module) -> Tensor:
            joint = torch.cat([own(hidden_states), added(encoder_hidden_states)], 1)
            return joint.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

        query = heads(attn.to_q, attn.add_q_proj)
        key, value = heads(attn.to_k, attn.add_k_proj), heads(attn.to_v, attn.add_v_proj)
        shares = torch.softmax((query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2), -1)
        out = (shares @ value).transpose(1, 2).reshape(num_rows, -1, attn.to_q.out_features)
        own, added = out[:, :num_patches], out[:, num_patches:]
        return attn.to_out[0](own), added if attn.context_pre_only else attn.to_add_out(added)


def encode_prompts(parts: Parts, prompts: list[str], num_t5_tokens: int = T5_TOKENS) -> tuple[Tensor, Tensor]:
    """Prompt embeddings [rows, tokens, T5_WIDTH] and pooled ones [rows, 2 * CLIP_WIDTH], as the stock pipeline makes them."""
    states, pooled = [], []
    for tokenizer, encoder in (
        (parts.tokenizer, parts.text_encoder),
        (parts.tokenizer_2, parts.text_encoder_2),
    ):
        ids = tokenizer(
            prompts, padding="max_length", max_length=CLIP_TOKENS, truncation=True, return_tensors="pt"
        ).input_ids
        out = encoder(ids, output_hidden_states=True)
        states.append(out.hidden_states[-2])
        pooled.append(out[0])
    ids = parts.tokenizer_3(
        prompts, padding="max_length", max_length=num_t5_tokens, truncation=True, return_tensors="pt"
    ).input_ids
    return torch.cat([torch.cat(states, -1), parts.text_encoder_3(ids)[0]], 1), torch.cat(pooled, -1)


def measure_scaling(vae: Any, latents: Tensor) -> None:
    """Set the autoencoder's shift and scaling so that `latents` would have mean 0 and deviation 1."""
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())


def save_pipeline(parts: Parts, folder: Path, shift: float = 1.0) -> None:
    """Write the folder of a stock StableDiffusion3Pipeline in half precision."""
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    named = {field.name: getattr(parts, field.name) for field in fields(parts)}
    kept = {
        name: {k: v.clone() for k, v in part.state_dict().items()} for name, part in parts.modules().items()
    }
    pipeline: Any = StableDiffusion3Pipeline(scheduler=scheduler, **named)
    pipeline.to(torch.float16).save_pretrained(folder)
    for name, part in parts.modules().items():
        part.float().load_state_dict(kept[name])
    for config in folder.glob("**/config.json"):
        config.write_text(re.sub(r'\n  "_name_or_path": .*', "", config.read_text()))


def make_controlnet(transformer: Any, num_layers: int = 2) -> Any:
    """A ControlNet that begins as a copy of the first blocks of `transformer` and as yet changes nothing."""
    from diffusers import SD3ControlNetModel

    return SD3ControlNetModel.from_transformer(
        transformer, num_extra_conditioning_channels=0, num_layers=num_layers
    )


def save_controlnet(controlnet: Any, folder: Path) -> None:
    """Write the ControlNet's folder in half precision; `controlnet` itself is left as it is."""
    copy.deepcopy(controlnet).half().save_pretrained(folder)


LORA_TARGETS = [
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "ff.net.0.proj",
    "ff.net.2",
]


def add_lora(transformer: Any, rank: int) -> None:
    """Give `transformer` an adapter that as yet changes nothing; nothing else of it can be trained then."""
    from peft import LoraConfig

    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA_TARGETS))


def save_lora(transformer: Any, folder: Path) -> None:
    """Write the adapter as the stock pipeline loads it, in half precision."""
    from diffusers import StableDiffusion3Pipeline
    from peft.utils import get_peft_model_state_dict

    layers = {name: weight.half() for name, weight in get_peft_model_state_dict(transformer).items()}
    StableDiffusion3Pipeline.save_lora_weights(folder, transformer_lora_layers=layers)


def load_pipeline(folder: Path) -> Any:
    """The stock pipeline from its folder, in single precision, without progress bars."""
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
