"""Tiny random checkpoints of the served architectures, for tests, docs and trying out without a network.

Published config keys and tensor names; weights drawn wide, so that argmax has clear margins.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from genserve.core.errors import ConfigError
from genserve.core.models.tiny import make_tiny_tokenizer

_MASK = "<|mask|>"
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")
_LM_HEADS = ("lm_head.weight", "transformer.ff_out.weight")
_ATTENTION_OUT = ("o_proj.weight", "attn_out.weight", "dense.weight")
_HEAD_NORMS = ("q_norm.weight", "k_norm.weight", "query_layernorm.weight", "key_layernorm.weight")
_QWEN: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TINY_DIFFUSION_MODELS: dict[str, dict[str, Any]] = {
    "llada": {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "block_type": "llama",
        "d_model": 48,
        "include_bias": False,
        "include_qkv_bias": False,
        "layer_norm_type": "rms",
        "max_sequence_length": 512,
        "mlp_hidden_size": 96,
        "n_heads": 4,
        "n_kv_heads": 4,
        "n_layers": 2,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 10000.0,
        "weight_tying": False,
    },
    "dream": {"architectures": ["DreamModel"], "model_type": "Dream", **_QWEN},
    "llada2": {
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        **_QWEN,
        "head_dim": 16,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_bias": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
    },
    "sdar": {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        **_QWEN,
        "attention_bias": False,
        "block_size": 8,
        "head_dim": 16,
    },
}


def write_tiny(arch: str, folder: str | Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a float32 checkpoint of a named architecture (`TINY_DIFFUSION_MODELS`); returns the folder.

    With a tokenizer of a few hundred tokens (its own mask and end-of-turn tokens, a chat template) and
    an embedding that has more rows than it. `overrides` are config keys. The same arguments give the
    same weights.
    """
    if arch not in TINY_DIFFUSION_MODELS:
        raise ConfigError(f"no tiny model {arch!r}; there are: {', '.join(TINY_DIFFUSION_MODELS)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"mask_token": _MASK})
    config = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        **TINY_DIFFUSION_MODELS[arch],
    }
    if arch in ("llada", "dream"):  # the others leave it to the tokenizer
        config["mask_token_id"] = tokenizer.mask_token_id
    config |= overrides
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _draw(name, shape, generator, tokenizer.mask_token_id)
        for name, shape in tensor_shapes(arch, config).items()
    }
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator, mask_token_id: int) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        centre = 0.0 if name.endswith("bias") else 2.0 if name.endswith(_HEAD_NORMS) else 1.0
        return noise * 0.1 + centre
    if name.endswith(_EMBEDDINGS):
        # What an open position becomes is told by its surroundings, not by the mask all have in common.
        noise[mask_token_id] *= 0.1
        return noise
    scale = 4.0 if name.endswith(_LM_HEADS) else 3.0 if name.endswith(_ATTENTION_OUT) else 1.6
    return noise * scale * shape[1] ** -0.5


def tensor_shapes(arch: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint with this config."""
    if arch == "llada":
        return _llada_shapes(config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    query, kv = heads * head_dim, kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {}

    def gated(at: str, width: int) -> None:
        for name in ("gate_proj", "up_proj"):
            shapes[f"{at}{name}.weight"] = (width, hidden)
        shapes[f"{at}down_proj.weight"] = (hidden, width)

    shapes["model.word_embeddings.weight" if arch == "llada2" else "model.embed_tokens.weight"] = (
        vocab,
        hidden,
    )
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        if arch == "llada2":
            attn = at + "attention."
            shapes[attn + "query_key_value.weight"] = (query + 2 * kv, hidden)
            shapes[attn + "dense.weight"] = (hidden, query)
            shapes[attn + "query_layernorm.weight"] = shapes[attn + "key_layernorm.weight"] = (head_dim,)
        else:
            attn = at + "self_attn."
            for name, size in (("q", query), ("k", kv), ("v", kv)):
                shapes[f"{attn}{name}_proj.weight"] = (size, hidden)
                if arch == "dream" or config.get("attention_bias"):
                    shapes[f"{attn}{name}_proj.bias"] = (size,)
            shapes[attn + "o_proj.weight"] = (hidden, query)
            if config.get("attention_bias"):
                shapes[attn + "o_proj.bias"] = (hidden,)
            if arch == "sdar":
                shapes[attn + "q_norm.weight"] = shapes[attn + "k_norm.weight"] = (head_dim,)
        if arch != "llada2" or index < config["first_k_dense_replace"]:
            gated(at + "mlp.", config["intermediate_size"])
            continue
        shapes[at + "mlp.gate.weight"] = (config["num_experts"], hidden)
        shapes[at + "mlp.gate.expert_bias"] = (config["num_experts"],)
        width = config["moe_intermediate_size"]
        for expert in range(config["num_experts"]):
            gated(f"{at}mlp.experts.{expert}.", width)
        if config["num_shared_experts"]:
            gated(at + "mlp.shared_experts.", width * config["num_shared_experts"])
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _llada_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["d_model"], config.get("embedding_size", config["vocab_size"])
    width = config["mlp_hidden_size"]
    kv = hidden // config["n_heads"] * config["n_kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.transformer.wte.weight": (vocab, hidden)}
    for index in range(config["n_layers"]):
        at = f"model.transformer.blocks.{index}."
        shapes[at + "attn_norm.weight"] = shapes[at + "ff_norm.weight"] = (hidden,)
        for name, size in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{at}{name}_proj.weight"] = (size, hidden)
            if config["include_qkv_bias"]:
                shapes[f"{at}{name}_proj.bias"] = (size,)
        shapes[at + "attn_out.weight"] = (hidden, hidden)
        shapes[at + "ff_proj.weight"] = shapes[at + "up_proj.weight"] = (width, hidden)
        shapes[at + "ff_out.weight"] = (hidden, width)
    shapes["model.transformer.ln_f.weight"] = (hidden,)
    if not config["weight_tying"]:
        shapes["model.transformer.ff_out.weight"] = (vocab, hidden)
    return shapes
