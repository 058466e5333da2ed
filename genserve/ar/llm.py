"""The library's front door: a language model in this process (or in a Ray actor), sync and async.

    from genserve import LLM
    with LLM("smollm2") as llm:
        print(llm.generate("The capital of France is", max_tokens=8).text)

`AsyncLLM` is the thing itself; `LLM` runs one on an event loop in a thread of its own, so both give
the same results for the same seeds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

from genserve.ar.config import ArConfig
from genserve.core.config import load
from genserve.core.errors import GenserveError, InvalidRequest
from genserve.core.runtime.choice import ChoiceDelta, CompletionRequest
from genserve.core.runtime.client import EngineClient
from genserve.core.runtime.completion import Completer, Completion, Usage
from genserve.core.runtime.sampling_limits import check_number
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import FinishReason, Grammar, SamplingParams, TokenLogprobs

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """One choice: its text, token ids (stop tokens included), and why it ended.

    `logprobs` is aligned with `token_ids`; None unless asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What one prompt gave: `n` outputs in order, and the token counts.

    `prompt_logprobs` is aligned with `prompt_token_ids` and begins with None, since nothing predicts the
    first token; None unless asked for.
    """

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Output, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text


class AsyncLLM:
    """A language model on the running event loop. Start it with `await AsyncLLM.start(...)`."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._completer = Completer(engine, tokenizer, clock=asyncio.get_running_loop().time)
        self._ids = itertools.count()
        self.tokenizer = tokenizer

    @classmethod
    async def start(
        cls, model: str, *, on_progress: Callable[[Any], None] | None = None, **options: Any
    ) -> AsyncLLM:
        """Load `model` (fetched if it is a built-in) with the options of `ArConfig`."""
        from genserve.ar.serve import start_engine

        config = load(ArConfig, model=model, **options)
        engine, hf_tokenizer = await start_engine(config, on_progress)
        return cls(engine, Tokenizer(hf_tokenizer))

    @property
    def engine(self) -> EngineClient:
        return self._engine

    async def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Complete one prompt (text or token ids). `options`: see `completion_request`."""
        return await _collect(self._start(self._encode(prompt), options))

    async def chat(self, messages: Sequence[Message], **options: Any) -> Generation:
        """Answer a conversation, through the model's chat template."""
        return await _collect(self._start(self._template(messages), {"continues_prompt": False, **options}))

    async def stream(self, prompt: Prompt, **options: Any) -> AsyncIterator[ChoiceDelta]:
        """The same as `generate`, as it comes. Leaving the loop early stops the generation."""
        async with self._start(self._encode(prompt), options) as completion:
            async for delta in completion:
                yield delta

    async def stream_chat(self, messages: Sequence[Message], **options: Any) -> AsyncIterator[ChoiceDelta]:
        """The same as `chat`, as it comes."""
        options = {"continues_prompt": False, **options}
        async with self._start(self._template(messages), options) as completion:
            async for delta in completion:
                yield delta

    async def aclose(self) -> None:
        """Abort what runs and free the engine."""
        await self._engine.aclose()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        if not _is_list(prompt):
            kind = type(prompt).__name__
            raise InvalidRequest("prompt", f"must be text or a list of token ids, not {kind}")
        return tuple(prompt)

    def _template(self, messages: Sequence[Message]) -> tuple[int, ...]:
        if not _is_list(messages) or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRequest("messages", "must be a list of messages, each a dict")
        return tuple(self.tokenizer.apply_chat_template(list(messages)))

    def _start(self, prompt_token_ids: tuple[int, ...], options: dict[str, Any]) -> Completion:
        request_id = f"llm-{next(self._ids)}"
        return self._completer.complete(completion_request(request_id, prompt_token_ids, **options))


