"""What tests of several packages share: tiny tokenizers and a scripted engine.

Nothing here downloads or loads weights. `ScriptedEngine` is an honest `EngineClient`: it queues at
`submit`, ends aborted sequences with "abort", counts what is alive, and can refuse, stall or fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from genserve.core.errors import ExecutorLost, GenserveError, Overloaded
from genserve.core.types import EngineInfo, FinishReason, Submit, TokenLogprobs, TokenOutput, Unmasked

_CORPUS = [
    "Hello world, hello there! The quick brown fox jumps over the lazy dog.",
    "ça va très bien, merci. Größe, naïve, Ελληνικά, русский текст, 你好世界, 日本語, 👋🏽 👩‍👩‍👧",
    "def f(x):\n    return {'a': [1, 2, 3]}\n\nUser: hi\nAssistant: hello",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role: ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(vocab_size: int = 400, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A byte-level BPE (GPT-2 style) `transformers` tokenizer, trained on the spot. Ids 0-2 are special."""
    from tokenizers import AddedToken, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend
    from tokenizers.decoders import ByteLevel

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool é>", normalized=False)])
    return _hugging_face(backend, chat_template, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def byte_fallback_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A SentencePiece-like (Llama style) tokenizer: leading spaces as "▁", unknown text as byte tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers

    words = ["▁", "▁Hello", "▁world", "Hello", "world", "▁a", "b", "!", ",", "▁▁", "é", "lo"]
    letters = [*"abcdefghijklmnopqrstuvwxyzHWU:\n"]
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokens = dict.fromkeys([*special, *(f"<0x{b:02X}>" for b in range(256)), *words, *letters])
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("l", "o"), ("▁", "▁"), ("▁", "a")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(special)
    return _hugging_face(backend, chat_template, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def _hugging_face(backend: Any, chat_template: str | None, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


@dataclass(frozen=True, slots=True)
class Script:
    """What one sequence does: `chunks` of tokens one step each, then how it ends.

    The sequence ends at `max_tokens` ("length"), at an eos or stop id ("stop"), or when the script is
    used up: with `end`, or never when `end` is None (it then waits for an abort). `unmasked`, one entry a
    chunk, is for requests whose options have `include_unmasking` set.
    """

    chunks: Sequence[Sequence[int]]
    end: FinishReason | None = "stop"
    first_delay_s: float = 0.0
    step_delay_s: float = 0.0
    error: str | None = None
    lost: bool = False
    unmasked: Sequence[Sequence[Unmasked]] = ()


@dataclass(slots=True)
class _Sequence:
    request: Submit
    outputs: asyncio.Queue[TokenOutput | BaseException] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None


class ScriptedEngine:
    """An `EngineClient` that plays scripts. `script(request)` says what each submitted sequence does."""

    def __init__(self, script: Callable[[Submit], Script], info: EngineInfo) -> None:
        self._script = script
        self._info = info
        self._live: dict[str, _Sequence] = {}
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.lost: GenserveError | None = None

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def failure(self) -> GenserveError | None:
        return self.lost  # tests set it

    @property
    def num_live(self) -> int:
        """Sequences submitted and neither finished nor aborted: zero when nothing leaks."""
        return len(self._live)

    def submit(self, request: Submit) -> AsyncIterator[TokenOutput]:
        if self.lost is not None:
            raise self.lost
        if len(self._live) >= self._info.max_queued_requests:
            raise Overloaded("the engine's queue is full", retry_after_s=2.0)
        if request.request_id in self._live:
            raise ValueError(f"request id {request.request_id!r} is in use")
        sequence = _Sequence(request)
        self._live[request.request_id] = sequence
        self.submitted.append(request)
        sequence.task = asyncio.get_running_loop().create_task(self._play(sequence))
        return self._iterate(sequence)

    def abort(self, request_id: str) -> None:
        sequence = self._live.pop(request_id, None)
        if sequence is not None:
            self.aborted.append(request_id)
            if sequence.task is not None:
                sequence.task.cancel()
            sequence.outputs.put_nowait(TokenOutput(request_id, finish_reason="abort"))

    def run_age_s(self) -> float:
        return 0.0

    async def stats(self) -> dict[str, float]:
        if self.lost is not None:
            raise self.lost
        return {
            "num_live": float(len(self._live)),
            "num_submitted": float(len(self.submitted)),
            "num_aborted": float(len(self.aborted)),
        }

    async def aclose(self) -> None:
        for request_id in list(self._live):
            self.abort(request_id)

    async def _iterate(self, sequence: _Sequence) -> AsyncIterator[TokenOutput]:
        while True:
            output = await sequence.outputs.get()
            if isinstance(output, BaseException):
                raise output
            yield output
            if output.finish_reason is not None:
                return

    async def _play(self, sequence: _Sequence) -> None:
        request = sequence.request
        script = self._script(request)
        if script.first_delay_s:
            await asyncio.sleep(script.first_delay_s)
        num_emitted = 0
        limit = request.sampling.max_tokens
        assert limit is not None
        if limit == 0:
            self._emit(sequence, (), "length", first=True)
            return
        shows_unmasking = getattr(request.options, "include_unmasking", False)
        for index, chunk in enumerate(script.chunks):
            await asyncio.sleep(script.step_delay_s)
            unmasked = tuple(script.unmasked[index]) if script.unmasked and shows_unmasking else ()
            taken: list[int] = []
            finish: FinishReason | None = None
            stop_id: int | None = None
            for token_id in chunk:
                taken.append(token_id)
                is_eos = token_id in self._info.eos_token_ids and not request.sampling.ignore_eos
                if is_eos or token_id in request.sampling.stop_token_ids:
                    finish, stop_id = "stop", token_id
                elif num_emitted + len(taken) == limit:
                    finish = "length"
                if finish is not None:
                    break
            self._emit(sequence, tuple(taken), finish, stop_id, first=num_emitted == 0, unmasked=unmasked)
            num_emitted += len(taken)
            if finish is not None:
                return
        if script.lost:
            self._live.pop(request.request_id, None)
            sequence.outputs.put_nowait(ExecutorLost("the engine's process is gone"))
        elif script.end is not None:
            self._emit(sequence, (), script.end, error=script.error)

    def _emit(
        self,
        sequence: _Sequence,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        stop_id: int | None = None,
        *,
        first: bool = False,
        error: str | None = None,
        unmasked: tuple[Unmasked, ...] = (),
    ) -> None:
        request = sequence.request
        wanted = request.sampling.logprobs
        logprobs: tuple[TokenLogprobs, ...] = ()
        if wanted is not None:
            logprobs = tuple(_scripted_logprobs(token_id, wanted) for token_id in token_ids)
        prompt = None
        if first and request.sampling.prompt_logprobs is not None:
            count = request.sampling.prompt_logprobs
            prompt = (None, *(_scripted_logprobs(i, count) for i in request.prompt_token_ids[1:]))
        if finish is not None:
            self._live.pop(request.request_id, None)
        sequence.outputs.put_nowait(
            TokenOutput(
                request.request_id,
                token_ids,
                logprobs,
                finish,
                stop_id,
                num_cached_tokens=(len(request.prompt_token_ids) - 1) // 16 * 16 if first else 0,
                prompt_logprobs=prompt,
                error=error,
                unmasked=unmasked,
            )
        )


def _scripted_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple((token_id + rank, -0.5 - rank) for rank in range(num_top))
    return TokenLogprobs(token_id, -0.5, top)
