"""Ids, units and the frozen records that cross package borders. No torch, no I/O.

What a text front end (library or HTTP) and an engine say to each other is here: `Submit` and
`Abort` go down, `TokenOutput` comes up. They are small and picklable, so the same records serve
an engine in this process and one inside a Ray actor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]

# `TokenOutput.error` of a sequence whose deadline passed.
DEADLINE_EXCEEDED = "deadline exceeded"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output text. `text` is a JSON schema, a regex, or empty for `json_object`."""

    kind: Literal["json_schema", "json_object", "regex"]
    text: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one sequence are chosen. Values are validated where they enter (`validate`).

    temperature  0 is greedy, whatever the seed.
    top_p        keep the smallest set of tokens whose mass reaches `top_p`; 1 is off.
    top_k        keep the `top_k` likeliest; 0 is off.
    min_p        keep tokens at least `min_p` times as likely as the likeliest; 0 is off.
    repetition_penalty  divides positive and multiplies negative logits of every token that
                 occurs in prompt or output (CTRL); 1 is off.
    presence_penalty, frequency_penalty  subtracted once, or per occurrence, for tokens of the output.
    seed         the sequence's random stream; None lets the front end draw one.
    logit_bias   (token id, bias) pairs added to the raw logits.
    stop_token_ids  ids that end the sequence, besides the model's own end-of-sequence ids.
    ignore_eos   do not stop at the model's own end-of-sequence ids.
    max_tokens   output tokens at most; None is as many as the context allows.
    logprobs     None: none. k >= 0: the chosen token's log-probability and the k likeliest,
                 of the model's own distribution (before temperature, penalties and bias).
    prompt_logprobs  the same for every prompt token but the first (costs a full, uncached prefill).
    grammar      constrain the output to a JSON schema or regex.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    """One sequence for an engine. `sampling.seed` and `sampling.max_tokens` are set by now.

    `after` names an earlier sequence with the same prompt (`n` > 1): this one waits until that
    prompt's KV can be shared. `deadline_s` is on the loop's clock. `options` is the engine's family's
    own frozen record, if it has one.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    after: str | None = None
    deadline_s: float | None = None
    options: Any = None


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a sequence in whatever state it is. Unknown ids are ignored (it may just have ended)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token's own, and the likeliest `(id, logprob)` in order."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Unmasked(NamedTuple):
    """A token that a diffusion model put at `position` of its answer (0 is the first) in pass `step`.

    Positions come out of order, and one that is named again was edited. `confidence` is the token's
    probability when it was chosen.
    """

    position: int
    token_id: int
    confidence: float
    step: int


class TokenOutput(NamedTuple):
    """New tokens of one sequence; the last one carries `finish_reason`.

    A stop token is part of `token_ids` (so counts are exact); `stop_token_id` names it, for front
    ends that hide it. `num_cached_tokens` and `prompt_logprobs` come once, with the first output.
    After `finish_reason` nothing more comes. `error` explains reason "error". `unmasked` is what a
    diffusion model committed anywhere in its answer, for requests that want to see it; `token_ids` are
    then only what has become the committed prefix.
    One is made per token: a tuple costs a third of a frozen dataclass.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None
    unmasked: tuple[Unmasked, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end must know of an engine to refuse what can never run.

    `default_max_tokens` is what a request without `max_tokens` gets; None is as many as fit.
    `default_temperature` is that of requests that name none. `unsupported` are names of `SamplingParams`
    fields (and "echo") that the engine cannot honour.
    """

    model: str
    family: str
    vocab_size: int
    max_context_tokens: int
    kv_pool_tokens: int
    max_queued_requests: int
    eos_token_ids: tuple[int, ...] = field(default=())
    default_max_tokens: int | None = None
    default_temperature: float = 1.0
    unsupported: tuple[str, ...] = ()
