"""What the dispatcher and the engines of its workers tell each other. Small frozen data.

An engine answers every `Assign` with exactly one `Progress` whose `ended` is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from genserve.core.types import SamplingParams
from genserve.dllm.request import DiffusionParams
from genserve.dllm.step import Commit

Ended = Literal["block", "answer", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Assign:
    """Denoise a request's answer from block `block_index` on: this block, or (`keep`) all that follow.

    order      number of the request's original arrival: an old request's re-prefill goes before a newer
               request's prefill.
    ids        the canvas as the block begins, `OPEN` where nothing is committed.
    """

    request_id: str
    order: int
    ids: tuple[int, ...]
    prompt_len: int
    answer_end: int
    block_index: int
    keep: bool
    sampling: SamplingParams
    params: DiffusionParams


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a request in whatever state it is; unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Progress:
    """One pass of one request, or its end.

    prefilled  this pass was a prefill: its tokens are no longer outstanding.
    block_index  the block that the commits belong to.
    filled     the answer behind its first stop token was overwritten with EOS.
    num_cached_tokens  prompt tokens whose KV was found in the prefix cache (said with the first prefill).
    waited_s   how long a prefill waited at the engine before it ran.
    ended      the engine holds nothing of the request any more: its block or answer is complete, or it
               was cancelled, or `error` says what went wrong.
    """

    request_id: str
    block_index: int
    commits: tuple[Commit, ...] = ()
    filled: bool = False
    prefilled: bool = False
    num_cached_tokens: int = 0
    ended: Ended | None = None
    error: str | None = None
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What one step of `engine` brought, in the order of its passes, and what ended without one."""

    engine: str
    progress: tuple[Progress, ...]


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine is gone with its process; nothing more will come from it."""

    engine: str
    error: str


@dataclass(frozen=True, slots=True)
class EngineBack:
    """The engine runs again, empty."""

    engine: str
