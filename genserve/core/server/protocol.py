"""What `/v1/chat/completions` and `/v1/completions` accept, as the official `openai` client sends it.

Owns the request models and their translation into core records. Every field is either served or
refused by name: keys that this server does not know are errors unless their value asks for nothing.
Knows nothing of engines and of how a request runs; ranges of sampling parameters are checked where
they are defined (`core.runtime.sampling_limits`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    ValidationError,
)
from pydantic_core import from_json

from genserve.core.errors import InvalidRequest, UnsupportedField
from genserve.core.runtime.sampling_limits import MAX_CHOICES, MAX_LOGPROBS
from genserve.core.types import EngineInfo, Grammar, SamplingParams

COMPLETIONS_DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256

# Values that ask for nothing beyond what is done anyway, of fields that are otherwise refused.
_ASKS_NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "store": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "reasoning_effort": ("none",),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
}
_MESSAGE_ASKS_NOTHING = ("tool_calls", "annotations")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _text_of_parts(value: Any) -> Any:
    """Message content: a string, or a list of text parts, which are joined."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise InvalidRequest(f"[{index}]", "must be an object with a string 'type'")
        if kind != "text":
            raise UnsupportedField(f"[{index}].type", f"content parts of type {kind!r} are not supported")
        unknown = next((key for key in part if key not in ("type", "text")), None)
        if unknown is not None:
            raise UnsupportedField(f"[{index}].{unknown}", "is not supported")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"[{index}].text", "must be a string")
        texts.append(part["text"])
    return "".join(texts)


