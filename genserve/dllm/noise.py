"""Where the uniforms come from that draw tokens and rank positions: functions of what they belong to alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from genserve.core.models.distribution import uniform


class NoiseKey(NamedTuple):
    """What a uniform belongs to, besides its position. `stream`: 0 draws tokens, 1 ranks positions."""

    request_id: str
    seed: int
    stream: int
    block: int
    pass_number: int


# Uniforms in [0, 1) at absolute positions: of the open positions of the block, or of some of them.
Noise = Callable[[NoiseKey, Sequence[int]], Sequence[float]]


def seeded_noise(key: NoiseKey, positions: Sequence[int]) -> list[float]:
    """A pure function of seed, stream, block, pass and position, whatever else is in the batch."""
    first = ((key.block << 20) + key.pass_number) << 24
    return [uniform(key.seed, ((first + position) << 1) | key.stream) for position in positions]
