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


class DiffusionModel(Protocol):
    """A torch module in evaluation mode. `hidden` and `logits` are apart so that logits can be chunked."""

    layer_specs: tuple[LayerSpec, ...]

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        """Final-normed hidden states [T, H] of packed tokens; each layer writes its KV and then attends."""
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Raw logits [R, V] of some of those rows, in the model's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedDiffusionModel:
    """A model ready to serve and the facts an engine needs.

    shift        0: row i predicts position i. 1: row i predicts position i + 1 (Dream).
    vocab_size   width of the logits; the mask token and ids from `num_valid_tokens` on are never proposed.
    default_block_length  of requests that do not say; block-causal models were trained with it.
    tokenizer    None for checkpoints without one.
    """

    model: DiffusionModel
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
