"""The contract of paged attention, and the bridge from `transformers` models to it.

A backend owns the storage of KV pages for all layers, in whatever layout it likes. A model loaded
with `attn_implementation=PAGED` calls `write` and then `attend` once a layer; which backend, and the
batch, travel as the keyword argument `paged` of the model's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from genserve.core.models.attention.batch import PagedBatch

PAGED = "genserve_paged"


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How scores are made: scale, sliding window in tokens (0: none), logit softcap (0: none).

    With a window a token sees nothing at `its anchor - window_tokens` or before.
    """

    scale: float
    window_tokens: int = 0
    softcap: float = 0.0


class AttentionBackend(Protocol):
    """Attention over paged KV. Shapes: T tokens, H query heads, K KV heads, D head dims.

    A class also says, before it is built, what a page costs: `page_bytes(layers, dtype)`.
    """

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, which are allocated once."""
        ...

    def page_tensors(self, layer: int) -> Sequence[torch.Tensor]:
        """The storage of a layer's pages, `[num_pages, ...]` each: pages are moved by copying their rows."""
        ...

    def page_layout(self, layer: int) -> str:
        """Order, dtype, heads, dims and padding of a layer's page. Pages named alike are interchangeable."""
        ...

    def write(self, layer: int, key_THD: torch.Tensor, value_THD: torch.Tensor, batch: PagedBatch) -> None:
        """Store KV of the batch's tokens at their positions, overwriting what is there."""
        ...

    def attend(
        self, layer: int, query_THD: torch.Tensor, batch: PagedBatch, rule: AttentionRule
    ) -> torch.Tensor:
        """[T, H, D] in the query's dtype; each token sees positions [0, `batch.ends_T`) of its sequence."""
        ...


@dataclass(frozen=True, slots=True)
class PagedContext:
    """What the model's forward is given as `paged=`."""

    backend: AttentionBackend
    batch: PagedBatch


def paged_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: PagedContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`transformers`' attention function: query `[1, H, T, D]`, key and value `[1, K, T, D]`."""
    if paged is None:
        raise RuntimeError("a model with paged attention must be called with paged=PagedContext(...)")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    rule = AttentionRule(float(scaling), sliding_window or 0, softcap or 0.0)
    paged.backend.write(module.layer_idx, key[0].transpose(0, 1), value[0].transpose(0, 1), paged.batch)
    out = paged.backend.attend(module.layer_idx, query[0].transpose(0, 1), paged.batch, rule)
    return out[None], None


def register() -> None:
    """Make `attn_implementation="genserve_paged"` known to `transformers`."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, paged_attention_forward)
