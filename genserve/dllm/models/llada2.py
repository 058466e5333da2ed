"""LLaDA2 (2.0, 2.1; mini and flash): block-causal mixture of experts. Layout of `LLaDA2MoeModelLM`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from genserve.dllm.models.build import Built, check_shape, finish, qwen_shape
from genserve.dllm.models.checkpoint import Checkpoint
from genserve.dllm.models.parts import Parts
from genserve.dllm.models.transformer import Attention, HeadNorms, Layer, MixtureMlp, Rotary, Shape

_ONLY = (
    ("using_split_qkv_in_self_attention", False),
    ("use_rmsnorm", True),
    ("norm_head", False),
    ("norm_softmax", False),
    ("norm_topk_prob", True),
    ("score_function", "sigmoid"),
    ("router_dtype", "fp32"),
)


def build(checkpoint: Checkpoint, parts: Parts) -> Built:
    for key, allowed in _ONLY:
        checkpoint.only(key, allowed)
    # Absent keys mean what the published configuration class makes of them.
    shape = qwen_shape(checkpoint)
    fraction = checkpoint.number("partial_rotary_factor", 0.5)
    shape = replace(
        shape,
        rotary_dims=int(shape.head_dim * fraction),
        rms_norm_eps=checkpoint.number("rms_norm_eps", 1e-5),
    )
    check_shape(checkpoint, shape)
    rotary = Rotary(shape.rotary_dims, shape.rope_theta, parts.device)
    num_dense = checkpoint.integer("first_k_dense_replace", 0, minimum=0)
    layers = []
    for index in range(shape.num_layers):
        at = f"model.layers.{index}."
        layers.append(
            Layer(
                parts.norm(
                    checkpoint.tensor(at + "input_layernorm.weight", shape.hidden_size), shape.rms_norm_eps
                ),
                _attention(checkpoint, parts, shape, index, rotary),
                parts.norm(
                    checkpoint.tensor(at + "post_attention_layernorm.weight", shape.hidden_size),
                    shape.rms_norm_eps,
                ),
                _mlp(checkpoint, parts, at + "mlp.", checkpoint.integer("intermediate_size"))
                if index < num_dense
                else _mixture(checkpoint, parts, at + "mlp."),
            )
        )
    model = finish(
        checkpoint,
        parts,
        shape,
        layers,
        rotary,
        embedding="model.word_embeddings.weight",
        norm="model.norm.weight",
        head="lm_head.weight",
        tied=checkpoint.flag("tie_word_embeddings"),
    )
    return Built(
        model,
        "block_causal",
        max_context_tokens=checkpoint.integer("max_position_embeddings"),
        vocab_size=shape.vocab_size,
        num_ids=shape.vocab_size,
        default_block_length=checkpoint.integer("block_size", 32),
    )


def _attention(checkpoint: Checkpoint, parts: Parts, shape: Shape, index: int, rotary: Rotary) -> Attention:
    at = f"model.layers.{index}.attention."
    size = shape.query_size + 2 * shape.kv_size
    norms = None
    if checkpoint.flag("use_qk_norm", True):
        norms = HeadNorms(
            parts.tensor(checkpoint.tensor(at + "query_layernorm.weight", shape.head_dim)),
            parts.tensor(checkpoint.tensor(at + "key_layernorm.weight", shape.head_dim)),
            shape.rms_norm_eps,
        )
    qkv_bias = (
        [checkpoint.tensor(at + "query_key_value.bias", size)] if checkpoint.flag("use_qkv_bias") else None
    )
    out_bias = (
        [checkpoint.tensor(at + "dense.bias", shape.hidden_size)]
        if checkpoint.flag("use_bias", True)
        else None
    )
    return Attention(
        index,
        shape,
        parts.linear([checkpoint.tensor(at + "query_key_value.weight", size, shape.hidden_size)], qkv_bias),
        parts.linear([checkpoint.tensor(at + "dense.weight", shape.hidden_size, shape.query_size)], out_bias),
        rotary,
        norms,
    )


def _mlp_weights(
    checkpoint: Checkpoint, at: str, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = checkpoint.integer("hidden_size")
    return (
        checkpoint.tensor(at + "gate_proj.weight", width, hidden),
        checkpoint.tensor(at + "up_proj.weight", width, hidden),
        checkpoint.tensor(at + "down_proj.weight", hidden, width),
    )


def _mlp(checkpoint: Checkpoint, parts: Parts, at: str, width: int) -> nn.Module:
    return parts.gated_mlp(*_mlp_weights(checkpoint, at, width))


def _mixture(checkpoint: Checkpoint, parts: Parts, at: str) -> nn.Module:
    num_experts, num_chosen = checkpoint.integer("num_experts"), checkpoint.integer("num_experts_per_tok")
    num_groups, num_kept = checkpoint.integer("n_group", 8), checkpoint.integer("topk_group", 4)
    if num_experts % num_groups or num_kept > num_groups:
        raise checkpoint.error(
            f"num_experts {num_experts}, n_group {num_groups} and topk_group {num_kept} do not go together"
        )
    if num_chosen > num_experts // num_groups * num_kept:
        raise checkpoint.error(
            f"num_experts_per_tok {num_chosen} is more than {num_kept} of {num_groups} groups have"
        )
    width = checkpoint.integer("moe_intermediate_size")
    bias = torch.zeros(num_experts)
    if checkpoint.flag("moe_router_enable_expert_bias", True):
        bias = checkpoint.tensor(at + "gate.expert_bias", num_experts)
    router = parts.group_router(
        checkpoint.tensor(at + "gate.weight", num_experts, checkpoint.integer("hidden_size")),
        bias,
        num_chosen,
        num_groups,
        num_kept,
        checkpoint.number("routed_scaling_factor", 2.5),
    )
    weights = [_mlp_weights(checkpoint, f"{at}experts.{expert}.", width) for expert in range(num_experts)]
    gates, ups, downs = ([each[part] for each in weights] for part in range(3))
    num_shared = checkpoint.integer("num_shared_experts", 0, minimum=0)
    shared = _mlp(checkpoint, parts, at + "shared_experts.", width * num_shared) if num_shared else None
    return MixtureMlp(router, parts.experts(gates, ups, downs), shared)
