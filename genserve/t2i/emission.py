"""From a workflow's records to its graph: names for nodes and loops, and references as edges.

Records come in the order in which they were made, which is topological.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from genserve.t2i.graph import (
    Carried,
    CarriedValue,
    Const,
    Edge,
    FromInput,
    FromLoop,
    FromNode,
    Graph,
    Item,
    Length,
    ListOf,
    Loop,
    LoopCount,
    LoopIndex,
    Node,
    WorkflowInput,
    WorkflowOutput,
)
from genserve.t2i.ports import PortType
from genserve.t2i.tracing import Call, LoopTrace, Record
from genserve.t2i.values import After, Carry, Count, Element, Final, Index, Items, Out, Ref


def emit(
    name: str,
    inputs: Mapping[str, WorkflowInput],
    outputs: Mapping[str, tuple[Ref, PortType]],
    records: Sequence[Record],
) -> Graph:
    emitter = _Emitter(records)
    for ref, _ in outputs.values():
        emitter.want(ref)
    return Graph(
        name,
        tuple(inputs.values()),
        emitter.items(records),
        tuple(WorkflowOutput(out, type_, emitter.edge(ref)) for out, (ref, type_) in outputs.items()),
    )


class _Emitter:
    def __init__(self, records: Sequence[Record]) -> None:
        self._ids: dict[Record, str] = {}
        self._counts: dict[str, int] = {}
        self._name(records)
        self._want_all(records)

    def _name(self, records: Sequence[Record]) -> None:
        for record in records:
            number = self._counts[record.name] = self._counts.get(record.name, 0) + 1
            self._ids[record] = record.name if number == 1 else f"{record.name}_{number}"
            if isinstance(record, LoopTrace):
                self._name(record.body)

    def _want_all(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, Call):
                for ref in record.refs.values():
                    self.want(ref)
                continue
            self.want(record.count)
            self.want(record.first)
            for first, next_ in list(record.carried.values()):
                if first is not None:
                    self.want(first)
                self.want(next_)
            self._want_all(record.body)

    def want(self, ref: Ref) -> None:
        """See to it that loops hand out what `ref` takes from them."""
        if isinstance(ref, After):
            ref.loop.result(ref.ref)
            self.want(ref.ref)
        elif isinstance(ref, Items):
            for item in ref.items:
                self.want(item)

    def items(self, records: Sequence[Record]) -> tuple[Node | Loop, ...]:
        return tuple(
            self._node(record) if isinstance(record, Call) else self._loop(record) for record in records
        )

    def _node(self, call: Call) -> Node:
        return Node(
            self._ids[call],
            call.spec,
            tuple((port, self.edge(ref)) for port, ref in call.refs.items()),
            call.input_ports,
            call.output_ports,
            call.where,
            call.patches,
        )

    def _loop(self, loop: LoopTrace) -> Loop:
        return Loop(
            self._ids[loop],
            self.edge(loop.count),
            tuple(
                CarriedValue(name, None if first is None else self.edge(first), self.edge(next_))
                for name, (first, next_) in loop.carried.items()
            ),
            self.items(loop.body),
            loop.where,
            self.edge(loop.first),
        )

    def edge(self, ref: Ref) -> Edge:
        match ref:
            case Const() | FromInput() | Length():
                return ref
            case Out(call, port):
                return FromNode(self._ids[call], port)
            case After(loop, inner):
                return FromLoop(self._ids[loop], loop.result(inner))
            case Final(loop, name):
                return FromLoop(self._ids[loop], name)
            case Carry(loop, name):
                return Carried(self._ids[loop], name)
            case Index(loop):
                return LoopIndex(self._ids[loop])
            case Count(loop):
                return LoopCount(self._ids[loop])
            case Element(loop):
                assert loop.source is not None
                return Item(loop.source, self._ids[loop])
            case Items(items):
                return ListOf(tuple(self.edge(item) for item in items))
