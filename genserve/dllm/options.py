"""What a client may ask of a diffusion model beyond sampling, and the checks of it, all before any work.

Owns the request fields (`DiffusionOptions`), their defaults of a served model, and what can never run:
each refusal names the field and the limit. Knows no engine and no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from genserve.core.errors import ContextLengthExceeded, InvalidRequest, UnsupportedField
from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.core.runtime.choice import CompletionRequest
from genserve.core.runtime.sampling_limits import check_integer, check_number, shown
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import EngineInfo
from genserve.dllm.request import CacheMode, DiffusionParams, Unmasking, UnmaskingKind

# Of the sampling fields these cannot work: there is no left-to-right order to count in or to follow.
UNSUPPORTED = (
    *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("prompt_logprobs", "grammar", "echo"),
)
# Renoised canvases have a schedule of temperatures, and no distribution that a token was drawn from.
UNSUPPORTED_BY_CANVAS = (*UNSUPPORTED, "top_p", "top_k", "logprobs")

# The ways of caching that each attention family has; the first is its default.
CACHES: Mapping[str, tuple[CacheMode, ...]] = {
    "bidirectional": ("dual", "none", "prefix", "dkv"),
    "block_causal": ("block",),
    "canvas": ("canvas",),
}
_KINDS: tuple[str, ...] = get_args(UnmaskingKind)
_SCHEDULED = ("quota", "random", "sequential", "margin", "entropy")
# Which kinds read a parameter. One that is given alone chooses the first of them.
_READ_BY: Mapping[str, tuple[str, ...]] = {
    "threshold": ("threshold",),
    "factor": ("factor",),
    "factor_rule": ("factor",),
    "entropy_bound": ("entropy_bound",),
    "steps": (*_SCHEDULED, "threshold"),
    "steps_bound": ("threshold",),
    "schedule": _SCHEDULED,
    "eps": _SCHEDULED,
    "independent": ("random",),
    "strict": ("threshold",),
    "min_commits": ("threshold",),
}
_READ_BY_CANVAS = ("entropy_bound", "threshold", "steps")
MAX_STEPS = 1 << 20
# Independent draws are made for every step in turn, those that commit nothing included.
MAX_INDEPENDENT_STEPS = 1 << 10
# More passes than that, and the noise of one canvas would be that of the next.
MAX_CANVAS_STEPS = (1 << 12) - 1


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class UnmaskingOptions(_Strict):
    """`unmasking` as an object: a rule and what it reads; see `dllm.request.Unmasking`."""

    kind: str | None = None
    threshold: float | None = None
    factor: float | None = None
    factor_rule: Literal["strict", "fast_dllm"] | None = None
    entropy_bound: float | None = None
    steps: int | None = None
    steps_bound: Literal["most", "least"] | None = None
    schedule: Literal["even", "linear"] | None = None
    eps: float | None = None
    independent: bool | None = None
    strict: bool | None = None
    min_commits: int | None = None


class Pin(_Strict):
    """Tokens that are given: from `position` of the answer on, as text or as ids."""

    position: int
    text: str | None = None
    token_ids: list[int] | None = None


class DiffusionOptions(_Strict):
    """The fields of a request to a diffusion model beyond the common ones; whatever is left out is the
    served model's default."""

    cache: str | None = None
    """none (exact), prefix, dual or dkv; of block-causal models block, which is exact."""
    unmasking: UnmaskingOptions | None = None
    """A rule's name, or an object with its parameters."""
    threshold: float | None = None
    factor: float | None = None
    entropy_bound: float | None = None
    steps: int | None = None
    """Passes over the whole answer; alone it means a fixed number a pass (`quota`)."""
    schedule: Literal["even", "linear"] | None = None
    block_length: int | None = None
    refresh_interval: int | None = None
    editing_threshold: float | None = None
    cfg_scale: float | None = None
    first_position: Literal["commit", "left_neighbour"] | None = None
    max_block_steps: int | None = None
    pinned: list[Pin] = Field(default=[])
    suffix: str | list[int] | None = None
    """What follows the answer (completions): the model fills in between."""

    @field_validator("unmasking", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"kind": value}
        if value is None or isinstance(value, Mapping | UnmaskingOptions):
            return value
        raise InvalidRequest("", "must be a rule's name or an object")

    @field_validator("suffix", mode="before")
    @classmethod
    def _text_or_ids(cls, value: Any) -> Any:
        if isinstance(value, str) or (isinstance(value, list) and all(type(item) is int for item in value)):
            return value
        raise InvalidRequest("", "must be a string or a list of token ids")


