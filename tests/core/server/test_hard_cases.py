"""What clients do to a server, through the official client and raw sockets."""

from __future__ import annotations

import socket
import threading

import openai
import pytest

from .conftest import CONTEXT_TOKENS

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
PROMPT = {"model": "tiny", "prompt": "hi there", "temperature": 0}
FULL_LENGTH = {"extra_body": {"ignore_eos": True}}


def streamed(client, **kwargs):
    """Joined text and finish reason of each choice of a streamed request, and the usage."""
    texts, finishes, usage = {}, {}, None
    is_chat = "messages" in kwargs
    create = client.chat.completions.create if is_chat else client.completions.create
    for chunk in create(stream=True, stream_options={"include_usage": True}, **kwargs):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.delta.content if is_chat else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            if choice.finish_reason:
                assert choice.index not in finishes
                finishes[choice.index] = choice.finish_reason
    return texts, finishes, usage


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 60])
def test_streamed_equals_whole_and_usage_counts_tokens(served, n, max_tokens):
    body = {**CHAT, **FULL_LENGTH, "n": n, "max_tokens": max_tokens, "seed": 5}
    whole = served.client.chat.completions.create(**body)
    texts, finishes, usage = streamed(served.client, **body)
    assert [texts[c.index] for c in whole.choices] == [c.message.content for c in whole.choices]
    assert [finishes[c.index] for c in whole.choices] == [c.finish_reason for c in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens == n * max_tokens
    assert usage.prompt_tokens == len(served.tokenizer.apply_chat_template(CHAT["messages"]))
    assert served.settled()


def test_every_stop_string_cuts_where_it_first_appears_streamed_or_not(served):
    body = {**PROMPT, **FULL_LENGTH, "max_tokens": 40}
    full = served.client.completions.create(**body).choices[0].text
    assert len(full) > 40
    for start in range(0, 36, 5):
        for length in (1, 2, 6):
            stop = full[start : start + length]
            expected = full[: full.index(stop)]
            whole = served.client.completions.create(**body, stop=[stop, "never-there"])
            assert (whole.choices[0].text, whole.choices[0].finish_reason) == (expected, "stop")
            texts, finishes, usage = streamed(served.client, **body, stop=stop)
            assert (texts[0], finishes[0]) == (expected, "stop")
            assert usage.completion_tokens == whole.usage.completion_tokens <= 40
    assert served.settled()


def test_text_cut_anywhere_is_a_prefix_without_half_characters(served):
    body = {**PROMPT, **FULL_LENGTH}
    full = served.client.completions.create(**body, max_tokens=150).choices[0].text
    for max_tokens in range(1, 40):
        texts, _, usage = streamed(served.client, **body, max_tokens=max_tokens)
        assert full.startswith(texts[0]) and usage.completion_tokens == max_tokens


def disconnects(served, body, n, num_bytes):
    """Send `body`, read `num_bytes` of the answer, drop the connection, and see everything freed."""
    before = served.stats()["num_decode_tokens"]
    body = {**CHAT, "n": n, "max_tokens": 200, "ignore_eos": True, **body}
    sock = served.open_post("/v1/chat/completions", body)
    try:
        if num_bytes:
            assert sock.recv(num_bytes)
        else:
            served.wait_live(n)
    finally:
        sock.close()
    assert served.settled()
    assert served.stats()["num_decode_tokens"] - before < n * 190  # aborted, not played to the end


@pytest.mark.parametrize("n", [1, 4])
def test_client_that_goes_mid_stream_frees_everything(served, n):
    disconnects(served, {"stream": True}, n, 10)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("stream", [True, False])
def test_client_that_goes_before_the_answer_frees_everything(served, n, stream):
    disconnects(served, {"stream": stream}, n, 0)


def test_client_that_resets_the_connection_frees_everything(served):
    sock = served.open_post("/v1/completions", {**PROMPT, "max_tokens": 200, "stream": True})
    assert sock.recv(10)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    assert served.settled()


def test_official_client_that_closes_its_stream_frees_everything(served):
    stream = served.client.chat.completions.create(**CHAT, n=2, max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    assert served.settled()


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[1], []], ["a", ""]])
def test_empty_prompts_are_refused_and_the_next_request_works(served, prompt):
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.completions.create(**{**PROMPT, "prompt": prompt})
    assert refused.value.param == "prompt"
    assert served.client.completions.create(**PROMPT, max_tokens=1).usage.completion_tokens == 1
    assert served.settled()


def test_context_length_to_the_token(served):
    ids = (served.tokenizer.encode("hello world ") * CONTEXT_TOKENS)[: CONTEXT_TOKENS + 1]
    create = served.client.completions.create
    almost = create(model="tiny", prompt=ids[: CONTEXT_TOKENS - 1], max_tokens=1)
    assert almost.usage.total_tokens == CONTEXT_TOKENS
    exact = create(model="tiny", prompt=ids[:CONTEXT_TOKENS], max_tokens=0)
    assert (exact.usage.prompt_tokens, exact.usage.completion_tokens) == (CONTEXT_TOKENS, 0)
    for prompt, max_tokens, param in [
        (ids[:CONTEXT_TOKENS], 1, "max_tokens"),
        (ids[:CONTEXT_TOKENS], None, "max_tokens"),
        (ids, 0, "prompt"),
        (ids[: CONTEXT_TOKENS - 1], 2, "max_tokens"),
    ]:
        with pytest.raises(openai.BadRequestError, match=str(CONTEXT_TOKENS)) as refused:
            create(model="tiny", prompt=prompt, max_tokens=max_tokens)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)


