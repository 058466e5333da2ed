"""The library's keyword options, checked by name and type, as a `CompletionRequest`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from genserve.core.errors import InvalidRequest
from genserve.core.runtime.choice import CompletionRequest
from genserve.core.runtime.sampling_limits import check_number
from genserve.core.types import Grammar, SamplingParams

_OWN = ("n", "stop", "json_schema", "regex", "timeout_s", "options", "include_unmasking")


def completion_request(
    request_id: str,
    prompt_token_ids: tuple[int, ...],
    /,
    *,
    sampling: SamplingParams | None = None,
    n: int = 1,
    stop: str | Sequence[str] = (),
    timeout_s: float | None = None,
    continues_prompt: bool = True,
    json_schema: str | dict[str, Any] | None = None,
    regex: str | None = None,
    logit_bias: dict[int, float] | None = None,
    options: Any = None,
    include_unmasking: bool = False,
    default_temperature: float | None = None,
    **fields: Any,
) -> CompletionRequest:
    """A request from keyword options.

    sampling     a ready `SamplingParams`; `fields` (`max_tokens`, `temperature`, `top_p`, `seed`, ...:
                 its field names) replace single values of it. Unknown names are `InvalidRequest`.
    n            choices; each has its own random stream, derived from the seed.
    stop         strings that end a choice; not part of its text.
    timeout_s    seconds (above 0) from now until the request is given up (`DeadlineExceeded`).
    json_schema, regex  constrain the text; give one at most.
    options      what the model's family takes beyond these, by name (of a diffusion model: `cache`,
                 `unmasking`, `threshold`, `block_length`, `steps`, `suffix`, `pinned`, ...).
    include_unmasking  the deltas also tell each token that a diffusion model puts anywhere.
    default_temperature  of requests that name neither `sampling` nor `temperature`.
    """
    if sampling is None:
        sampling = SamplingParams()
        if default_temperature is not None:
            sampling = replace(sampling, temperature=default_temperature)
    elif not isinstance(sampling, SamplingParams):
        raise InvalidRequest("sampling", f"must be a SamplingParams, not {type(sampling).__name__}")
    unknown = [name for name in fields if name not in SamplingParams.__slots__]
    if unknown:
        known = ", ".join((*SamplingParams.__slots__, *_OWN))
        raise InvalidRequest(unknown[0], f"no such option; there is: {known}")
    if json_schema is not None and regex is not None:
        raise InvalidRequest("regex", "json_schema and regex exclude each other")
    if json_schema is not None:
        fields["grammar"] = Grammar("json_schema", _schema_text(json_schema))
    if regex is not None:
        if not isinstance(regex, str):
            raise InvalidRequest("regex", f"must be text, not {type(regex).__name__}")
        fields["grammar"] = Grammar("regex", regex)
    if logit_bias is not None:
        fields["logit_bias"] = logit_bias
    sampling = replace(sampling, **fields)
    if sampling.grammar is not None and not isinstance(sampling.grammar, Grammar):
        raise InvalidRequest("grammar", f"must be a Grammar, not {type(sampling.grammar).__name__}")
    deadline_s = None
    if timeout_s is not None:
        check_number("timeout_s", timeout_s, 0.0, sys.float_info.max, open_low=True)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
    return CompletionRequest(
        request_id,
        prompt_token_ids,
        replace(
            sampling,
            stop_token_ids=_items("stop_token_ids", sampling.stop_token_ids, "token ids"),
            logit_bias=_bias_pairs(sampling.logit_bias),
        ),
        n=n,
        stop=(stop,) if isinstance(stop, str) else _items("stop", stop, "strings"),
        continues_prompt=continues_prompt,
        deadline_s=deadline_s,
        options=options,
        include_unmasking=include_unmasking,
    )


def _items(field: str, value: Any, what: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest(field, f"must be a list of {what}, not {type(value).__name__}")
    return tuple(value)


def _bias_pairs(value: Any) -> tuple[tuple[Any, Any], ...]:
    pairs = _items("logit_bias", value.items() if isinstance(value, Mapping) else value, "pairs, or a dict")
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise InvalidRequest("logit_bias", "must give one bias for each token id")
    return tuple((token_id, bias) for token_id, bias in pairs)


def _schema_text(schema: Any) -> str:
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        raise InvalidRequest("json_schema", f"must be text or a dict, not {type(schema).__name__}")
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest("json_schema", f"is no JSON: {error}") from error
