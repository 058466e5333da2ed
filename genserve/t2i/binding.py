"""From the arguments of a model's call to a record: every port bound, every type checked.

Owns the messages about one call. Knows no graph and no loop's rolling.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from genserve.core.errors import CompileError
from genserve.t2i.graph import Const, ModelSpec, Patch
from genserve.t2i.ports import LOOP_COUNT, LOOP_INDEX, REQUIRED, InputPort, PortType
from genserve.t2i.typecheck import (
    Mismatch,
    Sizes,
    as_json,
    common,
    fit,
    fit_constant,
    is_json,
)
from genserve.t2i.values import Count, Index, Items, Ref, Value

if TYPE_CHECKING:
    from genserve.t2i.model import Model
    from genserve.t2i.workflow import Workflow

RESERVED_PORTS = ("self", "model_components")


def node_name(model: Model) -> str:
    """What a call of the model is named after: its class, in snake case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(model).__name__).lower()


def spec_of(model: Model, where: str) -> ModelSpec:
    """The model as data, without its identity, which is found by reading files."""
    cls = type(model)
    if "<locals>" in cls.__qualname__:
        raise CompileError(
            f"{cls.__qualname__} is defined inside a function, where no worker can import it",
            node=node_name(model),
            where=where,
        )
    for name, value in model.params.items():
        if not is_json(value):
            raise CompileError(
                f"parameter {name!r} of {cls.__name__} must be plain data, got {value!r}",
                node=node_name(model),
                where=where,
            )
    params = tuple(sorted((name, as_json(value)) for name, value in model.params.items()))
    return ModelSpec(f"{cls.__module__}:{cls.__qualname__}", params, "")


def patch_of(patch: Any, where: str) -> Patch:
    """A `ModelPatch` as data."""
    path, scale = patch.model_path, patch.scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not is_json(scale):
        raise CompileError(f"the scale of patch {path!r} must be a finite number, got {scale!r}", where=where)
    cls = type(patch)
    spec = ModelSpec(f"{cls.__module__}:{cls.__qualname__}", (("model_path", str(path)),), "")
    return Patch(spec, float(scale))


def check_ports(model: Model, name: str, where: str) -> None:
    """Raise `CompileError` if the declaration itself is wrong."""
    for ports in (model.input_ports, model.output_ports):
        seen: set[str] = set()
        for port in ports:
            problem = None
            if not port.name.isidentifier():
                problem = "a port's name must be a Python identifier"
            elif port.name in RESERVED_PORTS:
                problem = f"reserved names are {', '.join(RESERVED_PORTS)}"
            elif port.name in seen:
                problem = "declared twice"
            if problem:
                raise CompileError(problem, node=name, port=port.name, where=where)
            seen.add(port.name)
    if not model.output_ports:
        raise CompileError("declares no output", node=name, where=where)
    for port in model.input_ports:
        if port.default in (REQUIRED, LOOP_INDEX, LOOP_COUNT, None):
            continue
        try:
            fit_constant(port.default, port.type)
        except Mismatch as error:
            raise CompileError(f"its default {error}", node=name, port=port.name, where=where) from error


def bind(
    workflow: Workflow,
    ports: Sequence[InputPort],
    args: Sequence[Any],
    named: Mapping[str, Any],
    name: str,
    where: str,
) -> tuple[dict[str, Ref], Sizes]:
    """A reference for each port, in declared order, and what the inputs tell about the node's sizes."""
    given = _by_port(ports, args, named, name, where)
    sizes: Sizes = {}
    refs: dict[str, Ref] = {}
    for port in ports:
        if port.name not in given:
            refs[port.name] = _default(workflow, port, name, where)
            continue
        try:
            refs[port.name] = _bound(workflow, given[port.name], port, sizes)
        except Mismatch as error:
            raise CompileError(str(error), node=name, port=port.name, where=where) from error
    return refs, sizes


def _by_port(
    ports: Sequence[InputPort], args: Sequence[Any], named: Mapping[str, Any], name: str, where: str
) -> dict[str, Any]:
    known = [port.name for port in ports]
    if len(args) > len(ports):
        raise CompileError(
            f"takes {len(ports)} inputs ({', '.join(known) or 'none'}), got {len(args)}",
            node=name,
            where=where,
        )
    given: dict[str, Any] = dict(zip(known, args, strict=False))
    for port, value in named.items():
        if port not in known:
            raise CompileError(unknown("input", port, known), node=name, port=port, where=where)
        if port in given:
            raise CompileError("given twice", node=name, port=port, where=where)
        given[port] = value
    return given


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"no {what} {name!r}; {hint}there are: {', '.join(known) or 'none'}"


def _default(workflow: Workflow, port: InputPort, name: str, where: str) -> Ref:
    if port.default is REQUIRED:
        raise CompileError("missing input", node=name, port=port.name, where=where)
    if port.default is LOOP_INDEX or port.default is LOOP_COUNT:
        loop = workflow._innermost_loop()
        if loop is None:
            raise CompileError(
                "is filled by the enclosing loop, and there is none: give it, or call the model in a loop",
                node=name,
                port=port.name,
                where=where,
            )
        return Index(loop) if port.default is LOOP_INDEX else Count(loop)
    return Const(as_json(port.default))


def _bound(workflow: Workflow, value: Any, port: InputPort, sizes: Sizes) -> Ref:
    if value is None:
        if port.default is not None:
            raise Mismatch("is not optional, got None")
        return Const(None)
    if isinstance(value, Value):
        if value.type is not None:
            fit(value.type, port.type, sizes)
        return workflow._reference(value)
    if isinstance(value, list | tuple) and any(isinstance(item, Value) for item in value):
        type_, ref = gathered(workflow, value)
        if type_ is not None:
            fit(type_, port.type, sizes)
        return ref
    fit_constant(value, port.type)
    return Const(as_json(value))


def gathered(workflow: Workflow, values: Sequence[Any]) -> tuple[PortType | None, Items]:
    """A list of values as one reference, and its type."""
    if not all(isinstance(item, Value) for item in values):
        raise Mismatch("wants a list of values of this workflow, or one of constants; got a mixture")
    item = common(value.type for value in values)
    type_ = None if item is None else PortType("list", item=item, length=len(values))
    return type_, Items(tuple(workflow._reference(value) for value in values))