def parse_options(data: Mapping[str, Any]) -> DiffusionOptions:
    """Options from plain data; `InvalidRequest` names the first bad field."""
    try:
        return DiffusionOptions.model_validate(dict(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(DiffusionOptions.model_fields)
            raise InvalidRequest(field, f"no such option; there is: {known}") from None
        raise InvalidRequest(field, first["msg"]) from None


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """What the checks must know of a served model. `defaults` are those of requests that say nothing.

    shift  1 for models whose row i predicts position i + 1.
    """

    family: Literal["bidirectional", "block_causal", "canvas"]
    shift: int
    mask_token_id: int
    defaults: DiffusionParams


class DiffusionCheck:
    """The family's part of `Completer.prepare`: options become `DiffusionParams`, or are refused.

    `CompletionRequest.options` may be `DiffusionOptions`, a mapping of its fields, ready
    `DiffusionParams`, or None.
    """

    def __init__(self, facts: ServedFacts, tokenizer: Tokenizer) -> None:
        self._facts = facts
        self._tokenizer = tokenizer

    def __call__(self, request: CompletionRequest, info: EngineInfo) -> CompletionRequest:
        options = request.options
        if isinstance(options, Mapping):
            options = parse_options(options)
        if options is None:
            params = self._facts.defaults
        elif isinstance(options, DiffusionParams):
            params = options
        elif isinstance(options, DiffusionOptions):
            if options.suffix and not request.continues_prompt:
                raise UnsupportedField("suffix", "is for completions, not for chat")
            params = self._params(options, info)
        else:
            raise InvalidRequest("options", f"must be a mapping, not {type(options).__name__}")
        if request.include_unmasking:
            params = replace(params, include_unmasking=True)
        check_params(params, self._facts, info)
        max_tokens = fitting_max_tokens(request, params, info)
        _check_pinned(params.pinned, max_tokens, self._facts.mask_token_id, info.vocab_size)
        return replace(request, options=params, sampling=replace(request.sampling, max_tokens=max_tokens))

    def _params(self, options: DiffusionOptions, info: EngineInfo) -> DiffusionParams:
        plain = ("block_length", "refresh_interval", "editing_threshold", "cfg_scale", "max_block_steps")
        given = {name: getattr(options, name) for name in (*plain, "cache", "first_position")}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        defaults = self._facts.defaults
        if options.refresh_interval is not None and (cache := options.cache or defaults.cache) != "dkv":
            raise InvalidRequest("refresh_interval", f"is for cache 'dkv', not for {cache[:40]!r}")
        if options.cfg_scale and options.cache is None and "none" in CACHES[self._facts.family]:
            changes["cache"] = "none"  # guidance has no other
        return replace(
            defaults,
            **changes,
            unmasking=_unmasking(options, defaults.unmasking, self._facts.family == "canvas"),
            pinned=tuple(
                pair for index, pin in enumerate(options.pinned) for pair in self._pinned(index, pin)
            ),
            suffix_token_ids=self._ids("suffix", options.suffix or (), info),
        )

    def _pinned(self, index: int, pin: Pin) -> list[tuple[int, int]]:
        where = f"pinned[{index}]"
        if (pin.text is None) == (pin.token_ids is None):
            raise InvalidRequest(where, "needs either text or token_ids")
        token_ids: Any = pin.token_ids
        if token_ids is None:
            token_ids = self._tokenizer.encode(
                pin.text or "", add_special_tokens=False, field=f"{where}.text"
            )
        if not token_ids:
            raise InvalidRequest(where, "pins no token")
        return [(pin.position + offset, token_id) for offset, token_id in enumerate(token_ids)]

    def _ids(self, field: str, value: Any, info: EngineInfo) -> tuple[int, ...]:
        if isinstance(value, str):
            return tuple(self._tokenizer.encode(value, add_special_tokens=False, field=field))
        for token_id in value:
            check_integer(field, token_id, 0, info.vocab_size - 1, what="token id")
        return tuple(value)


def _unmasking(options: DiffusionOptions, default: Unmasking, is_canvas: bool) -> Unmasking:
    given: dict[str, Any] = {}
    names: dict[str, str] = {}  # where each was given
    inner = options.unmasking
    for name in _READ_BY:
        value = getattr(inner, name) if inner is not None else None
        outer = getattr(options, name, None)
        if value is not None and outer is not None and value != outer:
            raise InvalidRequest(name, f"contradicts unmasking.{name}")
        if value is not None or outer is not None:
            given[name] = value if outer is None else outer
            names[name] = f"unmasking.{name}" if outer is None else name
    kind = inner.kind if inner is not None else None
    if is_canvas:
        if kind not in (None, default.kind):
            raise InvalidRequest("unmasking", f"a renoised canvas has no rule but {default.kind!r}")
        unread = next((name for name in given if name not in _READ_BY_CANVAS), None)
        if unread is not None:
            raise InvalidRequest(names[unread], f"is not read here; there is: {', '.join(_READ_BY_CANVAS)}")
        return replace(default, **given)
    if kind is None:
        kind = _implied_kind(given, default)
    elif kind not in _KINDS:
        raise InvalidRequest("unmasking", f"no rule {kind[:40]!r}; there are: {', '.join(_KINDS)}")
    for name in given:
        if kind not in _READ_BY[name]:
            raise InvalidRequest(
                names[name], f"is not read by unmasking {kind!r}; it is for: {', '.join(_READ_BY[name])}"
            )
    rule = replace(default, **given) if kind == default.kind else Unmasking(kind=kind, **given)  # type: ignore[arg-type]
    if rule.independent:
        if given.get("schedule", "linear") != "linear":
            raise InvalidRequest(names["schedule"], "independent draws have the schedule 'linear'")
        rule = replace(rule, schedule="linear")
    if "eps" in given and rule.schedule != "linear":
        raise InvalidRequest(names["eps"], "is read by schedule 'linear' alone")
    if "steps_bound" in given and rule.steps is None:
        raise InvalidRequest(names["steps_bound"], "needs steps, which it is the bound of")
    return rule


def _implied_kind(given: Mapping[str, Any], default: Unmasking) -> str:
    """The rule that reads what was given: the default one if it does, else the first that does."""
    if all(default.kind in _READ_BY[name] and name != "steps" for name in given):
        return default.kind
    if "steps" in given and "threshold" in given:
        return "threshold"
    wanted = next((name for name in given if name not in ("steps", "schedule")), None)
    return _READ_BY[wanted or "steps"][0]


def check_params(params: DiffusionParams, facts: ServedFacts, info: EngineInfo) -> None:
    """`InvalidRequest` for the first field that the model or its engine could not honour."""
    caches = CACHES[facts.family]
    family = facts.family.replace("_", "-")
    if params.cache not in caches:
        raise InvalidRequest(
            "cache",
            f"no {str(params.cache)[:40]!r} for a {family} model; there is: {', '.join(sorted(caches))}",
        )
    check_integer("block_length", params.block_length, 1, info.max_context_tokens)
    if facts.family == "canvas":
        if params.block_length != facts.defaults.block_length:
            raise InvalidRequest(
                "block_length", f"this model's canvas has {facts.defaults.block_length} positions"
            )
        if params.unmasking.steps is not None:
            check_integer("steps", params.unmasking.steps, 1, MAX_CANVAS_STEPS)
        if params.pinned:
            raise InvalidRequest("pinned", "a renoised canvas keeps no given tokens")
    check_integer("refresh_interval", params.refresh_interval, 1, MAX_STEPS)
    check_number("cfg_scale", params.cfg_scale, 0.0, 1e3)
    if params.cfg_scale > 0 and (params.cache != "none" or facts.family != "bidirectional"):
        raise InvalidRequest(
            "cfg_scale", f"needs a bidirectional model and cache 'none', not {params.cache!r}"
        )
    if params.max_block_steps is not None:
        check_integer("max_block_steps", params.max_block_steps, 1, MAX_STEPS)
    check_integer("max_post_steps", params.max_post_steps, 0, MAX_STEPS)
    if params.editing_threshold is not None:
        if facts.family != "block_causal":
            raise InvalidRequest("editing_threshold", f"is for block-causal models, not for a {family} one")
        check_number("editing_threshold", params.editing_threshold, 0.0, 1.0, open_low=True)
    if params.first_position not in ("commit", "left_neighbour"):
        raise InvalidRequest("first_position", "must be 'commit' or 'left_neighbour'")
    if params.first_position == "left_neighbour" and not facts.shift:
        raise InvalidRequest(
            "first_position", "'left_neighbour' is for models with shifted logits; this one has none"
        )
    if params.suffix_token_ids and facts.family != "bidirectional":
        raise InvalidRequest(
            "suffix", f"a {family} model does not see what follows; infilling needs a bidirectional one"
        )
    for token_id in params.suffix_token_ids:
        check_integer("suffix", token_id, 0, info.vocab_size - 1, what="token id")
    _check_unmasking(params.unmasking)


def _check_unmasking(rule: Unmasking) -> None:
    if rule.kind not in _KINDS:
        raise InvalidRequest("unmasking", f"no rule {str(rule.kind)[:40]!r}; there are: {', '.join(_KINDS)}")
    check_number("threshold", rule.threshold, 0.0, 1.0, open_low=True)
    check_number("factor", rule.factor, 0.0, 1e6, open_low=True)
    check_number("entropy_bound", rule.entropy_bound, 0.0, 1e6)
    check_number("eps", rule.eps, 0.0, 1.0, open_low=True)
    if rule.eps >= 1:
        raise InvalidRequest("eps", f"must be below 1, not {rule.eps}")
    check_integer("min_commits", rule.min_commits, 1, MAX_STEPS)
    if rule.steps is not None:
        check_integer("steps", rule.steps, 1, MAX_INDEPENDENT_STEPS if rule.independent else MAX_STEPS)


def fitting_max_tokens(request: CompletionRequest, params: DiffusionParams, info: EngineInfo) -> int:
    """`max_tokens` of the request, or the default that fits; `ContextLengthExceeded` if it cannot fit.

    The whole canvas (prompt, answer, suffix) has KV; guidance keeps a second, unconditional canvas.
    """
    num_prompt, num_suffix = len(request.prompt_token_ids), len(params.suffix_token_ids)
    copies = 2 if params.cfg_scale > 0 else 1
    pool = info.kv_pool_tokens // PAGE_TOKENS // copies * PAGE_TOKENS
    pool_name = "the KV pool" if copies == 1 else "half the KV pool (cfg_scale keeps two canvases)"
    given = f"{num_prompt} prompt tokens" + (f" + {num_suffix} suffix tokens" if num_suffix else "")
    wanted = request.sampling.max_tokens
    # Canvases are whole, whatever is told of them.
    unit = params.block_length if params.cache == "canvas" else 1
    whole = f" in whole canvases of {unit}" if unit > 1 else ""
    for limit, what in ((info.max_context_tokens, "the model's context"), (pool, pool_name)):
        room = (limit - num_prompt - num_suffix) // unit * unit
        if room < (1 if wanted is None else 0):
            raise ContextLengthExceeded("prompt", f"{given} leave no room in {what} of {limit} tokens")
        if wanted is not None and wanted > room:
            raise ContextLengthExceeded(
                "max_tokens",
                f"{given} + {shown(wanted)} output tokens{whole} are more than {what} of {limit} tokens",
            )
    if wanted is not None:
        return wanted
    room = (min(info.max_context_tokens, pool) - num_prompt - num_suffix) // unit * unit
    return room if info.default_max_tokens is None else min(room, info.default_max_tokens)


def _check_pinned(
    pinned: tuple[tuple[int, int], ...], max_tokens: int, mask_token_id: int, vocab_size: int
) -> None:
    taken: set[int] = set()
    for position, token_id in pinned:
        check_integer("pinned", position, 0, MAX_STEPS, what="position")
        if position >= max_tokens:
            raise InvalidRequest(
                "pinned", f"position {shown(position)} is outside of the answer of {max_tokens} tokens"
            )
        check_integer("pinned", token_id, 0, vocab_size - 1, what="token id")
        if token_id == mask_token_id:
            raise InvalidRequest("pinned", f"token id {token_id} is the mask, which stands for no text")
        if position in taken:
            raise InvalidRequest("pinned", f"position {position} is pinned twice")
        taken.add(position)
