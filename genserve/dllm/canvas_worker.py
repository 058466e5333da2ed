"""The worker of a renoised-canvas model (family C): one packed step at a time, like `dllm.worker`.

A request's rows before its block are causal and leave their KV behind; the rows of the block are its
canvas, which sees all before it and all of itself. Between passes a slot holds the token ids, the
canvas and what the last pass predicted: rebuilt from the ids and the noise when a canvas starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from genserve.core.models.attention.backend import AttentionBackend, PagedContext
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.types import SamplingParams
from genserve.dllm.canvas import OPEN
from genserve.dllm.models.interface import CanvasModel, LoadedDiffusionModel
from genserve.dllm.renoise import CanvasState, Noise, Rules, advance, canvas_noise, start
from genserve.dllm.request import DiffusionParams
from genserve.dllm.step import FETCH, RELEASE, STEP, Admit, Commit, Denoised, Pass, StepArgs, StepResult


class _Slot:
    __slots__ = ("canvas", "ids", "num_pages", "rules", "soft_CH")

    def __init__(self, ids: Sequence[int], rules: Rules) -> None:
        self.ids = list(ids)
        self.rules = rules
        self.num_pages = 0
        self.canvas: CanvasState | None = None
        self.soft_CH: torch.Tensor | None = None


class _Rows(NamedTuple):
    """One span of the packed pass; `is_canvas`, or causal."""

    slot: int
    start: int
    end: int
    is_canvas: bool


class CanvasWorker:
    """One model on one device.

    loaded      of family "canvas"; every block has exactly `default_block_length` positions.
    backend     owns the KV pages.
    num_slots   requests at once, at most.
    max_pages   pages per request, at most.
    noise       what draws and random tokens are made of.
    """

    def __init__(
        self,
        loaded: LoadedDiffusionModel,
        backend: AttentionBackend,
        num_slots: int,
        max_pages: int,
        noise: Noise = canvas_noise,
    ) -> None:
        if loaded.canvas is None:
            raise ValueError(f"{loaded.name} is no model of renoised canvases")
        self._defaults = loaded.canvas
        self._model: CanvasModel = loaded.model  # type: ignore[assignment]
        self._num_positions = loaded.default_block_length
        self._num_valid_tokens = loaded.num_valid_tokens
        self._dtype = loaded.dtype
        self._device = loaded.device
        self._backend = backend
        self._noise = noise
        self._slots: list[_Slot | None] = [None] * num_slots
        self._page_table = np.zeros((num_slots, max_pages), np.int32)

    def warm_up(self) -> None:
        """Run a canvas for two passes and forget it: the first request must not wait for compilers."""
        end = 3 + self._num_positions
        ids = (0, 0, 0, *(OPEN,) * self._num_positions)
        admit = Admit(0, "", ids, 3, end, SamplingParams(temperature=1.0, seed=0), DiffusionParams("canvas"))
        pages = (0,) * -(-end // 16)
        self.perform(STEP, StepArgs((), (admit,), (Pass(0, ((0, end),), pages, (0, 3, end), True),)))
        self.perform(STEP, StepArgs((), (), (Pass(0, ((3, end),), (), (0, 3, end), False),)))
        self.perform(STEP, StepArgs((0,), (), ()))

    def perform(self, op: str, args: Any) -> StepResult:
        """`args` is `StepArgs`; requests that fail alone are reported inside the result."""
        if op in (FETCH, RELEASE) or (op == STEP and any(each.hand_over for each in args.passes)):
            raise RuntimeError("a worker of renoised canvases hands nothing over")
        if op != STEP:
            raise ValueError(f"unknown operation {op!r}")
        with torch.inference_mode():
            return self._step(args)

    def _step(self, args: StepArgs) -> StepResult:
        for slot in args.freed:
            self._slots[slot] = None
        for admit in args.admits:
            rules = Rules.of(admit.sampling, admit.params, self._defaults, self._num_valid_tokens)
            self._slots[admit.slot] = _Slot(admit.ids, rules)
        if not args.passes:
            return StepResult(())
        for each in args.passes:
            self._begin(each)
        hidden_NH = self._forward(args.passes)
        return StepResult(
            tuple(
                self._denoise(each, part_CH)
                for each, part_CH in zip(args.passes, hidden_NH.split(self._num_positions), strict=True)
            )
        )

    def _begin(self, each: Pass) -> None:
        """Take the pages in, and begin a canvas where one starts."""
        slot = self._slot(each.slot)
        first, slot.num_pages = slot.num_pages, slot.num_pages + len(each.new_pages)
        self._page_table[each.slot, first : slot.num_pages] = each.new_pages
        index, begin, end = each.block
        if end - begin != self._num_positions:
            raise ValueError(
                f"a block of {end - begin} positions; the model's canvas has {self._num_positions}"
            )
        if each.is_start:
            slot.canvas = start(index, self._num_positions, slot.rules, self._noise, self._device)
            slot.soft_CH = None

    def _forward(self, passes: Sequence[Pass]) -> torch.Tensor:
        """Hidden states of the passes' canvases, one after another."""
        spans = [rows for each in passes for rows in _spans(each)]
        positions = [np.arange(rows.start, rows.end) for rows in spans]
        pairs = list(zip(spans, positions, strict=True))
        batch = PagedBatch.pack(
            [(rows.slot, rows.start, rows.end - rows.start) for rows in spans],
            self._page_table,
            np.concatenate([np.full_like(at, rows.end) if rows.is_canvas else at + 1 for rows, at in pairs]),
            np.concatenate([np.full_like(at, rows.start) if rows.is_canvas else at for rows, at in pairs]),
        )
        is_canvas = np.concatenate([np.full(len(at), rows.is_canvas) for rows, at in pairs])
        ids = [self._ids(rows) for rows in spans]
        hidden_NH: torch.Tensor = self._model.hidden(
            torch.cat(ids),
            batch.position_ids(self._device)[0],
            torch.from_numpy(is_canvas.nonzero()[0]).to(self._device),
            torch.cat([self._soft(each.slot) for each in passes]),
            PagedContext(self._backend, batch),
        )
        return hidden_NH

    def _ids(self, rows: _Rows) -> torch.Tensor:
        slot = self._slot(rows.slot)
        if not rows.is_canvas:
            return torch.tensor(slot.ids[rows.start : rows.end], dtype=torch.int64, device=self._device)
        assert slot.canvas is not None
        return slot.canvas.ids_C

    def _soft(self, slot_index: int) -> torch.Tensor:
        soft_CH = self._slot(slot_index).soft_CH
        if soft_CH is not None:
            return soft_CH
        return torch.zeros(
            self._num_positions, self._model.hidden_size, dtype=self._dtype, device=self._device
        )

    def _denoise(self, each: Pass, hidden_CH: torch.Tensor) -> Denoised:
        slot = self._slot(each.slot)
        assert slot.canvas is not None
        logits_CV = self._model.logits(hidden_CH)
        if logits_CV.isnan().any():
            return Denoised(each.slot, (), error="the model's logits are not numbers (NaN)")
        after = advance(slot.canvas, logits_CV, slot.rules, self._noise)
        if not after.is_done:
            slot.canvas, slot.soft_CH = after.state, self._model.soften(after.logits_CV)
            return Denoised(each.slot, ())
        slot.canvas = slot.soft_CH = None
        _, begin, end = each.block
        tokens = after.tokens_C.tolist()
        slot.ids[begin:end] = tokens
        commits = zip(range(begin, end), tokens, after.probs_C.tolist(), strict=True)
        return Denoised(each.slot, tuple(Commit(*commit) for commit in commits), block_done=True)

    def _slot(self, index: int) -> _Slot:
        slot = self._slots[index]
        assert slot is not None
        return slot


def _spans(each: Pass) -> list[_Rows]:
    """The pass' rows, cut where its canvas begins."""
    begin = each.block[1]
    found = []
    for first, last in each.spans:
        if first < begin:
            found.append(_Rows(each.slot, first, min(last, begin), False))
        if last > begin:
            found.append(_Rows(each.slot, max(first, begin), last, True))
    return found
