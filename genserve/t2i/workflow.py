"""`Workflow`: what an author writes a text-to-image workflow with (LegoDiffusion §4.1, Figure 7).

    wf = Workflow("two_steps")
    prompt = wf.add_input("prompt", str)
    latents = sampler(prompt)
    for i in wf.loop(2):
        latents = denoise(latents, i)
    wf.add_output(decode(latents), "image")

Making a workflow opens its scope: calls of models are recorded in the newest one, or in that of the enclosing
`with`. Owns the scope and the author's calls; the graph is put together in `emission`, loops in `tracing`.
"""

from __future__ import annotations

import keyword
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from genserve.core.errors import CompileError
from genserve.t2i.binding import bind, check_ports, gathered, node_name, patch_of, spec_of
from genserve.t2i.graph import Const, FromInput, Graph, WorkflowInput
from genserve.t2i.ports import INT, REQUIRED, InputPort, PortType, port_type
from genserve.t2i.tracing import Call, LoopTrace, SymbolicRange, Trace, line_of, site_of, user_frame
from genserve.t2i.typecheck import Mismatch, as_json, describe, fit, fit_constant, produced
from genserve.t2i.values import Out, Ref, Value

if TYPE_CHECKING:
    from genserve.t2i.model import Model

_current: ContextVar[Workflow | None] = ContextVar("genserve_workflow", default=None)


