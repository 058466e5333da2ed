"""The autoregressive worker: holds the model, KV pages and samplers; performs one packed step at a time.

It blocks, knows no queue and no clock, and keeps of a sequence only what its slot holds: token ids,
the page-table row and the sampler's state, all rebuilt by `Admit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from genserve.ar.engine import STEP
from genserve.ar.step import Admit, Row, Sampled, StepArgs, StepResult
from genserve.core.models.attention.backend import AttentionBackend, PagedContext
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.sampler_state import SamplerState, TokenMatcher
from genserve.core.models.sampling import sample, token_logprobs
from genserve.core.types import SamplingParams, TokenLogprobs

MatcherFactory = Callable[[SamplingParams], TokenMatcher | None]


class LanguageModel(Protocol):
    """What the worker calls: a `transformers` causal LM with paged attention."""

    def __call__(self, **kwargs: Any) -> Any: ...


class _Slot:
    __slots__ = ("error", "num_pages", "sampler", "token_ids")

    def __init__(self, admit: Admit, matcher: TokenMatcher | None, error: str | None = None) -> None:
        self.error = error
        self.token_ids = list(admit.token_ids)
        self.num_pages = 0
        prompt, output = (
            admit.token_ids[: admit.num_prompt_tokens],
            admit.token_ids[admit.num_prompt_tokens :],
        )
        self.sampler = SamplerState(admit.sampling, prompt, output, matcher)


class ArWorker:
    """One model on one device.

    model           in evaluation mode, loaded with paged attention.
    backend         owns the KV pages; `num_pages` of them.
    num_slots       sequences at once, at most.
    max_pages       pages per sequence, at most.
    num_valid_tokens  ids from here on are padding of the embedding and never chosen.
    """

    def __init__(
        self,
        model: LanguageModel,
        backend: AttentionBackend,
        num_slots: int,
        max_pages: int,
        num_valid_tokens: int | None = None,
        make_matcher: MatcherFactory = lambda sampling: None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model = model
        self._backend = backend
        self._slots: list[_Slot | None] = [None] * num_slots
        self._page_table = np.zeros((num_slots, max_pages), np.int32)
        self._num_valid_tokens = num_valid_tokens
        self._make_matcher = make_matcher
        self._device = torch.device(device)

    def warm_up(self) -> None:
        """Run a prompt and a token and forget both: the first request must not wait for compilers."""
        admit = Admit(0, (0, 0, 0), 3, SamplingParams(temperature=0, max_tokens=2))
        self.perform(STEP, StepArgs((), (admit,), (Row(0, 0, 3, (0,), True),)))
        self.perform(STEP, StepArgs((), (), (Row(0, 3, 1, (), True),)))
        self.perform(STEP, StepArgs((0,), (), ()))

    def perform(self, op: str, args: Any) -> StepResult:
        """`args` is `StepArgs`; rows that fail alone are reported inside the result."""
        if op != STEP:
            raise ValueError(f"unknown operation {op!r}")
        with torch.inference_mode():
            return self._step(args)

    def _step(self, args: StepArgs) -> StepResult:
        for slot in args.freed:
            self._slots[slot] = None
        for admit in args.admits:
            self._slots[admit.slot] = self._admit(admit)
        if not args.rows:
            return StepResult(())
        input_ids, batch = self._pack(args.rows)
        keep, owners = self._wanted_logits(args.rows, batch)
        logits_RV = self._model(
            input_ids=input_ids,
            position_ids=batch.position_ids(self._device),
            use_cache=False,
            paged=PagedContext(self._backend, batch),
            logits_to_keep=torch.tensor(keep, dtype=torch.int64, device=self._device),
        ).logits[0]
        if not keep:
            return StepResult(())
        return self._sample(args.rows, logits_RV.float(), owners)

    def _admit(self, admit: Admit) -> _Slot:
        matcher = None
        try:
            if admit.sampling.grammar is not None:
                matcher = self._make_matcher(admit.sampling)
            return _Slot(admit, matcher)
        except Exception as error:
            # Kept in the slot: its first token, which reports it, may be several chunks away.
            cause = "sampling" if admit.sampling.grammar is None else "grammar"
            neutral = SamplingParams(temperature=0, prompt_logprobs=admit.sampling.prompt_logprobs)
            return _Slot(replace(admit, sampling=neutral), None, f"{cause}: {error}")

    def _pack(self, rows: Sequence[Row]) -> tuple[torch.Tensor, PagedBatch]:
        ids: list[int] = []
        for slot_index, start, num_tokens, new_pages, _ in rows:
            slot = self._slots[slot_index]
            assert slot is not None
            if new_pages:
                first = slot.num_pages
                slot.num_pages = first + len(new_pages)
                self._page_table[slot_index, first : slot.num_pages] = new_pages
            if num_tokens == 1:
                ids.append(slot.token_ids[start])
            else:
                ids.extend(slot.token_ids[start : start + num_tokens])
        batch = PagedBatch.pack([(row.slot, row.start, row.num_tokens) for row in rows], self._page_table)
        return torch.tensor([ids], device=self._device), batch

    def _wanted_logits(
        self, rows: Sequence[Row], batch: PagedBatch
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token rows whose logits are needed, and for each row its (first, count) among them."""
        keep: list[int] = []
        owners: list[tuple[int, int]] = []
        for row, span in zip(rows, batch.spans, strict=True):
            slot = self._slots[row.slot]
            assert slot is not None
            first = len(keep)
            end = span.row + row.num_tokens
            if slot.sampler.params.prompt_logprobs is not None:
                keep.extend(range(span.row, end))
            elif row.sample:
                keep.append(end - 1)
            owners.append((first, len(keep) - first))
        return keep, owners

    def _sample(
        self,
        rows: Sequence[Row],
        logits_RV: torch.Tensor,
        owners: list[tuple[int, int]],
    ) -> StepResult:
        sampling = [
            (row, first + count - 1) for row, (first, count) in zip(rows, owners, strict=True) if row.sample
        ]
        last_rows = [at for _, at in sampling]
        states = [self._slot(row.slot).sampler for row, _ in sampling]
        chosen_from = logits_RV if len(last_rows) == len(logits_RV) else logits_RV[last_rows]
        tokens = sample(chosen_from, states, num_valid_tokens=self._num_valid_tokens) if states else []
        sampled = []
        for (row, _), token in zip(sampling, tokens, strict=True):
            slot = self._slot(row.slot)
            error = slot.error or token.error
            if error is None:
                slot.token_ids.append(token.token_id)
                try:
                    slot.sampler.append(token.token_id)
                except Exception as failure:  # a grammar that cannot follow fails its own row
                    error = f"grammar: {failure}"
            sampled.append(Sampled(row.slot, token.token_id, token.logprobs, error))
        prompt_logprobs = tuple(
            (row.slot, self._prompt_logprobs(row, logits_RV[first : first + count]))
            for row, (first, count) in zip(rows, owners, strict=True)
            if count and self._slot(row.slot).sampler.params.prompt_logprobs is not None
        )
        return StepResult(tuple(sampled), prompt_logprobs)

    def _prompt_logprobs(self, row: Row, logits_NV: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens that follow this chunk's tokens: the last prompt token predicts output."""
        slot = self._slot(row.slot)
        num_prompt = len(slot.token_ids) - slot.sampler.num_output_tokens
        following = slot.token_ids[row.start + 1 : min(row.start + row.num_tokens + 1, num_prompt)]
        if not following:
            return ()
        num_top = slot.sampler.params.prompt_logprobs or 0
        return tuple(
            token_logprobs(
                logits_NV[: len(following)],
                following,
                [num_top] * len(following),
                num_valid_tokens=self._num_valid_tokens,
            )
        )

    def _slot(self, index: int) -> _Slot:
        slot = self._slots[index]
        assert slot is not None
        return slot
