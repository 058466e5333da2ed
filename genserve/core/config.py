"""Configuration at the edges: frozen models that refuse unknown keys, YAML files, `--set a.b=c`.

Inside, components take plain frozen dataclasses; nothing below a composition root reads these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
)

from genserve.core.errors import ConfigError

if TYPE_CHECKING:
    import yaml


class Config(BaseModel):
    """A frozen piece of configuration. Unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True
    )


C = TypeVar("C", bound=Config)

# The `context` of `model_dump` with which sizes are written as people write them.
READABLE = {"readable": True}


def _written(size: int, info: SerializationInfo[Any]) -> int | str:
    if info.context == READABLE:
        for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if size and size % (1 << exponent) == 0:
                return f"{size >> exponent}{unit}"
    return int(size)


# A number of bytes; "512MiB" and "4GB" are read too.
Bytes = Annotated[ByteSize, PlainSerializer(_written)]


def load(kind: type[C], path: str | Path | None = None, overrides: Sequence[str] = (), **values: Any) -> C:
    """Build a `kind` from a YAML file, then `values` (None is skipped), then `a.b=c` overrides.

    Raises `ConfigError` that names the file or option, the key and what is wrong with it.
    """
    data: dict[str, Any] = {}
    source = "configuration"
    if path is not None:
        source = str(path)
        data = read_yaml(Path(path))
    data.update({key: value for key, value in values.items() if value is not None})
    for override in overrides:
        apply_override(data, override)
    return parse(kind, data, source)


def parse(kind: type[C], data: Mapping[str, Any], source: str = "configuration") -> C:
    """Validate plain data as a `kind`; raises `ConfigError`."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """Every problem of a validation error: the key, what is wrong, and the value.

    Parts of a key in angle brackets are tags of unions, which nobody wrote, and are left out.
    """
    problems = []
    for problem in error.errors():
        parts = [str(part) for part in problem["loc"]]
        key = ".".join(part for part in parts if not part.startswith("<")) or "(top level)"
        message = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"]
        message = message.removeprefix("Value error, ")
        shown = problem.get("input")
        value = f" (got {shown!r})" if isinstance(shown, str | int | float | bool) else ""
        problems.append(f"{key}: {message}{value}")
    return "; ".join(problems)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, empty if the file is; `ConfigError` if there is none."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {_where(error)}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level must be a mapping, not a {type(data).__name__}")
    return data


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return (
        f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', None) or 'unreadable'}"
    )


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one dotted key of `data` in place, list positions included; the value is read as YAML."""
    import yaml

    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override}: expected key=value")
    *parents, last = key.split(".")
    target: Any = data
    for part in parents:
        if isinstance(target, list):
            target = target[_position(target, part, override)]
        else:
            target = target.setdefault(part, {})
        if not isinstance(target, dict | list):
            raise ConfigError(f"--set {override}: {part} is not a mapping or list")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not YAML") from error
    if isinstance(target, list):
        target[_position(target, last, override)] = value
    else:
        target[last] = value


def _position(items: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"--set {override}: {part} is no position of a list of {len(items)}")
    return int(part)
