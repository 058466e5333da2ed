"""Recording what a workflow's author calls, loops included.

A loop over a placeholder runs `TRIAL` times while the workflow is written; `rolling` then finds out what one
iteration is and what it hands to the next. Owns the records and where a loop begins and ends. `wf.loop(n)`
and lists tell by themselves; a `range` tells nothing, so the frame that runs it is looked at: is it still in
the loop's body, and what is the loop's variable?

Deviation: LegoDiffusion (§4.1, Figure 7) writes `for i in range(num_denoising_steps)` and does not say how the
loop is captured.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from genserve.core.errors import CompileError
from genserve.t2i import loop_source
from genserve.t2i.graph import Const, FromInput, ModelSpec, Patch
from genserve.t2i.model import Model
from genserve.t2i.ports import INT, InputPort, OutputPort
from genserve.t2i.values import After, Carry, Count, Element, Final, Index, Items, Out, Ref, Value

if TYPE_CHECKING:
    from genserve.t2i.workflow import Workflow

TRIAL = 6

_INTERNAL = frozenset(
    f"genserve.t2i.{name}" for name in ("workflow", "model", "values", "tracing", "binding")
)


def user_frame() -> FrameType:
    """The innermost frame that is neither of this package's recording nor a model's own `__call__`."""
    frame: FrameType | None = sys._getframe(1)
    while (
        frame is not None
        and frame.f_back is not None
        and (frame.f_globals.get("__name__") in _INTERNAL or _is_models_call(frame))
    ):
        frame = frame.f_back
    assert frame is not None
    return frame


def _is_models_call(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__call__" and isinstance(frame.f_locals.get("self"), Model)


def line_of(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def user_line() -> str:
    return line_of(user_frame())


class Call:
    """One recorded call of a model; the node of a graph to be."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        input_ports: tuple[InputPort, ...],
        output_ports: tuple[OutputPort, ...],
        patches: tuple[Patch, ...],
        refs: dict[str, Ref],
        where: str,
        site: tuple[Any, ...],
    ) -> None:
        self.name = name
        self.spec = spec
        self.input_ports = input_ports
        self.output_ports = output_ports
        self.patches = patches
        self.refs = refs
        self.where = where
        self.site = site
        self.owner: LoopTrace | None = None
        self.iteration = 0


class LoopTrace:
    """A loop: open while its trial runs, then closed, with one iteration as its `body`."""

    def __init__(self, count: Ref, first: Ref, source: FromInput | None, where: str, site: tuple[Any, ...]):
        self.count = count
        self.first = first
        self.source = source
        self.where = where
        self.site = site
        self.name = "loop"
        self.owner: LoopTrace | None = None
        self.iteration = 0
        self.iterations: list[list[Record]] = []
        self.closed = False
        self.body: list[Record] = []
        # By name: the value before the first iteration (None: a result only), and the one handed on.
        self.carried: dict[str, tuple[Ref | None, Ref]] = {}
        # Of each record of the trial: its iteration, and its counterpart in the body.
        self.counterparts: dict[Record, tuple[int, Record]] = {}
        # Of a range: its statement, and who runs it while it is open.
        self.frame: FrameType | None = None
        self.source_for: loop_source.ForLoop | None = None

    def carry(self, first: Ref | None, next_: Ref) -> str:
        """The name under which the pair is carried; a new one if it isn't yet."""
        for name, known in self.carried.items():
            if known == (first, next_):
                return name
        base = name = _carried_name(next_)
        number = 2
        while name in self.carried:
            name = f"{base}_{number}"
            number += 1
        self.carried[name] = (first, next_)
        return name

    def result(self, ref: Ref) -> str:
        """The name under which `ref` can be had after the loop.

        If one carried value takes it on, that one: without an iteration it is what the loop began with.
        """
        names = [name for name, (first, next_) in self.carried.items() if next_ == ref and first is not None]
        return names[0] if len(names) == 1 else self.carry(None, ref)


Record = Call | LoopTrace


def _carried_name(ref: Ref) -> str:
    if isinstance(ref, Out):
        return ref.port
    if isinstance(ref, After):
        return _carried_name(ref.ref)
    if isinstance(ref, Final):
        return ref.name
    if isinstance(ref, Carry):
        return f"{ref.name}_before"
    return "index" if isinstance(ref, Index) else "value"


