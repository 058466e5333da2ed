"""A request in a worker's slot, and which rows of a packed pass are its. Knows no model and no storage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from genserve.dllm.canvas import Canvas
from genserve.dllm.step import Admit
from genserve.dllm.unmasking import BlockState


def visible_ends(positions: np.ndarray, length: int, block_length: int | None) -> np.ndarray:
    """End of what each row sees: of the canvas, or of its absolute block in block-causal models."""
    if block_length is None:
        return np.full(len(positions), length, np.int64)
    return np.minimum((positions // block_length + 1) * block_length, length)


class Slot:
    """What a worker keeps of a request: all of it is rebuilt by an `Admit`.

    given  positions that were pinned, and are never edited.
    block  where it stands in its block; another worker goes on from it.
    """

    __slots__ = ("block", "canvas", "error", "given", "pages", "params", "request_id", "sampling")

    def __init__(self, admit: Admit, error: str | None) -> None:
        self.request_id, self.sampling, self.params = admit.request_id, admit.sampling, admit.params
        self.error = error
        self.canvas = Canvas(
            admit.ids,
            admit.prompt_len,
            admit.answer_end,
            admit.params.block_length,
            aligned=admit.params.cache == "block",
            stop_ids=admit.sampling.stop_token_ids,
            stop_in_prompt=admit.params.stop_in_prompt,
        )
        self.given = {admit.prompt_len + offset for offset, _ in admit.params.pinned}
        self.pages: list[int] = []
        self.block = BlockState(*(admit.resume or (1, 1, 0)))


def row_of_position(spans: Sequence[tuple[int, int]], first_row: int, shift: int) -> dict[int, int]:
    """The packed row that predicts each position of which one ran."""
    row_of: dict[int, int] = {}
    row = first_row
    for start, end in spans:
        for position in range(start + shift, end + shift):
            row_of[position] = row
            row += 1
        if shift and start == 0:
            row_of[0] = row - (end - start)
    return row_of
