"""From the recorded iterations of a loop to one body and the values it carries.

Iterations are compared call by call: same line, same model, same constants. What a call uses is then the same
in each (made outside, or in its own iteration), or the iteration's index, or carried: in the first iteration
something from outside, in each later one what its predecessor made. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genserve.core.errors import CompileError
from genserve.t2i.graph import Const
from genserve.t2i.tracing import TRIAL, Call, LoopTrace, Record, map_records
from genserve.t2i.values import After, Carry, Count, Element, Final, Index, Items, Out, Ref

_MIN_SAME = 3
"""Iterations that must agree before something counts as the loop's rule."""


class _Differs(Exception):
    pass


def roll(loop: LoopTrace) -> None:
    """Fill `body`, `carried` and `counterparts` of a closed loop. Raises `CompileError`."""
    iterations = loop.iterations
    if not any(iterations):
        raise CompileError(
            "no model is called in this loop, and what else it does would be done a fixed number of times",
            where=loop.where,
        )
    if len(iterations) != TRIAL or len({len(iteration) for iteration in iterations}) != 1:
        _refuse(loop, loop, "its iterations make different numbers of calls")
    loop.body = iterations[-1]
    for number, iteration in enumerate(iterations):
        for record, own in zip(iteration, loop.body, strict=True):
            _match(loop, number, record, own)
    for position, own in enumerate(loop.body):
        _resolve_record(loop, [iteration[position] for iteration in iterations], own)


def _refuse(loop: LoopTrace, record: Record, message: str) -> None:
    raise CompileError(
        f"in the loop at {loop.where}, {message}: a loop's body must be the same in each iteration. Give what "
        "depends on the step to a model, as in `for i in wf.loop(n): model(..., i)`",
        node=record.name if isinstance(record, Call) else "",
        where=record.where,
    )


def _match(loop: LoopTrace, number: int, record: Record, own: Record) -> None:
    """Note that `own` is the counterpart of `record`; refuse what is not the same call."""
    loop.counterparts[record] = (number, own)
    if isinstance(record, Call) and isinstance(own, Call):
        if record.site != own.site:
            _refuse(loop, record, f"a call of iteration {number} is another one than in the last")
        same = (record.spec, record.patches, tuple(record.refs)) == (own.spec, own.patches, tuple(own.refs))
        if not same:
            _refuse(loop, record, f"iteration {number} calls it with another model, patch or inputs")
        return
    if not isinstance(record, LoopTrace) or not isinstance(own, LoopTrace):
        _refuse(loop, record, f"a call of iteration {number} is another one than in the last")
        return
    shape = [
        (each.site, each.source, len(each.body), [(n, v[0] is None) for n, v in each.carried.items()])
        for each in (record, own)
    ]
    if shape[0] != shape[1]:
        _refuse(loop, record, f"the inner loop of iteration {number} is another one than in the last")
    for inner, inner_own in zip(record.body, own.body, strict=True):
        _match(loop, number, inner, inner_own)


def _resolve_record(loop: LoopTrace, records: Sequence[Any], own: Record) -> None:
    """Make every reference of `own` one that holds in all iterations."""

    def resolved(refs: list[Ref], what: str) -> Ref:
        try:
            return _Resolver(loop).resolve(refs)
        except _Differs:
            _refuse(loop, own, f"{what} follows no rule over the first {TRIAL} iterations")
            raise

    if isinstance(own, Call):
        own.refs = {
            port: resolved([record.refs[port] for record in records], f"input {port!r} of {own.name}")
            for port in own.refs
        }
        return
    own.count = resolved([record.count for record in records], "the number of iterations of an inner loop")
    own.first = resolved([record.first for record in records], "the first iteration of an inner loop")
    for name, (first, _) in list(own.carried.items()):
        firsts = [record.carried[name][0] for record in records]
        nexts = [record.carried[name][1] for record in records]
        own.carried[name] = (
            None if first is None else resolved(firsts, f"what an inner loop begins {name!r} with"),
            resolved(nexts, f"what an inner loop hands on as {name!r}"),
        )
    for position, inner in enumerate(own.body):
        _resolve_record(loop, [record.body[position] for record in records], inner)


class _Resolver:
    """References of successive iterations, `refs[j]` as iteration j has it, as one reference of the body."""

    def __init__(self, loop: LoopTrace) -> None:
        self._loop = loop

    def resolve(self, refs: Sequence[Ref]) -> Ref:
        is_range = self._loop.source_for is not None  # others give symbolic indexes
        if is_range and all(
            isinstance(r, Const) and type(r.value) is int and r.value == j for j, r in enumerate(refs)
        ):
            return Index(self._loop)
        try:
            return self._same(refs)
        except _Differs:
            if len(refs) <= _MIN_SAME or self._is_inside(refs[0]):
                raise
            return Carry(self._loop, self._loop.carry(refs[0], self.resolve(refs[1:])))

    def _same(self, refs: Sequence[Any]) -> Ref:
        head = refs[0]
        if any(type(ref) is not type(head) for ref in refs):
            raise _Differs
        match head:
            case Out():
                self._equal([ref.port for ref in refs])
                return Out(self._record([ref.call for ref in refs]), head.port)
            case After():
                inner = self._same([ref.ref for ref in refs])
                return After(self._record([ref.loop for ref in refs]), inner)
            case Carry() | Final():
                self._equal([ref.name for ref in refs])
                return type(head)(self._record([ref.loop for ref in refs]), head.name)
            case Index() | Count() | Element():
                return type(head)(self._record([ref.loop for ref in refs]))
            case Items():
                self._equal([len(ref.items) for ref in refs])
                return Items(tuple(map(self.resolve, zip(*(ref.items for ref in refs), strict=True))))
            case Const():
                self._equal([repr(ref.value) for ref in refs])  # True is no 1, 1 no 1.0
                return head
        self._equal(refs)
        return head

    def _equal(self, values: Sequence[Any]) -> None:
        if any(value != values[0] for value in values):
            raise _Differs

    def _record(self, records: Sequence[Record]) -> Any:
        """The same record outside the loop, or each iteration's own."""
        known = [self._loop.counterparts.get(record) for record in records]
        if known[0] is None:
            self._equal(records)
            return records[0]
        for number, found in enumerate(known):
            if found is None or found[0] != number or found[1] is not known[0][1]:
                raise _Differs
        return known[0][1]

    def _is_inside(self, ref: Ref) -> bool:
        found = False

        def look(record: Record) -> Record:
            nonlocal found
            found = found or record in self._loop.counterparts
            return record

        map_records(ref, look)
        return found
