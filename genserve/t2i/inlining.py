"""A finished workflow's graph, recorded once more inside another workflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genserve.core.errors import CompileError
from genserve.t2i.graph import (
    Carried,
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
    walk,
)
from genserve.t2i.tracing import Call, LoopTrace, Record, Trace
from genserve.t2i.values import Carry, Count, Element, Final, Index, Items, Out, Ref


def inline(
    trace: Trace, graph: Graph, inputs: Mapping[str, Ref], where: str, site: tuple[Any, ...]
) -> list[Ref]:
    """Record `graph` with its inputs replaced; returns what its outputs are in the trace."""
    if any(patch.adapter is not None for node in walk(graph.nodes) for patch in node.patches):
        raise CompileError(f"workflow {graph.name!r} is compiled already; use what was written", where=where)
    copy = _Copy(graph, inputs, where, site)
    for item in graph.nodes:
        record = copy.record(item)
        trace.add(record)
    copy.fill(graph.nodes)
    return [copy.ref(output.edge) for output in graph.outputs]


class _Copy:
    def __init__(self, graph: Graph, inputs: Mapping[str, Ref], where: str, site: tuple[Any, ...]) -> None:
        self._prefix = graph.name
        self._inputs = inputs
        self._where = where
        self._site = site
        self._records: dict[str, Any] = {}

    def record(self, item: Node | Loop) -> Record:
        """A record without references: they may point to what comes later in a loop."""
        record: Record
        if isinstance(item, Node):
            record = Call(
                f"{self._prefix}/{item.id}",
                item.model,
                item.input_ports,
                item.output_ports,
                item.patches,
                {},
                f"{item.where} in {self._where}" if item.where else self._where,
                (*self._site, item.id),
            )
        else:
            record = LoopTrace(Const(0), Const(0), None, item.where or self._where, (*self._site, item.id))
            record.name = f"{self._prefix}/{item.id}"
            record.closed = True
            for inner in item.body:
                body_record = self.record(inner)
                body_record.owner = record
                record.body.append(body_record)
        self._records[item.id] = record
        return record

    def fill(self, items: tuple[Node | Loop, ...]) -> None:
        for item in items:
            record = self._records[item.id]
            if isinstance(item, Node):
                record.refs = {port: self.ref(edge) for port, edge in item.inputs}
                continue
            record.source = self._source(item)
            record.count, record.first = self.ref(item.count), self.ref(item.first)
            record.carried = {
                each.name: (None if each.first is None else self.ref(each.first), self.ref(each.next))
                for each in item.carried
            }
            self.fill(item.body)

    def _source(self, loop: Loop) -> FromInput | None:
        return self._list(loop.count.source) if isinstance(loop.count, Length) else None

    def _list(self, source: FromInput) -> FromInput:
        found = self._inputs[source.name]
        if not isinstance(found, FromInput):
            raise CompileError(
                f"workflow {self._prefix!r} loops over its input {source.name!r}; "
                "it must be given an input of the outer workflow",
                where=self._where,
            )
        return found

    def ref(self, edge: Edge) -> Ref:
        match edge:
            case FromInput(name):
                return self._inputs[name]
            case FromNode(node, port):
                return Out(self._records[node], port)
            case FromLoop(loop, name):
                return Final(self._records[loop], name)
            case Carried(loop, name):
                return Carry(self._records[loop], name)
            case LoopIndex(loop):
                return Index(self._records[loop])
            case LoopCount(loop):
                return Count(self._records[loop])
            case Item(_, loop):
                return Element(self._records[loop])
            case Length(source):
                return Length(self._list(source))
            case ListOf(items):
                return Items(tuple(self.ref(item) for item in items))
        assert isinstance(edge, Const)
        return edge
