"""Paged attention on CPU threads, through the kernels of `core.models.kernels`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from genserve.core.models.attention.backend import AttentionRule
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.kernels.attention import MOST_QUERIES, PAGE, attend_rows, write_pages
from genserve.core.models.kernels.linear import registers_are_wide
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.layers import LayerSpec


def _padded(head_dim: int) -> int:
    """Values are summed sixteen dims at a time."""
    return -(-head_dim // 16) * 16


class CpuAttention:
    """Float32 or bfloat16 pages of 16 tokens. Scores and sums are float32 in both cases."""

    def __init__(
        self, layers: Sequence[LayerSpec], num_pages: int, dtype: torch.dtype, team: ThreadTeam | None = None
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"KV pages on a CPU are float32 or bfloat16, not {dtype}")
        self._dtype = dtype
        self._layers = layers
        self._padded_dims = [_padded(layer.head_dim) for layer in layers]
        self._keys = [
            torch.zeros(num_pages, layer.num_kv_heads, layer.head_dim, PAGE, dtype=dtype) for layer in layers
        ]
        self._values = [
            torch.zeros(num_pages, layer.num_kv_heads, PAGE, padded, dtype=dtype)
            for layer, padded in zip(layers, self._padded_dims, strict=True)
        ]
        self._team = team or ThreadTeam()
        self._wide = registers_are_wide()

    @staticmethod
    def page_bytes(layers: Sequence[LayerSpec], dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, keys and values, padding included."""
        cells = sum(layer.num_kv_heads * (layer.head_dim + _padded(layer.head_dim)) for layer in layers)
        return cells * PAGE * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def page_tensors(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._keys[layer], self._values[layer]

    def page_layout(self, layer: int) -> str:
        keys, values = (list(tensor.shape[1:]) for tensor in self.page_tensors(layer))
        return f"{self._dtype} keys {keys} dims before tokens, values {values} tokens before dims"

    def write(self, layer: int, key_THD: torch.Tensor, value_THD: torch.Tensor, batch: PagedBatch) -> None:
        item = self._dtype.itemsize
        dims, padded = self._layers[layer].head_dim, self._padded_dims[layer]
        keys, values = self._keys[layer], self._values[layer]
        for source, target, dim_stride, slot_stride, head_bytes in (
            (key_THD, keys, PAGE * item, item, dims * PAGE * item),
            (value_THD, values, item, padded * item, padded * PAGE * item),
        ):
            source = source.to(self._dtype)
            if source.stride(2) != 1:
                source = source.contiguous()
            write_pages(
                source.data_ptr(),
                source.stride(0) * item,
                source.stride(1) * item,
                target.data_ptr(),
                source.shape[1],
                dims,
                dim_stride,
                slot_stride,
                head_bytes,
                batch.page_table,
                batch.token_slots_T,
                batch.positions_T,
                item,
            )

    def attend(
        self, layer: int, query_THD: torch.Tensor, batch: PagedBatch, rule: AttentionRule
    ) -> torch.Tensor:
        num_tokens, num_heads, dims = query_THD.shape
        query = query_THD.float()
        if query.stride(2) != 1:
            query = query.contiguous()
        padded = self._padded_dims[layer]
        out = torch.empty(num_tokens, num_heads, padded)
        num_kv_heads = self._layers[layer].num_kv_heads

        def rows(first: int, last: int) -> None:
            attend_rows(
                query.data_ptr(),
                query.stride(0),
                query.stride(1),
                self._keys[layer].data_ptr(),
                self._values[layer].data_ptr(),
                num_kv_heads,
                num_heads // num_kv_heads,
                dims,
                padded,
                self._dtype is torch.bfloat16,
                batch.page_table,
                batch.token_slots_T,
                batch.ends_T,
                batch.anchors_T,
                np.float32(rule.scale),
                rule.window_tokens,
                np.float32(rule.softcap),
                out.data_ptr(),
                first,
                last,
                self._wide,
                np.empty(MOST_QUERIES * dims, np.float32),
                np.empty(MOST_QUERIES * padded, np.float32),
            )

        self._team.run(rows, self._cuts(batch, num_heads * dims))
        if padded != dims:
            out = out[:, :, :dims]
        return out.to(query_THD.dtype)

    def _cuts(self, batch: PagedBatch, width: int) -> list[int]:
        """Row ranges of about equal work, one per thread that is worth waking."""
        num_tokens = len(batch.positions_T)
        if self._team.num_threads == 1:
            return [0, num_tokens]
        work = np.cumsum(batch.ends_T)
        num_parts = min(num_tokens, self._team.num_parts(2 * int(work[-1]) * width))
        targets = work[-1] * np.arange(1, num_parts) / num_parts
        return [0, *np.searchsorted(work, targets).tolist(), num_tokens]
