"""A graph as versioned JSON, and back, exactly.

Driven by the declarations of the records in `graph` and `ports`: each becomes an object with all its fields,
unions carry the class's name under "is". Unknown keys, classes and versions are refused.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from genserve.core import workflows
from genserve.core.errors import CompileError
from genserve.t2i import graph as graph_module
from genserve.t2i import ports
from genserve.t2i.graph import Graph
from genserve.t2i.typecheck import is_json
from genserve.t2i.verify import verify

FORMAT = "genserve.workflow"
VERSION = 1

# Defaults that are no JSON values.
_MARKS = {"REQUIRED": ports.REQUIRED, "LOOP_INDEX": ports.LOOP_INDEX, "LOOP_COUNT": ports.LOOP_COUNT}


class _Wrong(Exception):
    pass


def graph_to_json(graph: Graph) -> str:
    """The graph as JSON text."""
    document = {"format": FORMAT, "version": VERSION, "graph": _plain(graph, Graph)}
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False)


def graph_from_json(text: str) -> Graph:
    """The graph of a JSON text, verified. Raises `CompileError`."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise CompileError(f"no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CompileError(f'no workflow: "format" must be "{FORMAT}"')
    if document.get("version") != VERSION:
        raise CompileError(f"version {document.get('version')!r} of the format; this reads {VERSION}")
    if set(document) != {"format", "version", "graph"}:
        raise CompileError(f"unknown or missing keys: {', '.join(document)}")
    try:
        graph: Graph = _read(document["graph"], Graph, "graph")
    except _Wrong as error:
        raise CompileError(str(error)) from error
    verify(graph)
    return graph


def _hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls, {**vars(workflows), **vars(graph_module), **vars(ports)})


def _members(type_: Any) -> tuple[Any, ...] | None:
    """The alternatives of a union of several records; None for anything else."""
    if not isinstance(type_, types.UnionType) and typing.get_origin(type_) is not typing.Union:
        return None
    members = tuple(each for each in typing.get_args(type_) if each is not types.NoneType)
    return members if len(members) > 1 and all(is_dataclass(each) for each in members) else None


def _optional(type_: Any) -> Any | None:
    """X of `X | None`; None for anything else."""
    args = typing.get_args(type_)
    if types.NoneType not in args:
        return None
    rest = tuple(each for each in args if each is not types.NoneType)
    return typing.Union[rest]  # noqa: UP007


def _plain(value: Any, type_: Any) -> Any:
    if (inner := _optional(type_)) is not None:
        return None if value is None else _plain(value, inner)
    if _members(type_) is not None:
        return {"is": type(value).__name__, **_plain(value, type(value))}
    if is_dataclass(type_):
        hints = _hints(type_)  # type: ignore[arg-type]
        return {each.name: _plain(getattr(value, each.name), hints[each.name]) for each in fields(type_)}
    if typing.get_origin(type_) is tuple:
        args = typing.get_args(type_)
        inners = [args[0]] * len(value) if args[1:] == (...,) else args
        return [_plain(item, inner) for item, inner in zip(value, inners, strict=True)]
    if type_ is Any:
        marks = [name for name, mark in _MARKS.items() if value is mark]
        return {"mark": marks[0]} if marks else {"value": value}
    return value


def _read(value: Any, type_: Any, at: str) -> Any:
    if (inner := _optional(type_)) is not None:
        return None if value is None else _read(value, inner, at)
    members = _members(type_)
    if members is not None:
        found = {each.__name__: each for each in members}
        name = value.get("is") if isinstance(value, dict) else None
        if name not in found:
            raise _Wrong(f'{at}: "is" must be one of {", ".join(found)}; got {name!r}')
        return _read({key: item for key, item in value.items() if key != "is"}, found[name], at)
    if is_dataclass(type_):
        return _read_record(value, type_, at)
    if typing.get_origin(type_) is tuple:
        args = typing.get_args(type_)
        if not isinstance(value, list) or (args[1:] != (...,) and len(value) != len(args)):
            raise _Wrong(f"{at}: expected a list, got {value!r}")
        inners = [args[0]] * len(value) if args[1:] == (...,) else args
        return tuple(
            _read(item, inner, f"{at}.{number}")
            for number, (item, inner) in enumerate(zip(value, inners, strict=True))
        )
    if type_ is Any:
        if isinstance(value, dict) and set(value) == {"mark"} and value["mark"] in list(_MARKS):
            return _MARKS[value["mark"]]
        if isinstance(value, dict) and set(value) == {"value"} and is_json(value["value"]):
            return value["value"]
        raise _Wrong(f"{at}: expected a value or a mark, got {value!r}")
    return _read_plain(value, type_, at)


def _read_record(value: Any, type_: Any, at: str) -> Any:
    if not isinstance(value, dict):
        raise _Wrong(f"{at}: expected an object, got {value!r}")
    hints = _hints(type_)
    names = [each.name for each in fields(type_)]
    for name in (*value, *names):
        if name not in names:
            raise _Wrong(f"{at}.{name}: unknown key")
        if name not in value:
            raise _Wrong(f"{at}.{name}: missing")
    return type_(**{name: _read(value[name], hints[name], f"{at}.{name}") for name in names})


def _read_plain(value: Any, type_: Any, at: str) -> Any:
    """Numbers, text, and choices of them."""
    if typing.get_origin(type_) is typing.Literal:
        if value not in typing.get_args(type_):
            raise _Wrong(f"{at}: no {value!r}; there are: {', '.join(typing.get_args(type_))}")
        return value
    allowed = typing.get_args(type_) or (type_,)
    if type(value) not in allowed:
        names = " or ".join(each.__name__ for each in allowed)
        raise _Wrong(f"{at}: expected {names}, got {value!r}")
    return value