def map_records(ref: Ref, change: Callable[[Any], Any]) -> Ref:
    """The reference with each record in it replaced."""
    match ref:
        case Out(call, port):
            return Out(change(call), port)
        case After(loop, inner):
            return After(change(loop), map_records(inner, change))
        case Final(loop, name):
            return Final(change(loop), name)
        case Carry(loop, name):
            return Carry(change(loop), name)
        case Index(loop):
            return Index(change(loop))
        case Count(loop):
            return Count(change(loop))
        case Element(loop):
            return Element(change(loop))
        case Items(items):
            return Items(tuple(map_records(item, change) for item in items))
    return ref


class Trace:
    """What one workflow has recorded so far."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.open: list[LoopTrace] = []

    def settle(self) -> None:
        """Close the ranges whose bodies have been left. To be called before anything is recorded or asked."""
        while self.open and self.open[-1].frame is not None:
            loop = self.open[-1]
            assert loop.source_for is not None
            if _is_running(loop.frame) and loop.source_for.holds(loop.frame):  # type: ignore[arg-type]
                return
            self.close(loop)

    def add(self, record: Record) -> None:
        if not self.open:
            self.records.append(record)
            return
        loop = self.open[-1]
        if loop.frame is not None:
            assert loop.source_for is not None and loop.source_for.variable is not None
            self.begin_iteration(loop, loop.frame.f_locals[loop.source_for.variable])
        record.owner, record.iteration = loop, len(loop.iterations) - 1
        loop.iterations[-1].append(record)

    def begin(self, loop: LoopTrace) -> None:
        self.add(loop)
        self.open.append(loop)

    def begin_iteration(self, loop: LoopTrace, number: int) -> None:
        self.settle()
        if self.open[-1:] != [loop]:
            raise CompileError("the loop was left before its end", where=(self.open or [loop])[-1].where)
        while len(loop.iterations) <= number:
            loop.iterations.append([])

    def close(self, loop: LoopTrace) -> None:
        from genserve.t2i.rolling import roll

        assert self.open.pop() is loop
        loop.frame = None
        loop.closed = True
        roll(loop)

    def finish(self) -> None:
        """Raise `CompileError` if a loop is still running."""
        self.settle()
        if self.open:
            raise CompileError(
                "the loop was left before its end, or is still running: each iteration must be the same",
                where=self.open[-1].where,
            )

    def visible(self, ref: Ref, what: str) -> Ref:
        """The reference as it is seen from here: out of a loop that is over, it is the loop's result."""
        if isinstance(ref, Items):
            return Items(tuple(self.visible(item, what) for item in ref.items))
        if isinstance(ref, Const | FromInput) or (not hasattr(ref, "call") and not hasattr(ref, "loop")):
            return ref
        if isinstance(ref, Index | Count | Element) and ref.loop.closed:
            raise CompileError(f"{what} belongs to a loop and is used after it", where=user_line())
        record: Record = ref.call if isinstance(ref, Out) else ref.loop  # type: ignore[union-attr]
        if isinstance(ref, Index | Count | Element):
            return ref
        while record.owner is not None and record.owner.closed:
            loop = record.owner
            ref = After(loop, _at_the_end(loop, record, ref, what))
            record = loop
        return ref


def _at_the_end(loop: LoopTrace, record: Record, ref: Ref, what: str) -> Ref:
    """`ref` of some trial iteration as something that the last iteration has."""
    own = map_records(ref, lambda each: loop.counterparts.get(each, (0, each))[1])
    for _ in range(len(loop.iterations) - 1 - loop.counterparts[record][0]):
        names = [name for name, (_, next_) in loop.carried.items() if next_ == own]
        if not names:
            raise CompileError(
                f"{what}, of an iteration before the last, is used after the loop: "
                "only what the last iteration leaves can be used there",
                where=user_line(),
            )
        own = Carry(loop, names[0])
    return own


def _is_running(frame: FrameType | None) -> bool:
    running: FrameType | None = sys._getframe(1)
    while running is not None:
        if running is frame:
            return True
        running = running.f_back
    return False


