"""One completion: from token ids to streamed text, over any engine.

Owns what lies between a validated request and an engine's tokens: refusing what can never run,
seeds and ids of the sequences, decoding, stop strings, and aborting everything when the reader goes.
Knows nothing of HTTP and of how an engine works.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from genserve.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    ExecutionFailed,
    InvalidRequest,
)
from genserve.core.runtime.client import EngineClient
from genserve.core.text.detokenizer import Detokenizer
from genserve.core.text.stops import StopMatcher
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import (
    EngineInfo,
    FinishReason,
    SamplingParams,
    Submit,
    TokenLogprobs,
    TokenOutput,
)

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
_SEED_MODULUS = 1 << 63


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What to generate for one prompt; `Completer.prepare` validates it.

    sampling    a template for all `n` choices; `max_tokens=None` is as many as fit.
    stop        strings that end a choice; they are not part of its text.
    echo        each choice's text (and log-probabilities) begin with the prompt's.
    prompt_text the prompt as the caller wrote it, for `echo`; None decodes the ids.
    continues_prompt  the output continues the prompt's text (completions), so a leading space is kept;
                False for an answer that begins a new text (chat).
    deadline_s  on the engine loop's clock.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    stop: tuple[str, ...] = ()
    echo: bool = False
    prompt_text: str | None = None
    continues_prompt: bool = True
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New text and tokens of choice `index`; the last one of a choice carries `finish_reason`.

    `token_ids` are the output tokens that this delta counts, hidden ones (stop tokens, those of a stop
    string) included; text may lag behind them while it could still become a stop string. `logprobs`
    and `text_offsets` (characters into the choice's text where each token's begins) are aligned with
    `token_ids`, preceded in the first delta by the prompt's tokens (`prompt_token_ids`) when `echo`
    asked for those; the first of them is None, since nothing predicts it. `stop_reason` is the stop
    string or the stop token id that ended the choice.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    text_offsets: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole completion; a prompt counts once, whatever `n`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def derived_seed(seed: int, index: int) -> int:
    """Seed of choice `index` under `seed`, in [0, 2**63). Choice 0 keeps `seed` (modulo 2**63)."""
    if index == 0:
        return seed % _SEED_MODULUS
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _SEED_MODULUS


def validate_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidRequest` naming the first field of `sampling` that is out of range."""
    _check_number("temperature", sampling.temperature, 0.0, 1e4)
    _check_number("top_p", sampling.top_p, 0.0, 1.0, open_low=True)
    _check_number("min_p", sampling.min_p, 0.0, 1.0)
    _check_number("repetition_penalty", sampling.repetition_penalty, 0.0, 1e4, open_low=True)
    _check_number("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_number("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _check_integer("top_k", sampling.top_k, 0, _SEED_MODULUS)
    if sampling.seed is not None:
        _check_integer("seed", sampling.seed, -_SEED_MODULUS, _SEED_MODULUS - 1)
    if sampling.max_tokens is not None:
        _check_integer("max_tokens", sampling.max_tokens, 0, _SEED_MODULUS)
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None:
            _check_integer(name, count, 0, MAX_LOGPROBS)
    for token_id, bias in sampling.logit_bias:
        _check_integer("logit_bias", token_id, 0, vocab_size - 1, what="token id")
        _check_number("logit_bias", bias, -100.0, 100.0)
    if len({token_id for token_id, _ in sampling.logit_bias}) != len(sampling.logit_bias):
        raise InvalidRequest("logit_bias", "names a token id twice")
    for token_id in sampling.stop_token_ids:
        _check_integer("stop_token_ids", token_id, 0, vocab_size - 1)


def _check_number(field: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(field, f"must be a number, not {type(value).__name__}")
    if not (low < value if open_low else low <= value) or not value <= high:  # NaN fails both
        bracket = "(" if open_low else "["
        raise InvalidRequest(field, f"must be in {bracket}{low:g}, {high:g}], not {_shown(value)}")


def _check_integer(field: str, value: Any, low: int, high: int, what: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(field, f"{what or 'value'} must be an integer, not {type(value).__name__}")
    if not low <= value <= high:
        raise InvalidRequest(field, f"{what or 'value'} must be in [{low}, {high}], not {_shown(value)}")


def _shown(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if abs(value) < 1e30 else f"a number over {'-' if value < 0 else ''}1e30"


class Completer:
    """Runs completions on one engine. Called from the engine client's asyncio loop.

    `clock` is the clock of `deadline_s`; `draw_seed` gives a request without a seed its own.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
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
        _check_integer("n", request.n, 1, MAX_CHOICES)
        if len(request.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"at most {MAX_STOP_STRINGS} strings, not {len(request.stop)}")
        if not all(isinstance(stop, str) and stop for stop in request.stop):
            raise InvalidRequest("stop", "must be non-empty strings")
        self._check_prompt(request.prompt_token_ids)
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._draw_seed())
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=self._room(request.prompt_token_ids))
        self._check_length(len(request.prompt_token_ids), sampling.max_tokens or 0)
        if request.echo and sampling.logprobs is not None:
            sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
        return replace(request, sampling=sampling)

    def complete(self, *requests: CompletionRequest) -> Completion:
        """Prepare all requests and submit their sequences now; iterate over what they yield.

        Choice `i` of the `r`-th request has index `r * n + i`. If a submission fails, those before it
        are aborted and the error is raised.
        """
        prepared = [self.prepare(request) for request in requests]
        return Completion(self.engine, self.tokenizer, prepared, self._clock)

    def _check_prompt(self, token_ids: tuple[int, ...]) -> None:
        if not token_ids:
            raise InvalidRequest("prompt", "must not be empty")
        vocab_size = self.engine.info.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
            raise InvalidRequest("prompt", f"token ids must be in [0, {vocab_size - 1}], not {_shown(wrong)}")

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
                    f"{prompt_tokens} prompt tokens + {_shown(max_tokens)} output tokens "
                    f"are more than {what} of {limit} tokens",
                )


class _Choice:
    """State of one sequence: decoding, stops, counts."""

    __slots__ = (
        "cached_tokens",
        "detokenizer",
        "echo_text",
        "index",
        "num_chars",
        "position",
        "request",
        "sequence_id",
        "stops",
        "tokenizer",
    )

    def __init__(
        self, index: int, position: int, sequence_id: str, request: CompletionRequest, tokenizer: Tokenizer
    ) -> None:
        self.index = index
        self.position = position
        self.sequence_id = sequence_id
        self.cached_tokens = 0
        self.request = request
        self.tokenizer = tokenizer
        special = tokenizer.special_ids
        continues = request.continues_prompt and not special.issuperset(request.prompt_token_ids)
        self.detokenizer = Detokenizer(tokenizer, continues=continues)
        self.stops = StopMatcher(request.stop)
        self.echo_text: str | None = None
        if request.echo:
            text = request.prompt_text
            self.echo_text = tokenizer.decode(request.prompt_token_ids) if text is None else text
        self.num_chars = len(self.echo_text or "")

    def take(self, output: TokenOutput) -> ChoiceDelta:
        """Fold one engine output in. A stop string may end the choice before the engine does."""
        finish, stop_reason = output.finish_reason, output.stop_token_id
        num_visible = len(output.token_ids) - (stop_reason is not None)
        token_ids: tuple[int, ...] = output.token_ids
        offsets: list[int] = []
        if not self.request.stop and self.request.sampling.logprobs is None:
            text = self.detokenizer.push(token_ids[:num_visible] if stop_reason is not None else token_ids)
        else:
            pieces: list[str] = []
            for position, token_id in enumerate(token_ids):
                offsets.append(self.num_chars)
                if position >= num_visible:
                    continue
                piece = self.detokenizer.push((token_id,))
                self.num_chars += len(piece)
                pieces.append(self.stops.push(piece))
                if self.stops.matched is not None:
                    token_ids = token_ids[: position + 1]
                    break
            text = "".join(pieces)
        if finish is not None and self.stops.matched is None:
            text += self.stops.push(self.detokenizer.flush())
            text += self.stops.flush()
        if self.stops.matched is not None:
            finish, stop_reason = "stop", self.stops.matched  # type: ignore[assignment]
        logprobs: tuple[TokenLogprobs | None, ...] = output.logprobs[: len(token_ids)]
        prompt_token_ids: tuple[int, ...] = ()
        if output.prompt_logprobs is not None:
            prompt_token_ids = self.request.prompt_token_ids
            logprobs = (*output.prompt_logprobs, *logprobs)
            offsets = [*self._prompt_offsets(), *offsets]
        if self.echo_text is not None:
            text, self.echo_text = self.echo_text + text, None
        wanted = self.request.sampling.logprobs is not None
        return ChoiceDelta(
            self.index,
            text,
            token_ids,
            logprobs,
            tuple(offsets) if wanted else (),
            prompt_token_ids,
            finish,
            stop_reason,
        )

    def _prompt_offsets(self) -> list[int]:
        detokenizer = Detokenizer(self.tokenizer)
        offsets, num_chars = [], 0
        for token_id in self.request.prompt_token_ids:
            offsets.append(num_chars)
            num_chars += len(detokenizer.push((token_id,)))
        return offsets


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
        self._live: dict[str, _Choice] = {}
        self._ready: list[ChoiceDelta] = []
        self._error: Exception | None = None
        self._completion_tokens = 0
        self._cached_tokens = 0
        streams: list[tuple[_Choice, AsyncIterator[TokenOutput]]] = []
        index = 0
        try:
            for number, request in enumerate(requests):
                prefix = request.request_id if number == 0 else f"{request.request_id}.{number}"
                for position in range(request.n):
                    choice = _Choice(index, position, f"{prefix}-{position}", request, tokenizer)
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

    def _fold(self, choice: _Choice, output: TokenOutput) -> ChoiceDelta:
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

    def _failure(self, choice: _Choice, output: TokenOutput) -> Exception:
        deadline_s = choice.request.deadline_s
        if deadline_s is not None and self._clock() >= deadline_s:
            return DeadlineExceeded("the request's deadline passed before it finished")
        if output.finish_reason == "abort":
            return Cancelled(output.error or "the request was aborted")
        return ExecutionFailed(output.error or "the engine failed")

    @staticmethod
    def _needs_no_engine(request: CompletionRequest) -> bool:
        return request.sampling.max_tokens == 0 and request.sampling.prompt_logprobs is None


def _submit(choice: _Choice, after: str | None) -> Submit:
    request = choice.request
    seed = request.sampling.seed
    if seed is None:
        raise ValueError("an unprepared request: its seed is not set")
    sampling = replace(request.sampling, seed=derived_seed(seed, choice.position))
    return Submit(choice.sequence_id, request.prompt_token_ids, sampling, after, request.deadline_s)


_Stream = Any  # an async generator of (choice, output)


async def _none() -> _Stream:
    return
    yield


async def _one(choice: _Choice, outputs: AsyncIterator[TokenOutput]) -> _Stream:
    """The outputs of a lone sequence, without a task of its own."""
    try:
        async for output in outputs:
            yield choice, output
    finally:
        # A generator left half-way would be closed only when collected, in a task of its own.
        close = getattr(outputs, "aclose", None)
        if close is not None:
            await close()


async def _many(streams: Sequence[tuple[_Choice, AsyncIterator[TokenOutput]]]) -> _Stream:
    """The outputs of several sequences as they come; a failing one raises here."""
    queue: asyncio.Queue[tuple[_Choice, TokenOutput | BaseException | None]] = asyncio.Queue()

    async def pump(choice: _Choice, outputs: AsyncIterator[TokenOutput]) -> None:
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
