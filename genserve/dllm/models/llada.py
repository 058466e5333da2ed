"""LLaDA (8B-Instruct, 1.5): bidirectional, row i predicts position i. Layout of `LLaDAModelLM`."""

from __future__ import annotations

from genserve.dllm.models.build import Built, check_shape, finish
from genserve.dllm.models.checkpoint import Checkpoint
from genserve.dllm.models.parts import Parts
from genserve.dllm.models.transformer import Attention, Layer, Rotary, Shape

# Options of the published code that no published checkpoint uses: key, the values served, the default.
_ONLY = (
    ("block_type", ("llama",), "sequential"),
    ("block_group_size", (1,), 1),
    ("activation_type", ("silu",), "swiglu"),
    ("layer_norm_type", ("rms",), "default"),
    ("layer_norm_with_affine", (True,), True),
    ("bias_for_layer_norm", (False,), None),
    ("attention_layer_norm", (False,), False),
    ("alibi", (False,), False),
    ("rope", (True,), False),
    ("include_bias", (False,), True),
    ("input_emb_norm", (False,), False),
    ("scale_logits", (False,), False),
)


def build(checkpoint: Checkpoint, parts: Parts) -> Built:
    for key, allowed, default in _ONLY:
        checkpoint.only(key, *allowed, default=default)
    shape = _shape(checkpoint)
    hidden = shape.hidden_size
    width = checkpoint.integer("mlp_hidden_size", checkpoint.integer("mlp_ratio", 4) * hidden)
    sizes = {"q": shape.query_size, "k": shape.kv_size, "v": shape.kv_size}
    has_bias = checkpoint.flag("include_qkv_bias")
    rotary = Rotary(shape.rotary_dims, shape.rope_theta, parts.device)
    layers = []
    for index in range(shape.num_layers):
        at = f"model.transformer.blocks.{index}."
        qkv = parts.linear(
            [checkpoint.tensor(f"{at}{name}_proj.weight", size, hidden) for name, size in sizes.items()],
            [checkpoint.tensor(f"{at}{name}_proj.bias", size) for name, size in sizes.items()]
            if has_bias
            else None,
        )
        out = parts.linear([checkpoint.tensor(at + "attn_out.weight", hidden, hidden)])
        layers.append(
            Layer(
                parts.norm(checkpoint.tensor(at + "attn_norm.weight", hidden), shape.rms_norm_eps),
                Attention(index, shape, qkv, out, rotary),
                parts.norm(checkpoint.tensor(at + "ff_norm.weight", hidden), shape.rms_norm_eps),
                parts.gated_mlp(
                    checkpoint.tensor(at + "ff_proj.weight", width, hidden),
                    checkpoint.tensor(at + "up_proj.weight", width, hidden),
                    checkpoint.tensor(at + "ff_out.weight", hidden, width),
                ),
            )
        )
    model = finish(
        checkpoint,
        parts,
        shape,
        layers,
        rotary,
        embedding="model.transformer.wte.weight",
        norm="model.transformer.ln_f.weight",
        head="model.transformer.ff_out.weight",
        tied=checkpoint.flag("weight_tying", True),
    )
    return Built(
        model,
        "bidirectional",
        max_context_tokens=checkpoint.integer("max_sequence_length"),
        vocab_size=shape.vocab_size,
        num_ids=min(checkpoint.integer("vocab_size"), shape.vocab_size),
    )


def _shape(checkpoint: Checkpoint) -> Shape:
    hidden, heads = checkpoint.integer("d_model"), checkpoint.integer("n_heads")
    if hidden % heads:
        raise checkpoint.error(f"d_model {hidden} is not a multiple of n_heads {heads}")
    one_for_all = checkpoint.get("multi_query_attention", False)
    shape = Shape(
        hidden_size=hidden,
        num_layers=checkpoint.integer("n_layers"),
        num_heads=heads,
        num_kv_heads=checkpoint.integer("n_kv_heads", 1 if one_for_all else heads),
        head_dim=hidden // heads,
        vocab_size=checkpoint.integer("embedding_size", checkpoint.integer("vocab_size")),
        rms_norm_eps=checkpoint.number("rms_norm_eps", 1e-5),
        rope_theta=checkpoint.rope_theta(),
        rotary_dims=hidden // heads,
    )
    check_shape(checkpoint, shape)
    return shape
