"""Whether a graph holds together: run on every graph that is written, read from JSON, or left by a pass.

Owns the rules: ids are unique, everything used exists, is made before, and may be seen from where it is used;
types, dtypes, shapes and absences fit. Must not know how a graph came about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from genserve.core.errors import CompileError
from genserve.t2i.binding import unknown
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
    edges,
    leaves,
    walk_all,
)
from genserve.t2i.ports import INT, REQUIRED, PortType
from genserve.t2i.typecheck import (
    Mismatch,
    Sizes,
    common,
    constant_type,
    describe,
    fit,
    fit_constant,
    is_json,
    produced,
)


def verify(graph: Graph) -> None:
    """Raise `CompileError` unless the graph can be run."""
    _check_names(graph)
    _Scope(graph).check()


def check_unused(graph: Graph) -> None:
    """Raise `CompileError` if an input of the workflow is used nowhere."""
    used = {name for item in graph.nodes for edge in edges(item) if (name := _input_of(edge))}
    used |= {name for each in graph.outputs for edge in leaves(each.edge) if (name := _input_of(edge))}
    for each in graph.inputs:
        if each.name not in used:
            raise CompileError(f"input {each.name!r} is not used", where=each.where)


def _input_of(edge: Edge) -> str | None:
    if isinstance(edge, FromInput):
        return edge.name
    return edge.source.name if isinstance(edge, Item | Length) else None


def _check_names(graph: Graph) -> None:
    seen: set[str] = set()
    for item in walk_all(graph.nodes):
        if item.id in seen:
            raise CompileError("two nodes or loops have this id", node=item.id, where=item.where)
        seen.add(item.id)
    for what, names in (
        ("input", [each.name for each in graph.inputs]),
        ("output", [each.name for each in graph.outputs]),
    ):
        for name in names:
            if names.count(name) > 1:
                raise CompileError(f"{what} {name!r} is declared twice")
    if not graph.outputs:
        raise CompileError(f"workflow {graph.name!r} has no output")


@dataclass(slots=True)
class _Level:
    """What can be seen at one depth: of the graph, or of a loop's body."""

    loop: Loop | None = None
    nodes: dict[str, dict[str, PortType | None]] = field(default_factory=dict)
    """Types of the outputs of the nodes so far."""
    loops: dict[str, dict[str, PortType | None]] = field(default_factory=dict)
    """Types of the results of the loops so far."""
    carried: dict[str, PortType | None] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    """Carried names that are None in the first iteration."""


