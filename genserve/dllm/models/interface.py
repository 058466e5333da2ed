"""What a diffusion language model is to the worker: one packed forward pass, and the facts it needs.

A model is one file of this package (its architecture names, its config keys, its tensor names); it is
added to `dllm.models.registry`. It knows tensors, not requests.

Shape suffixes: T tokens of a packed pass, R rows whose logits are wanted, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from genserve.core.models.attention.backend import PagedContext
from genserve.core.models.layers import LayerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A: every row sees the whole canvas. B: a row sees the blocks up to its own. C: a renoised canvas.
AttentionFamily = Literal["bidirectional", "block_causal", "canvas"]

# `mask_token_id` of a model that has none.
NO_MASK = -1


class DiffusionModel(Protocol):
    """A torch module in evaluation mode. `hidden` and `logits` are apart so that logits can be chunked."""

    layer_specs: tuple[LayerSpec, ...]

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        """Final-normed hidden states [T, H] of packed tokens; each layer writes its KV and then attends."""
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Raw logits [R, V] of some of those rows, in the model's dtype."""
        ...


class CanvasModel(Protocol):
    """Family C: causal rows, whose KV lasts, and rows of canvases, renoised as a whole. N canvas rows."""

    layer_specs: tuple[LayerSpec, ...]
    hidden_size: int

    def hidden(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        canvas_rows_N: torch.Tensor,
        soft_NH: torch.Tensor,
        paged: PagedContext,
    ) -> torch.Tensor:
        """Final-normed hidden states [N, H] of the canvas rows, whose last prediction was `soft_NH`."""
        ...

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Float32 logits [N, V]."""
        ...

    def soften(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """What the next pass is told of these predictions: the mean embedding under them [N, H]."""
        ...


@dataclass(frozen=True, slots=True)
class CanvasDefaults:
    """How a canvas is denoised by requests that do not say.

    num_steps      passes over a canvas, at most.
    entropy_bound  nats; see `Unmasking.entropy_bound`.
    hottest, coldest  temperature of the logits, falling linearly: `hottest` in the first pass,
                   `coldest` one pass after the last.
    num_stable     passes before the last that must have had the same likeliest tokens.
    confidence     nats; the mean entropy must be below it for a canvas to be done early.
    """

    num_steps: int = 48
    entropy_bound: float = 0.1
    hottest: float = 0.8
    coldest: float = 0.4
    num_stable: int = 1
    confidence: float = 0.005


@dataclass(frozen=True, slots=True)
class LoadedDiffusionModel:
    """A model ready to serve and the facts an engine needs.

    shift        0: row i predicts position i. 1: row i predicts position i + 1 (Dream).
    vocab_size   width of the logits; the mask token and ids from `num_valid_tokens` on are never proposed.
    default_block_length  of requests that do not say; block-causal models were trained with it, and a
                 canvas has no other.
    canvas       family "canvas" only, whose `model` is a `CanvasModel` and whose mask token is `NO_MASK`.
    tokenizer    None for checkpoints without one.
    """

    model: DiffusionModel | CanvasModel
    family: AttentionFamily
    name: str
    shift: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    vocab_size: int
    num_valid_tokens: int
    default_block_length: int
    dtype: torch.dtype
    device: torch.device
    tokenizer: PreTrainedTokenizerBase | None = None
    canvas: CanvasDefaults | None = None
