"""The rest of the HTTP front: formats, several models, keys, limits, errors, metrics, drain."""

from __future__ import annotations

import json
import threading
import time

import httpx
import openai
import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from genserve.core.errors import ConfigError
from genserve.core.runtime.completion import Completer
from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway, ServedModel
from genserve.core.server.in_thread import Parts, ServerInThread
from genserve.core.testing import Script, ScriptedEngine
from genserve.core.types import Grammar

from .conftest import API_KEY, TOKENIZER, engine_info, make_engine, read_response

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
PROMPT = {"model": "tiny", "prompt": "hi there", "max_tokens": 6}


def scripted(text: str, **script):
    chunks = [[i] for i in TOKENIZER.encode(text)]
    return lambda: make_engine(lambda request: Script(chunks, **script))


@pytest.fixture(scope="module")
def fixed(serve_engine):
    """A server whose model always says the same."""
    return serve_engine(scripted("Hé 👋🏽!"))


def test_chat_bodies_and_chunks_are_what_the_official_client_models_expect(fixed):
    body = {**CHAT, "max_tokens": 20, "logprobs": True, "top_logprobs": 2}
    _, answer = fixed.post("/v1/chat/completions", body)
    parsed = ChatCompletion.model_validate(answer, strict=True)
    assert not parsed.model_extra and parsed.choices[0].message.content == "Hé 👋🏽!"
    content = parsed.choices[0].logprobs.content
    assert len(content) == parsed.usage.completion_tokens == len(TOKENIZER.encode("Hé 👋🏽!"))
    assert bytes(b for entry in content for b in entry.bytes).decode() == "Hé 👋🏽!"
    assert all(len(entry.top_logprobs) == 2 for entry in content)

    lines = httpx.post(fixed.server.url + "/v1/chat/completions", json={**body, "stream": True}).text
    events = [line.removeprefix("data: ") for line in lines.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(e, strict=True) for e in events[:-1]]
    assert not any(chunk.model_extra for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert not any(chunk.choices[0].delta.role for chunk in chunks[1:])
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert streamed == content
    assert all(chunk.usage is None for chunk in chunks)


def test_completions_echo_and_legacy_logprobs(fixed):
    body = {**PROMPT, "max_tokens": 20, "logprobs": 2, "echo": True}
    _, plain = fixed.post("/v1/completions", {**PROMPT, "logprobs": 2})
    assert not OpenAICompletion.model_validate(plain, strict=True).choices[0].model_extra
    choice = fixed.client.completions.create(**body).choices[0]
    assert choice.text == "hi thereHé 👋🏽!"
    record = choice.logprobs
    assert record.token_logprobs[0] is None and all(x is not None for x in record.token_logprobs[1:])
    assert len({len(record.tokens), len(record.token_logprobs), len(record.top_logprobs)}) == 1
    for token, offset in zip(record.tokens, record.text_offset, strict=True):
        assert token.startswith("bytes:\\x") or choice.text[offset:].startswith(token)
    whole = b"".join(
        bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        for token in record.tokens
    )
    assert whole.decode() == choice.text

    stream = fixed.client.completions.create(**{**body, "stream": True})
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    assert [o for c in chunks if c.logprobs for o in c.logprobs.text_offset] == record.text_offset
    assert [t for c in chunks if c.logprobs for t in c.logprobs.tokens] == record.tokens


def test_characters_split_over_tokens_never_show_as_replacement_characters(fixed):
    for max_tokens in range(1, len(TOKENIZER.encode("Hé 👋🏽!")) + 1):
        stream = fixed.client.chat.completions.create(**{**CHAT, "max_tokens": max_tokens}, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "Hé 👋🏽!".startswith("".join(parts))


def test_usage_chunk_comes_last_and_only_when_asked(fixed):
    chunks = list(fixed.client.chat.completions.create(**CHAT, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    options = {"include_usage": True}
    chunks = list(fixed.client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_extras_and_constraints_reach_the_engine(fixed):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True, "stop_token_ids": [9]}
    fixed.client.chat.completions.create(
        **CHAT, response_format=wanted, logit_bias={"5": -3}, seed=4, temperature=0.5, extra_body=extra
    )
    sampling = fixed.engine.submitted[-1].sampling
    assert sampling.grammar.kind == "json_schema" and json.loads(sampling.grammar.text) == schema
    assert sampling.logit_bias == ((5, -3.0),) and (sampling.seed, sampling.temperature) == (4, 0.5)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.1, 1.2)
    assert sampling.ignore_eos and sampling.stop_token_ids == (9,)
    for extra, grammar in [
        ({"guided_regex": "[0-9]+"}, Grammar("regex", "[0-9]+")),
        ({"guided_json": schema}, Grammar("json_schema", json.dumps(schema))),
        ({"guided_json": json.dumps(schema)}, Grammar("json_schema", json.dumps(schema))),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "text"}}, None),
    ]:
        fixed.client.completions.create(**PROMPT, extra_body=extra)
        assert fixed.engine.submitted[-1].sampling.grammar == grammar