class _Scope:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._inputs = {each.name: each for each in graph.inputs}
        self._levels = [_Level()]
        self._homes = dict(_homes(graph.nodes, ""))

    def check(self) -> None:
        for each in self._graph.inputs:
            if each.default is not REQUIRED and each.default is not None:
                try:
                    fit_constant(each.default, each.type)
                except Mismatch as error:
                    raise CompileError(
                        f"input {each.name!r}: its default {error}", where=each.where
                    ) from error
        self._items(self._graph.nodes)
        for output in self._graph.outputs:
            found = self._type(output.edge, f"output {output.name}", "", "")
            try:
                if found is not None:
                    fit(found, output.type, {})
            except Mismatch as error:
                raise CompileError(f"output {output.name!r} {error}") from error

    def _items(self, items: Sequence[Node | Loop]) -> None:
        for item in items:
            if isinstance(item, Node):
                self._node(item)
            else:
                self._loop(item)

    def _node(self, node: Node) -> None:
        given = dict(node.inputs)
        known = [port.name for port in node.input_ports]
        for name in given:
            if name not in known:
                raise CompileError(unknown("input", name, known), node=node.id, port=name, where=node.where)
        if len(given) != len(node.inputs):
            raise CompileError("an input is given twice", node=node.id, where=node.where)
        sizes: Sizes = {}
        for port in node.input_ports:
            if port.name not in given:
                raise CompileError("missing input", node=node.id, port=port.name, where=node.where)
            edge = given[port.name]
            found = self._type(edge, node.id, port.name, node.where)
            try:
                if self._may_be_absent(edge) and port.default is not None:
                    raise Mismatch("is not optional, and may get None")
                if isinstance(edge, Const):
                    if edge.value is not None:
                        fit_constant(edge.value, port.type)
                elif found is not None:
                    fit(found, port.type, sizes)
            except Mismatch as error:
                raise CompileError(str(error), node=node.id, port=port.name, where=node.where) from error
        for patch in node.patches:
            if patch.adapter is not None:
                self._type(patch.adapter, node.id, "patch", node.where)
        self._levels[-1].nodes[node.id] = {port.name: produced(port, sizes) for port in node.output_ports}

    def _loop(self, loop: Loop) -> None:
        for name, edge in (("count", loop.count), ("first", loop.first)):
            found = self._type(edge, loop.id, name, loop.where)
            try:
                if isinstance(edge, Const):
                    fit_constant(edge.value, INT)
                elif found is not None:
                    fit(found, INT, {})
            except Mismatch as error:
                raise CompileError(str(error), node=loop.id, port=name, where=loop.where) from error
        if not loop.body:
            raise CompileError("a loop without a body", node=loop.id, where=loop.where)
        names = [each.name for each in loop.carried]
        if len(set(names)) != len(names):
            raise CompileError("a name is carried twice", node=loop.id, where=loop.where)
        level = _Level(loop)
        for carried in loop.carried:
            if carried.first is not None:
                level.carried[carried.name] = self._type(carried.first, loop.id, carried.name, loop.where)
                if self._may_be_absent(carried.first):
                    level.absent.add(carried.name)
        # Twice: only the first pass tells what the body hands on, which the second meets as carried values.
        nexts: dict[str, PortType | None] = {}
        for _ in range(2):
            self._levels.append(level)
            self._items(loop.body)
            nexts = {
                each.name: self._type(each.next, loop.id, each.name, loop.where) for each in loop.carried
            }
            self._levels.pop()
            try:
                met = {name: common((level.carried.get(name), type_)) for name, type_ in nexts.items()}
            except Mismatch as error:
                raise CompileError(
                    f"a value is replaced by one of another type: {error}", node=loop.id, where=loop.where
                ) from error
            level = _Level(
                loop, carried={name: met[name] for name in level.carried}, absent=set(level.absent)
            )
        self._levels[-1].loops[loop.id] = {
            each.name: nexts[each.name] if each.first is None else met[each.name] for each in loop.carried
        }

    def _may_be_absent(self, edge: Edge) -> bool:
        if isinstance(edge, Const):
            return edge.value is None
        if isinstance(edge, FromInput):
            return self._inputs[edge.name].default is None
        if isinstance(edge, Carried):
            return any(edge.name in each.absent for each in self._levels if _is(each.loop, edge.loop))
        return False

    def _type(self, edge: Edge, node: str, port: str, where: str) -> PortType | None:
        """The type of an edge as seen from the innermost level; None for "absent" or unknown."""

        def fail(message: str) -> CompileError:
            return CompileError(message, node=node, port=port, where=where)

        match edge:
            case Const(value):
                if not is_json(value):
                    raise fail(f"{value!r} is no constant that JSON can say")
                return constant_type(value)
            case FromInput(name):
                if name not in self._inputs:
                    raise fail(unknown("workflow input", name, list(self._inputs)))
                return self._inputs[name].type
            case FromNode(source, name):
                outputs = self._seen(source, "nodes", node, fail)
                if name not in outputs:
                    raise fail(unknown(f"output of {source}", name, list(outputs)))
                return outputs[name]
            case FromLoop(source, name):
                outputs = self._seen(source, "loops", node, fail)
                if name not in outputs:
                    raise fail(unknown(f"result of {source}", name, list(outputs)))
                return outputs[name]
            case Carried(source, name):
                level = self._around(source, fail)
                if name not in level.carried:
                    raise fail(unknown(f"value carried by {source}", name, list(level.carried)))
                return level.carried[name]
            case LoopIndex(source) | LoopCount(source):
                self._around(source, fail)
                return INT
            case Item(list_, source):
                level = self._around(source, fail)
                assert level.loop is not None
                if level.loop.count != Length(list_):
                    raise fail(f"loop {source!r} does not run over input {list_.name!r}")
                return self._list(list_, fail).item
            case Length(list_):
                self._list(list_, fail)
                return INT
            case ListOf(items):
                try:
                    item = common(self._type(each, node, port, where) for each in items)
                except Mismatch as error:
                    raise fail(str(error)) from error
                return None if item is None else PortType("list", item=item, length=len(items))
        raise fail(f"{edge!r} is no edge")

    def _list(self, source: FromInput, fail: object) -> PortType:
        found = self._inputs.get(source.name)
        if found is None or found.type.kind != "list":
            raise fail(  # type: ignore[operator]
                f"input {source.name!r} is no list: {describe(found.type if found else None)}"
            )
        return found.type

    def _around(self, loop: str, fail: object) -> _Level:
        for level in self._levels:
            if _is(level.loop, loop):
                return level
        raise fail(f"loop {loop!r} is not around it")  # type: ignore[operator]

    def _seen(self, source: str, what: str, user: str, fail: object) -> Mapping[str, PortType | None]:
        for level in self._levels:
            found = getattr(level, what).get(source)
            if found is not None:
                return found  # type: ignore[no-any-return]
        if source not in self._homes:
            message = f"no node or loop {source!r}"
        elif cycle := _cycle(self._graph, user, source):
            message = f"a cycle: {' -> '.join(cycle)}"
        elif any(_is(level.loop, self._homes[source]) for level in self._levels) or not self._homes[source]:
            message = f"uses {source!r}, which comes after it"
        else:
            message = (
                f"uses {source!r}, which is inside loop {self._homes[source]!r}: only its results can be used"
            )
        raise fail(message)  # type: ignore[operator]


def _is(loop: Loop | None, id_: str) -> bool:
    return loop is not None and loop.id == id_


def _homes(items: Sequence[Node | Loop], home: str) -> Iterator[tuple[str, str]]:
    """(id, id of the loop around it) of every node and loop."""
    for item in items:
        yield item.id, home
        if isinstance(item, Loop):
            yield from _homes(item.body, item.id)


def _cycle(graph: Graph, user: str, source: str) -> list[str]:
    """The way from `user` over `source` back to `user`, each using the next; empty if there is none."""
    uses: dict[str, set[str]] = {}
    for item in walk_all(graph.nodes):
        found = (
            edge.node if isinstance(edge, FromNode) else edge.loop
            for edge in edges(item)
            if isinstance(edge, FromNode | FromLoop)
        )
        uses[item.id] = set(found)
    seen: set[str] = set()

    def search(at: str) -> list[str]:
        if at == user:
            return [at]
        if at in seen:
            return []
        seen.add(at)
        for following in sorted(uses.get(at, ())):
            rest = search(following)
            if rest:
                return [at, *rest]
        return []

    way = search(source)
    return [user, *way] if way else []
