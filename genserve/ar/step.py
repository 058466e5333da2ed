"""What the engine asks of its worker in one step, and what comes back. Small frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from genserve.core.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Admit:
    """A sequence takes `slot`. `token_ids` are prompt and, after a preemption, what it generated."""

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams


class Row(NamedTuple):
    """Compute tokens `[start, start + num_tokens)` of the sequence in `slot`.

    `new_pages` extend its page table. `sample` asks for the next token after the last of them.
    """

    slot: int
    start: int
    num_tokens: int
    new_pages: tuple[int, ...]
    sample: bool


@dataclass(frozen=True, slots=True)
class StepArgs:
    """One packed forward pass: first `freed` slots are forgotten, then `admits` enter, then `rows` run."""

    freed: tuple[int, ...]
    admits: tuple[Admit, ...]
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class Sampled(NamedTuple):
    """The next token of a row that asked for one; `error` set means that this row alone failed."""

    slot: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """In the order of the rows that sample. `prompt_logprobs`: (slot, entries for this chunk)."""

    sampled: tuple[Sampled, ...]
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()
