"""The folders of the tiny models: tokenizer, config, weights and card, as other programs load them.

A LLaDA folder has the published layout; a Llama folder is what `transformers` writes. Knows nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_net import Shape, TinyNet
from torch import Tensor

BOS, EOS, MASK = "<|startoftext|>", "<|endoftext|>", "<|mdm_mask|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (EOS, BOS, MASK, SYSTEM, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MAX_CONTEXT = 1024


def make_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE trained on `texts`, as a `transformers` tokenizer with the chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _llada_config(shape: Shape, eos_id: int, mask_id: int) -> dict[str, Any]:
    return {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "activation_type": "silu",
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": shape.d_model,
        "embedding_size": shape.vocab_size,
        "eos_token_id": eos_id,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": mask_id,
        "max_sequence_length": MAX_CONTEXT,
        "mlp_hidden_size": shape.d_ff,
        "n_heads": shape.num_heads,
        "n_kv_heads": shape.num_heads,
        "n_layers": shape.num_layers,
        "pad_token_id": eos_id,
        "residual_dropout": 0.0,
        "rms_norm_eps": shape.norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": shape.rope_theta,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "vocab_size": shape.vocab_size,
        "weight_tying": False,
    }


_LLAMA_NAMES = (
    ("model.transformer.ff_out.", "lm_head."),
    ("model.transformer.wte.", "model.embed_tokens."),
    ("model.transformer.ln_f.", "model.norm."),
    ("model.transformer.blocks.", "model.layers."),
    (".q_proj.", ".self_attn.q_proj."),
    (".k_proj.", ".self_attn.k_proj."),
    (".v_proj.", ".self_attn.v_proj."),
    (".attn_out.", ".self_attn.o_proj."),
    (".ff_proj.", ".mlp.gate_proj."),
    (".up_proj.", ".mlp.up_proj."),
    (".ff_out.", ".mlp.down_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".ff_norm.", ".post_attention_layernorm."),
)


def llama_name(name: str) -> str:
    """The name that a LLaDA tensor has in a `LlamaForCausalLM`."""
    for ours, theirs in _LLAMA_NAMES:
        name = name.replace(ours, theirs)
    return name


def save_llada(weights: dict[str, Tensor], shape: Shape, tokenizer: Any, folder: Path) -> None:
    """Write a folder in the layout of the published LLaDA models: bf16 weights, config, tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    saved = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    config = _llada_config(shape, tokenizer.eos_token_id, tokenizer.mask_token_id)
    _write_json(folder / "config.json", config)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    generation |= {"mask_token_id": tokenizer.mask_token_id, "block_length": 32, "threshold": 0.9}
    _write_json(folder / "generation_config.json", generation)
    _save_tokenizer(tokenizer, folder)


def save_llama(weights: dict[str, Tensor], shape: Shape, tokenizer: Any, folder: Path) -> None:
    """Write a folder that `AutoModelForCausalLM` loads as a `LlamaForCausalLM`, in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_CONTEXT,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict({llama_name(name): weight for name, weight in weights.items()})
    model.to(torch.bfloat16).save_pretrained(folder)
    _save_tokenizer(tokenizer, folder)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    # The class that every version of transformers knows.
    _write_json(path, json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def load_llada(folder: Path) -> TinyNet:
    """The saved bf16 weights, widened to float32, in a network ready to decode."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        d_model=config["d_model"],
        num_layers=config["n_layers"],
        head_dim=config["d_model"] // config["n_heads"],
        d_ff=config["mlp_hidden_size"],
        vocab_size=config["vocab_size"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    net = TinyNet(shape)
    net.load_state_dict({name: w.float() for name, w in load_file(folder / "model.safetensors").items()})
    return net.eval()
