"""The diffusion worker: holds the model, KV pages and canvases; performs one packed step at a time.

It blocks, knows no queue and no clock, and keeps of a request only what its slot holds: its canvas,
the page-table row and where it stands in its block, all rebuilt by `Admit`. Which rows a pass runs is
the engine's choice; which of the open positions they predict are committed is decided here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.core.kv.parts import KvPart
from genserve.core.models.attention.backend import AttentionBackend, PagedContext
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.attention.transfer import KvTransfer, Staging
from genserve.core.models.sampling import token_logprobs
from genserve.core.types import SamplingParams, TokenLogprobs
from genserve.dllm.cache import LASTING, kv_end
from genserve.dllm.canvas import OPEN, Block
from genserve.dllm.denoise import (
    LOGITS_BUDGET_BYTES,
    Proposable,
    Proposals,
    RowOptions,
    logits_chunks,
    propose_rows,
)
from genserve.dllm.models.interface import DiffusionModel, LoadedDiffusionModel
from genserve.dllm.noise import Noise, NoiseKey, seeded_noise
from genserve.dllm.request import CacheMode, DiffusionParams
from genserve.dllm.slot import Slot, row_of_position, visible_ends
from genserve.dllm.step import (
    FETCH,
    RELEASE,
    STEP,
    Admit,
    Commit,
    Denoised,
    Handover,
    Pass,
    StepArgs,
    StepResult,
)
from genserve.dllm.unmasking import (
    BlockState,
    Candidate,
    Share,
    choose,
    needs_entropy,
    needs_margin,
    needs_noise,
    next_pass,
    share,
)

_log = logging.getLogger("genserve.dllm")

# Caches whose first pass over a block runs every row, and whose later ones may lack the left neighbour's.
_REBUILT_PER_BLOCK = ("prefix", "dual", "block")


class _Work(NamedTuple):
    """A pass that runs: the rows of its candidates, and what it may commit of them."""

    at: int
    slot: Slot
    open_positions: list[int]
    positions: list[int]
    rows: list[int]
    options: list[RowOptions]
    due: Share
    noise: dict[int, float]
    only_first: bool
    everything: bool


class DllmWorker:
    """One model on one device.

    backend      owns the KV pages.
    num_slots    requests at once, at most.
    max_pages    pages per canvas, at most; a request with guidance has two canvases.
    fill_token_id  what stands behind an answer's first stop token; by default the model's EOS. The
                 engine's canvas must be filled with the same.
    noise        where uniforms come from.
    transfer     hands KV over to other workers and fetches it from them.
    """

    def __init__(
        self,
        loaded: LoadedDiffusionModel,
        backend: AttentionBackend,
        num_slots: int,
        max_pages: int,
        noise: Noise = seeded_noise,
        fill_token_id: int | None = None,
        logits_budget_bytes: int = LOGITS_BUDGET_BYTES,
        transfer: KvTransfer | None = None,
    ) -> None:
        self._loaded = loaded
        self._model = cast(DiffusionModel, loaded.model)
        self._backend = backend
        self._transfer = transfer
        self._slots: list[Slot | None] = [None] * num_slots
        # Rows from `num_slots` on belong to the unconditional canvases.
        self._page_table = np.zeros((2 * num_slots, max_pages), np.int32)
        if fill_token_id is None and loaded.eos_token_ids:
            fill_token_id = loaded.eos_token_ids[0]
        self._fill_token_id = fill_token_id
        self._noise = noise
        self._allowed = Proposable(loaded.num_valid_tokens, loaded.mask_token_id)
        self._budget_bytes = logits_budget_bytes

    def warm_up(self) -> None:
        """Denoise two tokens and forget them: the first request must not wait for compilers."""
        cache: CacheMode = "block" if self._loaded.family == "block_causal" else "none"
        params = DiffusionParams(cache=cache, block_length=4)
        admit = Admit(0, "warm-up", (0, 0, OPEN, OPEN), 2, 4, SamplingParams(temperature=0), params)
        block = (0, 0 if cache == "block" else 2, 4)
        self.perform(STEP, StepArgs((), (admit,), (Pass(0, ((0, 4),), (0,), block, True),)))
        self.perform(STEP, StepArgs((0,), (), ()))

    def perform(self, op: str, args: Any) -> Any:
        """A `StepResult` of a step, whose requests that fail alone are reported inside the result, or of a link.

        Steps and what belongs to the link may be performed by two threads at once.
        """
        with torch.inference_mode():
            if op == STEP:
                return self._step(args)
            if op not in (FETCH, RELEASE):
                raise ValueError(f"unknown operation {op!r}")
            if self._transfer is None:
                raise RuntimeError("this worker was built to hand nothing over")
            if op == FETCH:
                self._transfer.fetch(args.pages, args.parts)
            else:
                self._transfer.release(args.request_id, args.parts)
            return None

    def _step(self, args: StepArgs) -> StepResult:
        for index in args.freed:
            self._slots[index] = None
        for admit in args.admits:
            self._slots[admit.slot] = Slot(admit, self._objection(admit))
        results: list[Denoised | None] = []
        running: list[int] = []
        for at, one in enumerate(args.passes):
            error = self._slot(one.slot).error
            results.append(None if error is None else Denoised(one.slot, (), error=error))
            if error is None:
                running.append(at)
        if running:
            passes = [args.passes[at] for at in running]
            for at, denoised in zip(running, self._run(passes), strict=True):
                results[at] = denoised
        return StepResult(tuple(denoised for denoised in results if denoised is not None))

    def _objection(self, admit: Admit) -> str | None:
        """Why this request cannot be denoised here, or None."""
        params, sampling = admit.params, admit.sampling
        if sampling.seed is None and (sampling.temperature > 0 or params.unmasking.kind == "random"):
            return "seed: must be set when temperature > 0 or positions are ranked at random"
        if params.cfg_scale > 0 and params.cache != "none":
            return f'cfg_scale: needs cache "none", not "{params.cache}"'
        if (params.cache == "block") != (self._loaded.family == "block_causal"):
            return f'cache: "{params.cache}" does not fit a {self._loaded.family} model'
        return None

    def _run(self, passes: Sequence[Pass]) -> list[Denoised]:
        staging = self._stage(passes)
        with contextlib.ExitStack() as stack:
            if staging is not None:
                stack.callback(staging.close)
            results = self._denoise(passes, self._backend if staging is None else staging.backend)
            return [
                self._handed_over(one, result, staging) if one.hand_over else result
                for one, result in zip(passes, results, strict=True)
            ]

    def _stage(self, passes: Sequence[Pass]) -> Staging | None:
        """Have the KV kept that later passes of departing requests read, as far as this pass leaves it."""
        pages_of: dict[str, list[int]] = {}
        for one in passes:
            slot = self._slot(one.slot)
            self._extend_pages(one, slot)
            if one.hand_over:
                num_pages = self._num_handed_pages(one, slot)
                if num_pages and self._transfer is not None:
                    pages_of[slot.request_id] = slot.pages[:num_pages]
        return self._transfer.stage(pages_of) if pages_of and self._transfer is not None else None

    def _num_handed_pages(self, one: Pass, slot: Slot) -> int:
        end = kv_end(slot.params.cache, Block(*one.block), len(slot.canvas))
        return -(-end // PAGE_TOKENS)

    def _denoise(self, passes: Sequence[Pass], backend: AttentionBackend) -> list[Denoised]:
        first_rows, hidden_TH = self._forward(passes, backend)
        results = [Denoised(one.slot, ()) for one in passes]
        works: list[_Work] = []
        for at, one in enumerate(passes):
            try:
                works.append(self._prepare(at, one, *first_rows[at]))
            except Exception as error:  # one request's options must not take its batch-mates along
                results[at] = self._failed(one, error)
        proposals = self._propose(hidden_TH, works)
        first = 0
        for work in works:
            last = first + len(work.rows)
            one = passes[work.at]
            try:
                part = proposals.rows(first, last)
                results[work.at] = self._commit(one, work, part, hidden_TH)
            except Exception as error:
                results[work.at] = self._failed(one, error)
            first = last
        return results

    def _handed_over(self, one: Pass, denoised: Denoised, staging: Staging | None) -> Denoised:
        slot = self._slot(one.slot)
        if denoised.error is not None or (denoised.block_done and slot.params.cache not in LASTING):
            return denoised
        num_pages = self._num_handed_pages(one, slot)
        parts: tuple[KvPart, ...] | None = ()
        if num_pages:
            parts = None if staging is None else staging.take(slot.request_id)
        if parts is None:
            return denoised
        return denoised._replace(handover=Handover(astuple(slot.block), num_pages, parts))

    def _failed(self, one: Pass, error: Exception) -> Denoised:
        """Called while `error` is handled: the client is told what it says, the log where it came from."""
        slot = self._slot(one.slot)
        _log.warning("request %s failed alone", slot.request_id, exc_info=error)
        slot.error = str(error)
        return Denoised(one.slot, (), error=str(error))

    # One packed forward pass.

    def _forward(
        self, passes: Sequence[Pass], backend: AttentionBackend
    ) -> tuple[list[tuple[int, int]], torch.Tensor]:
        """Hidden states of all rows, and for each pass its first row and its first unconditional one."""
        mask_id = self._loaded.mask_token_id
        ids: list[int] = []
        spans: list[tuple[int, int, int]] = []
        ends: list[np.ndarray] = []
        first_rows: list[tuple[int, int]] = []
        for one in passes:
            slot = self._slot(one.slot)
            known = slot.canvas.ids
            block_length = slot.params.block_length if slot.params.cache == "block" else None
            copies = [(one.slot, 0)]
            if slot.params.cfg_scale > 0:
                copies.append((one.slot + len(self._slots), slot.canvas.prompt_len))
            rows = []
            for table_row, num_hidden in copies:
                rows.append(len(ids))
                for start, end in one.spans:
                    shown = max(start, min(num_hidden, end))
                    ids.extend([mask_id] * (shown - start))
                    # Only the rows that run are looked at: a canvas may be far longer than a block.
                    ids.extend([mask_id if token == OPEN else token for token in known[shown:end]])
                    spans.append((table_row, start, end - start))
                    ends.append(visible_ends(np.arange(start, end), len(known), block_length))
            first_rows.append((rows[0], rows[-1]))
        batch = PagedBatch.pack(spans, self._page_table, np.concatenate(ends))
        device = self._loaded.device
        hidden_TH = self._model.hidden(
            torch.tensor(ids, device=device),
            torch.from_numpy(batch.positions_T).to(device),
            PagedContext(backend, batch),
        )
        return first_rows, hidden_TH

    def _extend_pages(self, one: Pass, slot: Slot) -> None:
        if not one.new_pages:
            return
        pages = slot.pages
        if slot.params.cfg_scale > 0:
            pages.extend(one.new_pages)
            half = len(pages) // 2
            self._page_table[one.slot, :half] = pages[:half]
            self._page_table[one.slot + len(self._slots), : len(pages) - half] = pages[half:]
        else:
            first = len(pages)
            pages.extend(one.new_pages)
            self._page_table[one.slot, first : len(pages)] = one.new_pages

    # What a pass may commit.

    def _prepare(self, at: int, one: Pass, first_row: int, first_bare_row: int) -> _Work:
        slot = self._slot(one.slot)
        index, start, end = one.block
        canvas, params, rule = slot.canvas, slot.params, slot.params.unmasking
        open_positions = canvas.open_positions(start, end)
        if one.is_start:
            slot.block = BlockState(end - start, canvas.num_blocks, len(open_positions))
        block = slot.block

        def draws(pass_number: int) -> Sequence[float]:
            return self._uniforms(slot, 1, index, pass_number, open_positions)

        row_of = row_of_position(one.spans, first_row, self._loaded.shift)
        only_first = (
            self._loaded.shift == 1
            and one.is_start
            and params.first_position == "commit"
            and params.cache in _REBUILT_PER_BLOCK
            and open_positions[:1] == [start]
        )
        block.next_pass = 0 if only_first else next_pass(rule, block, len(open_positions), draws)
        due = share(rule, block, block.next_pass, len(open_positions))
        is_last = block.num_passes_open + 1 == params.max_block_steps
        noise = {}
        if needs_noise(rule) and open_positions:
            noise = dict(zip(open_positions, draws(block.next_pass), strict=True))

        positions = [position for position in open_positions if position in row_of]
        if open_positions and not positions:
            raise RuntimeError("no row of this pass predicts an open position of its block")
        if params.editing_threshold is not None:
            first = max(start, canvas.prompt_len)
            ids, given = canvas.ids, slot.given
            committed = [p for p in range(first, end) if ids[p] != OPEN and p not in given and p in row_of]
            positions = sorted(positions + committed)
        options = self._row_options(slot, index, positions)
        rows = [row_of[position] for position in positions]
        if params.cfg_scale > 0:
            shift = first_bare_row - first_row
            options = [
                option._replace(guidance_row=row + shift, guidance_scale=params.cfg_scale)
                for option, row in zip(options, rows, strict=True)
            ]
        return _Work(at, slot, open_positions, positions, rows, options, due, noise, only_first, is_last)

    def _row_options(self, slot: Slot, block_index: int, positions: list[int]) -> list[RowOptions]:
        sampling = slot.sampling
        if sampling.temperature <= 0:
            return [RowOptions()] * len(positions)
        uniforms = self._uniforms(slot, 0, block_index, slot.block.next_pass, positions)
        ids = slot.canvas.ids
        # An edit is for what the model is now surest of, so it is not drawn.
        return [
            RowOptions(sampling.temperature, sampling.top_p, sampling.top_k, draw)
            if ids[position] == OPEN
            else RowOptions()
            for position, draw in zip(positions, uniforms, strict=True)
        ]

    def _uniforms(
        self, slot: Slot, stream: int, block: int, pass_number: int, positions: Sequence[int]
    ) -> Sequence[float]:
        key = NoiseKey(slot.request_id, slot.sampling.seed or 0, stream, block, pass_number)
        return self._noise(key, positions)

    def _propose(self, hidden_TH: torch.Tensor, works: Sequence[_Work]) -> Proposals:
        rows = [row for work in works for row in work.rows]
        if not rows:
            return Proposals([], [], [], [], [])
        rules = [work.slot.params.unmasking for work in works]
        return propose_rows(
            self._model,
            hidden_TH,
            rows,
            [option for work in works for option in work.options],
            self._allowed,
            self._loaded.vocab_size,
            with_margin=any(needs_margin(rule) for rule in rules),
            with_entropy=any(needs_entropy(rule) for rule in rules),
            budget_bytes=self._budget_bytes,
        )

    # Commits.

    def _commit(self, one: Pass, work: _Work, found: Proposals, hidden_TH: torch.Tensor) -> Denoised:
        slot = work.slot
        canvas, params = slot.canvas, slot.params
        at_of = {position: at for at, position in enumerate(work.positions)}
        failures = [error for error in found.errors if error is not None]
        if failures:
            raise RuntimeError(failures[0])
        candidates = [
            Candidate(
                position,
                found.confidences[at_of[position]],
                found.margins[at_of[position]],
                found.entropies[at_of[position]],
                work.noise.get(position, 0.0),
            )
            for position in work.open_positions
            if position in at_of
        ]
        if work.everything:
            chosen = [candidate.position for candidate in candidates]
        elif work.only_first:
            chosen = work.open_positions[:1]
        else:
            chosen = choose(params.unmasking, work.due, candidates)
        edited = self._edits(work, found, at_of)
        changed = sorted([*chosen, *edited])
        logprobs = self._logprobs(work, found, at_of, changed, hidden_TH)
        commits = []
        for position in changed:
            at = at_of[position]
            canvas.commit(position, found.token_ids[at])
            commits.append(
                Commit(position, found.token_ids[at], found.confidences[at], logprobs.get(position))
            )
        filled = self._fill(one, slot)
        if filled and canvas.first_stop is not None:
            commits = [commit for commit in commits if commit.position <= canvas.first_stop]
        done = self._count_and_end(one, work, bool(edited))
        return Denoised(one.slot, tuple(commits), filled, done)

    def _edits(self, work: _Work, found: Proposals, at_of: dict[int, int]) -> list[int]:
        threshold = work.slot.params.editing_threshold
        if threshold is None:
            return []
        ids = work.slot.canvas.ids
        return [
            position
            for position, at in at_of.items()
            if ids[position] != OPEN
            and found.token_ids[at] != ids[position]
            and found.confidences[at] > threshold
        ]

    def _logprobs(
        self,
        work: _Work,
        found: Proposals,
        at_of: dict[int, int],
        positions: Sequence[int],
        hidden_TH: torch.Tensor,
    ) -> dict[int, TokenLogprobs]:
        num_top = work.slot.sampling.logprobs
        if num_top is None:
            return {}
        ats = [at_of[position] for position in positions]
        options = [work.options[at] for at in ats]
        result: list[TokenLogprobs] = []
        # Only committed rows are wanted, and which these are was not known when there were logits.
        for first, last, logits_RV in logits_chunks(
            self._model,
            hidden_TH,
            [work.rows[at] for at in ats],
            options,
            self._loaded.vocab_size,
            self._budget_bytes,
        ):
            ids = [found.token_ids[at] for at in ats[first:last]]
            result += token_logprobs(
                logits_RV, ids, [num_top] * len(ids), num_valid_tokens=self._loaded.num_valid_tokens
            )
        return dict(zip(positions, result, strict=True))

    def _fill(self, one: Pass, slot: Slot) -> bool:
        canvas, params = slot.canvas, slot.params
        if not params.early_stop or canvas.first_stop is None or self._fill_token_id is None:
            return False
        if params.editing_threshold is not None:  # a stop token may still be edited away
            return False
        if one.is_start and params.cache != "none" and not params.fill_at_block_start:
            return False
        return canvas.fill_after_stop(self._fill_token_id)

    def _count_and_end(self, one: Pass, work: _Work, any_edited: bool) -> bool:
        """Count this pass, and whether the block wants no other."""
        block, params, canvas = work.slot.block, work.slot.params, work.slot.canvas
        block.next_pass += 1
        _, start, end = one.block
        began_full = not work.open_positions
        block.num_passes_full += began_full
        block.num_passes_open += not began_full
        if canvas.has_open(start, end):
            return False
        if params.editing_threshold is None or block.num_passes_open == params.max_block_steps:
            return True
        return (began_full and not any_edited) or block.num_passes_full >= params.max_post_steps

    def _slot(self, index: int) -> Slot:
        slot = self._slots[index]
        assert slot is not None
        return slot
