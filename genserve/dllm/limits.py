"""What bounds an engine and its worker. Frozen; engine, dispatcher and composition roots read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.dllm.budget import BudgetPolicy, CapBudget, PaperBudget, SignedBudget
from genserve.dllm.messages import Role
from genserve.dllm.request import DiffusionParams


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What bounds an engine.

    budget_tokens  tokens an iteration computes in the long run (`dllm.budget`).
    shifted        the model predicts a position from its left neighbour's row.
    fill_token_id  what stands behind an answer's first stop token (`DiffusionParams.early_stop`).
    eos_token_ids  the model's own; requests end at them unless they ignore them.
    prefill_tokens  of a step of a prefill worker, unless its first prefill alone is larger.
    num_staging_pages  of KV that a worker keeps for others to fetch; 0 is as many as `num_pages`.
    """

    num_pages: int
    max_context_tokens: int
    max_running: int = 64
    budget_tokens: int = 1024
    policy: Literal["signed", "paper"] = "signed"
    page_tokens: int = PAGE_TOKENS
    prefix_cache: bool = True
    shifted: bool = False
    fill_token_id: int = 0
    eos_token_ids: tuple[int, ...] = ()
    prefill_tokens: int = 4096
    num_staging_pages: int = 0

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.budget_tokens < 1 or self.prefill_tokens < 1:
            raise ValueError("max_running, budget_tokens and prefill_tokens must be at least 1")

    @property
    def staging_pages(self) -> int:
        return self.num_staging_pages or self.num_pages

    def budget_policy(self, role: Role) -> BudgetPolicy:
        if role == "prefill":
            return CapBudget(self.prefill_tokens)
        if self.policy == "paper":
            return PaperBudget(self.budget_tokens)
        return SignedBudget(self.budget_tokens)

    def pages_for(self, num_tokens: int, params: DiffusionParams) -> int:
        """Pages that a canvas of `num_tokens` takes."""
        num_pages = -(-num_tokens // self.page_tokens)
        return 2 * num_pages if params.cfg_scale > 0 else num_pages

    def staged_pages_for(self, num_tokens: int, params: DiffusionParams) -> int:
        """Pages that are set aside for handing such a canvas over; what is staged may be less."""
        return 0 if params.cache == "none" else self.pages_for(num_tokens, params)
