"""The ranges of what a request may ask for. Pure checks, named by field; knows nothing of engines."""

from __future__ import annotations

import math
from typing import Any

from genserve.core.errors import InvalidRequest
from genserve.core.types import SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 4096
MAX_STOP_TOKEN_IDS = 1024
SEED_MODULUS = 1 << 63


def validate_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidRequest` naming the first field of `sampling` that is out of range."""
    check_number("temperature", sampling.temperature, 0.0, 1e4)
    check_number("top_p", sampling.top_p, 0.0, 1.0, open_low=True)
    check_number("min_p", sampling.min_p, 0.0, 1.0)
    check_number("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0)
    check_number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    check_number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    check_integer("top_k", sampling.top_k, 0, SEED_MODULUS - 1)
    if sampling.seed is not None:
        check_integer("seed", sampling.seed, -SEED_MODULUS, SEED_MODULUS - 1)
    if sampling.max_tokens is not None:
        check_integer("max_tokens", sampling.max_tokens, 0, SEED_MODULUS)
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None:
            check_integer(name, count, 0, MAX_LOGPROBS)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            "logit_bias", f"may name {MAX_LOGIT_BIAS} token ids at most, not {len(sampling.logit_bias)}"
        )
    for token_id, bias in sampling.logit_bias:
        check_integer("logit_bias", token_id, 0, vocab_size - 1, what="token id")
        check_number("logit_bias", bias, -100.0, 100.0)
    if len({token_id for token_id, _ in sampling.logit_bias}) != len(sampling.logit_bias):
        raise InvalidRequest("logit_bias", "names a token id twice")
    num_stop = len(set(sampling.stop_token_ids))
    if num_stop > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids", f"may name {MAX_STOP_TOKEN_IDS} different ids at most, not {num_stop}"
        )
    for token_id in sampling.stop_token_ids:
        check_integer("stop_token_ids", token_id, 0, vocab_size - 1)


def check_number(field: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(field, f"must be a number, not {type(value).__name__}")
    if not (low < value if open_low else low <= value) or not value <= high:  # NaN fails both
        bracket = "(" if open_low else "["
        raise InvalidRequest(field, f"must be in {bracket}{low:g}, {high:g}], not {shown(value)}")


def check_integer(field: str, value: Any, low: int, high: int, what: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(field, f"{what or 'value'} must be an integer, not {type(value).__name__}")
    if not low <= value <= high:
        raise InvalidRequest(field, f"{what or 'value'} must be in [{low}, {high}], not {shown(value)}")


def shown(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if abs(value) < 1e30 else f"a number over {'-' if value < 0 else ''}1e30"
