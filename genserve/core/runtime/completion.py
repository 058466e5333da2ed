"""One completion: from token ids to streamed text, over any engine.

Owns what lies between a validated request and an engine's tokens: refusing what can never run,
seeds and ids of the sequences, decoding, stop strings, and aborting everything when the reader goes.
Knows nothing of HTTP and of how an engine works.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from genserve.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    ExecutionFailed,
    InvalidRequest,
    UnsupportedField,
)
from genserve.core.runtime.choice import Choice, ChoiceDelta, CompletionRequest, derived_seed
from genserve.core.runtime.client import EngineClient
from genserve.core.runtime.sampling_limits import (
    MAX_CHOICES,
    MAX_STOP_STRINGS,
    check_integer,
    shown,
    validate_sampling,
)
from genserve.core.text.stops import MAX_STOP_CHARS, StopTables
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import DEADLINE_EXCEEDED, EngineInfo, Grammar, SamplingParams, Submit, TokenOutput

# A family's part of `Completer.prepare`: checks the request's `options` (and what else it cares for) and
# returns the request with the record that goes into `Submit.options`. It may fill in `max_tokens`.
Check = Callable[[CompletionRequest, EngineInfo], CompletionRequest]

_DEFAULTS = SamplingParams()


def check_stop(stop: Sequence[str]) -> None:
    """`InvalidRequest` unless `stop` is as many strings, and as long, as a stream is searched for."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"at most {MAX_STOP_STRINGS} strings, not {len(stop)}")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise InvalidRequest("stop", "must be non-empty strings")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequest("stop", f"at most {MAX_STOP_CHARS} characters a string, not {len(text)}")


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole completion; a prompt counts once, whatever `n`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Completer:
    """Runs completions on one engine. Called from the engine client's asyncio loop.

    `clock` is the clock of `deadline_s`; `draw_seed` gives a request without a seed its own. Without a
    `check` the model's family has no options of its own, and requests that bring some are refused.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        *,
        check: Check | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._check = check
        self._clock = clock
        self._draw_seed = draw_seed

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    def prepare(self, request: CompletionRequest) -> CompletionRequest:
        """The request with seed and `max_tokens` filled in, or an `InvalidRequest` naming the field."""
        info = self.engine.info
        sampling = request.sampling
        validate_sampling(sampling, info.vocab_size)
        self._check_supported(request)
        if sampling.grammar is not None:
            self.check_grammar(sampling.grammar)
        check_integer("n", request.n, 1, MAX_CHOICES)
        check_stop(request.stop)
        self._check_prompt(request.prompt_token_ids)
        if self._check is not None:
            request = self._check(request, info)
            sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._draw_seed())
        if sampling.max_tokens is None:
            room = self._room(request.prompt_token_ids)
            limit = info.default_max_tokens
            sampling = replace(sampling, max_tokens=room if limit is None else min(room, limit))
        self._check_length(len(request.prompt_token_ids), sampling.max_tokens or 0)
        if request.echo and sampling.logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
        return replace(request, sampling=sampling)

    def check_grammar(self, grammar: Grammar) -> None:
        """`InvalidRequest` naming the grammar's kind unless it can be enforced. Remembers its answers.

        The first call imports the grammar library, which takes seconds: event loops call this in a thread
        before `prepare` asks again.
        """
        from genserve.core.models.grammar import validate_grammar

        self._check_grammar_supported(grammar)
        if not self.engine.info.eos_token_ids:
            raise InvalidRequest(
                grammar.kind, "the model has no end-of-sequence token, without which none can end"
            )
        validate_grammar(grammar, grammar.kind)

    def complete(self, *requests: CompletionRequest) -> Completion:
        """Prepare all requests and submit their sequences now; iterate over what they yield.

        Choice `i` of the `r`-th request has index `r * n + i`. If a submission fails, those before it
        are aborted and the error is raised.
        """
        prepared = [self.prepare(request) for request in requests]
        return Completion(self.engine, self.tokenizer, prepared, self._clock)

    def _check_grammar_supported(self, grammar: Grammar) -> None:
        if "grammar" in self.engine.info.unsupported:
            raise UnsupportedField(grammar.kind, "constrained output is not supported by this model")

    def _check_supported(self, request: CompletionRequest) -> None:
        for name in self.engine.info.unsupported:
            if name == "echo":
                asked = request.echo
            elif name == "grammar":
                if request.sampling.grammar is not None:
                    self._check_grammar_supported(request.sampling.grammar)
                continue
            else:
                asked = getattr(request.sampling, name) != getattr(_DEFAULTS, name)
            if asked:
                raise UnsupportedField(name, "is not supported by this model")
        if self._check is None:
            for name in ("options", "include_unmasking"):
                if getattr(request, name):
                    raise UnsupportedField(name, "is not supported by this model")

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise InvalidRequest("prompt", "must not be empty")
        for kind in set(map(type, token_ids)):  # the few types, not the many ids
            if kind is bool or not issubclass(kind, int):
                raise InvalidRequest("prompt", f"token ids must be integers, not {kind.__name__}")
        vocab_size = self.engine.info.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
            raise InvalidRequest("prompt", f"token ids must be in [0, {vocab_size - 1}], not {shown(wrong)}")

    def _room(self, token_ids: tuple[int, ...]) -> int:
        info = self.engine.info
        room = min(info.max_context_tokens, info.kv_pool_tokens) - len(token_ids)
        if room == 0:
            raise ContextLengthExceeded(
                "prompt",
                f"{len(token_ids)} tokens fill the whole context of "
                f"{min(info.max_context_tokens, info.kv_pool_tokens)}; nothing can be generated",
            )
        return max(room, 0)

    def _check_length(self, prompt_tokens: int, max_tokens: int) -> None:
        info = self.engine.info
        for limit, what in (
            (info.max_context_tokens, "the model's context"),
            (info.kv_pool_tokens, "the KV pool"),
        ):
            if prompt_tokens > limit:
                raise ContextLengthExceeded(
                    "prompt", f"{prompt_tokens} tokens are more than {what} of {limit} tokens"
                )
            if prompt_tokens + max_tokens > limit:
                raise ContextLengthExceeded(
                    "max_tokens",
                    f"{prompt_tokens} prompt tokens + {shown(max_tokens)} output tokens "
                    f"are more than {what} of {limit} tokens",
                )


class Completion:
    """A running completion: an async iterator of `ChoiceDelta`, also an async context manager.

    Its sequences are with the engine from the start. Whatever ends the iteration early (`aclose`, an
    error, cancellation of the reader) aborts every sequence that still runs.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        requests: Sequence[CompletionRequest],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._requests = tuple(requests)
        self._live: dict[str, Choice] = {}
        self._ready: list[ChoiceDelta] = []
        self._error: Exception | None = None
        self._completion_tokens = 0
        self._cached_tokens = 0
        streams: list[tuple[Choice, AsyncIterator[TokenOutput]]] = []
        tables = {stop: StopTables(stop) for stop in {request.stop for request in requests}}
        index = 0
        try:
            for number, request in enumerate(requests):
                prefix = request.request_id if number == 0 else f"{request.request_id}.{number}"
                for position in range(request.n):
                    choice = Choice(
                        index, position, f"{prefix}-{position}", request, tokenizer, tables[request.stop]
                    )
                    index += 1
                    if self._needs_no_engine(request):
                        self._ready.append(choice.take(TokenOutput("", finish_reason="length")))
                        continue
                    after = f"{prefix}-0" if position else None
                    streams.append((choice, engine.submit(_submit(choice, after))))
                    self._live[choice.sequence_id] = choice
        except BaseException:
            self.abort()
            raise
        self._stream = _one(*streams[0]) if len(streams) == 1 else _many(streams) if streams else _none()

    @property
    def requests(self) -> tuple[CompletionRequest, ...]:
        """As prepared: seeds and `max_tokens` filled in."""
        return self._requests

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self._requests)
        return Usage(prompt_tokens, self._completion_tokens, self._cached_tokens)

    def abort(self, error: Exception | None = None) -> None:
        """Stop every sequence that still runs, at once. The reader then sees `error`, or just the end."""
        if self._live and error is not None:
            self._error = error
        for sequence_id in list(self._live):
            self._engine.abort(sequence_id)
        self._live.clear()

    async def aclose(self) -> None:
        """Abort what still runs and free the streams. Safe to call twice."""
        self.abort()
        self._ready.clear()
        await self._stream.aclose()

    def __aiter__(self) -> Completion:
        return self

    async def __anext__(self) -> ChoiceDelta:
        if self._ready:
            return self._ready.pop(0)
        try:
            while self._live:
                choice, output = await anext(self._stream)
                if choice.sequence_id in self._live:
                    return self._fold(choice, output)
        except StopAsyncIteration:
            raise ExecutionFailed("the engine ended a sequence without a finish reason") from None
        except BaseException:
            self.abort()
            raise
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def __aenter__(self) -> Completion:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _fold(self, choice: Choice, output: TokenOutput) -> ChoiceDelta:
        if output.finish_reason in ("error", "abort"):
            self._live.pop(choice.sequence_id)
            raise self._failure(choice, output)
        delta = choice.take(output)
        self._completion_tokens += len(delta.token_ids)
        if choice.position == 0 and output.num_cached_tokens > choice.cached_tokens:
            self._cached_tokens += output.num_cached_tokens - choice.cached_tokens
            choice.cached_tokens = output.num_cached_tokens
        if delta.finish_reason is not None:
            self._live.pop(choice.sequence_id)
            if output.finish_reason is None:
                self._engine.abort(choice.sequence_id)
        return delta

    def _failure(self, choice: Choice, output: TokenOutput) -> Exception:
        deadline_s = choice.request.deadline_s
        passed = deadline_s is not None and self._clock() >= deadline_s
        if passed or output.error == DEADLINE_EXCEEDED:
            return DeadlineExceeded("the request's deadline passed before it finished")
        if output.finish_reason == "abort":
            return Cancelled(output.error or "the request was aborted")
        return ExecutionFailed(output.error or "the engine failed")

    @staticmethod
    def _needs_no_engine(request: CompletionRequest) -> bool:
        return request.sampling.max_tokens == 0 and request.sampling.prompt_logprobs is None