class ChatMessage(_Strict):
    """One message; `developer` is the newer name of `system` and is passed to templates as such."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of_parts)]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        return message if self.name is None else {**message, "name": self.name}


class JsonSchemaFormat(_Strict):
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    # Beyond OpenAI's API: what diffusion models put anywhere in their answer, as it happens.
    include_unmasking: bool = False


class _Common(_Strict):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[str], BeforeValidator(_one_or_many)] = []
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Bookkeeping of the caller: accepted, without effect on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Beyond OpenAI's API, through `extra_body`.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    guided_regex: str | None = Field(default=None, min_length=1)
    guided_json: dict[str, Any] | str | None = None
    response_format: ResponseFormat | None = None
    _options: BaseModel | None = PrivateAttr(None)

    @property
    def options(self) -> BaseModel | None:
        """The fields of the model's family; None if the body has none of them."""
        return self._options

    @property
    def include_unmasking(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_unmasking

    def sampling(self, info: EngineInfo, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The sampling template; the values are checked by `Completer.prepare`."""
        return SamplingParams(
            temperature=info.default_temperature if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            logit_bias=tuple(_bias_items(self.logit_bias)),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens,
            logprobs=logprobs,
            grammar=self._grammar(),
        )

    def common_names(self) -> dict[str, str]:
        """Where this body gave what core records call otherwise: its grammar, by kind, above all."""
        schema = "response_format" if self.guided_json is None else "guided_json"
        names = {"json_schema": schema, "json_object": "response_format", "regex": "guided_regex"}
        return {**names, "include_unmasking": "stream_options.include_unmasking"}

    def _grammar(self) -> Grammar | None:
        grammars: list[tuple[str, Grammar]] = []
        if self.guided_regex is not None:
            grammars.append(("guided_regex", Grammar("regex", self.guided_regex)))
        if self.guided_json is not None:
            grammars.append(("guided_json", Grammar("json_schema", _schema_text(self.guided_json))))
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            grammars.append(("response_format", Grammar("json_object")))
        elif wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise InvalidRequest("response_format.json_schema", "is required for type 'json_schema'")
            text = json.dumps(wanted.json_schema.schema_)
            grammars.append(("response_format", Grammar("json_schema", text)))
        if len(grammars) > 1:
            raise InvalidRequest(grammars[1][0], f"cannot be combined with {grammars[0][0]}")
        return grammars[0][1] if grammars else None


class ChatRequest(_Common):
    """Body of `/v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def to_sampling(self, info: EngineInfo) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs: true")
        limit = self.max_completion_tokens
        if limit is not None and self.max_tokens not in (None, limit):
            raise InvalidRequest("max_tokens", "contradicts max_completion_tokens")
        return self.sampling(
            info,
            self.max_tokens if limit is None else limit,
            (self.top_logprobs or 0) if self.logprobs else None,
        )

    def field_names(self) -> dict[str, str]:
        """Names this body uses for fields that core records call otherwise."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt": "messages", "max_tokens": limit, **self.common_names()}


def _prompts(value: Any) -> list[str | list[int]]:
    """One or many prompts, each a string or token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("", "must be a non-empty string, list of strings, or (list of) token ids")
    if type(value[0]) is int:
        return [_token_ids(value, "")]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest("", f"at most {MAX_PROMPTS} prompts in one request, not {len(value)}")
    if isinstance(value[0], str):
        wrong = next((i for i, prompt in enumerate(value) if not isinstance(prompt, str)), None)
        if wrong is not None:
            raise InvalidRequest(f"[{wrong}]", "must be a string like the first prompt")
        return value
    return [_token_ids(prompt, f"[{index}]") for index, prompt in enumerate(value)]


def _token_ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list):
        raise InvalidRequest(where, "must be a string or a list of token ids")
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise InvalidRequest(f"{where}[{index}]", "token ids must be integers")
    return value


class CompletionsRequest(_Common):
    """Body of `/v1/completions`. `logprobs` counts alternatives, as in the legacy API."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def to_sampling(self, info: EngineInfo) -> SamplingParams:
        limit = self.max_tokens
        if limit is None and info.default_max_tokens is None:
            limit = COMPLETIONS_DEFAULT_MAX_TOKENS
        return self.sampling(info, limit, self.logprobs)

    def field_names(self) -> dict[str, str]:
        return self.common_names()


def _bias_items(logit_bias: dict[str, float]) -> list[tuple[int, float]]:
    items = []
    for key, bias in logit_bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20):
            raise InvalidRequest("logit_bias", f"keys must be token ids, not {key[:40]!r}")
        items.append((int(key), bias))
    return items


def _schema_text(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, dict):
        return json.dumps(schema)
    try:
        parsed = from_json(schema)
    except ValueError as error:
        raise InvalidRequest("guided_json", f"is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest("guided_json", "must be a JSON schema object")
    return schema


_Body = TypeVar("_Body", bound=_Common)


def parse(
    model: type[_Body],
    body: bytes,
    options_of: Callable[[str], type[BaseModel] | None] = lambda name: None,
) -> _Body:
    """The request in `body`, or an `InvalidRequest`/`UnsupportedField` naming the first bad field.

    `options_of` gives the fields that the named model takes beyond the common ones, or raises.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest("body", f"is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest("body", "must be a JSON object")
    asked = {key: value for key, value in data.items() if not _asks_nothing(key, value)}
    if isinstance(asked.get("messages"), list):
        asked["messages"] = [_without_empty(message) for message in asked["messages"]]
    named = asked.get("model")
    options_model = options_of(named) if isinstance(named, str) else None
    own: dict[str, Any] = {}
    if options_model is not None:
        known = options_model.model_fields
        own = {key: asked.pop(key) for key in list(asked) if key in known and key not in model.model_fields}
    try:
        request = model.model_validate(asked)
        if options_model is not None and own:
            request._options = options_model.model_validate(own)
    except ValidationError as error:
        raise first_error(error) from None
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options", "is only for stream: true")
    return request


def _asks_nothing(key: str, value: Any) -> bool:
    if value is None:
        return True
    harmless = _ASKS_NOTHING.get(key, ())
    return any(type(value) is type(other) and value == other for other in harmless)


def _without_empty(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    return {
        key: value
        for key, value in message.items()
        if value is not None and not (key in _MESSAGE_ASKS_NOTHING and value == [])
    }


def first_error(error: ValidationError) -> InvalidRequest:
    """The first problem of a body, as the error that names its field."""
    # A refused key says most; report it first.
    errors = error.errors(include_url=False, include_input=False)
    first = next((e for e in errors if e["type"] == "extra_forbidden"), errors[0])
    field = ""
    for part in first["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif part not in ("dict[str,any]", "str"):  # branches of a union, not fields
            field += f".{part}" if field else str(part)
    if first["type"] == "extra_forbidden":
        return UnsupportedField(field[:200], "is not supported")
    if first["type"] == "model_type":  # its own message names a class of ours
        return InvalidRequest(field[:200], "must be an object")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        return type(cause)(field + cause.field, cause.message)
    return InvalidRequest(field[:200], first["msg"][:1].lower() + first["msg"][1:])