def test_chat_without_max_tokens_takes_the_rest_of_the_context(served):
    answer = served.client.chat.completions.create(**CHAT, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens <= CONTEXT_TOKENS
    assert answer.usage.total_tokens == CONTEXT_TOKENS or answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_zero(served, stream):
    if stream:
        texts, finishes, usage = streamed(served.client, **PROMPT, max_tokens=0, n=2)
        assert (texts, finishes) == ({0: "", 1: ""}, {0: "length", 1: "length"})
    else:
        answer = served.client.completions.create(**PROMPT, max_tokens=0, echo=True, logprobs=2)
        usage = answer.usage
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == ("hi there", "length")
        assert choice.logprobs.token_logprobs[0] is None
        assert "".join(choice.logprobs.tokens) == "hi there"
        assert all(
            choice.text[offset:].startswith(token)
            for offset, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
        )
    assert usage.completion_tokens == 0


def test_seeded_choices_repeat_differ_and_do_not_depend_on_n(served):
    create = served.client.completions.create
    body = {**PROMPT, **FULL_LENGTH, "temperature": 1.0, "seed": 11, "max_tokens": 20}
    four = [choice.text for choice in create(**body, n=4).choices]
    assert len(set(four)) == 4
    assert [choice.text for choice in create(**body, n=2).choices] == four[:2]
    assert create(**body).choices[0].text == four[0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 1e308}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 10**40}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 10**40}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["x", "y" * 1025]}, "stop"),
        ({"stop": "x" * 1_000_000, "n": 8}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": False}, "stream": False}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"best_of": 2}, "best_of"),
        ({"store": True}, "store"),
        ({"audio": {}}, "audio"),
        ({"suffix": "x"}, "suffix"),
        ({"no_such_thing": 1}, "no_such_thing"),
    ],
)
def test_bad_fields_are_named_and_the_engine_lives_on(served, path, change, field):
    body = {**(CHAT if "chat" in path else PROMPT), "max_tokens": 2, **change}
    status, answer = served.post(path, body)
    assert (status, answer["error"]["param"]) == (400, field)
    assert answer["error"]["message"].startswith(field)
    assert served.num_live() == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "audio": 1}]}, "messages[0].audio"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
        ({"echo": True}, "echo"),
    ],
)
def test_bad_chat_fields_are_named(served, change, field):
    status, answer = served.post("/v1/chat/completions", {**CHAT, **change})
    assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_completions_fields_are_named(served, change, field):
    status, answer = served.post("/v1/completions", {**PROMPT, **change})
    assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"a":' * 3000,
        b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_malformed_bodies_are_refused_by_name(served, body):
    status, answer = served.post("/v1/completions", body)
    assert status == 400
    assert answer["error"]["param"] in ("body", "seed")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: nine\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{",
    ],
)
def test_bytes_that_are_no_request_leave_the_server_alive(served, data):
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=5) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(65536)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert served.client.completions.create(**PROMPT, max_tokens=1).usage.completion_tokens <= 1
    assert served.settled()


def test_values_that_ask_for_nothing_pass(served):
    body = {**CHAT, "max_tokens": 1, "tools": None, "tool_choice": "none", "n": 1, "store": False}
    body |= {"user": "u", "metadata": {"a": "b"}, "logit_bias": None, "no_such_thing": None, "best_of": 1}
    body["messages"] = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}],
        },
        {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": [], "audio": None},
        {"role": "user", "content": "x"},
    ]
    status, answer = served.post("/v1/chat/completions", body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)


def test_many_clients_at_once_get_what_each_would_get_alone(served):
    prompts = [f"prompt number {i}" for i in range(24)]
    alone = [served.client.completions.create(**{**PROMPT, "prompt": p}, max_tokens=20) for p in prompts]
    results: dict[str, str] = {}

    def ask(prompt: str) -> None:
        texts, _, _ = streamed(served.client, **{**PROMPT, "prompt": prompt}, max_tokens=20)
        results[prompt] = texts[0]

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[p] for p in prompts] == [a.choices[0].text for a in alone]
    batch = served.client.completions.create(**{**PROMPT, "prompt": prompts}, max_tokens=20)
    assert [choice.text for choice in batch.choices] == [a.choices[0].text for a in alone]
    assert batch.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)
    assert served.settled()


def test_a_request_larger_than_the_queue_is_refused_by_name(served):
    with pytest.raises(openai.BadRequestError) as never:
        served.client.chat.completions.create(**CHAT, max_tokens=1, n=65)
    assert never.value.param == "n"
