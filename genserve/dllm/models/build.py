"""What a model file hands to the registry, and the dense layout that several published models share."""

from __future__ import annotations

from dataclasses import dataclass

from genserve.dllm.models.checkpoint import Checkpoint
from genserve.dllm.models.interface import AttentionFamily, CanvasDefaults, CanvasModel, DiffusionModel
from genserve.dllm.models.parts import Parts
from genserve.dllm.models.transformer import Attention, HeadNorms, Layer, Rotary, Shape, Transformer


@dataclass(frozen=True, slots=True)
class Built:
    """A model and what only its architecture knows; the fields are those of `LoadedDiffusionModel`.

    `num_ids` is how many ids the config counts; the logits may be wider (`vocab_size`).
    """

    model: DiffusionModel | CanvasModel
    family: AttentionFamily
    max_context_tokens: int
    vocab_size: int
    num_ids: int
    shift: int = 0
    default_block_length: int = 32
    canvas: CanvasDefaults | None = None


def qwen_shape(checkpoint: Checkpoint) -> Shape:
    """Sizes by the config keys of the Qwen family; what they can't say is refused."""
    checkpoint.only("hidden_act", "silu")
    checkpoint.only("use_sliding_window", False)
    hidden, heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    shape = Shape(
        hidden_size=hidden,
        num_layers=checkpoint.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=checkpoint.integer("num_key_value_heads", heads),
        head_dim=checkpoint.integer("head_dim", max(1, hidden // heads)),
        vocab_size=checkpoint.integer("vocab_size"),
        rms_norm_eps=checkpoint.number("rms_norm_eps", 1e-6),
        rope_theta=checkpoint.rope_theta(),
        rotary_dims=checkpoint.integer("head_dim", max(1, hidden // heads)),
    )
    check_shape(checkpoint, shape)
    return shape


def check_shape(checkpoint: Checkpoint, shape: Shape) -> None:
    """`ConfigError` for sizes that don't go together."""
    if shape.num_heads % shape.num_kv_heads:
        raise checkpoint.error(
            f"{shape.num_heads} attention heads do not share {shape.num_kv_heads} key-value heads evenly"
        )
    if shape.rotary_dims % 2 or not 0 < shape.rotary_dims <= shape.head_dim:
        raise checkpoint.error(
            f"{shape.rotary_dims} rotary dims are not an even number of at most {shape.head_dim} head dims"
        )


def build_qwen(
    checkpoint: Checkpoint, parts: Parts, shape: Shape, *, qkv_bias: bool, out_bias: bool, head_norms: bool
) -> Transformer:
    """A dense model in the tensor layout of the Qwen family."""
    hidden, width = shape.hidden_size, checkpoint.integer("intermediate_size")
    rotary = Rotary(shape.rotary_dims, shape.rope_theta, parts.device)
    sizes = {"q": shape.query_size, "k": shape.kv_size, "v": shape.kv_size}
    layers = []
    for index in range(shape.num_layers):
        at = f"model.layers.{index}."
        attn, mlp = at + "self_attn.", at + "mlp."
        norms = None
        if head_norms:
            norms = HeadNorms(
                parts.tensor(checkpoint.tensor(attn + "q_norm.weight", shape.head_dim)),
                parts.tensor(checkpoint.tensor(attn + "k_norm.weight", shape.head_dim)),
                shape.rms_norm_eps,
            )
        attention = Attention(
            index,
            shape,
            parts.linear(
                [checkpoint.tensor(f"{attn}{n}_proj.weight", size, hidden) for n, size in sizes.items()],
                [checkpoint.tensor(f"{attn}{n}_proj.bias", size) for n, size in sizes.items()]
                if qkv_bias
                else None,
            ),
            parts.linear(
                [checkpoint.tensor(attn + "o_proj.weight", hidden, shape.query_size)],
                [checkpoint.tensor(attn + "o_proj.bias", hidden)] if out_bias else None,
            ),
            rotary,
            norms,
        )
        layers.append(
            Layer(
                parts.norm(checkpoint.tensor(at + "input_layernorm.weight", hidden), shape.rms_norm_eps),
                attention,
                parts.norm(
                    checkpoint.tensor(at + "post_attention_layernorm.weight", hidden), shape.rms_norm_eps
                ),
                parts.gated_mlp(
                    checkpoint.tensor(mlp + "gate_proj.weight", width, hidden),
                    checkpoint.tensor(mlp + "up_proj.weight", width, hidden),
                    checkpoint.tensor(mlp + "down_proj.weight", hidden, width),
                ),
            )
        )
    return finish(
        checkpoint,
        parts,
        shape,
        layers,
        rotary,
        embedding="model.embed_tokens.weight",
        norm="model.norm.weight",
        head="lm_head.weight",
        tied=checkpoint.flag("tie_word_embeddings"),
    )


def finish(
    checkpoint: Checkpoint,
    parts: Parts,
    shape: Shape,
    layers: list[Layer],
    rotary: Rotary,
    *,
    embedding: str,
    norm: str,
    head: str,
    tied: bool,
) -> Transformer:
    """Embedding, final norm and LM head (the embedding itself if `tied`) around the layers."""
    embedding_VH = checkpoint.tensor(embedding, shape.vocab_size, shape.hidden_size)
    if tied:
        checkpoint.ignore(head)
        head_VH = embedding_VH
    else:
        head_VH = checkpoint.tensor(head, shape.vocab_size, shape.hidden_size)
    return Transformer(
        embedding_VH.to(parts.device),
        layers,
        parts.norm(checkpoint.tensor(norm, shape.hidden_size), shape.rms_norm_eps),
        parts.linear([head_VH]),
        shape,
        rotary,
        parts.dtype,
    )
