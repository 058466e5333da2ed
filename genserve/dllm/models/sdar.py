"""SDAR, dense: block-causal, Qwen3 layout, row i predicts position i."""

from __future__ import annotations

from genserve.dllm.models.build import Built, build_qwen, qwen_shape
from genserve.dllm.models.checkpoint import Checkpoint
from genserve.dllm.models.parts import Parts

# Of the published chat models, whose configs do not always say.
_BLOCK_LENGTH = 4


def build(checkpoint: Checkpoint, parts: Parts) -> Built:
    shape = qwen_shape(checkpoint)
    has_bias = checkpoint.flag("attention_bias")
    return Built(
        build_qwen(checkpoint, parts, shape, qkv_bias=has_bias, out_bias=has_bias, head_norms=True),
        "block_causal",
        max_context_tokens=checkpoint.integer("max_position_embeddings"),
        vocab_size=shape.vocab_size,
        num_ids=shape.vocab_size,
        default_block_length=checkpoint.integer("block_size", _BLOCK_LENGTH),
    )
