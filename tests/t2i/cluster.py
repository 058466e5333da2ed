"""Executors without time, threads or tensors: what the coordinator is checked against in virtual time.

Values are whole numbers that depend on everything that made them; the same graphs run in the reference interpreter.
A space knows what lies in it, so that a value that is read after its release, or never released, is found.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from zlib import crc32

from genserve.core.control import Failed
from genserve.t2i import messages as m
from genserve.t2i.coordinator import HOME, Coordinator, ExecutorSpec
from genserve.t2i.graph import (
    Carried,
    CarriedValue,
    Const,
    FromInput,
    FromLoop,
    FromNode,
    Graph,
    Loop,
    LoopIndex,
    ModelSpec,
    Node,
    WorkflowInput,
    WorkflowOutput,
)
from genserve.t2i.model import Model, model_class
from genserve.t2i.ports import IMAGE, INT, REQUIRED, InputPort, OutputPort, tensor

T = tensor()


class Mix(Model):
    """Whatever it is given, into one number; with `small` an int that the coordinator sees."""

    def setup_io(self):
        self.add_input("a", T)
        self.add_output("out", T)

    def execute(self, model_components, **inputs):
        patches = model_components.get("patches", [])
        text = repr((self.params, patches, [inputs[name] for name in sorted(inputs)]))
        return {"out": crc32(text.encode()) % self.params.get("below", 1 << 32)}


class Lookup(Model):
    """Where to begin and with what, as a cache says that each executor has of its own: each says something else."""

    def setup_io(self):
        self.add_input("a", T)
        self.add_output("first", INT)
        self.add_output("latents", T)

    def execute(self, model_components, **inputs):
        lane = model_components.get("lane", self.params["lane"])
        return {"first": 1 + (lane == "e1"), "latents": crc32(lane.encode())}


def looked_up(lane="e0"):
    """A diffusion that begins as a cache on `lane` says."""
    graph = denoising(Const(6), FromNode("lookup", "first"), name="looked_up")
    node = mix("lookup", a=FromInput("x"))
    spec = ModelSpec(f"{__name__}:Lookup", (("lane", lane),), "")
    node = replace(node, model=spec, output_ports=(OutputPort("first", INT), OutputPort("latents", T)))
    loop = graph.nodes[2]
    carried = (replace(loop.carried[0], first=FromNode("lookup", "latents")),)
    return replace(graph, nodes=(node, graph.nodes[0], replace(loop, carried=carried), graph.nodes[3]))


@contextmanager
def patched(components, adapters):
    """For the reference interpreter: what adapters do to `Mix`."""
    yield {"patches": [(outputs["out"], scale) for outputs, scale in adapters]}


def mix(name, num_bytes=0, deferred=(), below=None, patches=(), **edges):
    """A node `name` that reads `edges` by port."""
    params = {"name": name, **({} if below is None else {"below": below})}
    spec = ModelSpec(f"{__name__}:Mix", tuple(sorted(params.items())), f"mix-{name}-{num_bytes}", num_bytes)
    ports = tuple(InputPort(port, T, port in deferred) for port in edges)
    return Node(
        name,
        spec,
        tuple(edges.items()),
        ports,
        (OutputPort("out", T if below is None else INT),),
        "",
        patches,
    )


def graph_of(*items, outputs, name="mixed", inputs=("seed", "x")):
    return Graph(
        name,
        tuple(WorkflowInput(each, INT, REQUIRED) for each in inputs),
        items,
        tuple(WorkflowOutput(name, IMAGE if name == "image" else T, edge) for name, edge in outputs.items()),
    )


def out(node):
    return FromNode(node, "out")


def denoising(steps=Const(3), first=Const(0), name="denoising", num_bytes=100):
    """Like a diffusion with a ControlNet whose residuals are deferred."""
    return graph_of(
        mix("encode", num_bytes, x=FromInput("x")),
        mix("draw", seed=FromInput("seed")),
        Loop(
            "loop",
            steps,
            (CarriedValue("latents", out("draw"), out("solve")),),
            (
                mix("control", num_bytes, a=Carried("loop", "latents"), step=LoopIndex("loop")),
                mix(
                    "predict", num_bytes, deferred=("r",),
                    a=Carried("loop", "latents"), e=out("encode"), r=out("control"),
                ),
                mix("solve", n=out("predict"), a=Carried("loop", "latents")),
            ),
            first=first,
        ),
        mix("decode", num_bytes, a=FromLoop("loop", "latents")),
        outputs={"image": out("decode")},
        name=name,
    )  # fmt: skip


@dataclass
class Cluster:
    """Cost and outcome of every run. `fails(run)` says whether it shall raise; `cost(run)` its price."""

    num_executors: int = 2
    apart: bool = True  # each executor with a space of its own, as processes have
    fails: object = None
    cost: object = None
    spaces: dict[str, dict] = field(default_factory=dict)
    read_later: int = 0
    executed: list = field(default_factory=list)  # (node, lane)
    dead: dict[str, int] = field(default_factory=dict)  # executor -> last run of the process that died
    codes: dict[str, m.ModelCode] = field(default_factory=dict)
    loaded: dict[str, dict] = field(default_factory=dict)

    def __post_init__(self):
        self.specs = [
            ExecutorSpec(f"e{index}", f"e{index}" if self.apart else HOME, 250)
            for index in range(self.num_executors)
        ]
        self.values = {}  # of each dispatched run's outputs, by key
        self.last_run = 0

    def coordinator(self, **options):
        return Coordinator(self.specs, home_lane="home" if self.apart else None, **options)

    def space(self, lane):
        name = lane.partition("/")[0] if self.apart else HOME
        return self.spaces.setdefault(HOME if lane == "home" else name, {})

    def kill(self, name):
        self.dead[name] = 1 << 62
        self.spaces.pop(name, None)
        self.loaded.pop(name, None)

    def revive(self, name):
        """What was sent to the old process is lost."""
        self.dead[name] = self.last_run

    # -- CostModel ---------------------------------------------------------------------------------

    def price_s(self, run):
        self.last_run = max(self.last_run, run.run_id)
        if run.op in (m.TASK, m.ADAPTER):
            self._know(run)
            return self.cost(run) if self.cost else 1.0
        return 0.125

    def _know(self, run):
        """What the run will make is known when it is dispatched: what makes its inputs was before."""
        task = run.args
        if task.code is not None:
            self.codes[task.model] = task.code
        code = self.codes[task.model]
        inputs = {port: self._value(source) for port, source in task.inputs}
        patches = [(self._value(use.source), use.scale) for use in task.patches]
        components = {"patches": patches, "lane": run.lane}
        made = model_class(code.spec.cls)(**dict(code.spec.params)).execute(components, **inputs)
        for port, value in made.items():
            self.values[run.run_id, port] = value

    def _value(self, source):
        if isinstance(source, m.Given):
            return source.value
        if isinstance(source, m.Several):
            return [self._value(item) for item in source.items]
        return self.values[source.key]

    # -- OutcomeModel ------------------------------------------------------------------------------

    def outcome(self, run):
        name = run.lane.partition("/")[0]
        if run.run_id <= self.dead.get(name, 0):
            return Failed(run.lane, run.run_id, "its process is gone", lost=True)
        space = self.space(run.lane)
        match run.op:
            case m.TASK | m.ADAPTER:
                return self._task(run, space)
            case m.RELEASE:
                self._release(space, run.args)
            case m.KEEP:
                self._release(space, run.args.release)
                stored = []
                for source in run.args.sources:
                    there = self._find(source)
                    if there:
                        space[source.key] = self.values[source.key]
                    stored.append(m.Stored(8, HOME) if there else None)
                return stored
        return None

    def _release(self, space, keys):
        for key in keys:
            space.pop(key, None)

    def _find(self, source):
        return any(name == source.refs and source.key in space for name, space in self.spaces.items())

    def _task(self, run, space):
        task = run.args
        self._release(space, task.release)
        loaded = self.loaded.setdefault(run.lane, {})
        for identity in task.unload:
            loaded.pop(identity, None)
        num_bytes = self.codes[task.model].spec.num_bytes
        if num_bytes and run.op == m.TASK:
            loaded[task.weights] = num_bytes
            assert sum(loaded.values()) <= 250, "more weights than fit"
        for source in [source for _, source in task.inputs] + [use.source for use in task.patches]:
            if isinstance(source, m.Here) and source.key not in space:
                return m.Missed((source.key,), "not here")
            if isinstance(source, m.There) and source.key not in space:
                if not self._find(source):
                    return m.Missed((source.key,), "not there")
                space[source.key] = self.values[source.key]
            self.read_later += isinstance(source, m.Later)
        if self.fails and self.fails(run):
            return Failed(run.lane, run.run_id, "made to fail")
        self.executed.append((task.node, run.lane))
        told = {}
        for port in task.outputs:
            inline = port == "first" or "below" in dict(self.codes[task.model].spec.params)
            value = self.values[run.run_id, port]
            if port in task.keep:
                space[run.run_id, port] = value
                told[port] = (
                    value if inline else m.Stored(8, run.lane.partition("/")[0] if self.apart else None)
                )
            elif inline:
                told[port] = value
        return m.Ran(told)


class Gateway:
    """Takes what the coordinator sends, and answers as the real one does."""

    def __init__(self, cluster, post):
        self.cluster, self.post = cluster, post
        self.results, self.errors, self.progress, self.previews = {}, {}, {}, {}

    def __call__(self, *args):
        body = args[-1]
        home = self.cluster.spaces.setdefault(HOME, {})
        match body:
            case m.TaskDone():
                self.progress.setdefault(body.request_id, []).append(body)
            case m.PreviewMade():
                self.previews.setdefault(body.request_id, {})[body.image, body.step] = home[body.key]
                self.post(m.Taken(body.request_id, (body.key,)))
            case m.Finished():
                assert body.request_id not in self.results and body.request_id not in self.errors
                keys = [
                    value.key
                    for image in body.outputs
                    for value in image.values()
                    if isinstance(value, m.Here)
                ]
                self.results[body.request_id] = (
                    [
                        {
                            name: home[value.key] if isinstance(value, m.Here) else value
                            for name, value in image.items()
                        }
                        for image in body.outputs
                    ],
                    body.record,
                )
                if keys:
                    self.post(m.Taken(body.request_id, tuple(keys)))
            case m.Ended():
                assert body.request_id not in self.results and body.request_id not in self.errors
                self.errors[body.request_id] = body.kind, body.reason
