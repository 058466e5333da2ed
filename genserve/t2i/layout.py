"""Where the boxes of a picture of a graph are: layers from top to bottom, loops as boxes with layers of their own.

Units are points; y grows downwards. Owns geometry only; `draw` paints it. A loop's picture has on its upper edge what
enters an iteration (carried values, and values from outside), on its lower edge what it hands on; so every wire
joins two boxes of one level.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise

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
    leaves,
)

Key = Hashable
_GAP_X, _GAP_Y, _PAD = 18.0, 30.0, 12.0
_TITLE, _LINE = 13.0, 10.0


@dataclass(eq=False)
class Box:
    """`kind`: node, loop, pill (a value from outside), carried (one that iterations hand on), output, bend (of a wire)."""

    kind: str
    title: str = ""
    lines: list[tuple[str, str]] = field(default_factory=list)
    """(kind, text): "input", "constant", "index" or "patch"."""
    inner: Level | None = None
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    layer: int = 0

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


@dataclass(eq=False)
class Wire:
    """From one box to another one of its level, `bends` between them. `kind`: value, deferred or patch."""

    source: Box
    target: Box
    kind: str = "value"
    source_pill: Key | None = None
    target_pill: Key | None = None
    bends: list[Box] = field(default_factory=list)
    start: float = 0.0
    stop: float = 0.0
    """Where it leaves and arrives, across."""


class Level:
    """The boxes and wires of one level: the graph's, or those of a loop's body."""

    def __init__(self, loop: Loop | None) -> None:
        self.loop = loop
        self.boxes: dict[Key, Box] = {}
        self.wires: list[Wire] = []
        self.width = self.height = 0.0

    def items(self, items: tuple[Node | Loop, ...]) -> None:
        for item in items:
            if isinstance(item, Loop):
                self._loop_box(item)
            else:
                self._node_box(item)

    def _node_box(self, node: Node) -> None:
        box = self.boxes[node.id] = Box("node", node.id)
        lazy = {port.name for port in node.input_ports if port.deferred}
        defaults = {port.name: port.default for port in node.input_ports}
        for port, edge in node.inputs:
            if isinstance(edge, Const) and edge.value == defaults[port]:
                continue
            for leaf in leaves(edge):
                if not self._wire(leaf, box, "deferred" if port in lazy else "value"):
                    box.lines.append(_line(port, leaf))
        for patch in node.patches:
            if patch.adapter is not None:
                self._wire(patch.adapter, box, "patch")
            path = str(dict(patch.model.params).get("model_path", patch.model.cls))
            box.lines.append(("patch", f"+ {path.rpartition('/')[2]} x {patch.scale:g}"))

    def _loop_box(self, loop: Loop) -> None:
        inner = Level(loop)
        title = f"{loop.id}:  i from {short(loop.first)} to {short(loop.count)} - 1"
        if isinstance(loop.count, Length):
            title = f"{loop.id}:  each of {loop.count.source.name}"
        box = self.boxes[loop.id] = Box("loop", title, inner=inner)
        for carried in loop.carried:
            if carried.first is not None:
                inner.boxes["in", carried.name] = Box("carried", carried.name)
                for leaf in leaves(carried.first):
                    if not self._wire(leaf, box, "value", ("in", carried.name)):
                        inner.boxes["in", carried.name].title = f"{carried.name} = {short(leaf)}"
        inner.items(loop.body)
        for carried in loop.carried:
            out = inner.boxes["out", carried.name] = Box("carried", carried.name)
            for leaf in leaves(carried.next):
                if not inner._wire(leaf, out, "value"):
                    out.title = f"{carried.name} = {short(leaf)}"
        for edge in (loop.first, loop.count):
            self._wire(edge, box, "value")
        for key in list(inner.boxes):
            if isinstance(key, tuple) and key[0] == "outside":
                self._wire(key[1], box, "value", key)

    def _wire(self, edge: Edge, target: Box, kind: str, pill: Key | None = None) -> bool:
        """Draw the edge as a wire; False if it is none, but small text."""
        if isinstance(edge, Const | FromInput | LoopIndex | LoopCount | Item | Length | ListOf):
            return False
        source, source_pill = self._source(edge)
        same = any(
            (wire.source, wire.target, wire.source_pill, wire.target_pill)
            == (source, target, source_pill, pill)
            for wire in self.wires
        )
        if not same:
            self.wires.append(Wire(source, target, kind, source_pill, pill))
        return True

    def _source(self, edge: FromNode | FromLoop | Carried) -> tuple[Box, Key | None]:
        if isinstance(edge, FromNode) and edge.node in self.boxes:
            return self.boxes[edge.node], None
        if isinstance(edge, FromLoop) and edge.loop in self.boxes:
            return self.boxes[edge.loop], ("out", edge.name)
        if isinstance(edge, Carried) and self.loop is not None and edge.loop == self.loop.id:
            return self.boxes["in", edge.name], None
        key = ("outside", edge)
        if key not in self.boxes:
            name = edge.port if isinstance(edge, FromNode) else edge.name
            self.boxes[key] = Box("pill", name)
        return self.boxes[key], None

    def place(self) -> None:
        """Give every box its place, relative to the level."""
        for box in self.boxes.values():
            _size(box)
        layers = self._layers()
        self._bend(layers)
        for _ in range(4):
            self._order(layers, down=True)
            self._order(layers, down=False)
        y = _PAD
        for layer in layers:
            _spread(layer, [0.0] * len(layer))
        for _ in range(3):
            for layer in (*layers, *reversed(layers)):
                _spread(layer, [self._pull(box) for box in layer])
        for layer in layers:
            height = max(box.height for box in layer)
            for box in layer:
                if box.kind == "bend":
                    box.height = height
                box.y = y + (height - box.height) / 2
            y += height + _GAP_Y
        left = min((box.x for layer in layers for box in layer), default=0.0)
        for layer in layers:
            for box in layer:
                box.x += _PAD - left
        self.width = max((box.x + box.width for layer in layers for box in layer), default=0.0) + _PAD
        self.height = y - _GAP_Y + _PAD
        self._attach()

    def _attach(self) -> None:
        """Wires of one box leave and arrive side by side."""
        for box in self.boxes.values():
            leaving = [wire for wire in self.wires if wire.source is box]
            arriving = [wire for wire in self.wires if wire.target is box]
            for wires, own, way in (
                (leaving, "start", lambda wire: [*wire.bends, wire.target][0]),
                (arriving, "stop", lambda wire: [wire.source, *wire.bends][-1]),
            ):
                wires.sort(key=lambda wire: way(wire).middle)
                for number, wire in enumerate(wires):
                    step = min(10.0, box.width * 0.7 / len(wires))
                    setattr(wire, own, box.middle + (number - (len(wires) - 1) / 2) * step)
        for wire in self.wires:
            for own, box, pill in (
                ("start", wire.source, wire.source_pill),
                ("stop", wire.target, wire.target_pill),
            ):
                if pill is not None:
                    setattr(wire, own, _across(box, pill))

    def _layers(self) -> list[list[Box]]:
        before: dict[Box, list[Box]] = {box: [] for box in self.boxes.values()}
        for wire in self.wires:
            before[wire.target].append(wire.source)
        last: list[Box] = []
        for (
            key,
            box,
        ) in self.boxes.items():  # the order is topological, but for pills that were asked for later
            if isinstance(key, tuple) and key[0] in ("in", "outside"):
                box.layer = 0
        has_pills = any(isinstance(key, tuple) and key[0] in ("in", "outside") for key in self.boxes)
        for key, box in self.boxes.items():
            if isinstance(key, tuple) and key[0] in ("in", "outside"):
                continue
            box.layer = max([each.layer + 1 for each in before[box]], default=int(has_pills))
            if isinstance(key, tuple) and key[0] == "out":
                last.append(box)
        depth = max((box.layer for box in self.boxes.values() if box not in last), default=0)
        for box in last:
            box.layer = depth + 1
        self._sink(before)
        layers: list[list[Box]] = [[] for _ in range(max(box.layer for box in self.boxes.values()) + 1)]
        for box in self.boxes.values():
            layers[box.layer].append(box)
        return [layer for layer in layers if layer]

    def _sink(self, before: dict[Box, list[Box]]) -> None:
        """Boxes that wait for nothing go down to just above their first user: shorter wires."""
        for box in self.boxes.values():
            if not before[box] and box.kind not in ("pill", "carried"):
                users = [wire.target.layer for wire in self.wires if wire.source is box]
                box.layer = max(min(users, default=1) - 1, box.layer)

    def _bend(self, layers: list[list[Box]]) -> None:
        number = {id(box): index for index, layer in enumerate(layers) for box in layer}
        for wire in self.wires:
            for index in range(number[id(wire.source)] + 1, number[id(wire.target)]):
                bend = Box("bend", width=6.0, height=1.0)
                layers[index].append(bend)
                wire.bends.append(bend)

    def _steps(self) -> list[tuple[tuple[Box, Key | None], tuple[Box, Key | None]]]:
        """The parts of all wires: pairs of boxes, each with the value of a loop that is meant."""
        found = []
        for wire in self.wires:
            bends: list[tuple[Box, Key | None]] = [(bend, None) for bend in wire.bends]
            way = [(wire.source, wire.source_pill), *bends, (wire.target, wire.target_pill)]
            found += list(pairwise(way))
        return found

    def _order(self, layers: list[list[Box]], down: bool) -> None:
        places = {id(box): index / max(len(layer), 1) for layer in layers for index, box in enumerate(layer)}
        near: dict[int, list[float]] = {}
        for source, target in self._steps():
            (here, _), (there, pill) = (target, source) if down else (source, target)
            size = next(len(layer) for layer in layers if there in layer)
            within = 0.0 if pill is None else (_across(there, pill) - there.x) / there.width / size
            near.setdefault(id(here), []).append(places[id(there)] + within)
        for layer in layers:
            layer.sort(
                key=lambda box: (
                    sum(near[id(box)]) / len(near[id(box)]) if id(box) in near else places[id(box)]
                )
            )

    def _pull(self, box: Box) -> float:
        """The middle that its wires would like it to have."""
        others = [
            _across(*other)
            for source, target in self._steps()
            for mine, other in ((source, target), (target, source))
            if mine[0] is box
        ]
        return sum(others) / len(others) if others else box.middle


def _across(box: Box, pill: Key | None) -> float:
    """Where a wire meets a box, or a value on the edge of a loop."""
    if pill is None or box.inner is None or pill not in box.inner.boxes:
        return box.middle
    return box.x + (box.width - box.inner.width) / 2 + box.inner.boxes[pill].middle


def _spread(layer: list[Box], wishes: list[float]) -> None:
    """Place boxes of one layer in their order near the middles they wish for, without overlap."""
    x = None
    for box, wish in zip(layer, wishes, strict=True):
        box.x = wish - box.width / 2 if x is None else max(x, wish - box.width / 2)
        x = box.x + box.width + _GAP_X
    shift = sum(wish - box.middle for box, wish in zip(layer, wishes, strict=True)) / max(len(layer), 1)
    for box in layer:
        box.x += shift


def _size(box: Box) -> None:
    if box.kind == "bend":
        return
    if box.inner is not None:
        box.inner.place()
        box.width = max(box.inner.width, 5.2 * len(box.title) + 2 * _PAD)
        box.height = box.inner.height + _TITLE
        return
    widths = [5.2 * len(box.title), *(4.5 * len(text) for _, text in box.lines)]
    box.width = max(widths) + 2 * (8.0 if box.kind in ("pill", "carried") else 10.0)
    box.height = (_TITLE if box.kind in ("pill", "carried") else _TITLE + 8.0) + _LINE * len(box.lines)


def _line(port: str, edge: Edge) -> tuple[str, str]:
    if isinstance(edge, LoopIndex | LoopCount):
        return "index", f"{port} = {short(edge)}"
    if isinstance(edge, FromInput | Item | Length):
        text = short(edge)
        return "input", text if text == port else f"{port} = {text}"
    return "constant", f"{port} = {short(edge)}"


def short(edge: Edge) -> str:
    """An edge in a few letters."""
    match edge:
        case Const(value):
            text = repr(value)
            return text if len(text) <= 24 else f"{text[:21]}..."
        case FromInput(name):
            return name
        case FromNode(node, port):
            return f"{node}.{port}"
        case FromLoop(loop, name) | Carried(loop, name):
            return f"{loop}.{name}"
        case LoopIndex():
            return "i"
        case LoopCount():
            return "iterations"
        case Item(source, _):
            return f"each of {source.name}"
        case Length(source):
            return f"length of {source.name}"
        case ListOf(items):
            return f"[{', '.join(map(short, items))}]"


def laid_out(graph: Graph) -> Level:
    """The graph's boxes, placed."""
    level = Level(None)
    level.items(graph.nodes)
    for output in graph.outputs:
        box = level.boxes["output", output.name] = Box("output", output.name)
        for leaf in leaves(output.edge):
            if not level._wire(leaf, box, "value"):
                box.lines.append(_line(output.name, leaf))
    level.place()
    return level