def test_answers_name_the_request_that_the_engine_saw(fixed):
    answer = fixed.client.chat.completions.create(**CHAT)
    assert fixed.engine.submitted[-1].request_id.startswith(answer._request_id)
    assert answer.id == f"chatcmpl-{answer._request_id}"


def test_prompt_forms_agree(fixed):
    ids = TOKENIZER.encode("hi there")
    for prompt in ("hi there", ["hi there"], ids, [ids]):
        assert fixed.client.completions.create(**{**PROMPT, "prompt": prompt}).usage.prompt_tokens == len(ids)
    many = fixed.client.completions.create(**{**PROMPT, "prompt": ["a", "b"]}, n=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]


def test_several_models_in_one_server():
    async def build() -> Parts:
        models = []
        for name in ("org/one", "two"):
            chunks = [[i] for i in TOKENIZER.encode(name)]
            engine = ScriptedEngine(lambda request, c=chunks: Script(c), engine_info())
            models.append(ServedModel(name, 5, Completer(engine, TOKENIZER), TOKENIZER, engine.info))
        with pytest.raises(ConfigError):
            Gateway([models[0], models[0]])
        gateway = Gateway(models)

        async def close() -> None:
            pass

        return Parts(create_app(gateway), gateway, close)

    with ServerInThread(build) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0)
        assert [model.id for model in client.models.list()] == ["org/one", "two"]
        assert client.models.retrieve("org/one").created == 5
        for name in ("org/one", "two"):
            assert client.completions.create(model=name, prompt="x").choices[0].text == name
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="three", prompt="x")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("three")
        wrong = httpx.get(server.url + "/v1/nothing")
        assert wrong.status_code == 404 and wrong.json()["error"]["message"]
        assert httpx.get(server.url + "/v1/completions").status_code == 405


def test_api_keys_guard_all_but_health(serve_engine):
    served = serve_engine(api_keys=["other", API_KEY])
    assert served.client.chat.completions.create(**CHAT).usage.completion_tokens == 6
    url = served.server.url
    assert httpx.get(url + "/health").status_code == 200
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {API_KEY}"}):
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            refused = httpx.get(url + path, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        served.client.with_options(api_key="wrong").chat.completions.create(**CHAT)


def test_bodies_over_the_limit_are_413_declared_or_chunked(serve_engine):
    served = serve_engine(max_body_bytes=1000)
    large = json.dumps({**PROMPT, "prompt": "x" * 2000}).encode()
    status, answer = served.post("/v1/completions", large)
    assert (status, answer["error"]["code"]) == (413, "payload_too_large")
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (large[:700], large[700:])) + b"0\r\n\r\n"
    status, answer = served.post("/v1/completions", chunked, "transfer-encoding: chunked\r\n")
    assert (status, answer["error"]["code"]) == (413, "payload_too_large")
    small = json.dumps(PROMPT).encode()
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(small), small)
    assert served.post("/v1/completions", chunked, "transfer-encoding: chunked\r\n")[0] == 200
    with served.open_post("/v1/completions", b"x", "") as sock:  # a body that never comes whole
        assert read_response(sock)[0] == 400


