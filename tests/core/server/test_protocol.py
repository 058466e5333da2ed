"""Whatever JSON comes, it is understood or refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genserve.core.errors import InvalidRequest
from genserve.core.runtime.choice import CompletionRequest
from genserve.core.runtime.completion import Completer
from genserve.core.server.protocol import ChatRequest, CompletionsRequest, parse
from genserve.core.testing import Script, ScriptedEngine

from .conftest import TOKENIZER, engine_info

FIELDS = sorted({*ChatRequest.model_fields, *CompletionsRequest.model_fields, "tools", "best_of", "x"})
COMPLETER = Completer(ScriptedEngine(lambda request: Script([]), engine_info()), TOKENIZER)
numbers = st.one_of(
    st.integers(-3, 3), st.integers(), st.floats(), st.sampled_from([10**30, -(10**30), 1e308, -1e308, 2**63])
)
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "schema", "json_schema", "name", "1"]),
            inner,
            max_size=3,
        ),
    ),
    max_leaves=6,
)
VALID = {
    ChatRequest: {"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
    CompletionsRequest: {"model": "tiny", "prompt": "x"},
}


@pytest.mark.parametrize("model", [ChatRequest, CompletionsRequest])
@settings(max_examples=150, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), values, max_size=2))
def test_any_values_are_served_or_refused_by_the_name_of_a_field(model, changes):
    body = json.dumps({**VALID[model], **changes}).encode()
    refused: InvalidRequest | None = None
    names: dict[str, str] = {}
    try:
        request = parse(model, body)
        names = request.field_names()
        sampling = request.to_sampling(engine_info())
        COMPLETER.prepare(CompletionRequest("r", (5, 6), sampling, request.n, tuple(request.stop)))
    except InvalidRequest as error:
        refused = error
    if refused is not None:
        assert refused.field and refused.message
        field = names.get(refused.field, refused.field)
        named = field.split(".")[0].split("[")[0]
        assert named in {*changes, "body", "max_tokens"}
        assert len(str(refused)) < 500
    else:
        unserved = {key for key in changes if key not in model.model_fields}
        assert all(changes[key] in (None, False, 0, 1, "none", "auto", []) for key in unserved)


@settings(max_examples=80, deadline=None)
@given(body=st.one_of(st.binary(max_size=30), values.map(lambda v: json.dumps(v).encode())))
def test_any_bytes_are_served_or_refused(body):
    for model in VALID:
        with pytest.raises(InvalidRequest):
            parse(model, body)
