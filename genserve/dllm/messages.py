"""What the dispatcher and the engines of its workers tell each other. Small frozen data.

An engine answers every `Assign` with exactly one `Progress` whose `ended` is set. A request that is handed
over is assigned twice: to the engine that prefills, which holds the KV until a `Cancel`, and to the one that
fetches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from genserve.core.types import SamplingParams
from genserve.dllm.cache import PassesState
from genserve.dllm.request import DiffusionParams
from genserve.dllm.step import Commit, Handover

# transfer: the KV could not be handed over or fetched; the block has to begin again.
Ended = Literal["block", "answer", "cancelled", "error", "transfer"]

# colocated: prefills under the deficit budget beside decodes. prefill: as many prefills as a step may hold.
Role = Literal["colocated", "prefill"]


@dataclass(frozen=True, slots=True)
class Handed:
    """A request between two engines: what its workers and its passes need to go on with a block."""

    handover: Handover
    passes: PassesState
    block_index: int


@dataclass(frozen=True, slots=True)
class Assign:
    """Denoise a request's answer from block `block_index` on: this block, or (`keep`) all that follow.

    order      number of the request's original arrival: an old request's re-prefill goes before a newer
               request's prefill.
    ids        the canvas as the block begins, `OPEN` where nothing is committed.
    hand_over  run the block's prefill only, and keep its KV for another engine.
    handed     another engine has run the prefill: `ids` is the canvas after it, its KV is to be fetched.
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
    hand_over: bool = False
    handed: Handed | None = None


@dataclass(frozen=True, slots=True)
class SetRole:
    """The engine's role from now on. It may hold requests; those go on."""

    role: Role


@dataclass(frozen=True, slots=True)
class Cancel:
    """Drop a request, and KV kept for another engine, in whatever state it is; unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Progress:
    """One pass of one request, or its end.

    prefilled  this pass was a prefill: its tokens are no longer outstanding.
    block_index  the block that the commits belong to.
    filled     the answer behind its first stop token was overwritten with EOS.
    num_cached_tokens  prompt tokens whose KV was found in the prefix cache (said with the first prefill).
    waited_s   how long a prefill waited at the engine before it ran.
    handed     the prefill is done; its KV waits here for another engine.
    arrived    the KV has been fetched; the engine that ran the prefill may forget it.
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
    handed: Handed | None = None
    arrived: bool = False


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


# -- membership: told to the dispatcher, and by it to whoever runs the engines ---------------------------


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """A new engine runs, empty."""

    engine: str
    role: Role


@dataclass(frozen=True, slots=True)
class Drain:
    """Assign nothing more to the engine; `Drained` follows when it is empty, and it is no member any more."""

    engine: str


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Drain the engine, give it `role`, and go on with it; `RoleChanged` follows."""

    engine: str
    role: Role


@dataclass(frozen=True, slots=True)
class Drained:
    engine: str


@dataclass(frozen=True, slots=True)
class RoleChanged:
    engine: str
    role: Role
