"""What may flow into which port. Types only: knows neither nodes nor graphs.

A string in a shape is a size that is the same wherever it occurs in one node's ports. So each call has its
own `Sizes`: the first shape that arrives says what "batch" is, later ones must agree. Sizes that nobody knows
before the run stay strings and fit anything; only numbers can contradict each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from genserve.t2i.ports import OutputPort, PortType, Size

Sizes = dict[str, Size]


class Mismatch(Exception):
    """`str(error)` says what does not fit."""


def describe(type_: PortType | None) -> str:
    """For messages: "tensor float32 [batch, 77, 768]"."""
    if type_ is None:
        return "nothing"
    if type_.kind == "list":
        return f"list of {describe(type_.item)}"
    parts: list[str] = [type_.kind]
    if type_.dtype is not None:
        parts.append(type_.dtype)
    if type_.shape is not None:
        parts.append(f"[{', '.join(map(str, type_.shape))}]")
    if type_.length is not None:
        parts.append(f"of length {type_.length}")
    return " ".join(parts)


def fit(given: PortType, wanted: PortType, sizes: Sizes) -> None:
    """Raise `Mismatch` unless a value of type `given` may enter a port of type `wanted`; fills `sizes`."""
    if wanted.kind == "json" and given.is_inline:
        return
    if wanted.kind == "float" and given.kind == "int":
        return
    if wanted.kind == "tensors" and given.kind == "list":
        given = _as_tensors(given, wanted)
    if given.kind != wanted.kind:
        raise Mismatch(f"wants {describe(wanted)}, got {describe(given)}")
    if wanted.kind == "list":
        assert wanted.item is not None and given.item is not None
        fit(given.item, wanted.item, sizes)
        return
    if None not in (given.dtype, wanted.dtype) and given.dtype != wanted.dtype:
        raise Mismatch(f"wants dtype {wanted.dtype}, got {given.dtype}")
    if None not in (given.length, wanted.length) and given.length != wanted.length:
        raise Mismatch(f"wants {wanted.length} tensors, got {given.length}")
    if given.shape is not None and wanted.shape is not None:
        _fit_shape(given.shape, wanted.shape, sizes)


def _as_tensors(given: PortType, wanted: PortType) -> PortType:
    item = given.item
    if item is None or item.kind != "tensor":
        raise Mismatch(f"wants {describe(wanted)}, got {describe(given)}")
    return PortType("tensors", item.dtype, None, given.length)


def _fit_shape(given: tuple[Size, ...], wanted: tuple[Size, ...], sizes: Sizes) -> None:
    got = f"got [{', '.join(map(str, given))}]"
    if len(given) != len(wanted):
        raise Mismatch(f"wants the shape [{', '.join(map(str, wanted))}], {got}")
    for axis, (have, want) in enumerate(zip(given, wanted, strict=True)):
        if isinstance(want, int):
            if isinstance(have, int) and have != want:
                raise Mismatch(f"wants size {want} in axis {axis}, {got}")
            continue
        bound = sizes.get(want)
        if isinstance(bound, int) and isinstance(have, int) and bound != have:
            raise Mismatch(f"size {want!r} in axis {axis} is {bound} in another input, {got}")
        if not isinstance(bound, int):
            sizes[want] = have


def produced(port: OutputPort, sizes: Mapping[str, Size]) -> PortType:
    """The type of an output, given what the inputs have told about its sizes."""
    return _with_sizes(port.type, sizes)


def _with_sizes(type_: PortType, sizes: Mapping[str, Size]) -> PortType:
    if type_.kind == "list" and type_.item is not None:
        return replace(type_, item=_with_sizes(type_.item, sizes))
    if type_.shape is None:
        return type_
    return replace(
        type_, shape=tuple(sizes.get(size, size) if isinstance(size, str) else size for size in type_.shape)
    )


def common(types: Iterable[PortType | None]) -> PortType | None:
    """What is true of all `types`: the type of a list's items, or of a value that a loop replaces.

    None (absent) gives way to anything. Raises `Mismatch` where they are of different kinds or dtypes.
    """
    found: PortType | None = None
    for type_ in types:
        if found is None or type_ is None:
            found = found or type_
            continue
        if (found.kind, found.item is None) != (type_.kind, type_.item is None):
            raise Mismatch(f"{describe(found)} and {describe(type_)} in one place")
        if None not in (found.dtype, type_.dtype) and found.dtype != type_.dtype:
            raise Mismatch(f"{describe(found)} and {describe(type_)} in one place")
        found = _merged(found, type_)
    return found


def _merged(one: PortType, other: PortType) -> PortType:
    if one.kind == "list":
        return replace(one, item=common((one.item, other.item)), length=_agreed(one.length, other.length))
    shape = None
    if one.shape is not None and other.shape is not None:
        if len(one.shape) != len(other.shape):
            raise Mismatch(f"{describe(one)} and {describe(other)} in one place")
        shape = tuple(a if a == b else f"{a}|{b}" for a, b in zip(one.shape, other.shape, strict=True))
        if any(
            isinstance(a, int) and isinstance(b, int) and a != b
            for a, b in zip(one.shape, other.shape, strict=True)
        ):
            raise Mismatch(f"{describe(one)} and {describe(other)} in one place")
    return replace(one, dtype=one.dtype or other.dtype, shape=shape, length=_agreed(one.length, other.length))


def _agreed(one: int | None, other: int | None) -> int | None:
    return one if one == other else None


def fit_constant(value: Any, wanted: PortType) -> None:
    """Raise `Mismatch` unless `value`, which is not None, may stand in a workflow for a port's value."""
    kind = wanted.kind
    right = {
        "text": isinstance(value, str),
        "bool": isinstance(value, bool),
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, int | float) and not isinstance(value, bool),
        "json": is_json(value),
        "list": isinstance(value, list | tuple),
    }.get(kind)
    if right is None:
        raise Mismatch(f"wants {describe(wanted)}, got {value!r}; such values come from inputs and nodes")
    if not right or (isinstance(value, float) and not math.isfinite(value)):
        raise Mismatch(f"wants {describe(wanted)}, got {value!r}")
    if kind == "list":
        assert wanted.item is not None
        for item in value:
            fit_constant(item, wanted.item)


def is_json(value: Any) -> bool:
    """Whether JSON can say it and gives the same back."""
    if isinstance(value, list | tuple):
        return all(is_json(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json(item) for key, item in value.items())
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def as_json(value: Any) -> Any:
    """The same with lists for tuples, as reading JSON gives it."""
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return value


def constant_type(value: Any) -> PortType | None:
    """The type of a constant; None (absent) has none."""
    if value is None:
        return None
    for kind, python in (("bool", bool), ("int", int), ("float", float), ("text", str)):
        if isinstance(value, python):
            return PortType(kind)  # type: ignore[arg-type]
    return PortType("json")
