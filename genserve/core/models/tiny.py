"""Tiny random models of real architectures, for tests, docs and trying things out without a network.

Weights are drawn wide (a standard deviation of tenths, not hundredths), so that greedy decoding has
clear margins and its text varies: two implementations that agree do so for a reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from genserve.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_COMMON: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_LLAMA_LIKE: dict[str, Any] = {**_COMMON, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
# Gemma scales its embeddings up; tied to the head they would only ever repeat the last token.
_GEMMA_LIKE: dict[str, Any] = {**_LLAMA_LIKE, "tie_word_embeddings": False}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

TINY_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA_LIKE, "model_type": "llama"},
    "qwen2": {**_LLAMA_LIKE, "model_type": "qwen2", "head_dim": 12},
    "qwen3": {**_LLAMA_LIKE, "model_type": "qwen3"},
    "mistral": {**_LLAMA_LIKE, "model_type": "mistral", "sliding_window": 24},
    "gemma": {**_GEMMA_LIKE, "model_type": "gemma", "num_key_value_heads": 1},
    "gemma2": {
        **_GEMMA_LIKE,
        "model_type": "gemma2",
        "sliding_window": 24,
        "layer_types": _ALTERNATING,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        **_GEMMA_LIKE,
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "layer_types": _ALTERNATING,
        "query_pre_attn_scalar": 16,
    },
    "opt": {**_COMMON, "model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 48},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "mixtral": {
        **_LLAMA_LIKE,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}

# Repetitive on purpose: a byte-level BPE of a few merges is learnt from it.
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then the other dog jumps over the fox.",
    "One page of the book holds the names of the rivers, the other page holds the names of the towns.",
    "A token is a number; a page is a row of tokens; a batch is a list of requests that run together.",
    "Where is the nearest station? It is behind the old bridge, across the river, near the market.",
    'A small answer in JSON: {"name": "Ada", "age": 36, "tags": ["mathematics", "engines"]}',
] * 4
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(arch: str, seed: int = 0, *, vocab_size: int = 320, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model in eval mode of a named architecture (`TINY_ARCHITECTURES`).

    Two to three layers, hidden size 48; grouped-query attention, sliding windows (24), soft caps
    and experts where the family has them. `overrides` are fields of its config. The same arguments
    give the same weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if arch not in TINY_ARCHITECTURES:
        raise ConfigError(f"no tiny model {arch!r}; there are: {', '.join(TINY_ARCHITECTURES)}")
    options = {**TINY_ARCHITECTURES[arch], "vocab_size": vocab_size, **overrides}
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    gemma = arch.startswith("gemma")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 0.3)
            elif "norm" in name or "ln_" in name:
                # Gemma's norms multiply by one plus the weight.
                centre = 0.0 if gemma or name.endswith("bias") else 1.0
                parameter.copy_(centre + noise * 0.1)
            else:
                parameter.copy_(noise * 0.1)
    model.generation_config.eos_token_id = config.get_text_config().eos_token_id
    return model.eval().requires_grad_(False)


def make_tiny_tokenizer(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained here: any text round-trips; ids 0 to 2 are special, 2 ends a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_folder(path: str | Path, arch: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Save a tiny model with a tokenizer and chat template as a Hugging Face folder; returns the folder.

    The embedding has more rows than the tokenizer has tokens, as in many real models.
    """
    folder = Path(path)
    tokenizer = make_tiny_tokenizer()
    overrides.setdefault("vocab_size", -(-len(tokenizer) // 64) * 64)
    make_tiny_model(arch, seed, **overrides).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
