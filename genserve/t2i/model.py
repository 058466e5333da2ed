"""`Model`, which a model's developer subclasses (LegoDiffusion §4.1, Figure 6), and `ModelPatch`.

Owns the declaration of ports and the life of patches on the declaring side. A call records a node in the
current workflow and runs nothing; `load` and `execute` run in a worker.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from genserve.core.errors import ConfigError
from genserve.core.models.registry import located
from genserve.t2i.ports import REQUIRED, CfgPorts, InputPort, OutputPort, port_type


class Model:
    """A model of a workflow, or any step between two models.

        class Upscale(Model):
            def setup_io(self):
                self.add_input("image", Image)
                self.add_input("factor", int, default=2)
                self.add_output("image", Image)

            def load(self, model_path, device):
                return {"net": load_net(model_path).to(device)}

            def execute(self, model_components, image, factor):
                return {"image": model_components["net"](image, factor)}

    Keyword arguments of the constructor are the model's parameters: JSON values, kept in `params`, part of its
    identity. `model_path` (a folder, or a hub id) is hashed by content. Everything else happens in `setup_io`.

    `execute` gets absent optional inputs as None, images as uint8 tensors (height, width, 3), and deferred
    inputs as lazy tensors or sequences of them. It returns a dict of all declared outputs, and must be a pure
    function of its inputs: what is random takes a seed, and what one step hands to the next (a solver's
    history, a step cache) is an output that a loop carries.

    Lists of models that can be built from a folder read its configuration in `setup_io`, never its weights.
    A worker calls `execute` of one model from one thread at a time, under `torch.no_grad()`, with tensors on its device.
    """

    # Folder under `model_path` whose weights this node loads; () means none, and shares nothing with others.
    weights: ClassVar[tuple[str, ...]] = ()

    # Classes with the same key share what `load` returns, given the same files and `load_params`: a VAE's encode
    # and decode nodes, say. The default is the class itself.
    load_key: ClassVar[str] = ""

    # Names of the parameters, besides `model_path`, that `load` depends on; None means all of them.
    load_params: ClassVar[tuple[str, ...] | None] = None

    # Files or folders under `model_path`, besides `weights`, whose content the node's results depend on.
    content: ClassVar[tuple[str, ...]] = ()

    # False: the call has an effect besides its outputs, or draws on a store. It is never left out, merged with an
    # equal one, moved out of a loop, or answered from memory.
    pure: ClassVar[bool] = True

    # How guidance inside the node may be split into two nodes; None: not at all.
    cfg: ClassVar[CfgPorts | None] = None

    # Ports, each an optional input and an output, that the model declares when it gets the parameter
    # `step_cache_threshold`: what a step hands to the next, for it to skip most of its work where little changes.
    step_cache_ports: ClassVar[tuple[str, ...]] = ()

    # Whether adapters that a request names go on this model.
    takes_loras: ClassVar[bool] = False

    # Whether the compiler may run `execute` itself when all inputs are constants: cheap, pure, no weights, no torch,
    # and JSON values as outputs.
    foldable: ClassVar[bool] = False

    def __init__(self, **params: Any) -> None:
        self.params = params
        self.input_ports: list[InputPort] = []
        self.output_ports: list[OutputPort] = []
        self.patches: list[ModelPatch] = []
        self.setup_io()

    def setup_io(self) -> None:
        raise NotImplementedError

    @property
    def location(self) -> str | None:
        """`model_path`, or the folder of the packaged model that it names: what `load` gets."""
        path = self.params.get("model_path")
        return None if path is None else located(str(path))

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        """The loaded parts, shared by all nodes of equal identity; nothing for a model without weights."""
        return {}

    def execute(self, model_components: dict[str, Any], *args: Any, **inputs: Any) -> dict[str, Any]:
        raise NotImplementedError

    def add_input(
        self, name: str, data_type: Any, *, deferred: bool = False, default: Any = REQUIRED
    ) -> None:
        """Declare an input; the order of declaration is that of positional arguments."""
        self.input_ports.append(InputPort(name, port_type(data_type), deferred, default))

    def add_output(self, name: str, data_type: Any) -> None:
        self.output_ports.append(OutputPort(name, port_type(data_type)))

    def add_patch(self, patch: ModelPatch) -> None:
        """From now on calls of this model run with `patch` on its weights."""
        self.patches.append(patch)

    def rm_patch(self, patch: ModelPatch) -> None:
        """Calls recorded from now on run without it. Raises `ValueError` if it isn't on."""
        self.patches.remove(patch)

    def outputs_for(self, inputs: dict[str, Any]) -> tuple[str, ...] | None:
        """Which outputs a call with these keyword inputs has, for models with several ways to be called; None: all."""
        return None

    @classmethod
    def loading(cls, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """What tells whether two models share what they load, but for the files: a key and some parameters."""
        names = params if cls.load_params is None else cls.load_params
        key = cls.load_key or f"{cls.__module__}:{cls.__qualname__}"
        return key, {name: params[name] for name in sorted(names) if name != "model_path" and name in params}

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Record a node in the current workflow: its one output, or a tuple of them in declared order.

        An output named `warnings`, a list of sentences, isn't among them: the runtime gathers it.
        """
        from genserve.t2i.workflow import Workflow

        view = self._view(self.outputs_for(inputs))
        values = Workflow.current().call(view, args, inputs)
        names = [port.name for port in view.output_ports]
        if len(names) == 1 or "warnings" not in names:
            return values
        kept = tuple(value for name, value in zip(names, values, strict=True) if name != "warnings")
        return kept if len(kept) > 1 else kept[0]

    def _view(self, outputs: tuple[str, ...] | None) -> Model:
        """This model with only `outputs` declared: the same in all else, patches and identity too."""
        if outputs is None:
            return self
        view = copy.copy(self)
        view.output_ports = [port for port in self.output_ports if port.name in outputs]
        return view


class ModelPatch:
    """A weight-patching adapter, such as a LoRA: a folder or file at `model_path`, and a `scale`."""

    def __init__(self, model_path: str, scale: float = 1.0) -> None:
        self.model_path = model_path
        self.scale = scale


def model_class(name: str) -> type[Any]:
    """The class that a `ModelSpec` names, "module:Class"; a `Model` or a `ModelPatch`. Raises `ConfigError`."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Model | ModelPatch)):
        raise ConfigError(f"{name!r} is no model")
    return found
