"""The library: sync, async and streaming give the same; refusals come before work."""

import asyncio
import signal
import threading
import time

import pytest

from genserve import LLM, AsyncLLM, SamplingParams
from genserve.core.errors import ConfigError, DeadlineExceeded, GenserveError, InvalidRequest
from genserve.core.models.tiny import make_tiny_folder

OPTIONS = {"num_threads": 1, "kv_pool": "4MiB", "max_running": 8, "budget_tokens": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_folder(tmp_path_factory.mktemp("models") / "tiny", "llama"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def test_one_prompt_a_list_and_token_ids(llm):
    one = llm.generate("hello world", max_tokens=12, seed=3)
    assert one.usage.completion_tokens == len(one.outputs[0].token_ids) <= 12
    ids = llm.tokenizer.encode("hello world")
    assert llm.generate(ids, max_tokens=12, seed=3).outputs == one.outputs
    many = llm.generate(["other", "hello world", ids], max_tokens=12, seed=3, progress=True)
    assert [g.outputs for g in many[1:]] == [one.outputs, one.outputs]


def test_streaming_is_the_same_text(llm):
    whole = llm.generate("abc", max_tokens=20, temperature=0.8, seed=1)
    deltas = list(llm.stream("abc", max_tokens=20, temperature=0.8, seed=1))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish_reason == whole.outputs[0].finish_reason


def test_leaving_a_stream_stops_the_generation(llm):
    for _ in llm.stream("abc", max_tokens=200, ignore_eos=True):
        break
    for _ in range(200):
        stats = llm.stats()
        if stats["num_sequences"] == 0:
            break
    assert stats["num_sequences"] == stats["num_used_pages"] == stats["num_streams"] == 0


def test_n_choices_differ_and_logprobs_align(llm):
    result = llm.generate("abc", n=3, max_tokens=10, seed=5, logprobs=2)
    assert len({output.token_ids for output in result.outputs}) == 3
    for output in result.outputs:
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        assert all(len(entry.top) == 2 for entry in output.logprobs)


def test_chat_and_many_chats(llm):
    messages = [{"role": "user", "content": "hi"}]
    one = llm.chat(messages, max_tokens=6, temperature=0)
    assert llm.chat([messages, messages], max_tokens=6, temperature=0)[1].outputs == one.outputs
    streamed = llm.stream_chat(messages, max_tokens=6, temperature=0)
    assert "".join(delta.text for delta in streamed) == one.text


def test_constrained_output(llm):
    assert llm.generate("n:", regex="[0-9]{3}", max_tokens=8, temperature=1.5, seed=1).text.isdigit()
    with pytest.raises(InvalidRequest, match="exclude"):
        llm.generate("n:", regex="a", json_schema={})


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("", {}, "prompt"),
        ("a", {"temperature": -1}, "temperature"),
        ("a", {"temprature": 1}, "temprature"),
        ("a", {"max_tokens": 10**9}, "max_tokens"),
        ("a", {"n": 0}, "n"),
        ([10**6], {}, "prompt"),
        ("a", {"regex": "("}, "regex"),
    ],
)
def test_refusals_name_the_field(llm, prompt, options, field):
    with pytest.raises(InvalidRequest) as refused:
        llm.generate(prompt, **options)
    assert field in str(refused.value)
    assert llm.generate("still alive", max_tokens=1).usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        (5, {}, "prompt"),
        (None, {}, "prompt"),
        (b"abc", {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([1.5, 2.5], {}, "prompt"),
        ([True, False], {}, "prompt"),
        ([1, "a"], {}, "prompt"),
        ([["a"]], {}, "prompt"),
        ([[1], [2.5]], {}, "prompt"),
        ("a", {"stop": None}, "stop"),
        ("a", {"stop": 5}, "stop"),
        ("a", {"stop": [5]}, "stop"),
        ("a", {"stop_token_ids": 5}, "stop_token_ids"),
        ("a", {"stop_token_ids": "5"}, "stop_token_ids"),
        ("a", {"stop_token_ids": [True]}, "stop_token_ids"),
        ("a", {"sampling": SamplingParams(stop_token_ids=5)}, "stop_token_ids"),
        ("a", {"sampling": {"temperature": 1}}, "sampling"),
        ("a", {"logit_bias": 5}, "logit_bias"),
        ("a", {"logit_bias": [5]}, "logit_bias"),
        ("a", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("a", {"timeout_s": "x"}, "timeout_s"),
        ("a", {"timeout_s": True}, "timeout_s"),
        ("a", {"timeout_s": 0}, "timeout_s"),
        ("a", {"timeout_s": float("nan")}, "timeout_s"),
        ("a", {"timeout_s": float("inf")}, "timeout_s"),
        ("a", {"n": "2"}, "n"),
        ("a", {"regex": 5}, "regex"),
        ("a", {"json_schema": 5}, "json_schema"),
        ("a", {"json_schema": {"a": object()}}, "json_schema"),
        ("a", {"grammar": "[a]"}, "grammar"),
        ("a", {"request_id": "mine"}, "request_id"),
    ],
)
def test_wrong_types_are_refused_and_harm_nobody(llm, prompt, options, field):
    bystander = llm.stream("abc", max_tokens=100, ignore_eos=True, temperature=0)
    next(bystander)
    with pytest.raises(InvalidRequest) as refused:
        llm.generate(prompt, **{"max_tokens": 3, **options})
    assert refused.value.field == field
    assert list(bystander)[-1].finish_reason == "length"


@pytest.mark.parametrize("messages", [5, None, "hi", ["hi"], [[5]], [5], [{"role": "user"}, 5]])
def test_wrong_conversations_are_refused(llm, messages):
    with pytest.raises(InvalidRequest) as refused:
        llm.chat(messages, max_tokens=1)
    assert refused.value.field == "messages"


def test_prompt_logprobs_are_apart_from_those_of_the_output(llm):
    prompt = llm.tokenizer.encode("hello world")
    options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    result = llm.generate(prompt, n=2, logprobs=1, prompt_logprobs=2, **options)
    for output in result.outputs:
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    assert result.prompt_logprobs[0] is None
    assert [entry.token_id for entry in result.prompt_logprobs[1:]] == prompt[1:]
    assert all(len(entry.top) == 2 for entry in result.prompt_logprobs[1:])
    alone = llm.generate(prompt, prompt_logprobs=2, **options)
    assert alone.prompt_logprobs == result.prompt_logprobs
    assert alone.outputs[0].logprobs is None
    assert llm.generate(prompt, logprobs=1, **options).prompt_logprobs is None


def test_a_bad_prompt_in_a_list_stops_the_list(llm):
    with pytest.raises(InvalidRequest):
        llm.generate(["a", ""], max_tokens=100, ignore_eos=True)
    while llm.stats()["num_sequences"]:
        pass
    assert llm.stats()["num_used_pages"] == 0


def test_timeout(llm):
    with pytest.raises(DeadlineExceeded):
        llm.generate("abc", max_tokens=220, ignore_eos=True, timeout_s=0.01)


def test_sampling_object_and_overrides(llm):
    sampling = SamplingParams(temperature=0, max_tokens=5)
    assert (
        llm.generate("abc", sampling=sampling).outputs
        == llm.generate("abc", temperature=0, max_tokens=5).outputs
    )
    assert len(llm.generate("abc", sampling=sampling, max_tokens=2).outputs[0].token_ids) == 2


def test_threads_share_one_llm(llm):
    expected = llm.generate("abc", max_tokens=8, seed=2).outputs
    got = []
    threads = [
        threading.Thread(target=lambda: got.append(llm.generate("abc", max_tokens=8, seed=2).outputs))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == [expected] * 6


def test_async_twin_gives_the_same(llm, folder):
    expected = llm.generate("abc", max_tokens=8, seed=2).outputs

    async def main():
        async with await AsyncLLM.start(folder, **OPTIONS) as twin:
            results = await asyncio.gather(*(twin.generate("abc", max_tokens=8, seed=2) for _ in range(3)))
            text = "".join([delta.text async for delta in twin.stream("abc", max_tokens=8, seed=2)])
        return results, text

    results, text = asyncio.run(main())
    assert all(result.outputs == expected for result in results)
    assert text == expected[0].text


def test_closed_and_unknown(folder):
    llm = LLM(folder, **OPTIONS)
    llm.close()
    llm.close()
    with pytest.raises(GenserveError, match="closed"):
        llm.generate("a")
    with pytest.raises(ConfigError, match="kv_pool"):
        LLM(folder, kv_pool="1B")
    with pytest.raises(ConfigError, match="max_runing: unknown key"):
        LLM(folder, max_runing=3)


def test_timers_of_finished_requests_are_taken_back(folder):
    async def main():
        async with await AsyncLLM.start(folder, **OPTIONS) as llm:
            for _ in range(20):
                await llm.generate("abc", max_tokens=2, timeout_s=3600)
            return len(llm.engine._loop._timers)

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.02, 0.1])
def test_closing_ends_every_call_of_other_threads(folder, delay_s):
    llm = LLM(folder, **OPTIONS)
    endless = {"max_tokens": 230, "ignore_eos": True, "n": 4}
    ended = []

    def call(work):
        try:
            while True:
                work()
        except BaseException as error:
            ended.append(error)

    works = (
        lambda: llm.generate("abc", **endless),
        lambda: llm.generate(["abc", "def"], **endless),
        lambda: list(llm.stream("abc", **endless)),
        lambda: llm.stats(),
    )
    threads = [threading.Thread(target=call, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    time.sleep(delay_s)
    llm.close()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert [(type(error), str(error)) for error in ended] == [(GenserveError, "this LLM is closed")] * 4


def test_closing_ends_a_stream_that_is_read_later(folder):
    llm = LLM(folder, **OPTIONS)
    stream = llm.stream("abc", max_tokens=230, ignore_eos=True)
    unread = llm.stream("abc", max_tokens=5)
    next(stream)
    llm.close()
    with pytest.raises(GenserveError, match="this LLM is closed"):
        list(stream)
    with pytest.raises(GenserveError, match="this LLM is closed"):
        next(unread)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_interrupt_aborts_what_was_asked_for(llm, streaming):
    # A run in the background of a shell ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        while llm.stats()["num_sequences"] == 0:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    options = {"max_tokens": 240, "ignore_eos": True, "n": 8}

    def for_ever():
        while True:
            list(llm.stream("abc", **options)) if streaming else llm.generate("abc", **options)

    try:
        with pytest.raises(KeyboardInterrupt):
            for_ever()
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join()
    deadline = time.monotonic() + 10
    while llm.stats()["num_sequences"]:
        assert time.monotonic() < deadline
    assert llm.stats()["num_used_pages"] == llm.stats()["num_streams"] == 0
