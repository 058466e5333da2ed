"""A graph run as plainly as can be: one node after the other, in this thread, with no runtime.

What passes and the runtime are measured against. Must not know either of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from genserve.core.errors import InvalidRequest
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
    ModelSpec,
    Node,
)
from genserve.t2i.model import Model, model_class
from genserve.t2i.ports import REQUIRED

Components = dict[str, Any]
Adapter = tuple[Any, float]
"""The outputs of the node that loads it, and its scale."""
ApplyPatches = Callable[[Components, Sequence[Adapter]], contextlib.AbstractContextManager[Components]]


@dataclass
class Evaluation:
    """What a run has done, besides its result: for tests that count."""

    outputs: dict[str, Any] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)
    """By node id."""


def evaluate(
    graph: Graph,
    inputs: Mapping[str, Any],
    *,
    device: str = "cpu",
    loaded: dict[tuple[Any, ...], Components] | None = None,
    apply_patches: ApplyPatches | None = None,
) -> dict[str, Any]:
    """The workflow's outputs by name. Images are what nodes of `device` take: uint8 tensors.

    `loaded` keeps components from run to run. `apply_patches(components, adapters)` is a context within which a
    node with adapters runs; without it, adapters have no effect.
    """
    return run(graph, inputs, device=device, loaded=loaded, apply_patches=apply_patches).outputs


def run(
    graph: Graph,
    inputs: Mapping[str, Any],
    *,
    device: str = "cpu",
    loaded: dict[tuple[Any, ...], Components] | None = None,
    apply_patches: ApplyPatches | None = None,
) -> Evaluation:
    """As `evaluate`, with the number of calls of each node."""
    given = {}
    for each in graph.inputs:
        if each.name not in inputs and each.default is REQUIRED:
            raise InvalidRequest(each.name, "missing")
        given[each.name] = inputs.get(each.name, each.default)
    for name in inputs:
        if name not in given:
            raise InvalidRequest(name, f"no such input; there are: {', '.join(given)}")
    interpreter = _Interpreter(given, device, {} if loaded is None else loaded, apply_patches)
    interpreter.items(graph.nodes)
    done = interpreter.done
    done.outputs = {output.name: interpreter.value(output.edge) for output in graph.outputs}
    return done


class _Interpreter:
    def __init__(
        self,
        inputs: Mapping[str, Any],
        device: str,
        loaded: dict[tuple[Any, ...], Components],
        apply_patches: ApplyPatches | None,
    ) -> None:
        self.done = Evaluation()
        self._inputs = inputs
        self._device = device
        self._loaded = loaded
        self._apply_patches = apply_patches
        self._models: dict[str, Model] = {}
        self._nodes: dict[str, Mapping[str, Any]] = {}
        self._results: dict[str, dict[str, Any]] = {}
        self._carried: dict[str, dict[str, Any]] = {}
        self._index: dict[str, int] = {}
        self._count: dict[str, int] = {}

    def items(self, items: Sequence[Node | Loop]) -> None:
        for item in items:
            if isinstance(item, Node):
                self._node(item)
            else:
                self._loop(item)

    def _node(self, node: Node) -> None:
        model = self._models.get(node.id)
        if model is None:
            model = self._models[node.id] = make_model(node.model)
        path = model.location
        key = (*map(repr, model.loading(model.params)), path)
        if key not in self._loaded:
            self._loaded[key] = model.load(path, self._device)
        inputs = {port: self.value(edge) for port, edge in node.inputs}
        adapters = [
            (self._nodes[patch.adapter.node], patch.scale)
            for patch in node.patches
            if isinstance(patch.adapter, FromNode)
        ]
        components = self._loaded[key]
        with contextlib.ExitStack() as stack:
            if adapters and self._apply_patches is not None:
                components = stack.enter_context(self._apply_patches(components, adapters))
            outputs = model.execute(components, **inputs)
        missing = {port.name for port in node.output_ports} ^ set(outputs)
        if missing:
            raise TypeError(f"{node.id} returned {sorted(outputs)}; missing or too many: {sorted(missing)}")
        self._nodes[node.id] = outputs
        self.done.num_calls[node.id] = self.done.num_calls.get(node.id, 0) + 1

    def _loop(self, loop: Loop) -> None:
        first, count = self.value(loop.first), self.value(loop.count)
        values = {each.name: None if each.first is None else self.value(each.first) for each in loop.carried}
        if first >= count and any(each.first is None for each in loop.carried):
            raise InvalidRequest(loop.id, "must run at least once")
        self._count[loop.id] = count
        for index in range(first, count):
            self._index[loop.id] = index
            self._carried[loop.id] = values
            self.items(loop.body)
            values = {each.name: self.value(each.next) for each in loop.carried}
        self._results[loop.id] = values

    def value(self, edge: Edge) -> Any:
        match edge:
            case Const(value):
                return value
            case FromInput(name):
                return self._inputs[name]
            case FromNode(node, port):
                return self._nodes[node][port]
            case FromLoop(loop, name):
                return self._results[loop][name]
            case Carried(loop, name):
                return self._carried[loop][name]
            case LoopIndex(loop):
                return self._index[loop]
            case LoopCount(loop):
                return self._count[loop]
            case Item(source, loop):
                return self._inputs[source.name][self._index[loop]]
            case Length(source):
                return len(self._inputs[source.name])
            case ListOf(items):
                return [self.value(item) for item in items]


def make_model(spec: ModelSpec) -> Model:
    """A fresh instance of the model, not loaded."""
    model: Model = model_class(spec.cls)(**dict(spec.params))
    return model
