"""Hard cases that depend on what the engine is doing: real model, real pages, steps on demand."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time

import openai
import pytest

from genserve.ar.config import ArConfig
from genserve.ar.serve import build_parts, start_local
from genserve.core.runtime.local_engine import LocalEngine
from genserve.core.text.tokenizer import Tokenizer

from .conftest import CONTEXT_TOKENS, EngineUnderTest, real_engine
from .test_hard_cases import streamed

GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
LONG_TEXT = "The quick brown fox jumps over the lazy dog. " * 5


class GatedWorker:
    """The real worker, which performs a step only when it is let to."""

    def __init__(self, worker) -> None:
        self._worker = worker
        self._tickets = threading.Semaphore(0)
        self._open = True
        self.num_entered = 0

    def perform(self, op, args):
        self.num_entered += 1
        if not self._open:
            assert self._tickets.acquire(timeout=30), "nobody let the step run"
        return self._worker.perform(op, args)

    def close(self) -> None:
        self._tickets = threading.Semaphore(0)
        self._open = False

    def let(self, num_steps: int) -> None:
        """Perform `num_steps` steps, and have the next one wait at the gate, in flight."""
        target = self.num_entered + num_steps
        if num_steps:
            self._tickets.release(num_steps)
        wait_until(lambda: self.num_entered >= target)

    def open(self) -> None:
        self._open = True
        self._tickets.release()


def wait_until(condition, timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def gated(serve_engine, tiny_folder):
    """A server whose engine runs two sequences of 16 tokens a step, and its gate."""
    gates = []

    async def make() -> EngineUnderTest:
        config = ArConfig(
            model=tiny_folder,
            name="tiny",
            max_context_tokens=CONTEXT_TOKENS,
            num_threads=1,
            kv_pool="4MiB",
            max_running=2,
            budget_tokens=16,
            max_queued_requests=8,
        )
        parts = build_parts(config)
        gates.append(GatedWorker(parts.worker))
        engine = await start_local(type(parts)(parts.info, parts.controller, gates[0], parts.tokenizer))
        assert isinstance(engine, LocalEngine)
        return EngineUnderTest(engine, Tokenizer(parts.tokenizer))

    return serve_engine(make), gates[0]


STATES = {
    # name: (n, steps before the client goes, what the engine then holds)
    "first chunk in flight": (1, 0, {"num_running": 1, "num_waiting": 0}),
    "between chunks": (1, 3, {"num_running": 1, "num_waiting": 0}),
    "siblings parked": (3, 2, {"num_running": 1, "num_waiting": 2}),
    "decoding": (1, 15, {"num_running": 1, "num_waiting": 0}),
    "decoding, one waiting for a slot": (3, 20, {"num_running": 2, "num_waiting": 1}),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", STATES)
def test_a_client_that_goes_in_any_state_frees_everything(gated, state, stream):
    served, gate = gated
    n, num_steps, expected = STATES[state]
    assert served.settled()
    body = {"model": "tiny", "prompt": f"{state} {stream} {LONG_TEXT}", "max_tokens": 40, "ignore_eos": True}
    gate.close()
    before = gate.num_entered
    try:
        with served.open_post("/v1/completions", {**body, "n": n, "stream": stream, "temperature": 0}):
            wait_until(lambda: gate.num_entered == before + 1)
            gate.let(num_steps)
            stats = served.stats()
            assert {name: stats[name] for name in expected} == expected
            assert stats["num_sequences"] == stats["num_streams"] == n
            assert stats["num_used_pages"] > 0 and stats["num_leases"] == stats["num_running"]
        # The step is still in flight: nobody waits for it to give back what the client held.
        assert served.settled()
        assert gate.num_entered == before + num_steps + 1
    finally:
        gate.open()
    assert served.settled()
    assert served.stats()["num_free_slots"] == 2
    alive = served.client.completions.create(**GREEDY, prompt="hi", max_tokens=3)
    assert alive.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_while_it_waits_leaves_the_others_alone(gated, stream):
    served, gate = gated
    expected = served.client.completions.create(**GREEDY, prompt="hog", max_tokens=30, n=2)
    gate.close()
    before = gate.num_entered
    try:
        got = {}
        hog = threading.Thread(
            target=lambda: got.update(streamed(served.client, **GREEDY, prompt="hog", max_tokens=30, n=2)[0])
        )
        hog.start()
        wait_until(lambda: gate.num_entered == before + 1)
        gate.let(3)
        with served.open_post("/v1/completions", {"model": "tiny", "prompt": "late", "stream": stream}):
            served.wait_live(3)
            assert served.stats()["num_waiting"] == 1
        wait_until(lambda: served.num_live() == 2)
    finally:
        gate.open()
    hog.join(20)
    assert [got[i] for i in range(2)] == [choice.text for choice in expected.choices]
    assert served.settled()


def test_a_full_queue_is_429_and_opens_again(gated):
    served, gate = gated
    gate.close()
    before = gate.num_entered
    try:
        with served.open_post("/v1/completions", {"model": "tiny", "prompt": "x", "n": 8, "max_tokens": 4}):
            wait_until(lambda: gate.num_entered == before + 1)
            with pytest.raises(openai.RateLimitError) as refused:
                served.client.completions.create(**GREEDY, prompt="y", max_tokens=1)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            assert served.num_live() == 8
    finally:
        gate.open()
    assert served.settled()
    assert served.client.completions.create(**GREEDY, prompt="y", max_tokens=1).usage.completion_tokens == 1


CHARACTERS = "你好é👋🏽ß日"


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_characters_split_over_tokens_arrive_whole(served, temperature):
    body = {"model": "tiny", "prompt": "say", "temperature": temperature, "seed": 3}
    body["extra_body"] = {"guided_regex": f"[{CHARACTERS}]{{40}}"}
    full = served.client.completions.create(**body, max_tokens=200)
    text = full.choices[0].text
    assert re.fullmatch(f"[{CHARACTERS}]{{40}}", text) and full.choices[0].finish_reason == "stop"
    assert full.usage.completion_tokens > 80  # the tokens are bytes, or little more
    for max_tokens in range(1, 24):
        pieces = []
        for chunk in served.client.completions.create(**body, max_tokens=max_tokens, stream=True):
            pieces += [choice.text for choice in chunk.choices]
        assert not any("\ufffd" in piece for piece in pieces)
        assert text.startswith("".join(pieces))
    for stop in (text[7], text[5:9], text[38:]):
        texts, finishes, _ = streamed(served.client, **body, max_tokens=200, stop=stop)
        assert (texts[0], finishes[0]) == (text[: text.index(stop)], "stop")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_constrained_answers_parse_streamed_or_not(served, seed):
    messages = [{"role": "user", "content": "hi"}]
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    body = {"model": "tiny", "messages": messages, "seed": seed, "temperature": 1.3, "max_tokens": 200}
    whole = served.client.chat.completions.create(**body, response_format=wanted, n=2)
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        person = json.loads(choice.message.content)
        assert set(person) == {"name", "age", "tags"} and 0 <= person["age"] <= 99
    texts, _, _ = streamed(served.client, **body, response_format=wanted, n=2)
    assert [texts[i] for i in range(2)] == [choice.message.content for choice in whole.choices]
    digits = served.client.chat.completions.create(**body, extra_body={"guided_regex": "[0-9]{3}-[0-9]{4}"})
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", digits.choices[0].message.content)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "a" * 10_000}, "guided_regex"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_json": '{"type": 5}'}, "guided_json"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "x"}},
                }
            },
            "response_format",
        ),
    ],
)
def test_a_bad_grammar_is_named_before_any_work(served, path, change, field):
    num_steps = served.stats()["num_steps"]
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    status, answer = served.post(path, {"model": "tiny", **prompt, **change})
    assert (status, answer["error"]["param"]) == (400, field)
    assert served.stats()["num_steps"] == num_steps
    assert served.settled()


def test_usage_counts_the_token_ids(served):
    """Of stop tokens, stop strings and cut answers alike; the log-probabilities name every token."""
    create = served.client.completions.create
    prompt = served.tokenizer.encode("one two three")
    for options in ({"max_tokens": 1}, {"max_tokens": 33}, {"max_tokens": 100, "stop": ["e"]}):
        for seed in range(4):
            answer = create(model="tiny", prompt=prompt, seed=seed, logprobs=0, temperature=1.2, **options)
            assert answer.usage.prompt_tokens == len(prompt)
            assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.tokens)
            assert answer.usage.total_tokens == len(prompt) + answer.usage.completion_tokens


def test_prefix_cache_hit_partial_hit_and_eviction_give_the_same_text(served):
    base = served.tokenizer.encode(LONG_TEXT)[:100]
    prompts = {"cold": base, "hit": base, "partial": [*base[:50], 9, 9, 9], "longer": [*base, 7, 8]}
    others = [[10 + i, *base[:120]] for i in range(60)]

    def ask(prompt):
        answer = served.client.completions.create(**GREEDY, prompt=prompt, max_tokens=12)
        details = answer.usage.prompt_tokens_details
        return answer.choices[0].text, details.cached_tokens if details else 0

    first = {name: ask(prompt) for name, prompt in prompts.items()}
    assert first["hit"] == (first["cold"][0], 96)
    assert first["partial"][1] == 48 and first["longer"][1] >= 96
    for prompt in others:  # more than the pool holds
        ask(prompt)
    assert served.stats()["num_evictions"] > 0
    again = {name: ask(prompt) for name, prompt in prompts.items()}
    assert {name: text for name, (text, _) in again.items()} == {
        name: text for name, (text, _) in first.items()
    }
    assert again["cold"][1] < 96


def test_a_pool_of_a_few_pages_gives_the_same_texts_as_a_large_one(serve_engine, tiny_folder):
    page_bytes = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, k and v, heads, head size, fp32
    large = serve_engine(real_engine(tiny_folder, prefix_cache=False))
    small = serve_engine(real_engine(tiny_folder, kv_pool=7 * page_bytes))
    assert small.stats()["num_pages"] == 7
    prompts = [f"{i} {LONG_TEXT[: 7 * i]}" for i in range(8)]
    options = {"model": "tiny", "prompt": prompts, "max_tokens": 40, "temperature": 0.9, "seed": 4}
    options["presence_penalty"] = 0.5
    expected = large.client.completions.create(**options, n=2)
    got = small.client.completions.create(**options, n=2)
    assert [c.text for c in got.choices] == [c.text for c in expected.choices]
    assert got.usage.completion_tokens == expected.usage.completion_tokens
    assert small.stats()["num_preemptions"] > 0 and large.stats()["num_preemptions"] == 0
    assert small.settled() and large.settled()


@pytest.mark.ray
def test_a_server_whose_engine_dies_says_so_and_does_not_hang(serve_engine, tiny_folder, ray_session):

    served = serve_engine(real_engine(tiny_folder, executor="ray"))
    body = {"model": "tiny", "prompt": "x", "n": 2, "max_tokens": 240, "ignore_eos": True}
    with served.open_post("/v1/completions", {**body, "stream": True}) as stream:
        assert b"200 OK" in stream.recv(20)
        with served.open_post("/v1/completions", body) as whole:
            served.wait_live(4)
            begun = time.monotonic()
            served.engine._actor.kill()
            head, _, answer = read_all(whole).partition(b"\r\n\r\n")
        rest = read_all(stream)
    assert b" 503 " in head.splitlines()[0]
    assert json.loads(answer)["error"]["code"] == "executor_lost"
    assert b'"code":"executor_lost"' in rest.replace(b": ", b":") and b"[DONE]" not in rest
    with pytest.raises(openai.InternalServerError) as refused:
        served.client.completions.create(**GREEDY, prompt="y")
    assert refused.value.status_code == 503 and "gone" in refused.value.message
    assert time.monotonic() - begun < 10
    assert served.gateway.num_inflight_requests == 0


def read_all(sock) -> bytes:
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def test_sigterm_lets_real_requests_finish(tiny_folder):
    program = _SERVER.format(folder=tiny_folder, context=CONTEXT_TOKENS)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{int(process.stdout.readline())}/v1",
            api_key="x",
            timeout=30,
            max_retries=0,
        )
        options = {**GREEDY, "prompt": "hi", "max_tokens": 240}
        expected = client.completions.create(**options).choices[0].text
        stream = iter(client.completions.create(**options, stream=True))
        pieces = [next(stream).choices[0].text]
        process.send_signal(signal.SIGTERM)
        refused = None
        while refused is None:
            try:
                client.completions.create(**GREEDY, prompt="late", max_tokens=1)
            except (openai.InternalServerError, openai.APIConnectionError) as error:
                refused = error
        pieces += [choice.text for chunk in stream for choice in chunk.choices]
        assert "".join(pieces) == expected
        assert process.wait(20) == 0
        held = json.loads(process.stdout.read())
        assert held == {"num_sequences": 0, "num_used_pages": 0, "num_leases": 0, "num_streams": 0}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


_SERVER = """
import json
from genserve.ar.config import ArConfig
from genserve.ar.serve import start_served
from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway
from genserve.core.server.run import bind, run, serve

async def main():
    config = ArConfig(model={folder!r}, name="tiny", max_context_tokens={context}, num_threads=1,
                      kv_pool="4MiB", max_running=16, budget_tokens=64)
    model = await start_served(config)
    gateway = Gateway([model])
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]

    async def close():
        stats = await model.completer.engine.stats()
        names = ("num_sequences", "num_used_pages", "num_leases", "num_streams")
        print(json.dumps({{name: stats[name] for name in names}}), flush=True)
        await model.completer.engine.aclose()

    await serve(create_app(gateway), gateway, sock, drain_timeout_s=20,
                on_started=lambda: print(port, flush=True), on_stopped=close)

run(main)
"""
