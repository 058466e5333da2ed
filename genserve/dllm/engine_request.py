"""A request as its engine keeps it: canvas, passes, and what it holds of pages and slots."""

from __future__ import annotations

from genserve.core.kv.blocks import PageLease
from genserve.dllm.cache import Passes, PlannedPass
from genserve.dllm.canvas import Block, Canvas
from genserve.dllm.limits import EngineLimits
from genserve.dllm.messages import Assign, Handed
from genserve.dllm.step import Admit, Denoised


class EngineRequest:
    """One assignment. Requests compare by `key`: those that hold KV go before those that do not."""

    __slots__ = (
        "assign",
        "block",
        "cancelled",
        "canvas",
        "in_flight",
        "keep",
        "key",
        "lease",
        "num_cached_told",
        "num_fetches",
        "num_pages_sent",
        "params",
        "passes",
        "planned",
        "queued_s",
        "request_id",
        "resume",
        "slot",
        "span",
        "staging",
        "waited_s",
    )

    def __init__(self, assign: Assign, limits: EngineLimits, now: float) -> None:
        params = assign.params
        self.assign = assign
        self.request_id = assign.request_id
        self.params = params
        self.keep = assign.keep
        self.canvas = Canvas(
            assign.ids,
            assign.prompt_len,
            assign.answer_end,
            params.block_length,
            aligned=params.cache == "block",
            stop_ids=assign.sampling.stop_token_ids,
            stop_in_prompt=params.stop_in_prompt,
        )
        self.enter(Block(-1, 0, 0))
        self.passes = Passes(params, len(assign.ids), assign.prompt_len, shifted=limits.shifted)
        self.planned: PlannedPass | None = None
        self.lease: PageLease | None = None
        self.staging: PageLease | None = None
        self.slot = -1
        self.num_pages_sent = 0
        self.num_cached_told = -1
        self.num_fetches = 0
        self.in_flight = False
        self.cancelled = False
        self.resume: tuple[object, ...] | None = None
        self.key = (1, assign.order)
        self.queued_s = now
        self.waited_s = 0.0
        if assign.handed is not None:
            self.enter(self.canvas.block(assign.handed.block_index))
            self.passes.resume(self.block, assign.handed.passes)
            self.resume = assign.handed.handover.state
            self.num_cached_told = 0

    def __lt__(self, other: EngineRequest) -> bool:
        return self.key < other.key

    def next_block(self, first: int) -> Block | None:
        """The first block from number `first` on that has open positions."""
        canvas = self.canvas
        for index in range(first, canvas.num_blocks):
            block = canvas.block(index)
            if canvas.has_open(block.start, block.end):
                return block
        return None

    def enter(self, block: Block) -> None:
        self.block = block
        self.span = (block.index, block.start, block.end)

    def admit(self) -> Admit:
        """How the worker hears of it: with its first pass here, or after another worker's (once)."""
        assign, resume = self.assign, self.resume
        self.resume = None
        return Admit(
            self.slot,
            self.request_id,
            tuple(self.canvas.ids),
            assign.prompt_len,
            assign.answer_end,
            assign.sampling,
            assign.params,
            resume,
        )

    def handed(self, denoised: Denoised, following: Block | None) -> Handed | None:
        """For the engine that goes on: with this block, or with the one that follows. None if it can't."""
        if denoised.handover is None:
            return None
        if following is not None:
            self.enter(following)
            self.passes.begin(following)
        return Handed(denoised.handover, self.passes.state(), self.block.index)