class Workflow:
    """A workflow being written, or one that was read (`from_json`), which can be used in others but not extended."""

    def __init__(self, name: str) -> None:
        frame = user_frame()
        self.name = name
        self._where = line_of(frame)
        if not isinstance(name, str) or not name.replace("-", "_").isidentifier():
            raise CompileError(
                f"a workflow's name must be letters, digits, - and _, got {name!r}", where=self._where
            )
        self.inputs: dict[str, WorkflowInput] = {}
        self.outputs: dict[str, tuple[Ref, PortType]] = {}
        self._trace = Trace()
        self._graph: Graph | None = None
        self._used: set[str] = set()
        self._outer: list[Workflow | None] = [_current.get()]
        _current.set(self)

    @staticmethod
    def current() -> Workflow:
        """The workflow that calls are recorded in."""
        found = _current.get()
        if found is None:
            raise CompileError(
                "a model is called outside a workflow: make one first", where=line_of(user_frame())
            )
        return found

    def __enter__(self) -> Workflow:
        current = _current.get()
        if current is not self:
            self._outer.append(current)
            _current.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _current.set(self._outer.pop() if self._outer else None)

    def add_input(self, name: str, data_type: Any, default: Any = REQUIRED, description: str = "") -> Value:
        """Declare an input of the workflow, and return its placeholder.

        Without a default, requests must give it; None makes it optional.
        """
        frame = user_frame()
        where = line_of(frame)
        self._recording(None)
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name[0] == "_":
            raise CompileError(
                f"an input's name must be a Python identifier, no keyword and not begin with _, got {name!r}",
                where=where,
            )
        if name in self.inputs:
            raise CompileError(
                f"input {name!r} is declared twice (first at {self.inputs[name].where})", where=where
            )
        try:
            type_ = port_type(data_type)
            if default is not REQUIRED and default is not None:
                fit_constant(default, type_)
        except (TypeError, Mismatch) as error:
            raise CompileError(f"input {name!r}: {error}", where=where) from error
        kept = default if default is REQUIRED else as_json(default)
        self.inputs[name] = WorkflowInput(name, type_, kept, description, where)
        return Value(self, FromInput(name), type_, f"input {name!r}", where)

    def add_output(self, value: Any, name: str) -> None:
        """Declare that a value, or a list of values, is an output of the workflow."""
        where = line_of(user_frame())
        if not isinstance(name, str) or not name.isidentifier():
            raise CompileError(f"an output's name must be a Python identifier, got {name!r}", where=where)
        if name in self.outputs:
            raise CompileError(f"output {name!r} is declared twice", where=where)
        try:
            if isinstance(value, Value):
                ref, type_ = self._reference(value), value.type
            elif isinstance(value, list | tuple) and any(isinstance(item, Value) for item in value):
                type_, ref = gathered(self, value)
            else:
                raise Mismatch(f"must be a value of this workflow, got {value!r}")
        except Mismatch as error:
            raise CompileError(f"output {name!r}: {error}", where=where) from error
        if self._innermost_loop() is not None:
            raise CompileError(f"output {name!r} is declared inside a loop", where=where)
        if type_ is None:
            raise CompileError(f"output {name!r} has no value", where=where)
        self.outputs[name] = (ref, type_)

    def loop(self, n: Any, first: Any = 0) -> SymbolicRange:
        """For `for i in wf.loop(n):` the body runs for i from `first` to n - 1, both numbers or values.

        `i` is a placeholder; it may be given to models. What an iteration makes, the next one or the code after
        the loop uses by its Python name, as in any loop.
        """
        where = line_of(user_frame())
        return SymbolicRange(self, self._whole(n, "n", where), self._whole(first, "first", where), where)

    def call(self, model: Model, args: Sequence[Any], inputs: dict[str, Any]) -> Any:
        """Record a call of `model`: its one output, or a tuple of them in declared order."""
        frame = user_frame()
        name, where = node_name(model), line_of(frame)
        trace = self._recording(None)
        check_ports(model, name, where)
        refs, sizes = bind(self, model.input_ports, args, inputs, name, where)
        record = Call(
            name,
            spec_of(model, where),
            tuple(model.input_ports),
            tuple(model.output_ports),
            tuple(patch_of(patch, where) for patch in model.patches),
            refs,
            where,
            site_of(frame),
        )
        trace.add(record)
        values = tuple(
            Value(self, Out(record, port.name), produced(port, sizes), f"{port.name} of {name}", where)
            for port in model.output_ports
        )
        return values if len(values) > 1 else values[0]

    def __call__(self, /, *args: Any, **inputs: Any) -> Any:
        """Use this workflow inside the current one: its one output, or a tuple of them in declared order.

        Inputs in declared order or by name. Its nodes become nodes of the current workflow, with its name before
        theirs.
        """
        from genserve.t2i.inlining import inline

        outer = Workflow.current()
        frame = user_frame()
        where = line_of(frame)
        if outer is self:
            raise CompileError(
                f"workflow {self.name!r} is used inside itself; make the outer workflow after it", where=where
            )
        graph = self.to_graph()
        trace = outer._recording(None)
        ports = [InputPort(each.name, each.type, default=each.default) for each in graph.inputs]
        refs, _ = bind(outer, ports, args, inputs, self.name, where)
        outs = inline(trace, graph, refs, where, site_of(frame))
        values = tuple(
            Value(outer, ref, output.type, f"{output.name} of {self.name}", where)
            for ref, output in zip(outs, graph.outputs, strict=True)
        )
        return values if len(values) > 1 else values[0]

    def to_graph(self) -> Graph:
        """The workflow as data, checked. Raises `CompileError`."""
        from genserve.t2i.emission import emit
        from genserve.t2i.verify import check_unused, verify

        if self._graph is not None:
            return replace(self._graph, name=self.name)
        self._trace.finish()
        if not self.outputs:
            raise CompileError(f"workflow {self.name!r} has no output", where=self._where)
        graph = emit(self.name, self.inputs, self.outputs, self._trace.records)
        verify(graph)
        check_unused(graph)
        return graph

    def to_json(self) -> str:
        """The workflow as versioned JSON text; `from_json` gives the same graph again."""
        from genserve.t2i.serialize import graph_to_json

        return graph_to_json(self.to_graph())

    @classmethod
    def from_json(cls, text: str) -> Workflow:
        """The workflow that `to_json` has written. Raises `CompileError` for anything else."""
        from genserve.t2i.serialize import graph_from_json

        return cls.from_graph(graph_from_json(text))

    @classmethod
    def from_graph(cls, graph: Graph) -> Workflow:
        """A finished workflow, to be compiled or called inside another one."""
        current = _current.get()
        workflow = cls(graph.name)
        _current.set(current)  # nothing is recorded in it
        workflow._graph = graph
        workflow.inputs = {each.name: each for each in graph.inputs}
        return workflow

    # For the recording modules.

    def _recording(self, value: Value | None) -> Trace:
        """The trace, after leaving the loops that are over. Refuses values of other workflows."""
        if value is not None:
            self._reference(value)
        if self._graph is not None:
            raise CompileError(
                f"workflow {self.name!r} is finished: call it inside a new one", where=line_of(user_frame())
            )
        self._trace.settle()
        return self._trace

    def _innermost_loop(self) -> LoopTrace | None:
        self._trace.settle()
        return self._trace.open[-1] if self._trace.open else None

    def _reference(self, value: Value) -> Ref:
        """What a value is at this place of this workflow."""
        if value._workflow is not self:
            raise Mismatch(
                f"{value!r} is a value of workflow {value._workflow.name!r}, and this is {self.name!r}"
            )
        self._trace.settle()
        if isinstance(value._ref, FromInput):
            self._used.add(value._ref.name)
        return self._trace.visible(value._ref, repr(value))

    def _whole(self, number: Any, name: str, where: str) -> Ref:
        try:
            if isinstance(number, Value):
                if number.type is not None:
                    fit(number.type, INT, {})
                return self._reference(number)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise Mismatch(f"wants {describe(INT)} from 0, got {number!r}")
        except Mismatch as error:
            raise CompileError(f"{name} of a loop: {error}", where=where) from error
        return Const(number)
