"""What a request may ask of sampling: refused by field and limit, before any work."""

from __future__ import annotations

import math

import pytest

from genserve.core.errors import InvalidRequest
from genserve.core.runtime.sampling_limits import validate_sampling
from genserve.core.types import SamplingParams

VOCAB = 49152


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("repetition_penalty", math.inf, "must be in"),
        ("repetition_penalty", math.nan, "must be in"),
        ("repetition_penalty", 0.0, "must be in"),
        ("repetition_penalty", 5e-324, "must be in"),
        ("temperature", math.nan, "must be in"),
        ("temperature", -1e-310, "must be in"),
        ("min_p", 1.5, "must be in"),
        ("top_k", -1, "must be in"),
        ("top_k", 1 << 63, "must be in"),
        ("logit_bias", tuple((i, 1.0) for i in range(4097)), "4096 token ids at most, not 4097"),
        ("logit_bias", ((0, -math.inf),), "must be in"),
        ("stop_token_ids", tuple(range(1025)), "1024 different ids at most, not 1025"),
    ],
)
def test_values_out_of_range_are_refused_by_field(field: str, value: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        validate_sampling(SamplingParams(**{field: value}), VOCAB)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=5e-324),
        SamplingParams(top_k=1_000_000),
        SamplingParams(top_p=0.5, min_p=1.0),
        SamplingParams(repetition_penalty=0.01),
        SamplingParams(logit_bias=tuple((i, -100.0) for i in range(4096))),
        SamplingParams(stop_token_ids=tuple(range(1024)) * 3),
    ],
    ids=lambda p: str(p)[:60],
)
def test_the_edges_of_the_ranges_pass(params: SamplingParams) -> None:
    validate_sampling(params, VOCAB)
