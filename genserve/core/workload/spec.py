"""One request of a workload, and the prompt that stands for it.

Owns what a request weighs (arrival, lengths, shared prefix), never its real text: traces publish
lengths and hashes only, so prompts are made up, deterministically, with the trace's sharing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from genserve.core.errors import ConfigError

# Common short English words, each one token in most vocabularies when a space precedes it.
_WORDS = """
    the of and to in is you that it he was for on are as with his they at be this have from or one had
    by word but not what all were we when your can said there use an each which she do how their if will
    up other about out many then them these so some her would make like him into time has look two more
    write go see number no way could people my than first water been call who oil its now find long down
    day did get come made may part over new sound take only little work know place year live me back give
    most very after thing our just name good man think say great where help through much before line right
    too mean old any same tell boy follow came want show also around form three small set put end does
    another well large must big even such because turn here why ask went men read need land different home
    us move try kind hand picture again change off play air away animal house point page letter mother
""".split()  # noqa: SIM905 (a list of 190 quoted words reads worse)

_TAIL_STREAM = 1 << 63  # keeps a request's own tokens apart from those of any shared block


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request to come.

    arrival_s    seconds after the workload's start.
    prefix_ids   one id per block of `prefix_block_tokens` prompt tokens, from the front; requests with
                 equal leading ids share those tokens. Tokens past the last block are the request's own.
    kind         its client or class, for the reader of results.
    seed         what its own tokens are drawn from.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    prefix_block_tokens: int = 512
    kind: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.arrival_s) and self.arrival_s >= 0):
            raise ConfigError(f"arrival_s: must be a finite number >= 0, got {self.arrival_s}")
        for name in ("num_prompt_tokens", "num_output_tokens", "prefix_block_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")


def synthesize_prompt(spec: RequestSpec, vocab_size: int, first_token_id: int = 0) -> list[int]:
    """The request's prompt: `num_prompt_tokens` ids in `first_token_id`..`vocab_size - 1`.

    The same spec gives the same ids on every machine; equal prefix ids give equal blocks.
    """
    if not 0 <= first_token_id < vocab_size:
        raise ConfigError(f"first_token_id: must be in 0..{vocab_size - 1}, got {first_token_id}")
    bits = np.concatenate(list(_prompt_bits(spec)))
    return (bits % np.uint64(vocab_size - first_token_id) + np.uint64(first_token_id)).astype(int).tolist()


def synthesize_text(spec: RequestSpec) -> str:
    """A prompt of `num_prompt_tokens` common words, about as many tokens, that shares as the ids do."""
    return " ".join(_WORDS[index] for index in synthesize_prompt(spec, len(_WORDS)))


def _prompt_bits(spec: RequestSpec) -> Iterator[np.ndarray]:
    left = spec.num_prompt_tokens
    for block_id in spec.prefix_ids:
        if left <= 0:
            return
        yield _random_bits(block_id % _TAIL_STREAM, min(left, spec.prefix_block_tokens))
        left -= spec.prefix_block_tokens
    if left > 0:
        yield _random_bits(_TAIL_STREAM + spec.seed % _TAIL_STREAM, left)


def _random_bits(stream: int, num: int) -> np.ndarray:
    """SplitMix64 of (stream, position): unlike a library's generator, fixed for ever. uint64 [num]."""
    with np.errstate(over="ignore"):
        return _mix(np.arange(num, dtype=np.uint64) + _mix(np.full(1, stream, dtype=np.uint64)))


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = bits * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
