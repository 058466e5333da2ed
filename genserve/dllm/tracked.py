"""A request as the dispatcher keeps it: its canvas, where it may restart, and what its client was told.

Owns how an answer is laid out: its length, and what fills it before anything is denoised. Knows neither
engines nor outputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from genserve.core.types import Submit, TokenLogprobs
from genserve.dllm.canvas import OPEN, Block, Canvas
from genserve.dllm.limits import EngineLimits
from genserve.dllm.messages import Handed
from genserve.dllm.request import DiffusionParams

if TYPE_CHECKING:
    from genserve.dllm.ledger import EngineLedger


class TrackedRequest:
    """One request. `limit` is where its output ends at the latest; told_* is what the client has.

    key        of its assignment to `engine`: another one each time, so that late reports of an earlier
               assignment mean nothing.
    stays_whole  it could not be handed over once: whoever prefills its blocks decodes them too.
    source     the engine that keeps `handed`'s KV, under `source_key`, until it has been fetched.
    """

    __slots__ = (
        "arrival_s",
        "block",
        "canvas",
        "engine",
        "handed",
        "has_committed",
        "has_deadline",
        "key",
        "limit",
        "logprobs",
        "num_assigned",
        "num_block_passes",
        "num_cached",
        "num_passes",
        "num_restarts",
        "num_told",
        "num_told_passes",
        "order",
        "params",
        "queued_s",
        "request_id",
        "restart_ids",
        "restart_passes",
        "sampling",
        "source",
        "source_key",
        "stays_whole",
        "tag",
        "told_first",
        "waited_s",
    )

    def __init__(self, submit: Submit, order: int, params: DiffusionParams, limits: EngineLimits, now: float):
        sampling = submit.sampling
        eos_ids = () if sampling.ignore_eos else limits.eos_token_ids
        self.request_id = submit.request_id
        self.tag = f"{submit.request_id}#{order}"
        self.key = self.source_key = ""
        self.order = order
        self.num_assigned = 0
        self.arrival_s = self.queued_s = now
        self.waited_s = 0.0
        self.sampling = replace(
            sampling, stop_token_ids=tuple(dict.fromkeys((*eos_ids, *sampling.stop_token_ids)))
        )
        self.params = params
        self.canvas = lay_out(submit, params, self.sampling.stop_token_ids, limits)
        self.limit = len(submit.prompt_token_ids) + max_tokens(submit, params, limits)
        self.block = Block(-1, 0, 0)
        self.restart_ids = tuple(self.canvas.ids)
        self.restart_passes = 0
        self.engine: EngineLedger | None = None
        self.source: EngineLedger | None = None
        self.handed: Handed | None = None
        self.has_deadline = submit.deadline_s is not None
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.num_passes = self.num_block_passes = self.num_told_passes = 0
        self.num_cached = 0
        self.num_restarts = 0
        self.num_told = 0
        self.told_first = self.has_committed = self.stays_whole = False

    def __lt__(self, other: TrackedRequest) -> bool:
        return self.order < other.order

    def new_key(self) -> None:
        self.num_assigned += 1
        self.key = f"{self.tag}.{self.num_assigned}"

    def next_block(self) -> Block | None:
        """The block to denoise now, or None if no position is open."""
        canvas = self.canvas
        for index in range(max(self.block.index, 0), canvas.num_blocks):
            block = canvas.block(index)
            if canvas.has_open(block.start, block.end):
                return block
        return None

    def enter(self, block: Block) -> None:
        """A new block begins; unless KV outlives blocks approximately, one may restart from here."""
        self.block = block
        self.num_block_passes = 0
        if self.params.cache != "dkv" or block.index == 0:
            self.restart_ids = tuple(self.canvas.ids)
            self.restart_passes = self.num_passes

    def restart(self) -> None:
        """Forget what an engine did since the last place to restart from."""
        canvas = self.canvas
        start = canvas.prompt_len if self.params.cache == "dkv" else self.block.start
        canvas.reopen(Block(self.block.index, start, start), self.restart_ids)
        self.num_passes = self.restart_passes
        self.engine = None
        self.block = Block(-1, 0, 0)
        block = self.next_block()
        assert block is not None, "an engine held a finished request"
        self.enter(block)


def max_tokens(submit: Submit, params: DiffusionParams, limits: EngineLimits) -> int:
    """Positions that may be told; without `max_tokens` as many as context and pool hold."""
    if submit.sampling.max_tokens is not None:
        return submit.sampling.max_tokens
    pool = limits.num_pages // (2 if params.cfg_scale > 0 else 1) * limits.page_tokens
    given = len(submit.prompt_token_ids) + len(params.suffix_token_ids)
    room = min(limits.max_context_tokens, pool) - given
    return room // params.block_length * params.block_length if params.cache == "canvas" else room


def answer_end(submit: Submit, params: DiffusionParams, limits: EngineLimits) -> int:
    """Aligned answers are rounded up to whole blocks, as far as the context reaches; canvases in any case."""
    num_prompt, num_answer = len(submit.prompt_token_ids), max_tokens(submit, params, limits)
    end = num_prompt + num_answer
    if params.cache == "canvas":
        return num_prompt + -(-num_answer // params.block_length) * params.block_length
    if params.cache != "block":
        return end
    rounded = -(-end // params.block_length) * params.block_length
    pool = limits.num_pages * limits.page_tokens
    return max(end, min(rounded, limits.max_context_tokens, pool))


def lay_out(
    submit: Submit, params: DiffusionParams, stop_ids: tuple[int, ...], limits: EngineLimits
) -> Canvas:
    """The canvas as the request arrives: prompt, an open answer with what is pinned in it, suffix."""
    num_prompt = len(submit.prompt_token_ids)
    end = answer_end(submit, params, limits)
    ids = [*submit.prompt_token_ids, *([OPEN] * (end - num_prompt)), *params.suffix_token_ids]
    for offset, token_id in params.pinned:
        ids[num_prompt + offset] = token_id
    return Canvas(
        ids,
        num_prompt,
        end,
        params.block_length,
        aligned=params.cache == "block",
        stop_ids=stop_ids,
        stop_in_prompt=params.stop_in_prompt,
    )
