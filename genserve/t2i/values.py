"""What a workflow's author holds: symbolic values, and what they may not be asked.

Owns `Value` and the references it stands for while a workflow is being written. Knows no loop's rolling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from genserve.core.errors import CompileError
from genserve.t2i.graph import Const, FromInput, Length
from genserve.t2i.ports import PortType

if TYPE_CHECKING:
    from genserve.t2i.tracing import Call, LoopTrace
    from genserve.t2i.workflow import Workflow


@dataclass(frozen=True, slots=True)
class Out:
    """An output of a call."""

    call: Call
    port: str


@dataclass(frozen=True, slots=True)
class After:
    """What `ref`, which is inside the loop, was in its last iteration."""

    loop: LoopTrace
    ref: Ref


@dataclass(frozen=True, slots=True)
class Final:
    """The value of the carried `name` after the loop."""

    loop: LoopTrace
    name: str


@dataclass(frozen=True, slots=True)
class Carry:
    """The value of the carried `name` when an iteration begins."""

    loop: LoopTrace
    name: str


@dataclass(frozen=True, slots=True)
class Index:
    loop: LoopTrace


@dataclass(frozen=True, slots=True)
class Count:
    loop: LoopTrace


@dataclass(frozen=True, slots=True)
class Element:
    """This iteration's element of the list that the loop runs over."""

    loop: LoopTrace


@dataclass(frozen=True, slots=True)
class Items:
    """A list made of several references."""

    items: tuple[Ref, ...]


Ref = Out | After | Final | Carry | Index | Count | Element | Items | Const | FromInput | Length


class Value:
    """A placeholder for a workflow's input, or for what a call will give when a request runs.

    It may be given to models, to `add_output` and to loops. It has no content while the workflow is written:
    arithmetic, comparison, branching and formatting raise `CompileError`.
    """

    def __init__(self, workflow: Workflow, ref: Ref, type_: PortType | None, what: str, where: str) -> None:
        self._workflow = workflow
        self._ref = ref
        self._type = type_
        self._what = what
        self._where = where

    @property
    def type(self) -> PortType | None:
        """What is known of it; None for a list of nothing."""
        return self._type

    @property
    def where(self) -> str:
        """The line that made it, "file.py:12"."""
        return self._where

    def __repr__(self) -> str:
        return f"<{self._what}, made at {self._where}>"

    def __index__(self) -> int:
        from genserve.t2i.tracing import begin_range

        return begin_range(self)

    def __iter__(self) -> Iterator[Any]:
        from genserve.t2i.tracing import begin_items

        return begin_items(self)

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self!r} has no attribute {name!r}: it is known only when a request runs")

    def _refuse(self, wish: str) -> NoReturn:
        from genserve.t2i.tracing import user_line

        if isinstance(self._ref, Index):
            hint = (
                "a loop's body must be the same in each iteration; let a model that is given the index decide"
            )
        else:
            hint = "it is known only when a request runs; let a model compute it"
        raise CompileError(f"{wish} {self!r}: {hint}", where=user_line())

    def __bool__(self) -> NoReturn:  # noqa: PLE0304
        self._refuse("cannot branch on")

    def __len__(self) -> NoReturn:  # noqa: PLE0303
        self._refuse("no length of")

    def __int__(self) -> NoReturn:
        self._refuse("no number of")

    __float__ = __complex__ = __int__

    def __str__(self) -> NoReturn:  # noqa: PLE0307
        self._refuse("no text of")

    def __format__(self, spec: str) -> NoReturn:
        self._refuse("no text of")

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse("no element of")

    def __contains__(self, item: Any) -> NoReturn:
        self._refuse("no looking into")

    def _compare(self, other: Any) -> NoReturn:
        self._refuse("cannot compare")

    __lt__ = __le__ = __gt__ = __ge__ = _compare
    __eq__ = __ne__ = _compare  # type: ignore[assignment]

    def _arithmetic(self, *others: Any) -> NoReturn:
        self._refuse("no arithmetic on")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _arithmetic
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _arithmetic
    __pow__ = __rpow__ = __divmod__ = __rdivmod__ = __lshift__ = __rshift__ = _arithmetic
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _arithmetic
    __neg__ = __pos__ = __abs__ = __invert__ = __round__ = __floor__ = __ceil__ = __trunc__ = _arithmetic
