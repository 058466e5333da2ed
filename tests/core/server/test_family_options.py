"""Fields of a model's own family, and the events of its unmasking, through the official client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from genserve.core.errors import InvalidRequest
from genserve.core.testing import Script, ScriptedEngine
from genserve.core.types import Submit, Unmasked

from .conftest import TOKENIZER, EngineUnderTest, Served, engine_info

TEXT = "Hello world, the quick brown fox jumps"
TOKENS = TOKENIZER.encode(TEXT)


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    shade: str | None = None
    suffix: str | None = None


@dataclass(frozen=True)
class Record:
    shade: str
    include_unmasking: bool


def check(request: Any, info: Any) -> Any:
    options = request.options or Options()
    if options.shade == "plaid":
        raise InvalidRequest("shade", "no 'plaid'; there is: red, blue")
    return replace(request, options=Record(options.shade or "red", request.include_unmasking))


def backwards(request: Submit) -> Script:
    """The last token first; the text settles with the first token, which comes last."""
    steps = [
        [Unmasked(i, TOKENS[i], 0.5 + i / 100, 1 + n)] for n, i in enumerate(range(len(TOKENS) - 1, -1, -1))
    ]
    chunks: list[list[int]] = [[] for _ in TOKENS]
    chunks[-1] = TOKENS
    return Script(chunks, unmasked=steps)


@pytest.fixture(scope="module")
def served(serve_engine) -> Served:
    info = engine_info(
        default_max_tokens=40, default_temperature=0.0, unsupported=("min_p", "echo", "grammar")
    )
    return serve_engine(lambda: EngineUnderTest(ScriptedEngine(backwards, info), TOKENIZER, check, Options))


@pytest.fixture(scope="module")
def plain(serve_engine) -> Served:
    return serve_engine()


def ask(served: Served, endpoint: str, **fields: Any) -> Any:
    if endpoint == "chat":
        return served.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], **fields
        )
    return served.client.completions.create(model="tiny", prompt="x", **fields)


def text_of(choice: Any) -> str:
    return (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_events_come_before_text_and_are_the_text(served, endpoint):
    options = {"include_unmasking": True, "include_usage": True}
    chunks = [c for c in ask(served, endpoint, stream=True, stream_options=options) if c.choices]
    events = [event for c in chunks for event in getattr(c.choices[0], "unmasked", None) or []]
    assert [event["position"] for event in events] == list(range(len(TOKENS) - 1, -1, -1))
    assert [event["step"] for event in events] == list(range(1, len(TOKENS) + 1))
    assert events[0]["confidence"] == pytest.approx(0.5 + (len(TOKENS) - 1) / 100)
    assert "".join(event["token"] for event in reversed(events)) == TEXT
    assert [TOKENS[event["position"]] for event in events] == [event["token_id"] for event in events]
    first_text = next(i for i, c in enumerate(chunks) if text_of(c.choices[0]))
    first_event = next(i for i, c in enumerate(chunks) if getattr(c.choices[0], "unmasked", None))
    assert first_event < first_text
    assert "".join(text_of(c.choices[0]) for c in chunks) == TEXT


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_stream_that_does_not_ask_has_no_events(served, endpoint):
    chunks = list(ask(served, endpoint, stream=True))
    assert not any(hasattr(c.choices[0], "unmasked") for c in chunks)
    assert "".join(text_of(c.choices[0]) for c in chunks) == TEXT


def test_the_familys_fields_reach_the_engine(served):
    ask(served, "chat", extra_body={"shade": "blue"})
    ask(served, "chat", extra_body={"shade": None})
    ask(served, "completions", suffix="end")
    blue, red, third = served.engine.submitted[-3:]
    assert (blue.options.shade, red.options.shade) == ("blue", "red")
    assert blue.sampling.temperature == 0.0 and third.sampling.max_tokens == 40


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"extra_body": {"shade": "plaid"}}, "shade", "there is: red, blue"),
        ({"extra_body": {"shade": 3}}, "shade", "valid string"),
        ({"extra_body": {"tint": 3}}, "tint", "is not supported"),
        ({"extra_body": {"min_p": 0.5}}, "min_p", "is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "constrained output"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex", "constrained output"),
    ],
)
def test_other_fields_are_refused_by_name(served, fields, param, message):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(served, "chat", **fields)
    assert refused.value.param == param and message in refused.value.message


def test_models_without_a_family_of_options_refuse_them(plain):
    cases = [
        ({"extra_body": {"shade": "blue"}}, "shade"),
        ({"suffix": "end"}, "suffix"),
        ({"stream": True, "stream_options": {"include_unmasking": True}}, "stream_options.include_unmasking"),
    ]
    for fields, param in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(plain, "completions", **fields)
        assert refused.value.param == param and "not supported" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        plain.client.completions.create(model="other", prompt="x", extra_body={"shade": "blue"})
