"""One packed forward pass as attention sees it: which token is whose, and where its KV lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


class Span(NamedTuple):
    """Rows `[row, row + num_tokens)` of the pass are tokens `[start, ...)` of the sequence in `slot`."""

    slot: int
    row: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """T tokens of several sequences, packed without padding.

    spans          in row order; a sequence may have several.
    token_slots_T  int64: the slot (page-table row) of each token.
    positions_T    int64: its position in its sequence.
    ends_T         int64: it attends to positions `[0, end)` of its sequence. Causal: its position + 1;
                   bidirectional: the sequence's length, all of whose KV must have been written.
    anchors_T      int64: the position that a sliding window is counted back from; mostly its own.
    page_table     int32 [slot, page index]: the KV page ids; owned by the worker, read here.
    """

    spans: tuple[Span, ...]
    token_slots_T: np.ndarray
    positions_T: np.ndarray
    ends_T: np.ndarray
    anchors_T: np.ndarray
    page_table: np.ndarray

    @classmethod
    def pack(
        cls,
        spans: Sequence[tuple[int, int, int]],
        page_table: np.ndarray,
        ends: Sequence[int] | np.ndarray | None = None,
        anchors: Sequence[int] | np.ndarray | None = None,
    ) -> PagedBatch:
        """Build a batch from (slot, start, num_tokens) spans, none of them empty.

        `ends` and `anchors` say what rows see: a list has one number for each span, an int64 array one
        for each row; without them the batch is causal. ValueError if one has another length.
        """
        counts = np.array([num_tokens for _, _, num_tokens in spans], dtype=np.int64)
        rows = np.cumsum(counts) - counts
        starts = np.array([start for _, start, _ in spans], dtype=np.int64)
        slots = np.array([slot for slot, _, _ in spans], dtype=np.int64)
        positions = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(starts - rows, counts)
        packed = tuple(
            Span(slot, int(row), start, num_tokens)
            for (slot, start, num_tokens), row in zip(spans, rows, strict=True)
        )
        ends_T = positions + 1 if ends is None else _for_rows(ends, counts, "ends")
        anchors_T = positions if anchors is None else _for_rows(anchors, counts, "anchors")
        return cls(packed, np.repeat(slots, counts), positions, ends_T, anchors_T, page_table)

    def position_ids(self, device: torch.device) -> torch.Tensor:
        """int64 [1, T]."""
        return torch.from_numpy(self.positions_T).to(device)[None]


def _for_rows(given: Sequence[int] | np.ndarray, counts: np.ndarray, what: str) -> np.ndarray:
    """int64, one for each row, from one for each row (an array) or for each span."""
    if isinstance(given, np.ndarray):
        if len(given) != (num_rows := int(counts.sum())):
            raise ValueError(f"{len(given)} {what} for {num_rows} rows")
        return given.astype(np.int64, copy=False)
    if len(given) != len(counts):
        raise ValueError(f"{len(given)} {what} for {len(counts)} spans")
    return np.repeat(np.asarray(given, dtype=np.int64), counts)
