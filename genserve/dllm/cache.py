"""Which rows a request's next pass runs, by cache mode (Fast-dLLM, dKV-Cache, block-causal models).

Owns the spans, what they are charged and which passes are prefills to the scheduler; must not know
pages, slots or queues. No torch.

| mode   | first pass of a block          | passes after it                                | KV       |
|--------|--------------------------------|------------------------------------------------|----------|
| none   | the whole canvas (prefill)     | the whole canvas                               | a block  |
| prefix | the whole canvas (prefill)     | from the block to the end of the canvas        | a block  |
| dual   | the whole canvas (prefill)     | the block                                      | a block  |
| dkv    | like any other pass            | open positions, and those committed just before | request |
| block, canvas | rows not final yet, the block | the block                                | request  |

`dkv` begins with the whole canvas and runs all behind the prompt every `refresh_interval` passes; both
are prefills. `block` and `canvas` begin with what no cache holds, a prefill; KV of a block becomes
final when the next block's first pass runs its rows once more, so caching it costs no forward of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from genserve.dllm.canvas import Block, Canvas
from genserve.dllm.request import CacheMode, DiffusionParams

# Caches whose KV lives as long as the request; the others drop theirs with every block.
LASTING: frozenset[CacheMode] = frozenset(("dkv", "block", "canvas"))

Spans = tuple[tuple[int, int], ...]


class PlannedPass(NamedTuple):
    """Rows of one pass. `num_tokens` is what they cost: with guidance every row counts twice."""

    spans: Spans
    num_tokens: int
    is_prefill: bool
    is_start: bool


class PassesState(NamedTuple):
    """Where the passes of a request stand, for another engine to go on with."""

    num_final: int
    is_start: bool
    just_committed: tuple[int, ...]
    num_since_refresh: int


def kv_end(mode: CacheMode, block: Block, length: int) -> int:
    """After a block's first pass, positions `[0, end)` hold all KV that later passes read and do not write."""
    if mode == "none":
        return 0
    if mode == "prefix":
        return block.start
    return block.end if mode in ("block", "canvas") else length


class Passes:
    """The passes of one request while it holds KV; `begin` a block, then `next` and `ran` in turn.

    `shifted`: the model predicts a position from its left neighbour's row.
    """

    __slots__ = (
        "_block",
        "_has_kv",
        "_is_start",
        "_just_committed",
        "_left",
        "_length",
        "_mode",
        "_num_since_refresh",
        "_prompt_len",
        "_refresh_interval",
        "_shifted",
        "_steady",
        "_weight",
        "num_final",
    )

    def __init__(
        self, params: DiffusionParams, length: int, prompt_len: int, *, shifted: bool = False
    ) -> None:
        self._mode = params.cache
        self._length = length
        self._prompt_len = prompt_len
        self._shifted = shifted
        self._left = 1 if shifted and params.first_position == "left_neighbour" else 0
        self._refresh_interval = params.refresh_interval
        self._weight = 2 if params.cfg_scale > 0 else 1
        self._block = Block(-1, 0, 0)
        self._has_kv = False
        self._is_start = True
        self._just_committed: tuple[int, ...] = ()
        self._num_since_refresh = 0
        self._steady: PlannedPass | None = None
        # Positions before it need no further row when a block begins (`block` only).
        self.num_final = 0

    def begin(self, block: Block, num_cached_tokens: int = 0) -> None:
        """Enter a block. `num_cached_tokens` of KV, final, came with the lease (`block` only)."""
        self._block = block
        self._is_start = True
        self._steady = None
        if not self._has_kv:
            self.num_final = num_cached_tokens

    def state(self) -> PassesState:
        """To be resumed elsewhere, where the request has its KV."""
        return PassesState(self.num_final, self._is_start, self._just_committed, self._num_since_refresh)

    def resume(self, block: Block, state: PassesState) -> None:
        """Go on where another engine stopped, its KV at hand."""
        self._block = block
        self._steady = None
        self._has_kv = True
        self.num_final, self._is_start, self._just_committed, self._num_since_refresh = state

    @property
    def wants_refresh(self) -> bool:
        """Whether the next pass is a prefill although KV is there."""
        return self._mode == "dkv" and self._has_kv and self._num_since_refresh >= self._refresh_interval

    def next(self, canvas: Canvas) -> PlannedPass:
        """The rows of the coming pass; the same until `ran`."""
        if self._steady is not None and not self._is_start:
            return self._steady
        mode, block, length = self._mode, self._block, self._length
        if mode == "dkv":
            return self._next_dkv(canvas)
        if mode in LASTING:
            start = max(0, min(self.num_final, block.start - self._left))
            return self._plan(((start, block.end),), is_prefill=not self._has_kv)
        if self._is_start:
            return self._plan(((0, length),), is_prefill=True)
        first = 0 if mode == "none" else max(0, block.start - self._left)
        end = block.end if mode == "dual" else length
        self._steady = self._plan(((first, end),), is_prefill=False)
        return self._steady

    def _next_dkv(self, canvas: Canvas) -> PlannedPass:
        if not self._has_kv:
            return self._plan(((0, self._length),), is_prefill=True)
        if self.wants_refresh:
            first = max(0, self._prompt_len - 1) if self._shifted else self._prompt_len
            return self._plan(((first, self._length),), is_prefill=True)
        rows = canvas.open_positions(self._block.start, self._block.end)
        wanted = {*rows, *self._just_committed}
        if self._shifted:
            wanted.update([max(0, row - 1) for row in rows])
        return self._plan(_merge(sorted(wanted)), is_prefill=False)

    def _plan(self, spans: Spans, *, is_prefill: bool) -> PlannedPass:
        num_rows = sum([end - start for start, end in spans])
        return PlannedPass(spans, num_rows * self._weight, is_prefill, self._is_start)

    def ran(self, planned: PlannedPass, committed: Sequence[int]) -> None:
        """The pass ran and put tokens at the positions `committed`."""
        self._is_start = False
        self._has_kv = True
        if self._mode == "dkv":
            self._num_since_refresh = 1 if planned.is_prefill else self._num_since_refresh + 1
            self._just_committed = tuple(committed)
        elif self._mode == "canvas":
            self.num_final = self._block.start
        elif self._mode in LASTING:
            # KV of a pass that changed nothing is that of the final tokens already.
            self.num_final = self._block.start if committed else self._block.end


def _merge(rows: Sequence[int]) -> Spans:
    spans: list[tuple[int, int]] = []
    start = end = -1
    for row in rows:
        if row == end:
            end += 1
        else:
            if end > start:
                spans.append((start, end))
            start, end = row, row + 1
    if end > start:
        spans.append((start, end))
    return tuple(spans)
