"""Diffusion models over HTTP with the official client: what any model serves, and what only these do."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from genserve import LLM
from genserve.core.errors import ConfigError
from genserve.core.models.tiny import make_tiny_folder
from genserve.dllm.config import DllmConfig
from genserve.dllm.models.registry import load_diffusion_model
from genserve.dllm.models.tiny import write_tiny
from genserve.dllm.models.tiny_canvas import write_tiny_diffusion_gemma
from genserve.dllm.serve import describe, start_served

from .served import Served

POISON = 50  # prompts with this token have rows of NaN
LENGTHS = {"block_length": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = write_tiny("llada", tmp_path_factory.mktemp("models") / "llada")
    tensors = load_file(path / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("wte.weight")]
    tensors[name][POISON] = torch.nan
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return str(path)


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    """Two workers of one LLaDA, and an autoregressive model beside it."""
    ar = str(make_tiny_folder(tmp_path_factory.mktemp("models") / "llama"))
    with Served((folder, {"num_workers": 2, "default_max_tokens": 24}), (ar, {})) as server:
        yield server
        assert server.settled()


def text_of(chunk: Any) -> str:
    choice = chunk.choices[0]
    return (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 5, "threshold": 0.4}, {"cache": "none"}])
def test_a_stream_is_the_whole_answer(served, fields):
    fields = {"max_tokens": 21, **LENGTHS, **fields}
    whole = served.complete(**fields)
    chunks = list(served.complete(stream=True, stream_options={"include_usage": True}, **fields))
    usage = chunks.pop().usage
    assert "".join(map(text_of, chunks)) == whole.choices[0].text != ""
    assert usage == whole.usage and usage.completion_tokens <= 21
    assert len(chunks) > 2
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_chat_and_the_default_length(served):
    answer = served.chat()
    assert answer.usage.completion_tokens == 24 or answer.choices[0].finish_reason == "stop"
    assert served.complete().usage.completion_tokens == answer.usage.completion_tokens
    streamed = [text_of(chunk) for chunk in served.chat(stream=True)]
    assert "".join(streamed) == answer.choices[0].message.content


@pytest.mark.parametrize("fields", [LENGTHS, {"unmasking": "random", "steps": 12, "cache": "prefix"}])
def test_events_reassemble_to_the_text(served, fields):
    whole = served.complete(max_tokens=20, seed=3, logprobs=0, **fields).choices[0]
    options = {"include_unmasking": True}
    chunks = list(served.complete(max_tokens=20, seed=3, stream=True, stream_options=options, **fields))
    events = [event for chunk in chunks for event in getattr(chunk.choices[0], "unmasked", None) or []]
    answer: dict[int, int] = {}
    for event in events:
        answer[event["position"]] = event["token_id"]
        assert event["token"] == served.tokenizer.token_bytes(event["token_id"]).decode(errors="replace")
        assert 0 < event["confidence"] <= 1
    assert [event["step"] for event in events] == sorted(event["step"] for event in events)
    assert list(answer) != sorted(answer)  # out of order, or there is nothing to see
    token_ids = [answer[position] for position in range(len(whole.logprobs.tokens))]
    assert served.tokenizer.decode(token_ids, continues=True) == whole.text
    first_event = next(i for i, chunk in enumerate(chunks) if getattr(chunk.choices[0], "unmasked", None))
    last_text = max(i for i, chunk in enumerate(chunks) if text_of(chunk))
    assert first_event < last_text


def test_infilling_sees_what_follows(served):
    before = served.complete(max_tokens=12, **LENGTHS).choices[0].text
    ends = [served.complete(max_tokens=12, suffix=end, **LENGTHS) for end in (" the fox", " a number")]
    texts = {before, *(answer.choices[0].text for answer in ends)}
    assert len(texts) == 3
    assert ends[0].usage.completion_tokens <= 12


def test_pinned_tokens_stay(served):
    pinned = [{"position": 2, "text": "fox"}, {"position": 9, "token_ids": [60]}]
    answer = served.complete(max_tokens=16, pinned=pinned, logprobs=0, **LENGTHS).choices[0]
    ids = served.tokenizer.encode("fox")
    wanted = {**{2 + i: token_id for i, token_id in enumerate(ids)}, 9: 60}
    chunks = served.complete(
        max_tokens=16, pinned=pinned, stream=True, stream_options={"include_unmasking": True}, **LENGTHS
    )
    told = {
        event["position"] for chunk in chunks for event in getattr(chunk.choices[0], "unmasked", None) or []
    }
    assert "fox" in answer.text and told == set(range(16)) - set(wanted)
    for position, token_id in wanted.items():
        text = served.tokenizer.token_bytes(token_id).decode(errors="replace")
        assert answer.logprobs.tokens[position] == text


def test_choices_have_streams_of_their_own(served):
    fields = {"max_tokens": 16, "n": 3, "temperature": 1.0, **LENGTHS}
    first, again = (served.complete(seed=7, **fields) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.text for choice in again.choices] == texts and len(set(texts)) == 3
    assert served.complete(seed=7, **{**fields, "n": 1}).choices[0].text == texts[0]
    assert served.complete(seed=8, **fields).choices[0].text != texts[0]


def test_a_stop_string_ends_the_answer(served):
    text = served.complete(max_tokens=24, **LENGTHS).choices[0].text
    stop = text[len(text) // 2 :][:2]
    cut = served.complete(max_tokens=24, stop=[stop], **LENGTHS).choices[0]
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
    streamed = served.complete(max_tokens=24, stop=[stop], stream=True, **LENGTHS)
    assert "".join(map(text_of, streamed)) == cut.text


def test_a_stop_token_is_hidden_and_ends_the_answer(served):
    whole = served.complete(max_tokens=16, logprobs=0, **LENGTHS)
    stop_id = next(i for i in range(300) if _token(served, i) == whole.choices[0].logprobs.tokens[5])
    cut = served.complete(max_tokens=16, stop_token_ids=[stop_id], **LENGTHS)
    assert cut.choices[0].finish_reason == "stop" and cut.usage.completion_tokens <= 16


def _token(served: Served, token_id: int) -> str:
    data = served.tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def test_logprobs_are_of_the_committed_tokens(served):
    answer = served.client.chat.completions.create(
        model=served.names[0],
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=12,
        logprobs=True,
        top_logprobs=3,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)  # greedy


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"cache": "lru"}, "cache", "there is: dkv, dual, none, prefix"),
        ({"cache": "block"}, "cache", "for a bidirectional model"),
        ({"unmasking": "guess"}, "unmasking", "there are: threshold"),
        ({"unmasking": {"kind": "quota", "steps": 0}}, "steps", "[1, "),
        ({"block_length": 0}, "block_length", "[1, 512], not 0"),
        ({"threshold": 2}, "threshold", "(0, 1]"),
        ({"cfg_scale": 1, "cache": "dual"}, "cfg_scale", "cache 'none'"),
        ({"pinned": [{"position": 99, "text": "x"}]}, "pinned", "answer of 24 tokens"),
        ({"pinned": "x"}, "pinned", "list"),
        ({"pinned": [1]}, "pinned[0]", "must be an object"),
        ({"unmasking": 3}, "unmasking", "must be a rule's name or an object"),
        ({"stream": True, "stream_options": "all"}, "stream_options", "must be an object"),
        ({"max_tokens": 9999}, "max_tokens", "context of 512 tokens"),
        ({"suffix": "fox " * 400}, "prompt", "suffix tokens"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"echo": True}, "echo", "not supported"),
        ({"min_p": 0.5}, "min_p", "not supported"),
        ({"repetition_penalty": 2}, "repetition_penalty", "not supported"),
        ({"presence_penalty": 1}, "presence_penalty", "not supported"),
        ({"frequency_penalty": 1}, "frequency_penalty", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"guided_regex": "a+"}, "guided_regex", "not supported"),
        ({"guided_json": {"type": "object"}}, "guided_json", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"speed": 9}, "speed", "not supported"),
    ],
)
def test_what_cannot_work_is_a_400_that_names_it(served, fields, param, message):
    with pytest.raises(openai.BadRequestError) as refused:
        served.complete(**fields)
    assert refused.value.param == param and message in refused.value.message


def test_suffix_is_refused_in_chat_and_options_by_the_other_family(served):
    with pytest.raises(openai.BadRequestError, match="suffix: is for completions"):
        served.chat(extra_body={"suffix": "x"})
    for fields in ({"cache": "dual"}, {"suffix": "x"}):
        with pytest.raises(openai.BadRequestError, match="is not supported"):
            served.complete(model="llama", **fields)


def test_two_families_in_one_server(served):
    families = {model.id: model.family for model in served.client.models.list()}  # type: ignore[attr-defined]
    assert families == {"llada": "dllm", "llama": "ar"}
    assert served.complete(model="llama", max_tokens=4, temperature=0).usage.completion_tokens == 4
    assert served.complete(model="llama").usage.completion_tokens <= 16


def test_a_client_that_leaves_frees_everything(served):
    used = [served.stats()["num_commits"]]
    for fields in ({}, {"n": 3}, {"cache": "dkv"}):
        stream = served.complete(max_tokens=400, stream=True, unmasking="quota", steps=400, **fields)
        next(iter(stream))
        assert served.stats()["num_used_pages"] > 0
        stream.close()
        assert served.settled()
        used.append(served.stats()["num_commits"])
    assert used[-1] - used[0] < 5 * 400  # they did not run on to their ends


def test_nan_fails_its_own_request_alone(served):
    async def main() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        prompts = [[20, 21, 22], [20, POISON, 22], [20, 21, 22]]
        asked = [
            client.completions.create(model=served.names[0], prompt=prompt, max_tokens=16)
            for prompt in prompts
        ]
        async with client:
            return await asyncio.gather(*asked, return_exceptions=True)

    good, poisoned, twin = asyncio.run(main())
    assert isinstance(poisoned, openai.InternalServerError) and "NaN" in poisoned.message
    assert good.choices[0].text == twin.choices[0].text
    assert served.complete([20, 21, 22], max_tokens=16).choices[0].text == good.choices[0].text


def test_metrics(served):
    served.complete(max_tokens=8)
    found = served.metrics()
    label = '{model="llada"}'
    for name in ("steps_total", "passes_total", "commits_total", "refreshes_total", "blocks_total"):
        assert found[f"genserve_engine_{name}{label}"] > 0
    for name in ("prefill_tokens_total", "decode_tokens_total", "tokens_per_forward", "passes_per_block"):
        assert found[f"genserve_engine_{name}{label}"] > 0
    assert f"genserve_engine_budget_balance{label}" in found
    for name in ("queue_seconds", "first_commit_seconds", "block_passes"):
        assert found[f"genserve_engine_{name}_count{label}"] > 0
        buckets = [value for key, value in found.items() if key.startswith(f"genserve_engine_{name}_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == found[f"genserve_engine_{name}_count{label}"]
    assert found[f"genserve_http_request_seconds_count{label}"] > 0


def test_metrics_count_what_ran(served):
    names = ("steps", "passes", "commits", "blocks", "refreshes", "prefill_tokens", "decode_tokens")
    label = '{model="llada"}'
    before, prompt, length = served.metrics(), [20, 21, 22], 16
    fields = {"max_tokens": length, "block_length": 8, "unmasking": "quota", "ignore_eos": True}
    answer = served.complete(prompt, **fields)
    assert answer.usage.completion_tokens == length
    after = served.metrics()
    ran = {
        name: after[key] - before[key] for name in names for key in [f"genserve_engine_{name}_total{label}"]
    }
    canvas = len(prompt) + length
    assert ran == {
        "steps": length,  # a position a pass, nobody beside it
        "passes": length,
        "commits": length,
        "blocks": 2,
        "refreshes": 1,  # the second block begins with one
        "prefill_tokens": 2 * canvas,
        "decode_tokens": (length - 2) * 8,
    }
    steps, commits = (after[f"genserve_engine_{name}_total{label}"] for name in ("steps", "commits"))
    assert after[f"genserve_engine_tokens_per_forward{label}"] == pytest.approx(commits / steps)


def test_the_library_takes_either_family(folder):
    with LLM(folder, num_threads=1, kv_pool="1MiB") as llm:
        messages = [{"role": "user", "content": "hi"}]
        assert llm.chat(messages, max_tokens=8).usage.completion_tokens <= 8
        one = llm.generate("One page", max_tokens=16, options={"block_length": 8})
        deltas = list(llm.stream("One page", max_tokens=16, options=LENGTHS, include_unmasking=True))
        assert "".join(delta.text for delta in deltas) == one.text
        assert sum(len(delta.unmasked) for delta in deltas) >= len(one.outputs[0].token_ids)


@pytest.mark.parametrize(("arch", "fills"), [("llada", True), ("llada2", False), ("sdar", False)])
def test_answers_are_filled_behind_a_stop_token_where_the_references_do(tmp_path, arch, fills):
    folder = str(write_tiny(arch, tmp_path / arch))
    assert describe(DllmConfig(model=folder), load_diffusion_model(folder)).facts.defaults.early_stop is fills


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "block"}, "cache: no 'block' for a bidirectional model"),
        ({"block_length": 9999}, "block_length"),
        ({"max_context_tokens": 9999}, "max_context_tokens"),
        ({"kv_pool": "1KiB"}, "kv_pool"),
    ],
)
def test_a_configuration_that_the_model_cannot_have(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        asyncio.run(start_served(DllmConfig(model=folder, num_threads=1, **options)))


def test_block_causal_models_are_served_too(tmp_path):
    with Served((str(write_tiny("sdar", tmp_path / "sdar")), {"num_workers": 2})) as server:
        whole = server.complete(max_tokens=21)
        assert whole.usage.completion_tokens <= 21
        options = {"include_unmasking": True}
        chunks = list(server.complete(max_tokens=21, stream=True, stream_options=options))
        events = [event for chunk in chunks for event in getattr(chunk.choices[0], "unmasked", None) or []]
        assert "".join(map(text_of, chunks)) == whole.choices[0].text
        assert {event["position"] for event in events} <= set(range(21))
        for fields in ({"cache": "dual"}, {"suffix": "x"}):
            with pytest.raises(openai.BadRequestError) as refused:
                server.complete(**fields)
            assert refused.value.param == next(iter(fields))
        assert server.settled()


def test_renoised_canvases_are_served_too(tmp_path):
    folder = str(write_tiny_diffusion_gemma(tmp_path / "gemma"))
    for options in ({"max_context_tokens": 16}, {"kv_pool": "12KiB"}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}: .* a canvas of 16 and a prompt"):
            asyncio.run(start_served(DllmConfig(model=folder, num_threads=1, **options)))
    with Served((folder, {"max_context_tokens": 128})) as server:
        fields = {"max_tokens": 21, "seed": 4, "steps": 6}
        whole = server.complete(**fields)
        options = {"include_unmasking": True}
        chunks = list(server.complete(stream=True, stream_options=options, **fields))
        assert "".join(map(text_of, chunks)) == whole.choices[0].text
        events = [event for chunk in chunks for event in getattr(chunk.choices[0], "unmasked", None) or []]
        assert len(events) >= whole.usage.completion_tokens
        for field, value in (("cache", "none"), ("suffix", "x"), ("block_length", 8), ("logprobs", 1)):
            with pytest.raises(openai.BadRequestError) as refused:
                server.complete(**{field: value})
            assert refused.value.param == field
        assert server.settled()
