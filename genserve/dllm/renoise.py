"""One pass over a renoised canvas: from the model's logits to the next canvas, or to the final one.

DiffusionGemma's sampler. A canvas begins as random tokens. Each pass draws a proposal for every
position, keeps those of the surest positions (`entropy_bound`), and puts new random tokens everywhere
else; what was kept is judged anew in the next pass. Once the likeliest tokens are stable and sure, or
the passes are used up, *those* are committed, all at once. Pure functions over one request's canvas, so
that nothing depends on the batch; must not know the model, pages or slots.

Shape suffixes: C canvas positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from genserve.core.models.distribution import draw_over_vocabulary, uniforms
from genserve.core.types import SamplingParams
from genserve.dllm.models.interface import CanvasDefaults
from genserve.dllm.request import DiffusionParams


class Noise(Protocol):
    def __call__(
        self, seed: int, canvas: int, step: int, num_positions: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Uniforms [num_positions] in [0, 1) of one pass: for its proposals, and for its random tokens.

        Pass 0 is the canvas' beginning, which has random tokens only.
        """
        ...


def canvas_noise(seed: int, canvas: int, step: int, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """A `Noise` that is a function of seed, canvas, pass and position."""
    first = ((canvas << 12) + step) << 21
    both = uniforms(seed, first + np.arange(2 * num_positions, dtype=np.int64))
    return both[::2], both[1::2]


@dataclass(frozen=True, slots=True)
class Rules:
    """How one request's canvases are denoised; see `CanvasDefaults`.

    temperature  multiplies the model's schedule of temperatures. 0: the schedule as it is, proposals are
                 the likeliest tokens and the random tokens those of seed 0.
    num_valid_tokens  ids from here on are never proposed.
    """

    seed: int
    temperature: float
    num_valid_tokens: int
    num_steps: int
    entropy_bound: float
    hottest: float
    coldest: float
    num_stable: int
    confidence: float

    @classmethod
    def of(
        cls,
        sampling: SamplingParams,
        params: DiffusionParams,
        defaults: CanvasDefaults,
        num_valid_tokens: int,
    ) -> Rules:
        """Of a request: `entropy_bound` and `threshold` (the confidence) are those of its unmasking.

        Passes are bounded by its `steps`, a canvas, and by `max_block_steps`, the model's by neither.
        """
        if sampling.temperature > 0 and sampling.seed is None:
            raise ValueError("seed: must be set by the front end when temperature > 0")
        rule = params.unmasking
        asked = [steps for steps in (rule.steps, params.max_block_steps) if steps is not None]
        return cls(
            seed=sampling.seed if sampling.seed is not None and sampling.temperature > 0 else 0,
            temperature=sampling.temperature,
            num_valid_tokens=num_valid_tokens,
            num_steps=min(asked, default=defaults.num_steps),
            entropy_bound=rule.entropy_bound,
            hottest=defaults.hottest,
            coldest=defaults.coldest,
            num_stable=defaults.num_stable,
            confidence=rule.threshold,
        )


@dataclass(frozen=True, slots=True)
class CanvasState:
    """A canvas between two passes.

    ids_C     int64: what the next pass is shown.
    likeliest the likeliest tokens of the last passes, oldest first.
    num_steps passes so far.
    """

    index: int
    ids_C: Tensor
    likeliest: tuple[Tensor, ...] = ()
    num_steps: int = 0


class Advanced(NamedTuple):
    """After a pass: the state to go on with, or (`is_done`) the final tokens and their probabilities.

    logits_CV are those that the next pass is told of.
    """

    state: CanvasState
    logits_CV: Tensor
    is_done: bool
    tokens_C: Tensor
    probs_C: Tensor


def start(index: int, num_positions: int, rules: Rules, noise: Noise, device: torch.device) -> CanvasState:
    """A new canvas of random tokens."""
    _, random = noise(rules.seed, index, 0, num_positions)
    return CanvasState(index, _random_ids(random, rules.num_valid_tokens, device))


def advance(state: CanvasState, logits_CV: Tensor, rules: Rules, noise: Noise) -> Advanced:
    """Fold in one pass' float32 logits, none of them NaN."""
    device = logits_CV.device
    step = state.num_steps + 1
    z_CV = _tempered(logits_CV, step, rules)
    probs_CV = z_CV.softmax(-1)
    tokens_C = z_CV.argmax(-1)
    entropy_C = torch.distributions.Categorical(logits=z_CV, validate_args=False).entropy()

    stable = len(state.likeliest) >= rules.num_stable and all(
        torch.equal(earlier, tokens_C) for earlier in state.likeliest
    )
    is_done = step >= rules.num_steps or (stable and bool(entropy_C.mean() < rules.confidence))

    to_draw, to_renoise = noise(rules.seed, state.index, step, len(tokens_C))
    proposed_C = tokens_C
    if rules.temperature > 0:
        proposed_C = draw_over_vocabulary(probs_CV, torch.from_numpy(to_draw).to(device))
    sorted_C, order_C = entropy_C.sort(stable=True)
    surest_C = sorted_C.cumsum(0) - sorted_C <= rules.entropy_bound
    accepted_C = torch.zeros_like(surest_C).scatter(0, order_C, surest_C)
    ids_C = torch.where(accepted_C, proposed_C, _random_ids(to_renoise, rules.num_valid_tokens, device))
    likeliest = (*state.likeliest, tokens_C)[-rules.num_stable :] if rules.num_stable else ()
    return Advanced(
        CanvasState(state.index, ids_C, likeliest, step),
        z_CV,
        is_done,
        tokens_C,
        probs_CV.gather(1, tokens_C[:, None])[:, 0],
    )


def _tempered(logits_CV: Tensor, step: int, rules: Rules) -> Tensor:
    # In float32 and in this order, as the model's own `generate` does it.
    remaining = torch.tensor(rules.num_steps - step + 1, dtype=torch.int32, device=logits_CV.device)
    temperature = rules.coldest + ((rules.hottest - rules.coldest) * (remaining / rules.num_steps))
    if rules.temperature > 0:
        temperature = temperature * rules.temperature
    z_CV = logits_CV / temperature
    if rules.num_valid_tokens < z_CV.shape[1]:
        z_CV[:, rules.num_valid_tokens :] = -torch.inf
    return z_CV


def _random_ids(uniforms_C: np.ndarray, num_tokens: int, device: torch.device) -> Tensor:
    ids = np.minimum((uniforms_C * num_tokens).astype(np.int64), num_tokens - 1)
    return torch.from_numpy(ids).to(device)
