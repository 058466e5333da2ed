"""What each layer of a model asks of attention, learnt by watching one tiny forward pass.

Configs name the same thing in a dozen ways, or leave it out; what reaches the attention interface
of transformers is what a paged attention must serve. So it is looked at, not guessed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from genserve.core.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE = "genserve_probe"
_NUM_PROBE_TOKENS = 3
_PROBE_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The attention of one layer.

    `sliding_window` counts the tokens a query sees, itself included; None sees all. `softcap`
    bounds the scores by `softcap * tanh(score / softcap)`. `scaling` multiplies query-key products.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    softcap: float | None
    scaling: float


def probe(model: PreTrainedModel, name: str) -> tuple[LayerSpec, ...]:
    """One `LayerSpec` per layer, in order, from a forward pass over a few tokens.

    `ConfigError` if the model computes attention outside the interface, in some layers only, or in
    a form that is not served (sinks, biases, bidirectional). The attention implementation is restored.
    """
    from transformers import AttentionInterface

    seen: dict[int, LayerSpec] = {}

    def watch(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        index = getattr(module, "layer_idx", None)
        if index is None or index in seen:
            raise ConfigError(
                f"{name}: attention layers do not carry distinct layer numbers (layer_idx = {index})"
            )
        seen[index] = _spec(name, module, query, key, value, attention_mask, scaling, options)
        return query.new_zeros(query.shape).transpose(1, 2).contiguous(), None

    config = model.config.get_text_config(decoder=True)
    ids = torch.zeros(1, _NUM_PROBE_TOKENS, dtype=torch.long, device=model.device)
    positions = torch.arange(_NUM_PROBE_TOKENS, device=model.device).unsqueeze(0)
    with _PROBE_LOCK:
        before = model.config._attn_implementation
        AttentionInterface.register(_PROBE, watch)
        try:
            model.set_attn_implementation(_PROBE)
            with torch.no_grad():
                model(input_ids=ids, position_ids=positions, use_cache=False)
        except (ValueError, NotImplementedError, TypeError) as error:
            raise ConfigError(
                f"{name}: {config.model_type} cannot run on a custom attention: {error}"
            ) from error
        finally:
            model.set_attn_implementation(before)
    if sorted(seen) != list(range(config.num_hidden_layers)):
        raise ConfigError(
            f"{name}: {config.model_type} has {config.num_hidden_layers} layers, but those that use the attention "
            f"interface are {sorted(seen) or 'none'}; hybrid models and models with an attention of their own "
            "are not served"
        )
    return tuple(seen[index] for index in sorted(seen))


def _spec(
    name: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    options: dict[str, Any],
) -> LayerSpec:
    """The spec of one call `[1, heads, tokens, head_dim]`, or `ConfigError` for what is not served."""
    unserved = {
        "attention sinks": options.get("s_aux") is not None or options.get("sinks") is not None,
        "a position bias": options.get("position_bias") is not None,
        "an attention mask of its own": attention_mask is not None,
        "bidirectional attention": (options.get("is_causal") is False)
        or not getattr(module, "is_causal", True),
        "cross-attention or shared keys": key.shape[2] != query.shape[2],
        "values of another size than keys": key.shape != value.shape or key.shape[-1] != query.shape[-1],
    }
    found = [what for what, present in unserved.items() if present]
    if found:
        raise ConfigError(
            f"{name}: layer {getattr(module, 'layer_idx', '?')} uses {', '.join(found)}; not served"
        )
    return LayerSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[-1],
        sliding_window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        scaling=key.shape[-1] ** -0.5 if scaling is None else scaling,
    )
