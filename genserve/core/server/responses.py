"""What `/v1/chat/completions` and `/v1/completions` answer: bodies and stream chunks as JSON.

Built from plain dicts and a preformatted head, since a chunk is made for every token. Knows nothing
of how deltas come about.

Log-probabilities have one entry for each output token, hidden ones (end of sequence, a stop string's)
included, so their number is the completion's token count. A token that is not whole UTF-8 reads
"bytes:\\xe4" in the legacy format. `text_offset` counts characters of the choice's own text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from json.encoder import encode_basestring as _quoted
from typing import Any, Protocol

from genserve.core.runtime.choice import ChoiceDelta
from genserve.core.runtime.completion import Usage
from genserve.core.server import sse
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import TokenLogprobs, Unmasked

_LEAST_LOGPROB = -9999.0  # JSON has no infinity


def dumps(value: Any) -> str:
    """Compact JSON; numbers must be finite."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ResponseFormat(Protocol):
    """Bodies and chunks of one response."""

    def opening(self, num_choices: int) -> bytes:
        """Events before any text."""
        ...

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """The event of one delta; empty if it has nothing to show."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes: ...

    def body(self, deltas: Sequence[ChoiceDelta], num_choices: int, usage: Usage) -> bytes:
        """The whole response of a request that did not stream."""
        ...


class _Format:
    def __init__(
        self,
        response_id: str,
        kind: str,
        chunk_kind: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        include_usage: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._base = {"id": response_id, "object": kind, "created": created, "model": model}
        self._chunk_base = {**self._base, "object": chunk_kind}
        self._head = "data: " + dumps(self._chunk_base)[:-1] + ',"choices":[{"index":'
        self._tail = '}],"usage":null}\n\n' if include_usage else "}]}\n\n"

    def usage_chunk(self, usage: Usage) -> bytes:
        return sse.event(dumps({**self._chunk_base, "choices": [], "usage": usage_object(usage)}))

    def _unmasked(self, unmasked: Sequence[Unmasked]) -> str:
        """The rest of a chunk's choice: tokens by their place in the answer; an edited one comes again."""
        if not unmasked:
            return ""
        events = [
            {
                "position": event.position,
                "token": self._tokenizer.token_bytes(event.token_id).decode(errors="replace"),
                "token_id": event.token_id,
                "confidence": _finite(event.confidence),
                "step": event.step,
            }
            for event in unmasked
        ]
        return f',"unmasked":{dumps(events)}'

    def _body(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return dumps({**self._base, "choices": choices, "usage": usage_object(usage)}).encode()


class ChatFormat(_Format):
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(
        self, response_id: str, created: int, model: str, tokenizer: Tokenizer, include_usage: bool
    ) -> None:
        super().__init__(
            f"chatcmpl-{response_id}",
            "chat.completion",
            "chat.completion.chunk",
            created,
            model,
            tokenizer,
            include_usage,
        )

    def opening(self, num_choices: int) -> bytes:
        rest = ',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return "".join([f"{self._head}{i}{rest}{self._tail}" for i in range(num_choices)]).encode()

    def chunk(self, delta: ChoiceDelta) -> bytes:
        if not (delta.text or delta.logprobs or delta.finish_reason or delta.unmasked):
            return b""
        content = f'{{"content":{_quoted(delta.text)}}}' if delta.text or delta.logprobs else "{}"
        logprobs = dumps(self._logprobs([delta])) if delta.logprobs else "null"
        finish = f'"{delta.finish_reason}"' if delta.finish_reason else "null"
        return (
            f'{self._head}{delta.index},"delta":{content},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{self._unmasked(delta.unmasked)}{self._tail}'
        ).encode()

    def body(self, deltas: Sequence[ChoiceDelta], num_choices: int, usage: Usage) -> bytes:
        choices = []
        for index, own in enumerate(_by_choice(deltas, num_choices)):
            text = "".join([delta.text for delta in own])
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": text, "refusal": None},
                    "logprobs": self._logprobs(own) if any(delta.logprobs for delta in own) else None,
                    "finish_reason": own[-1].finish_reason,
                }
            )
        return self._body(choices, usage)

    def _logprobs(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        content = []
        for delta in deltas:
            for entry in delta.logprobs[len(delta.prompt_token_ids) :]:
                if entry is not None:
                    top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
                    content.append({**self._token(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionsFormat(_Format):
    """`text_completion`, whole and in chunks."""

    def __init__(
        self, response_id: str, created: int, model: str, tokenizer: Tokenizer, include_usage: bool
    ) -> None:
        kind = "text_completion"
        super().__init__(f"cmpl-{response_id}", kind, kind, created, model, tokenizer, include_usage)

    def opening(self, num_choices: int) -> bytes:
        return b""

    def chunk(self, delta: ChoiceDelta) -> bytes:
        if not (delta.text or delta.logprobs or delta.finish_reason or delta.unmasked):
            return b""
        logprobs = dumps(self._logprobs([delta])) if delta.logprobs else "null"
        finish = f'"{delta.finish_reason}"' if delta.finish_reason else "null"
        return (
            f'{self._head}{delta.index},"text":{_quoted(delta.text)},"logprobs":{logprobs},'
            f'"finish_reason":{finish}{self._unmasked(delta.unmasked)}{self._tail}'
        ).encode()

    def body(self, deltas: Sequence[ChoiceDelta], num_choices: int, usage: Usage) -> bytes:
        choices = []
        for index, own in enumerate(_by_choice(deltas, num_choices)):
            choices.append(
                {
                    "index": index,
                    "text": "".join([delta.text for delta in own]),
                    "logprobs": self._logprobs(own) if any(delta.logprobs for delta in own) else None,
                    "finish_reason": own[-1].finish_reason,
                }
            )
        return self._body(choices, usage)

    def _logprobs(self, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for delta in deltas:
            offsets.extend(delta.text_offsets)
            for position, entry in enumerate(delta.logprobs):
                if entry is None:
                    tokens.append(self._text(delta.prompt_token_ids[position]))
                    chosen.append(None)
                    top.append(None)
                    continue
                tokens.append(self._text(entry.token_id))
                chosen.append(_finite(entry.logprob))
                top.append(self._top(entry))
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float] | None:
        if not entry.top:
            return None
        likeliest = {self._text(token_id): _finite(logprob) for token_id, logprob in entry.top}
        return {**likeliest, self._text(entry.token_id): _finite(entry.logprob)}

    def _text(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])


def _by_choice(deltas: Sequence[ChoiceDelta], num_choices: int) -> list[list[ChoiceDelta]]:
    choices: list[list[ChoiceDelta]] = [[] for _ in range(num_choices)]
    for delta in deltas:
        choices[delta.index].append(delta)
    return choices


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB) if not math.isnan(logprob) else _LEAST_LOGPROB
