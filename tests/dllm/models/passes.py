"""Runs packed passes of a loaded model over spans of canvases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from genserve.core.models.attention.backend import AttentionBackend, PagedContext
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.attention.reference import ReferenceAttention
from genserve.dllm.models.interface import LoadedDiffusionModel

PAGES = 60


def block_ends(length: int, block_length: int) -> np.ndarray:
    """What each row of a block-causal canvas sees."""
    return np.minimum((np.arange(length) // block_length + 1) * block_length, length)


class Passes:
    """KV pages of a few canvases, and the passes over them. Slot s has the pages s, s + slots, ..."""

    def __init__(self, loaded: LoadedDiffusionModel, num_slots: int = 1, kind: str = "cpu") -> None:
        specs = loaded.model.layer_specs
        self.backend: AttentionBackend = (
            CpuAttention(specs, PAGES, torch.float32)
            if kind == "cpu"
            else ReferenceAttention(specs, PAGES, torch.float32)
        )
        self.loaded = loaded
        self.table = np.arange(PAGES, dtype=np.int32).reshape(-1, num_slots).T.copy()

    def run(
        self,
        canvases: Sequence[torch.Tensor],
        spans: list[tuple[int, int, int]],
        ends: Sequence[int] | np.ndarray,
    ) -> torch.Tensor:
        """Logits of all rows, in the order of the spans (slot, start, num_tokens)."""
        batch = PagedBatch.pack(spans, self.table, ends)
        ids = torch.cat([canvases[slot][start : start + num] for slot, start, num in spans])
        model = self.loaded.model
        with torch.inference_mode():
            hidden = model.hidden(ids, torch.from_numpy(batch.positions_T), PagedContext(self.backend, batch))
            return model.logits(hidden)