def _submit(choice: Choice, after: str | None) -> Submit:
    request = choice.request
    seed = request.sampling.seed
    if seed is None:
        raise ValueError("an unprepared request: its seed is not set")
    sampling = replace(request.sampling, seed=derived_seed(seed, choice.position))
    return Submit(
        choice.sequence_id, request.prompt_token_ids, sampling, after, request.deadline_s, request.options
    )


_Stream = Any  # an async generator of (choice, output)


async def _none() -> _Stream:
    return
    yield


async def _one(choice: Choice, outputs: AsyncIterator[TokenOutput]) -> _Stream:
    """The outputs of a lone sequence, without a task of its own."""
    try:
        async for output in outputs:
            yield choice, output
    finally:
        # A generator left half-way would be closed only when collected, in a task of its own.
        close = getattr(outputs, "aclose", None)
        if close is not None:
            await close()


async def _many(streams: Sequence[tuple[Choice, AsyncIterator[TokenOutput]]]) -> _Stream:
    """The outputs of several sequences as they come; a failing one raises here."""
    queue: asyncio.Queue[tuple[Choice, TokenOutput | BaseException | None]] = asyncio.Queue()

    async def pump(choice: Choice, outputs: AsyncIterator[TokenOutput]) -> None:
        try:
            async for output in outputs:
                queue.put_nowait((choice, output))
            queue.put_nowait((choice, None))
        except Exception as error:
            queue.put_nowait((choice, error))

    tasks = [asyncio.ensure_future(pump(choice, outputs)) for choice, outputs in streams]
    try:
        num_open = len(tasks)
        while num_open:
            choice, output = await queue.get()
            if output is None:
                num_open -= 1
            elif isinstance(output, BaseException):
                raise output
            else:
                yield choice, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
