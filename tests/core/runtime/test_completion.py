"""The completer over a scripted engine: validation, seeds, choices, stops, aborts in every state."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from genserve.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    ExecutionFailed,
    ExecutorLost,
    InvalidRequest,
    Overloaded,
)
from genserve.core.runtime.choice import CompletionRequest, derived_seed
from genserve.core.runtime.completion import Completer
from genserve.core.testing import Script, ScriptedEngine, byte_fallback_tokenizer, byte_level_tokenizer
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import EngineInfo, SamplingParams

TOKENIZER = Tokenizer(byte_level_tokenizer())
PROMPT = tuple(TOKENIZER.encode("hi there"))
INFO = EngineInfo("tiny", "ar", TOKENIZER.vocab_size, 64, 48, 8, (2,))


def tokens(text: str, per_chunk: int = 1) -> list[list[int]]:
    ids = TOKENIZER.encode(text)
    return [ids[i : i + per_chunk] for i in range(0, len(ids), per_chunk)]


def completer(script=None, info=INFO, tokenizer=TOKENIZER, **kwargs) -> Completer:
    play = script if callable(script) else lambda request: script or Script(tokens("Hello world"))
    return Completer(ScriptedEngine(play, info), tokenizer, **kwargs)


def request(**changes) -> CompletionRequest:
    sampling = SamplingParams(**{"max_tokens": 20, **changes.pop("sampling", {})})
    return CompletionRequest("r", changes.pop("ids", PROMPT), sampling, **changes)


def run(subject: Completer, *requests: CompletionRequest):
    async def collect():
        async with subject.complete(*requests) as completion:
            return [delta async for delta in completion], completion.usage

    deltas, usage = asyncio.run(collect())
    assert subject.engine.num_live == 0
    return deltas, usage


def text_of(deltas, index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ids": ()}, "prompt"),
        ({"ids": (-1,)}, "prompt"),
        ({"ids": (INFO.vocab_size,)}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"sampling": {"temperature": float("nan")}}, "temperature"),
        ({"sampling": {"temperature": float("inf")}}, "temperature"),
        ({"sampling": {"temperature": -1}}, "temperature"),
        ({"sampling": {"top_p": 0.0}}, "top_p"),
        ({"sampling": {"top_p": float("nan")}}, "top_p"),
        ({"sampling": {"min_p": 1.1}}, "min_p"),
        ({"sampling": {"top_k": -1}}, "top_k"),
        ({"sampling": {"top_k": 1.0}}, "top_k"),
        ({"sampling": {"repetition_penalty": 0.0}}, "repetition_penalty"),
        ({"sampling": {"presence_penalty": 2.01}}, "presence_penalty"),
        ({"sampling": {"frequency_penalty": -2.01}}, "frequency_penalty"),
        ({"sampling": {"logprobs": 21}}, "logprobs"),
        ({"sampling": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"sampling": {"logit_bias": ((0, 100.5),)}}, "logit_bias"),
        ({"sampling": {"logit_bias": ((INFO.vocab_size, 1.0),)}}, "logit_bias"),
        ({"sampling": {"logit_bias": ((1, 1.0), (1, 2.0))}}, "logit_bias"),
        ({"sampling": {"stop_token_ids": (INFO.vocab_size,)}}, "stop_token_ids"),
        ({"sampling": {"max_tokens": -1}}, "max_tokens"),
        ({"sampling": {"seed": 1 << 63}}, "seed"),
    ],
)
def test_what_can_never_run_is_refused_by_name_before_the_engine_sees_it(changes, field):
    subject = completer()
    with pytest.raises(InvalidRequest) as refused:
        subject.complete(request(**changes))
    assert refused.value.field == field
    assert subject.engine.submitted == []


def test_lengths_are_checked_against_context_and_pool_with_the_numbers():
    roomy = completer(info=replace(INFO, kv_pool_tokens=1000))
    rest = roomy.prepare(request(ids=(5,) * 60, sampling={"max_tokens": None}))
    assert rest.sampling.max_tokens == 4
    full = request(ids=(5,) * 64, sampling={"max_tokens": None})
    with pytest.raises(ContextLengthExceeded, match="64"):
        roomy.prepare(full)
    assert roomy.prepare(replace(full, sampling=SamplingParams(max_tokens=0))).sampling.max_tokens == 0
    with pytest.raises(ContextLengthExceeded, match=r"60 prompt tokens \+ 5 output tokens .* context of 64"):
        roomy.prepare(request(ids=(5,) * 60, sampling={"max_tokens": 5}))
    with pytest.raises(ContextLengthExceeded, match="KV pool of 48"):
        completer().prepare(request(ids=(5,) * 40, sampling={"max_tokens": 9}))
    assert completer().prepare(request(ids=(5,) * 40, sampling={"max_tokens": None})).sampling.max_tokens == 8


def test_choices_have_derived_seeds_and_wait_for_the_first():
    subject = completer()
    run(subject, request(n=3, sampling={"seed": 7}))
    first, second, third = subject.engine.submitted
    assert [s.sampling.seed for s in (first, second, third)] == [derived_seed(7, i) for i in range(3)]
    assert first.sampling.seed == 7
    assert len({derived_seed(s, i) for s in (0, 1, 7, -1) for i in range(128)}) == 4 * 128
    assert (first.after, second.after, third.after) == (None, first.request_id, first.request_id)
    assert derived_seed(-1, 0) == 2**63 - 1
    drawn = completer(draw_seed=lambda: 99).prepare(request())
    assert drawn.sampling.seed == 99


def test_several_prompts_are_numbered_in_order_and_counted_once_each():
    subject = completer(lambda r: Script(tokens("ab" if len(r.prompt_token_ids) == 1 else "xyz")))
    deltas, usage = run(subject, request(ids=PROMPT[:1], n=2), request(ids=PROMPT[:2], n=2))
    assert [text_of(deltas, i) for i in range(4)] == ["ab", "ab", "xyz", "xyz"]
    assert usage.prompt_tokens == 3
    assert usage.completion_tokens == sum(len(delta.token_ids) for delta in deltas)
    assert len({s.request_id for s in subject.engine.submitted}) == 4


@pytest.mark.parametrize("per_chunk", [1, 2, 5, 100])
def test_a_stop_string_ends_the_choice_and_counts_up_to_its_last_token(per_chunk):
    ids = TOKENIZER.encode("Hello world. STOP and more text")
    subject = completer(Script(tokens("Hello world. STOP and more text", per_chunk), end=None))
    deltas, usage = run(subject, request(stop=("never", "STOP"), sampling={"max_tokens": 40}))
    assert text_of(deltas) == "Hello world. "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "STOP")
    counted = [i for delta in deltas for i in delta.token_ids]
    assert counted == ids[: len(counted)] and usage.completion_tokens == len(counted)
    assert "STOP" in TOKENIZER.decode(counted) and "STOP" not in TOKENIZER.decode(counted[:-1])
    assert subject.engine.aborted == ["r-0"]


def test_a_stop_string_completed_by_the_last_token_is_a_stop_and_not_a_length():
    ids = TOKENIZER.encode("ab STOP")
    deltas, _ = run(
        completer(Script(tokens("ab STOP"))), request(stop=("STOP",), sampling={"max_tokens": len(ids)})
    )
    assert (text_of(deltas), deltas[-1].finish_reason) == ("ab ", "stop")


def test_text_held_back_for_a_stop_is_shown_when_the_end_comes_first():
    deltas, _ = run(completer(Script(tokens("ab STO"))), request(stop=("STOP",)))
    assert text_of(deltas) == "ab STO"


def test_stop_tokens_are_counted_and_hidden_special_or_not():
    plain = TOKENIZER.encode("!")[0]
    for stop_id, params in ((2, {}), (plain, {"stop_token_ids": (plain,)})):
        script = Script([*tokens("Hello"), [stop_id], *tokens("more")])
        deltas, usage = run(completer(script), request(sampling=params))
        assert text_of(deltas) == "Hello"
        assert usage.completion_tokens == len(TOKENIZER.encode("Hello")) + 1
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop_id)


def test_an_unfinished_character_at_the_end_is_dropped():
    ids = TOKENIZER.encode("a👋🏽")
    for cut in range(1, len(ids)):
        deltas, usage = run(completer(Script([ids])), request(sampling={"max_tokens": cut}))
        assert "\ufffd" not in text_of(deltas) and "a👋🏽".startswith(text_of(deltas))
        assert usage.completion_tokens == cut


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_logprobs_and_offsets_are_aligned_with_tokens(per_chunk):
    subject = completer(Script(tokens("héllo STOP 👋🏽", per_chunk)))
    deltas, usage = run(subject, request(stop=("STOP",), echo=True, sampling={"logprobs": 2}))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    offsets = [offset for delta in deltas for offset in delta.text_offsets]
    ids = [*PROMPT, *(i for delta in deltas for i in delta.token_ids)]
    assert entries[0] is None and [entry.token_id for entry in entries[1:]] == ids[1:]
    assert all(len(entry.top) == 2 for entry in entries[1:])
    whole = TOKENIZER.decode(ids)
    assert whole.startswith("hi there") and text_of(deltas) == whole[: whole.index("STOP")]
    assert offsets == [len(TOKENIZER.decode(ids[:i])) for i in range(len(ids))]
    assert usage.completion_tokens == len(ids) - len(PROMPT)


def test_max_tokens_zero_needs_the_engine_only_for_prompt_logprobs():
    subject = completer()
    deltas, usage = run(subject, request(n=2, echo=True, sampling={"max_tokens": 0}))
    assert [(d.index, d.text, d.finish_reason) for d in deltas] == [
        (0, "hi there", "length"),
        (1, "hi there", "length"),
    ]
    assert usage.completion_tokens == 0 and subject.engine.submitted == []
    deltas, _ = run(subject, request(echo=True, sampling={"max_tokens": 0, "logprobs": 0}))
    assert len(deltas[0].logprobs) == len(PROMPT) and deltas[0].text == "hi there"


def test_cached_tokens_are_counted_once_a_prompt():
    _, usage = run(completer(), request(ids=(7,) * 40, n=3, sampling={"max_tokens": 2}))
    assert (usage.prompt_tokens, usage.cached_tokens) == (40, 32)


def test_output_that_continues_a_prompt_keeps_its_leading_space():
    tokenizer = Tokenizer(byte_fallback_tokenizer())
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    info = replace(INFO, vocab_size=tokenizer.vocab_size, eos_token_ids=())
    subject = completer(Script([[i] for i in ids]), info, tokenizer)
    for continues, prompt, expected in [
        (True, ids, " Hello world"),
        (True, [1], "Hello world"),
        (False, ids, "Hello world"),
    ]:
        deltas, _ = run(subject, request(ids=tuple(prompt), continues_prompt=continues))
        assert text_of(deltas) == expected


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_read", [None, 0, 1, 4])
def test_closing_aborts_every_sequence_in_every_state(n, num_read):
    subject = completer(Script(tokens("Hello world, the quick brown fox"), end=None, step_delay_s=0.001))

    async def leave() -> None:
        completion = subject.complete(request(n=n))
        assert subject.engine.num_live == n  # submitted at once, before any iteration
        if num_read is not None:
            for _ in range(num_read):
                await anext(completion)
        await completion.aclose()
        await completion.aclose()
        assert subject.engine.num_live == 0
        with pytest.raises(StopAsyncIteration):
            await anext(completion)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(leave())
    assert len(subject.engine.aborted) == n


@pytest.mark.parametrize("n", [1, 3])
def test_cancelling_the_reader_aborts(n):
    subject = completer(Script([], end=None))

    async def read() -> None:
        async with subject.complete(request(n=n)) as completion:
            await anext(completion)

    async def cancel() -> None:
        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0.01)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(cancel())
    assert subject.engine.num_live == 0 and len(subject.engine.aborted) == n


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script(tokens("Hello"), end="error", error="out of memory"), ExecutionFailed),
        (Script(tokens("Hello"), end="abort"), Cancelled),
        (Script(tokens("Hello"), lost=True), ExecutorLost),
    ],
)
def test_a_failing_sequence_fails_the_completion_and_aborts_the_others(n, script, kind):
    endless = Script(tokens("Hello"), end=None)
    subject = completer(lambda r: script if r.after is None else endless)
    with pytest.raises(kind):
        run(subject, request(n=n))
    assert subject.engine.num_live == 0


def test_an_abort_at_the_deadline_is_a_missed_deadline():
    subject = completer(Script(tokens("Hello"), end="abort"), clock=lambda: 10.0)
    with pytest.raises(DeadlineExceeded):
        run(subject, request(deadline_s=9.0))
    assert subject.engine.submitted[0].deadline_s == 9.0


def test_aborting_with_an_error_shows_it_to_a_waiting_reader():
    subject = completer(Script([], end=None))

    async def drain() -> None:
        async with subject.complete(request(n=2)) as completion:
            reader = asyncio.ensure_future(anext(completion))
            await asyncio.sleep(0)
            completion.abort(Draining("going down"))
            with pytest.raises(Draining):
                await reader

    asyncio.run(drain())
    assert subject.engine.num_live == 0


def test_a_refusal_of_a_later_sequence_takes_back_the_earlier_ones():
    subject = completer(Script([], end=None), info=replace(INFO, max_queued_requests=2))

    async def submit() -> None:
        with pytest.raises(Overloaded):
            subject.complete(request(n=3))

    asyncio.run(submit())
    assert subject.engine.num_live == 0 and len(subject.engine.aborted) == 2


@pytest.mark.parametrize("ids", [(1.5,), (1, 2.5), (True, False), (1, True), ("a",), (None,)])
def test_token_ids_of_another_type_are_refused(ids):
    with pytest.raises(InvalidRequest, match="integers") as refused:
        completer().prepare(request(ids=ids))
    assert refused.value.field == "prompt"