class LoopRun:
    """What `for` iterates over: `TRIAL` symbolic indexes, or elements."""

    def __init__(self, trace: Trace, loop: LoopTrace, make: Callable[[], Value]) -> None:
        self._trace = trace
        self._loop = loop
        self._make = make
        self._number = 0

    def __iter__(self) -> Iterator[Value]:
        return self

    def __next__(self) -> Value:
        number, self._number = self._number, self._number + 1
        if number == 0:
            self._trace.settle()
            self._trace.begin(self._loop)
        if number == TRIAL:
            self._trace.begin_iteration(self._loop, number - 1)
            self._trace.close(self._loop)
            raise StopIteration
        self._trace.begin_iteration(self._loop, number)
        return self._make()


def site_of(frame: FrameType) -> tuple[Any, ...]:
    return (frame.f_code.co_filename, frame.f_lineno, loop_source.position(frame))


def _refuse(message: str, count: str, where: str) -> NoReturn:
    raise CompileError(f"{message}. Write `for i in wf.loop({count}):`", where=where)


def begin_range(value: Value) -> int:
    """`range(value)` was called, or something else that wants a number."""
    from genserve.t2i.model import Model
    from genserve.t2i.workflow import Workflow

    frame = user_frame()
    where = line_of(frame)
    name = value._ref.name if isinstance(value._ref, FromInput) else "n"
    if value.type != INT:
        raise CompileError(f"{value!r} is no whole number", where=where)
    try:
        loop = loop_source.ranged_for(frame)
    except loop_source.NoSource:
        _refuse("the source of this loop cannot be read", name, where)
    if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        _refuse("a generator's loop over a placeholder cannot be traced", name, where)
    if loop is None or loop.variable is None:
        _refuse(
            f"{value!r} is known only when a request runs; it can be used in `for i in range(...):` with "
            "nothing else in it",
            name,
            where,
        )

    def may_take_index(called: Any) -> bool:
        return isinstance(called, Model | Workflow) or called is print

    objection = loop_source.object_to_body(loop) or loop_source.object_to_index(loop, frame, may_take_index)
    if objection is not None:
        _refuse(objection.message, name, _line(frame, objection))
    trace = value._workflow._recording(value)
    record = LoopTrace(trace.visible(value._ref, repr(value)), Const(0), None, where, site_of(frame))
    record.frame, record.source_for = frame, loop
    trace.begin(record)
    return TRIAL


def _line(frame: FrameType, objection: loop_source.Objection) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{objection.line}"


def begin_items(value: Value) -> Iterator[Value]:
    """`for item in value:`."""
    frame = user_frame()
    where = line_of(frame)
    type_ = value.type
    if type_ is None or type_.kind != "list" or not isinstance(value._ref, FromInput):
        raise CompileError(
            f"{value!r} cannot be iterated over or unpacked; only workflow inputs that are lists can",
            where=where,
        )
    from genserve.t2i.graph import Length

    trace = value._workflow._recording(value)
    record = LoopTrace(Length(value._ref), Const(0), value._ref, where, site_of(frame))
    check_iterating(frame)

    def element() -> Value:
        return Value(value._workflow, Element(record), type_.item, f"element of {value._what}", where)

    return LoopRun(trace, record, element)


def check_iterating(frame: FrameType) -> None:
    """Raise `CompileError` unless the frame begins a `for` statement that can be traced."""
    try:
        loop = loop_source.iterating_for(frame)
    except loop_source.NoSource:
        return
    if loop is None:
        message = "only a `for` statement can go through a placeholder: no enumerate, zip, comprehension or the like"
        raise CompileError(message, where=line_of(frame))
    objection = loop_source.object_to_body(loop)
    if objection is not None:
        raise CompileError(objection.message, where=_line(frame, objection))


class SymbolicRange:
    """What `wf.loop(n)` gives: to be iterated over by one `for` statement."""

    def __init__(self, workflow: Workflow, count: Ref, first: Ref, where: str) -> None:
        self._workflow = workflow
        self._count = count
        self._first = first
        self._where = where

    def __iter__(self) -> Iterator[Value]:
        frame = user_frame()
        check_iterating(frame)
        record = LoopTrace(self._count, self._first, None, self._where, site_of(frame))
        return LoopRun(
            self._workflow._recording(None),
            record,
            lambda: Value(self._workflow, Index(record), INT, "index of the loop", self._where),
        )
