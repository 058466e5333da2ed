"""Types of the values that travel between workflow nodes, and how a port is declared.

Owns what the compiler checks and what a request's inputs are validated against. Knows no node, no
graph and no torch: a tensor's type is its dtype's name and its shape, in which a string is a size that
is the same wherever it occurs in one node ("batch"), and a number is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from genserve.core.workflows import REQUIRED, PortType, Size


def tensor(dtype: str | None = None, shape: tuple[Size, ...] | None = None) -> PortType:
    return PortType("tensor", dtype, shape)


def tensors(length: int | None = None, dtype: str | None = None) -> PortType:
    return PortType("tensors", dtype, None, length)


def list_of(item: Any) -> PortType:
    return PortType("list", item=port_type(item))


IMAGE = PortType("image")
TEXT = PortType("text")
INT = PortType("int")
FLOAT = PortType("float")
BOOL = PortType("bool")
JSON = PortType("json")

_PYTHON = {
    "int": INT,
    "float": FLOAT,
    "bool": BOOL,
    "str": TEXT,
    "dict": JSON,
    "Tensor": tensor(),
    "Image": IMAGE,
}


def port_type(declared: Any) -> PortType:
    """The type that a declaration means: a `PortType`, or `int`, `float`, `bool`, `str`, `dict`, `torch.Tensor`,
    PIL's `Image` (class or module), or `list[...]` of one of them. Raises `TypeError`.

    By name, so that neither torch nor PIL is imported here.
    """
    if isinstance(declared, PortType):
        return declared
    args = getattr(declared, "__args__", None)
    if getattr(declared, "__origin__", None) is list and args:
        return list_of(args[0])
    name = getattr(declared, "__name__", "").rpartition(".")[2]
    found = _PYTHON.get(name)
    if found is None:
        raise TypeError(
            f"{declared!r} is no type of a port; there are: {', '.join(_PYTHON)}, list[...], PortType"
        )
    return found


class _FromLoop:
    """Default of ports that the enclosing loop fills: its index, or its number of iterations."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


LOOP_INDEX = _FromLoop("LOOP_INDEX")
LOOP_COUNT = _FromLoop("LOOP_COUNT")


@dataclass(frozen=True, slots=True)
class InputPort:
    """A declared input. `deferred`: the node may start without it and fetches it where it is used
    (LegoDiffusion §4.3.2). `default` is REQUIRED, a JSON value, None for "absent", LOOP_INDEX or LOOP_COUNT."""

    name: str
    type: PortType
    deferred: bool = False
    default: Any = REQUIRED


@dataclass(frozen=True, slots=True)
class OutputPort:
    name: str
    type: PortType


@dataclass(frozen=True, slots=True)
class CfgPorts:
    """How a model that does classifier-free guidance inside one node may be split into two nodes and a `Guidance`.

    The conditional half is called without the `unconditional` ports; the unconditional half gets their values
    at the `conditional` ports, pairwise, and is called without them too. `Guidance` joins their `output`s with the
    value of port `guidance`. Port `branch` (int), where there is one, tells a half which row of inputs that still
    come as a pair, such as a ControlNet's residuals, is its own: 0 the unconditional one, 1 the conditional one.
    """

    conditional: tuple[str, ...]
    unconditional: tuple[str, ...]
    guidance: str
    output: str
    branch: str | None = None