@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        ({"end": "error", "error": "out of memory"}, 500, "execution_failed"),
        ({"lost": True}, 503, "executor_lost"),
    ],
)
def test_errors_have_a_status_before_the_first_token_and_an_event_after_it(
    serve_engine, script, status, code
):
    before = serve_engine(scripted("", **script))
    for stream in (False, True):
        assert before.post("/v1/chat/completions", {**CHAT, "stream": stream})[0] == status
    after = serve_engine(scripted("Hello", **script))
    body = {**CHAT, "max_tokens": 50}
    assert after.post("/v1/chat/completions", body)[0] == status
    texts = []
    stream = after.client.chat.completions.create(**body, stream=True)
    with pytest.raises(openai.APIError) as broken:
        texts.extend(chunk.choices[0].delta.content for chunk in stream)
    assert broken.value.code == code and "".join(texts) == "Hello"
    raw = httpx.post(after.server.url + "/v1/chat/completions", json={**body, "stream": True})
    assert json.loads(raw.text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == code
    assert after.settled()


def test_metrics_count_what_clients_saw(serve_engine):
    registry = CollectorRegistry()
    served = serve_engine(scripted("Hello world", end=None, step_delay_s=0.001), registry=registry)
    served.client.chat.completions.create(**{**CHAT, "max_tokens": 3})
    list(served.client.chat.completions.create(**{**CHAT, "max_tokens": 2}, stream=True))
    served.post("/v1/completions", {**PROMPT, "n": 0})
    served.post("/v1/completions", {**PROMPT, "model": "three"})
    with served.open_post("/v1/chat/completions", {**CHAT, "max_tokens": 50}):
        served.wait_live(1)
    assert served.settled()
    time.sleep(0.05)
    values = {
        (sample.name.removeprefix("genserve_http_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(httpx.get(served.server.url + "/metrics").text)
        for sample in family.samples
    }
    assert values["requests_total", "tiny", "200"] == 2
    assert values["requests_total", "", "400"] == 1
    assert values["requests_total", "", "404"] == 1
    assert values["requests_total", "tiny", "499"] == 1
    assert values["disconnects_total", "tiny"] == 1
    assert values["inflight_requests", "tiny"] == 0
    assert values["generation_tokens_total", "tiny"] >= 5
    assert values["time_to_first_token_seconds_count", "tiny"] == 2
    assert values["time_per_output_token_seconds_count", "tiny"] == 2
    assert values["request_seconds_count", "tiny"] == 2
    assert registry.get_sample_value("genserve_http_inflight_requests", {"model": "tiny"}) == 0


def test_drain_refuses_new_requests_and_finishes_those_in_flight(serve_engine):
    served = serve_engine(scripted("Hello world", step_delay_s=0.2))
    texts: list[str] = []

    def read() -> None:
        for chunk in served.client.chat.completions.create(**CHAT, stream=True):
            texts.append(chunk.choices[0].delta.content or "")

    reader = threading.Thread(target=read)
    reader.start()
    served.wait_live(1)
    served.server.begin_stop()
    end = time.monotonic() + 5
    while not served.gateway.is_draining and time.monotonic() < end:
        time.sleep(0.005)
    with pytest.raises(openai.InternalServerError) as refused:
        served.client.chat.completions.create(**CHAT)
    assert refused.value.status_code == 503 and refused.value.code == "draining"
    assert httpx.get(served.server.url + "/health").status_code == 503
    reader.join()
    assert "".join(texts) == "Hello world"
    served.server.join()


def test_drain_that_times_out_ends_streams_with_an_error_event(serve_engine):
    served = serve_engine(scripted("Hello", end=None), drain_timeout_s=0.2)
    stream = iter(served.client.chat.completions.create(**{**CHAT, "max_tokens": 50}, stream=True))
    next(stream)
    served.server.begin_stop()
    with pytest.raises(openai.APIError) as ended:
        list(stream)
    assert ended.value.code == "draining"
    served.server.join()
    assert served.engine.num_live == 0
