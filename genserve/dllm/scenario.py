"""What a simulation is made of: a modelled device, limits, and a workload cut to fit the model's context.

Owns the defaults that the commands share; must not know them, clocks or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from genserve.core.errors import ConfigError
from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.core.workload.presets import open_workload
from genserve.core.workload.workload import Workload
from genserve.dllm.cost import MODELS, StepCost, open_cost
from genserve.dllm.limits import EngineLimits
from genserve.dllm.request import DiffusionParams
from genserve.dllm.simulate import Denoising

CACHES = ("none", "prefix", "dual", "dkv", "block")
POLICIES = ("signed", "paper")


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that `simulate` needs but the workers. `num_cut` requests were longer than the limits told."""

    workload: Workload
    limits: EngineLimits
    cost: StepCost
    params: DiffusionParams
    denoising: Denoising
    num_masks: int
    max_prompt_tokens: int
    num_cut: int


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name}: no {value!r}; there are: {', '.join(known)}")


def open_scenario(
    workload: str,
    num_requests: int,
    seed: int,
    *,
    model: str = "llada-8b",
    hardware: str = "h100",
    profiles: Path | None = None,
    max_running: int = 256,
    budget_tokens: int = 1024,
    policy: str = "signed",
    prefill_tokens: int = 4096,
    cache: str = "dual",
    block_length: int = 32,
    tokens_per_pass: float | None = None,
    num_masks: int | None = None,
) -> Scenario:
    """Read the workload, at its own rate, and model the device. `ConfigError` names what is wrong."""
    check_choice("policy", policy, POLICIES)
    check_choice("cache", cache, CACHES)
    cost = open_cost(model, hardware, profiles)
    shape = MODELS[model]
    masks = num_masks or (512 if workload == "sangam-arxiv" else 1024)
    context_tokens = max(shape.context_tokens, 2 * masks)
    limits = EngineLimits(
        cost.kv_pool_tokens // PAGE_TOKENS,
        context_tokens,
        max_running,
        budget_tokens,
        policy,  # type: ignore[arg-type]
        shifted=shape.shifted,
        prefill_tokens=prefill_tokens,
    )
    wanted = open_workload(workload, num_requests, seed)
    most = context_tokens - masks
    requests = wanted.clip_lengths(most, masks)
    return Scenario(
        requests,
        limits,
        cost,
        DiffusionParams(cache=cache, block_length=block_length),  # type: ignore[arg-type]
        Denoising() if tokens_per_pass is None else Denoising(tokens_per_pass),
        masks,
        most,
        sum([a != b for a, b in zip(wanted.requests, requests.requests, strict=True)]),
    )
