"""One sequence's way from engine outputs to text: decoding, stop strings, log-probabilities.

Owns what is asked (`CompletionRequest`), what is shown (`ChoiceDelta`) and the state between. Knows
nothing of engines, tasks or HTTP.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from genserve.core.runtime.sampling_limits import SEED_MODULUS
from genserve.core.text.detokenizer import Detokenizer
from genserve.core.text.stops import StopMatcher, StopTables
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import FinishReason, SamplingParams, TokenLogprobs, TokenOutput, Unmasked


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
    options     what the model's family may be asked beyond `sampling`; its own `check` reads it.
    include_unmasking  the deltas also tell every token that a diffusion model puts anywhere.
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
    options: Any = None
    include_unmasking: bool = False


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New text and tokens of choice `index`; the last one of a choice carries `finish_reason`.

    `token_ids` are the output tokens that this delta counts, hidden ones (stop tokens, those of a stop
    string) included; text may lag behind them while it could still become a stop string. `logprobs`
    and `text_offsets` (characters into the choice's text where each token's begins) are aligned with
    `token_ids`, preceded in the first delta by the prompt's tokens (`prompt_token_ids`) when `echo`
    asked for those; the first of them is None, since nothing predicts it. `stop_reason` is the stop
    string or the stop token id that ended the choice. `unmasked` is what was put anywhere in the answer,
    in the order of passes; it runs ahead of text and tokens.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    text_offsets: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    unmasked: tuple[Unmasked, ...] = ()


def derived_seed(seed: int, index: int) -> int:
    """Seed of choice `index` under `seed`, in [0, 2**63). Choice 0 keeps `seed` (modulo 2**63)."""
    if index == 0:
        return seed % SEED_MODULUS
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEED_MODULUS


class Choice:
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
        self,
        index: int,
        position: int,
        sequence_id: str,
        request: CompletionRequest,
        tokenizer: Tokenizer,
        stop_tables: StopTables,
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
        self.stops = StopMatcher(stop_tables)
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
            output.unmasked,
        )

    def _prompt_offsets(self) -> list[int]:
        detokenizer = Detokenizer(self.tokenizer)
        offsets, num_chars = [], 0
        for token_id in self.request.prompt_token_ids:
            offsets.append(num_chars)
            num_chars += len(detokenizer.push((token_id,)))
        return offsets
