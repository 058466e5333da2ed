"""The library's front door: a language model of any family in this process (or in Ray actors), sync and async.

    from genserve import LLM
    with LLM("smollm2") as llm:
        print(llm.generate("The capital of France is", max_tokens=8).text)

`AsyncLLM` is the thing itself; `LLM` runs one on an event loop in a thread of its own, so both give
the same results for the same seeds.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

from genserve.core.errors import GenserveError, InvalidRequest
from genserve.core.runtime.choice import ChoiceDelta
from genserve.core.runtime.client import EngineClient
from genserve.core.runtime.completion import Completion, Usage
from genserve.core.runtime.request_options import completion_request
from genserve.core.server.gateway import ServedModel
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import EngineInfo, FinishReason, TokenLogprobs
from genserve.families import start_model

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

    def __init__(self, served: ServedModel) -> None:
        self._completer = served.completer
        self._ids = itertools.count()
        self.tokenizer = served.tokenizer

    @classmethod
    async def start(
        cls, model: str, *, on_progress: Callable[[Any], None] | None = None, **options: Any
    ) -> AsyncLLM:
        """Load `model` (fetched if need be) with the options of its family: `ArConfig` or `DllmConfig`.

        `family` among the options names the family where the model does not tell it.
        """
        return cls(await start_model(model, options, on_progress))

    @property
    def engine(self) -> EngineClient:
        return self._completer.engine

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
        await self.engine.aclose()

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
        options.setdefault("default_temperature", self._completer.info.default_temperature)
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

    @property
    def info(self) -> EngineInfo:
        """The limits of model and engine."""
        return self._open().engine.info

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
