"""The canvas of one request: prompt, answer and suffix, of which some positions are still open.

The same class keeps the books of the dispatcher, of an engine and of a worker, so that the three agree
on what is committed, settled and finished. No torch; a canvas knows nothing of passes or caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# An open position of a canvas. Never a token id, so that a mask token in a prompt is a token like any.
OPEN = -1


@dataclass(frozen=True, slots=True)
class Block:
    """Positions `[start, end)` of the canvas, denoised together; the `index`-th of its answer."""

    index: int
    start: int
    end: int


class Canvas:
    """Token ids with `OPEN` positions in the answer `[prompt_len, answer_end)`; a suffix may follow.

    `first_stop` is the first committed position of the answer (`stop_in_prompt`: of prompt and answer)
    that holds a stop token, or None. Positions are
    absolute. Blocks are cut from the end of the prompt, or, `aligned`, at absolute multiples of
    `block_length` (then the first one may begin with prompt tokens).
    """

    __slots__ = (
        "_settled",
        "_stops_from",
        "aligned",
        "answer_end",
        "block_length",
        "first_stop",
        "ids",
        "prompt_len",
        "stop_ids",
    )

    def __init__(
        self,
        ids: Sequence[int],
        prompt_len: int,
        answer_end: int,
        block_length: int,
        *,
        aligned: bool = False,
        stop_ids: Iterable[int] = (),
        stop_in_prompt: bool = False,
    ) -> None:
        self.ids = list(ids)
        self.prompt_len = prompt_len
        self.answer_end = answer_end
        self.block_length = block_length
        self.aligned = aligned
        self.stop_ids = frozenset(stop_ids)
        self._settled = prompt_len
        self._stops_from = 0 if stop_in_prompt else prompt_len
        self.first_stop = self._find_stop(self._stops_from)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_blocks(self) -> int:
        return -(-(self.answer_end - self._grid_start) // self.block_length)

    @property
    def _grid_start(self) -> int:
        return self.prompt_len // self.block_length * self.block_length if self.aligned else self.prompt_len

    def block(self, index: int) -> Block:
        start = self._grid_start + index * self.block_length
        return Block(index, start, min(start + self.block_length, self.answer_end))

    def open_positions(self, start: int, end: int) -> list[int]:
        """Open positions in `[start, end)`, rising."""
        ids = self.ids
        return [position for position in range(start, end) if ids[position] == OPEN]

    def has_open(self, start: int, end: int) -> bool:
        return OPEN in self.ids[start:end]

    def commit(self, position: int, token_id: int) -> None:
        """Put a token at a position of the answer: an open one, or one that is edited."""
        before = self.ids[position]
        self.ids[position] = token_id
        if token_id in self.stop_ids:
            if self.first_stop is None or position < self.first_stop:
                self.first_stop = position
        elif before in self.stop_ids and position == self.first_stop:
            self.first_stop = self._find_stop(position + 1)

    def _find_stop(self, start: int) -> int | None:
        if self.stop_ids.isdisjoint(self.ids[start : self.answer_end]):
            return None
        return next(p for p in range(start, self.answer_end) if self.ids[p] in self.stop_ids)

    def fill_after_stop(self, token_id: int) -> bool:
        """Overwrite the canvas, to the end of the answer, behind the first stop token; whether that changed anything."""
        if self.first_stop is None:
            return False
        start, end = self.first_stop + 1, self.answer_end
        if all(token == token_id for token in self.ids[start:end]):
            return False
        self.ids[start:end] = [token_id] * (end - start)
        return True

    def reopen(self, block: Block, start_ids: Sequence[int]) -> None:
        """Take the block and all after it back to `start_ids`, the whole canvas as the block began."""
        self.ids[block.start :] = start_ids[block.start :]
        if self.first_stop is not None and self.first_stop >= block.start:
            self.first_stop = self._find_stop(self._stops_from)
        self._settled = min(self._settled, max(block.start, self.prompt_len))

    def settled_end(self) -> int:
        """End of the committed prefix: no position before it is open. At most `answer_end`."""
        position, ids, end = self._settled, self.ids, self.answer_end
        while position < end and ids[position] != OPEN:
            position += 1
        self._settled = position
        return position

    @property
    def is_settled(self) -> bool:
        """Whether the answer is complete: committed up to its first stop token, or to its end."""
        end = self.answer_end if self.first_stop is None else self.first_stop + 1
        return self.settled_end() >= end
