"""What sampling one sequence remembers: counts for penalties, bias, the place in its grammar.

A state is a function of the request and its token ids, so it is rebuilt from them on any worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from genserve.core.types import SamplingParams


class TokenMatcher(Protocol):
    """What the sampler needs of a grammar matcher (`core.models.grammar.GrammarMatcher`)."""

    def mask(self, logits_V: Tensor) -> None:
        """Set the logits of tokens that may not come next to -inf, in place."""
        ...

    def accept(self, token_id: int) -> None: ...


class _Counts:
    """Occurrences per token id, kept incrementally as growing tensors."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = torch.empty(64, dtype=torch.int64)
        self._counts = torch.zeros(64, dtype=torch.float32)

    def add(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._ids):
                self._ids = torch.cat((self._ids, torch.empty_like(self._ids)))
                self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
            self._ids[slot] = token_id
            self._counts[slot] = 0
        self._counts[slot] += 1

    def __len__(self) -> int:
        return len(self._slots)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        num = len(self._slots)
        return self._ids[:num].to(device), self._counts[:num].to(device)


class SamplerState:
    """What sampling one sequence remembers. Rebuild it from token ids alone (after a preemption).

    `params.seed` must be set unless temperature is 0. `matcher` must be fresh: the output ids are
    fed to it here. The owner calls `append` once for each token it commits; `sample` changes nothing.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
        matcher: TokenMatcher | None = None,
    ) -> None:
        if params.temperature > 0 and params.seed is None:
            raise ValueError("seed: must be set by the front end when temperature > 0")
        self.params = params
        self.matcher = matcher
        self.num_output_tokens = 0
        self._seen = _Counts() if params.repetition_penalty != 1.0 else None
        self._output = _Counts() if params.presence_penalty or params.frequency_penalty else None
        self.has_extras = bool(
            params.logit_bias or matcher or self._seen is not None or self._output is not None
        )
        self._bias: tuple[Tensor, Tensor] | None = None
        self._bias_range = (0, -1)
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            self._bias = torch.tensor(ids), torch.tensor(values, dtype=torch.float32)
            self._bias_range = min(ids), max(ids)
        if self._seen is not None:
            for token_id in dict.fromkeys(prompt_token_ids):
                self._seen.add(token_id)
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Fold in one committed output token."""
        self.num_output_tokens += 1
        if self._seen is not None:
            self._seen.add(token_id)
        if self._output is not None:
            self._output.add(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)

    def bias_fits(self, vocab_size: int) -> bool:
        """Whether every biased token id is one of the model's."""
        low, high = self._bias_range
        return low >= 0 and high < vocab_size

    def apply_extras(self, logits_V: Tensor) -> None:
        """Bias, penalties and grammar mask on one row of raw logits, in place."""
        params, device = self.params, logits_V.device
        if self._bias is not None:
            if self._bias[0].device != device:
                self._bias = self._bias[0].to(device), self._bias[1].to(device)
            ids, values = self._bias
            logits_V.index_add_(0, ids, values)
        if self._seen is not None and len(self._seen):
            ids, _ = self._seen.tensors(device)
            seen = logits_V[ids]
            penalty = params.repetition_penalty
            logits_V[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)
        if self._output is not None and len(self._output):
            ids, counts = self._output.tensors(device)
            logits_V[ids] -= params.presence_penalty + params.frequency_penalty * counts
        if self.matcher is not None:
            self.matcher.mask(logits_V)
