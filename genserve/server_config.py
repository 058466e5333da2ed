"""What a server is configured with: a YAML file, command line options and `--set`, in one model.

Owns the shape of the configuration and of `--model` arguments; knows every family's own part.
Nothing is loaded or started here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ByteSize, Discriminator, Field, SecretStr, Tag, field_validator

from genserve.ar.config import ArConfig
from genserve.core.config import Bytes, Config, apply_override, parse, read_yaml
from genserve.core.errors import ConfigError
from genserve.dllm.config import DllmConfig
from genserve.families import DEFAULT_FAMILY, DEFAULT_MODELS, FAMILIES, config_kind, family_of
from genserve.t2i.catalogue import ImageModelConfig

DEFAULT_MODEL = DEFAULT_MODELS[DEFAULT_FAMILY]

Positive = Annotated[int, Field(ge=1)]


def _not_blank(key: SecretStr) -> SecretStr:
    if not key.get_secret_value().strip():
        raise ValueError("an empty key would let nobody in")
    return key


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ApiKey = Annotated[SecretStr, AfterValidator(_not_blank)]


class ArModel(ArConfig):
    """An autoregressive model of the server."""

    family: Literal["ar"] = "ar"
    """Tells models of different families apart; by default the model itself does."""


class DllmModel(DllmConfig):
    """A diffusion language model of the server."""

    family: Literal["dllm"] = "dllm"
    """Tells models of different families apart; by default the model itself does."""


class T2iModel(ImageModelConfig):
    """A text-to-image model of the server."""

    family: Literal["t2i"] = "t2i"
    """Tells models of different families apart; by default the model itself does."""


def _tag(entry: Any) -> str | None:
    family = entry.get("family") if isinstance(entry, Mapping) else getattr(entry, "family", None)
    if family is None and isinstance(entry, Mapping):
        model = entry.get("model")
        family = family_of(model) if isinstance(model, str) and model else DEFAULT_FAMILY
    return f"<{family}>"


# A further family is a further class here.
ModelEntry = Annotated[
    Annotated[ArModel, Tag("<ar>")] | Annotated[DllmModel, Tag("<dllm>")] | Annotated[T2iModel, Tag("<t2i>")],
    Discriminator(
        _tag,
        custom_error_type="family",
        custom_error_message=f"no such family; there is: {', '.join(FAMILIES)}",
    ),
]


class ServerConfig(Config):
    """A server and its models."""

    models: tuple[ModelEntry, ...] = (ArModel(model=DEFAULT_MODEL),)
    """What is served, each under a name of its own."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0 takes a free one."""
    api_keys: tuple[ApiKey, ...] = ()
    """Accepted bearer tokens; with none, every request is accepted."""
    max_body: Annotated[Bytes, Field(ge=1)] = ByteSize(8 << 20)
    """Bytes of a request body, at most; "8MiB" is read too."""
    max_image_body: Annotated[Bytes, Field(ge=1)] = ByteSize(32 << 20)
    """The same of requests that may carry pictures: /v1/images and /v1/workflows."""
    max_jobs: Positive = 64
    """Ended jobs whose results are kept, at most; the oldest go first."""
    max_job_bytes: Annotated[Bytes, Field(ge=1)] = ByteSize(256 << 20)
    """Bytes of ended jobs' results and previews, at most."""
    job_age_s: Seconds = 3600.0
    """Seconds for which ended jobs are kept."""
    body_timeout_s: Seconds = 30.0
    """How long a request's body may stand still before the answer is 408."""
    write_timeout_s: Seconds = 60.0
    """How long a client may not read its answer before the connection is reset."""
    max_inflight_requests: Positive = 1024
    """Requests in flight over all models, at most; beyond it the answer is 429."""
    max_inflight_sequences: Positive | None = None
    """Sequences in flight of each model, at most; by default its max_queued_requests."""
    drain_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """Seconds that requests in flight may go on after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """What the log on stderr tells."""

    @field_validator("models")
    @classmethod
    def _some_and_distinct(cls, models: tuple[ModelEntry, ...]) -> tuple[ModelEntry, ...]:
        if not models:
            raise ValueError("a server needs at least one model")
        names = [model.name or model.model for model in models]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two models are called {', '.join(sorted(twice))}; give one another name")
        return models


def server_config(
    path: Path | None = None,
    *,
    family: str | None = None,
    models: Sequence[str] = (),
    model_options: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    **values: Any,
) -> ServerConfig:
    """Put a configuration together: file, then `values` and `models`, then `overrides`.

    `models` are arguments as `model_entry` reads them and replace the file's; those that name no family
    are of `family`, whose default model is served if none is named. `model_options` are set on every
    model; None means not given. Raises `ConfigError`.
    """
    if family is not None and family not in FAMILIES:
        raise ConfigError(f"no family {family!r}; there is: {', '.join(FAMILIES)}")
    data = read_yaml(path) if path is not None else {}
    data.update({key: value for key, value in values.items() if value is not None})
    if models:
        named = {} if family is None else {"family": family}
        data["models"] = [{**named, **model_entry(text)} for text in models]
    elif family is not None:
        data["models"] = [{"family": family, "model": DEFAULT_MODELS[family]}]
    data.setdefault("models", [{"model": DEFAULT_MODEL}])
    options = {key: value for key, value in (model_options or {}).items() if value is not None}
    if options and isinstance(data["models"], list):
        data["models"] = _with_options(data["models"], options)
    for override in overrides:
        apply_override(data, override)
    return parse(ServerConfig, data, str(path) if path is not None else "configuration")


def _with_options(entries: list[Any], options: Mapping[str, Any]) -> list[Any]:
    """Options set on every model. Beside language models, image models are spared those that they don't have."""
    makes_images = [_tag(entry) == "<t2i>" for entry in entries]
    known = config_kind("t2i").model_fields
    spared = {key: value for key, value in options.items() if key in known}
    return [
        {**entry, **(spared if is_image and not all(makes_images) else options)}
        if isinstance(entry, dict)
        else entry
        for entry, is_image in zip(entries, makes_images, strict=True)
    ]


def model_entry(text: str) -> dict[str, Any]:
    """Read `[NAME=][FAMILY:]MODEL`, e.g. `smollm2`, `ar:smollm2` or `helper=ar:models/tuned`."""
    entry: dict[str, Any] = {}
    rest = text
    if found := re.match(r"([\w.-]+)=", text):
        entry["name"] = found[1]
        rest = text[found.end() :]
    if (found := re.match(r"(\w+):", rest)) and not Path(rest).exists():
        if found[1] not in FAMILIES:
            raise ConfigError(f"--model {text}: no family {found[1]!r}; there is: {', '.join(FAMILIES)}")
        entry["family"] = found[1]
        rest = rest[found.end() :]
    if not rest:
        raise ConfigError(f"--model {text}: expected [NAME=][FAMILY:]MODEL")
    return {**entry, "model": rest}
