"""Dream (v0-Instruct-7B) and DiffuCoder: bidirectional, Qwen2 layout, row i predicts position i + 1."""

from __future__ import annotations

from genserve.dllm.models.build import Built, build_qwen, qwen_shape
from genserve.dllm.models.checkpoint import Checkpoint
from genserve.dllm.models.parts import Parts


def build(checkpoint: Checkpoint, parts: Parts) -> Built:
    shape = qwen_shape(checkpoint)
    return Built(
        build_qwen(checkpoint, parts, shape, qkv_bias=True, out_bias=False, head_norms=False),
        "bidirectional",
        max_context_tokens=checkpoint.integer("max_position_embeddings"),
        vocab_size=shape.vocab_size,
        num_ids=shape.vocab_size,
        shift=1,
    )