class LLM:
    """A language model for plain Python code. Safe to call from several threads; close it when done."""

    def __init__(
        self, model: str, *, on_progress: Callable[[Any], None] | None = None, **options: Any
    ) -> None:
        self._aio = asyncio.new_event_loop()
        self._lock = threading.Lock()  # nothing is handed to the loop once `_closed` is set
        self._closed = False
        self._close_error: BaseException | None = None
        self._llm: AsyncLLM | None = None
        self._thread = threading.Thread(target=self._run_loop, name="genserve-llm", daemon=True)
        self._thread.start()
        try:
            self._llm = self._call(AsyncLLM.start(model, on_progress=on_progress, **options))
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer:
        return self._open().tokenizer

    @overload
    def generate(self, prompts: str, *, progress: bool = ..., **options: Any) -> Generation: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], *, progress: bool = ..., **options: Any
    ) -> list[Generation]: ...
    @overload
    def generate(self, prompts: Sequence[int], *, progress: bool = ..., **options: Any) -> Generation: ...

    def generate(self, prompts: Any, *, progress: bool = False, **options: Any) -> Any:
        """Complete one prompt, or a list of them in one batch (results in the same order).

        A prompt is text or a list of token ids; `options` are those of `completion_request`. If one
        prompt of a list is refused, the error is raised and none of the list goes on.
        """
        llm = self._open()
        if not _is_list(prompts) or not all(isinstance(item, str) or _is_list(item) for item in prompts):
            return self._call(llm.generate(prompts, **options))
        return self._call(self._many(partial(llm.generate, **options), prompts, progress))

    @overload
    def chat(self, messages: Sequence[Message], *, progress: bool = ..., **options: Any) -> Generation: ...
    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], *, progress: bool = ..., **options: Any
    ) -> list[Generation]: ...

    def chat(self, messages: Any, *, progress: bool = False, **options: Any) -> Any:
        """Answer one conversation (a list of messages), or a list of conversations in one batch."""
        llm = self._open()
        if not _is_list(messages) or not messages or not all(map(_is_list, messages)):
            return self._call(llm.chat(messages, **options))
        return self._call(self._many(partial(llm.chat, **options), messages, progress))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[ChoiceDelta]:
        """Complete one prompt as it comes. Leaving the loop early stops the generation."""
        return self._iterate(self._open().stream(prompt, **options))

    def stream_chat(self, messages: Sequence[Message], **options: Any) -> Iterator[ChoiceDelta]:
        """Answer one conversation as it comes."""
        return self._iterate(self._open().stream_chat(messages, **options))

    def stats(self) -> dict[str, float]:
        """The engine's gauges and counters."""
        return self._call(self._open().engine.stats())

    def close(self) -> None:
        """Abort what runs and free model and thread. Safe to call twice, and from any thread.

        Whoever waits in another thread gets a `GenserveError`.
        """
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._aio.call_soon_threadsafe(self._aio.stop)
        self._thread.join()
        if first and self._close_error is not None:
            raise self._close_error

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> AsyncLLM:
        if self._closed or self._llm is None:
            raise _closed()
        return self._llm

    def _run_loop(self) -> None:
        try:
            self._aio.run_forever()
            self._aio.run_until_complete(self._shut())
        except BaseException as error:
            self._close_error = error
        finally:
            self._aio.close()

    async def _shut(self) -> None:
        """End every call that still waits, then free the engine."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._llm is not None:
            await self._llm.aclose()
        await self._aio.shutdown_asyncgens()

    def _schedule(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        with self._lock:
            if self._closed:
                coroutine.close()
                raise _closed()
            return asyncio.run_coroutine_threadsafe(coroutine, self._aio)

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._result(self._schedule(coroutine))

    def _result(self, future: Future[Any]) -> Any:
        try:
            return future.result()
        except CancelledError:
            if self._closed:
                raise _closed() from None
            raise
        except BaseException:  # Ctrl-C above all: what was asked for must not go on unseen
            future.cancel()
            raise

    async def _many(
        self, start: Callable[[Any], Coroutine[Any, Any, Generation]], items: Sequence[Any], progress: bool
    ) -> list[Generation]:
        tasks = [asyncio.ensure_future(start(item)) for item in items]
        try:
            if progress:
                from rich.progress import Progress

                with Progress(transient=True) as bar:
                    shown = bar.add_task("generating", total=len(tasks))
                    for task in tasks:
                        task.add_done_callback(lambda _: bar.advance(shown))
                    return list(await asyncio.gather(*tasks))
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    def _iterate(self, source: AsyncIterator[ChoiceDelta]) -> Iterator[ChoiceDelta]:
        arrived: queue.SimpleQueue[ChoiceDelta | None] = queue.SimpleQueue()

        async def pump() -> None:
            async for delta in source:
                arrived.put(delta)

        future = self._schedule(pump())
        # Also when the pump was cancelled before it began: the reader must not wait for ever.
        future.add_done_callback(lambda _: arrived.put(None))
        try:
            while (item := arrived.get()) is not None:
                yield item
            self._result(future)
        finally:
            future.cancel()


def _closed() -> GenserveError:
    return GenserveError("this LLM is closed")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


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
    **fields: Any,
) -> CompletionRequest:
    """A request from keyword options.

    sampling     a ready `SamplingParams`; `fields` (`max_tokens`, `temperature`, `top_p`, `seed`, ...:
                 its field names) replace single values of it. Unknown names are `InvalidRequest`.
    n            choices; each has its own random stream, derived from the seed.
    stop         strings that end a choice; not part of its text.
    timeout_s    seconds (above 0) from now until the request is given up (`DeadlineExceeded`).
    json_schema, regex  constrain the text; give one at most.
    """
    if sampling is None:
        sampling = SamplingParams()
    elif not isinstance(sampling, SamplingParams):
        raise InvalidRequest("sampling", f"must be a SamplingParams, not {type(sampling).__name__}")
    unknown = [name for name in fields if name not in SamplingParams.__slots__]
    if unknown:
        known = ", ".join((*SamplingParams.__slots__, "n", "stop", "json_schema", "regex", "timeout_s"))
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


async def _collect(completion: Completion) -> Generation:
    texts: dict[int, list[str]] = {}
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    reasons: dict[int, FinishReason] = {}
    async with completion:
        async for delta in completion:
            texts.setdefault(delta.index, []).append(delta.text)
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
            num_prompt = len(delta.prompt_token_ids)
            if num_prompt and prompt_logprobs is None:
                prompt_logprobs = delta.logprobs[:num_prompt]
            logprobs.setdefault(delta.index, []).extend(
                entry for entry in delta.logprobs[num_prompt:] if entry is not None
            )
            if delta.finish_reason is not None:
                reasons[delta.index] = delta.finish_reason
    (request,) = completion.requests
    with_logprobs = request.sampling.logprobs is not None
    outputs = tuple(
        Output(
            index,
            "".join(texts[index]),
            tuple(tokens[index]),
            reasons[index],
            tuple(logprobs[index]) if with_logprobs else None,
        )
        for index in sorted(reasons)
    )
    return Generation(request.prompt_token_ids, outputs, completion.usage, prompt_logprobs)
