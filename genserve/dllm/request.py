"""What a diffusion request may ask for beyond `SamplingParams`: cache, unmasking, blocks, infilling.

Frozen records that travel inside `Submit.options`; checking them is `dllm.options`, acting on them
`dllm.cache` (which rows a pass runs) and `dllm.unmasking` (which positions it commits).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

CacheMode = Literal["none", "prefix", "dual", "dkv", "block", "canvas"]
UnmaskingKind = Literal[
    "threshold", "factor", "quota", "random", "sequential", "margin", "entropy", "entropy_bound"
]


@dataclass(frozen=True, slots=True)
class Unmasking:
    """Which open positions of the current block a pass commits.

    kind       threshold: all at least `threshold` sure, in any case the surest.
               factor: rank n is taken if its confidence is >= 1 - factor / (n + 1) (`factor_rule`).
               quota, random, sequential, margin, entropy: as many as the step schedule says, ranked by
               confidence, noise, position, top-1 minus top-2, or negative entropy.
               entropy_bound: the surest ones whose entropies sum to at most `entropy_bound` nats.
    steps      passes over the whole answer for kinds with a schedule, shared out evenly among blocks;
               None is one position a pass. For threshold it bounds what a pass commits (`steps_bound`);
               None doesn't.
    steps_bound  of threshold with steps. most: a pass looks only at its even share of the surest
               positions, and what it leaves is added to the next (Dream's `confidence_threshold` without
               blocks). least: a pass commits at least its share (LLaDA2 in `diffusers`).
    schedule   even: LLaDA's equal shares. linear: Dream's time grid from 1 to `eps`.
    factor_rule  strict, or fast_dllm: the last two positions always go together, as released.
    independent  with `random` and the linear schedule, each open position is committed by its own draw
               (Dream's `origin`), not as a ranking.
    strict     threshold kinds compare with > instead of >= (LLaDA2).
    min_commits  positions a threshold pass commits at least (LLaDA2's `num_to_transfer`).
    """

    kind: UnmaskingKind = "threshold"
    threshold: float = 0.9
    factor: float = 1.0
    factor_rule: Literal["strict", "fast_dllm"] = "strict"
    entropy_bound: float = 0.1
    steps: int | None = None
    steps_bound: Literal["most", "least"] = "most"
    schedule: Literal["even", "linear"] = "even"
    eps: float = 1e-3
    independent: bool = False
    strict: bool = False
    min_commits: int = 1


@dataclass(frozen=True, slots=True)
class DiffusionParams:
    """How one answer is denoised.

    block_length  positions denoised together; the last block may be shorter.
    refresh_interval  `dkv`: passes between two refreshes of the answer's KV.
    cfg_scale     classifier-free guidance (LLaDA): logits = u + (w + 1)(c - u); needs cache "none".
    editing_threshold  block-causal models: committed tokens of the block may be replaced above it.
    max_post_steps  passes of a block that began without open positions, at most (editing).
    max_block_steps  passes of a block that began with open positions, at most: the last of them commits
                  whatever is open and ends the block.
    first_position  models with shifted logits, cached: "commit" takes a block's first position in the
                  block's start pass (the reference's way); "left_neighbour" keeps its left neighbour's
                  row in every pass.
    pinned        (offset into the answer, token id) pairs that are given, not generated.
    suffix_token_ids  what follows the answer: the model sees it from the start (infilling).
    early_stop    fill the answer with EOS after the first committed EOS, and end there. With editing,
                  which may take an EOS back, nothing is filled and the answer ends with its block.
    fill_at_block_start  whether that fill also follows a block's start pass with a cache.
    stop_in_prompt  whether a stop token of the prompt counts too: then the fill overwrites what is behind it.
    end_when_settled  end as soon as every position up to the first EOS is committed, even mid-block
                  (with editing at the block's end).
    include_unmasking  report every commit with position, confidence and pass, not just the settled prefix.
    """

    cache: CacheMode = "dual"
    unmasking: Unmasking = field(default_factory=Unmasking)
    block_length: int = 32
    refresh_interval: int = 8
    cfg_scale: float = 0.0
    editing_threshold: float | None = None
    max_post_steps: int = 16
    max_block_steps: int | None = None
    first_position: Literal["commit", "left_neighbour"] = "commit"
    pinned: tuple[tuple[int, int], ...] = ()
    suffix_token_ids: tuple[int, ...] = ()
    early_stop: bool = True
    fill_at_block_start: bool = True
    stop_in_prompt: bool = False
    end_when_settled: bool = True
    include_unmasking: bool = False
