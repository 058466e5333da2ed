"""What an engine asks of its worker in one step, and what comes back. Small frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from genserve.core.kv.parts import KvPart
from genserve.core.types import SamplingParams, TokenLogprobs
from genserve.dllm.request import DiffusionParams

STEP = "step"  # on the device's lane, `StepArgs`
FETCH = "fetch"  # on the link's lane, `FetchArgs`; nothing comes back
RELEASE = "release"  # on the link's lane, `ReleaseArgs`; nothing comes back


@dataclass(frozen=True, slots=True)
class Handover:
    """What one worker leaves for another that goes on with a request's block.

    state      where the worker stands in the block; its own, given back in `Admit.resume`.
    num_pages  the first pages of the request, whose KV is in `parts`. 0 if no later pass reads KV.
    parts      held in the store of the worker that ran the prefill until it is told to release them.
    """

    state: tuple[Any, ...]
    num_pages: int = 0
    parts: tuple[KvPart, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchArgs:
    """Copy `parts` into `pages`, as many as the parts hold. No step may read the pages meanwhile."""

    request_id: str
    pages: tuple[int, ...]
    parts: tuple[KvPart, ...]


@dataclass(frozen=True, slots=True)
class ReleaseArgs:
    """Give up what this worker holds for `request_id`; `parts` are gone afterwards."""

    request_id: str
    parts: tuple[KvPart, ...]


@dataclass(frozen=True, slots=True)
class Admit:
    """A request takes `slot`, with the canvas as its block begins (`OPEN` where nothing is committed).

    The page table of the slot is empty. Seeds and stop ids are in `sampling`, complete: `stop_token_ids`
    holds the model's own EOS ids too unless they are ignored. `resume` is the state of a `Handover`: the
    request goes on in the middle of its block, or was handed over between two blocks.
    """

    slot: int
    request_id: str
    ids: tuple[int, ...]
    prompt_len: int
    answer_end: int
    sampling: SamplingParams
    params: DiffusionParams
    resume: tuple[Any, ...] | None = None


class Pass(NamedTuple):
    """One request's part of a packed forward pass.

    spans      `[start, end)` ranges of positions whose rows run, rising; their KV is written before any
               row attends. A row sees the whole canvas, or (cache "block") up to the end of its block.
    new_pages  extend the slot's page table. With `cfg_scale` the second half of a slot's pages holds the
               unconditional canvas, whose rows run too.
    block      index, start and end of the block whose open positions may be committed.
    is_start   the first pass of that block.
    hand_over  the request leaves this worker with the pass: say in `Denoised.handover` how it goes on.
    """

    slot: int
    spans: tuple[tuple[int, int], ...]
    new_pages: tuple[int, ...]
    block: tuple[int, int, int]
    is_start: bool
    hand_over: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, slots=True)
class StepArgs:
    """First `freed` slots are forgotten, then `admits` enter, then `passes` run packed together."""

    freed: tuple[int, ...]
    admits: tuple[Admit, ...]
    passes: tuple[Pass, ...]


class Commit(NamedTuple):
    """A token put at an absolute position. `confidence` is its probability when it was chosen."""

    position: int
    token_id: int
    confidence: float
    logprobs: TokenLogprobs | None = None


class Denoised(NamedTuple):
    """What a pass did to its request. `error` set means that this request alone failed.

    commits    in rising position order; a position that was not open has been edited.
    filled     after the commits the answer behind its first stop token was overwritten with EOS.
    block_done no further pass over this block is wanted.
    handover   after a pass with `hand_over`, unless the block is done and its KV dies with it. None also if
               the KV could not be kept for another worker.
    """

    slot: int
    commits: tuple[Commit, ...]
    filled: bool = False
    block_done: bool = False
    error: str | None = None
    handover: Handover | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """In the order of the step's passes."""

    denoised: tuple[Denoised, ...]
