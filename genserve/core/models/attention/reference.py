"""Paged attention in plain torch, on any device: the oracle that other backends are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genserve.core.models.attention.backend import AttentionRule
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.layers import LayerSpec


class ReferenceAttention:
    """Gathers each sequence's pages and computes softmax attention, one sequence after another."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_pages: int,
        dtype: torch.dtype,
        page_tokens: int = 16,
        device: torch.device | str = "cpu",
    ) -> None:
        self._page_tokens = page_tokens
        self._device = torch.device(device)
        self._pages = [
            torch.zeros(
                2, num_pages, page_tokens, layer.num_kv_heads, layer.head_dim, dtype=dtype, device=device
            )
            for layer in layers
        ]

    @staticmethod
    def page_bytes(layers: Sequence[LayerSpec], dtype: torch.dtype, page_tokens: int = 16) -> int:
        """Bytes of one page over all layers, keys and values."""
        cells = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
        return cells * page_tokens * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return sum(pages.nbytes for pages in self._pages)

    def page_tensors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pages[layer][0], self._pages[layer][1]

    def page_layout(self, layer: int) -> str:
        _, _, *shape = self._pages[layer].shape
        return f"{self._pages[layer].dtype} keys and values {shape} tokens before heads"

    def write(self, layer: int, key_THD: torch.Tensor, value_THD: torch.Tensor, batch: PagedBatch) -> None:
        pages = self._pages[layer]
        positions = batch.positions_T
        page_ids = torch.from_numpy(
            batch.page_table[batch.token_slots_T, positions // self._page_tokens].astype("int64")
        ).to(self._device)
        offsets = torch.from_numpy(positions % self._page_tokens).to(self._device)
        pages[0, page_ids, offsets] = key_THD.to(pages.dtype)
        pages[1, page_ids, offsets] = value_THD.to(pages.dtype)

    def attend(
        self, layer: int, query_THD: torch.Tensor, batch: PagedBatch, rule: AttentionRule
    ) -> torch.Tensor:
        out = torch.empty_like(query_THD, memory_format=torch.contiguous_format)
        for span in batch.spans:
            rows = slice(span.row, span.row + span.num_tokens)
            end = int(batch.ends_T[rows].max())
            num_pages = -(-end // self._page_tokens)
            ids = torch.from_numpy(batch.page_table[span.slot, :num_pages].astype("int64")).to(self._device)
            keys, values = self._pages[layer][:, ids].flatten(1, 2)[:, :end].float()
            query = query_THD[rows].float()
            group = query.shape[1] // keys.shape[1]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", query, keys) * rule.scale
            if rule.softcap:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            q_end = torch.from_numpy(batch.ends_T[rows]).to(self._device)[:, None]
            k_at = torch.arange(end, device=self._device)[None]
            hidden = k_at >= q_end
            if rule.window_tokens:
                q_at = torch.from_numpy(batch.anchors_T[rows]).to(self._device)[:, None]
                hidden |= k_at <= q_at - rule.window_tokens
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        return out
