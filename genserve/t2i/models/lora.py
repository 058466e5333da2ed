"""Low-rank adapters: how they are declared, read from files, and put on and taken off a model's weights.

Owns `LoRA` (LegoDiffusion Figure 7), the node that reads one, and `Patcher`, which changes the weights of loaded
models. Knows no family: what an adapter targets are module paths, as its file says them.

Deviation from LegoDiffusion §4.2: adapters are never subtracted again, which drifts (0.12 of a weight after 256 swaps
in bf16). Patched weights are always computed from the pristine ones, in float32 and rounded once; taking adapters off
copies the pristine ones back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from genserve.core.errors import ConfigError
from genserve.t2i.model import Model, ModelPatch
from genserve.t2i.models.lora_file import Adapter, read_adapter
from genserve.t2i.ports import JSON, tensors

if TYPE_CHECKING:
    import torch


class LoRA(ModelPatch):
    """A low-rank adapter: `model_path` is a safetensors file, a folder with one, or a hub id.

    Its difference is multiplied by `scale`. Any of the models that it has weights for may be patched with it.
    """


class LoadLora(Model):
    """Reads the adapter at `model_path` (`weight_name`: which file of the folder) into tensors of its own, on the CPU.

    Understands the files of diffusers, peft and kohya's trainers, for all families.
    """

    content: ClassVar[tuple[str, ...]] = ("",)

    def setup_io(self) -> None:
        self.add_output("weights", tensors())
        self.add_output("names", JSON)

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        return {}  # the tensors are outputs: their store may free them when nobody needs them

    def execute(self, model_components: dict[str, Any]) -> dict[str, Any]:
        adapter = read_adapter(self.params["model_path"], self.params.get("weight_name"))
        return {"weights": list(adapter.weights), "names": list(adapter.names)}


class Patcher:
    """Puts adapters on the weights of loaded models and takes them off again. One for each loaded model, which keeps it.

    `key` says which adapters are on, as (identity, scale) pairs; None while unknown (a change broke off).
    Weights are changed in place, so that modules, captured graphs and their addresses stay. The pristine copy of a
    weight is made when it is first patched, once, on `backup_device` (where the weight is, by default). Not for use
    by two threads at a time.
    """

    def __init__(self, backup_device: str | None = None) -> None:
        self.key: tuple[tuple[str, float], ...] | None = ()
        self._backup_device = backup_device
        self._pristine: dict[tuple[str, str], torch.Tensor] = {}
        self._patched: set[tuple[str, str]] = set()

    @property
    def num_bytes(self) -> int:
        """Of the pristine copies."""
        return sum(weight.numel() * weight.element_size() for weight in self._pristine.values())

    def apply(self, components: Mapping[str, Any], adapters: Sequence[tuple[Adapter, float]]) -> None:
        """Make these adapters, and no others, those that are on: W = W0 + sum of scale * alpha / rank * up @ down.

        `components` are the loaded parts of a model by name; adapters' weights for other parts don't matter, nor do
        parts that are no modules. Raises `ConfigError`, before anything is changed, if an adapter
        targets modules that a component lacks, or of another shape.
        """
        import torch

        adapters = [(adapter, scale) for adapter, scale in adapters if scale != 0]
        key = tuple((adapter.identity, float(scale)) for adapter, scale in adapters)
        if key == self.key:
            return
        plan: dict[tuple[str, str], list[_Delta]] = {}
        for adapter, scale in adapters:
            for place, delta in _deltas(components, adapter, scale).items():
                plan.setdefault(place, []).append(delta)
        self.key = None
        with torch.no_grad():
            for place in self._patched - plan.keys():
                self._restore(components, place)
            for place, deltas in plan.items():
                self._patch(components, place, deltas)
        self.key = key

    def restore(self, components: Mapping[str, Any]) -> None:
        """Take all adapters off: every weight is bit for bit what it was."""
        self.apply(components, [])

    def _patch(self, components: Mapping[str, Any], place: tuple[str, str], deltas: list[_Delta]) -> None:
        import torch

        weight = _module(components[place[0]], place[1]).weight
        if place not in self._pristine:
            copy = weight.detach().clone()
            self._pristine[place] = copy if self._backup_device is None else copy.to(self._backup_device)
        self._patched.add(place)
        total = self._pristine[place].to(weight.device, torch.float32, copy=True)
        for delta in deltas:
            total += delta.compute(weight)
        weight.copy_(total)

    def _restore(self, components: Mapping[str, Any], place: tuple[str, str]) -> None:
        _module(components[place[0]], place[1]).weight.copy_(self._pristine[place])
        self._patched.discard(place)


@dataclass(frozen=True, slots=True, eq=False)
class _Delta:
    down: torch.Tensor
    up: torch.Tensor
    factor: float

    def compute(self, weight: torch.Tensor) -> torch.Tensor:
        """The difference for `weight`, in float32, by the operations of peft's merge."""
        import torch

        up = self.up.to(weight.device, torch.float32)
        down = self.down.to(weight.device, torch.float32)
        if weight.dim() == 2:
            return (up @ down) * self.factor
        if tuple(weight.shape[2:]) == (1, 1):
            return (up.flatten(1) @ down.flatten(1))[..., None, None] * self.factor
        return torch.nn.functional.conv2d(down.transpose(0, 1), up).transpose(0, 1) * self.factor


def _deltas(components: Mapping[str, Any], adapter: Adapter, scale: float) -> dict[tuple[str, str], _Delta]:
    parts = dict(zip(adapter.names, adapter.weights, strict=True))
    found: dict[tuple[str, str], _Delta] = {}
    wrong: list[str] = []
    for name in adapter.names:
        target, _, part = name.rpartition(".")
        component, _, path = target.partition(".")
        path = path.removeprefix("text_model.")  # one name for both spellings
        if part != "down" or not hasattr(components.get(component), "get_submodule"):
            continue
        down, up, alpha = parts[name], parts[f"{target}.up"], float(parts[f"{target}.alpha"])
        module = _module(components[component], path)
        weight = getattr(module, "weight", None)
        if weight is None or not _fits(module, down, up):
            wrong.append(f"{target} ({'no such module' if module is None else 'of another kind or shape'})")
        else:
            found[component, path] = _Delta(down, up, scale * alpha / down.shape[0])
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ConfigError(f"adapter {adapter.identity} is for another model: {', '.join(wrong[:5])}{more}")
    return found


def _module(component: Any, path: str) -> Any:
    """The module at `path`, with or without the level that recent text encoders dropped; None if there is none."""
    for candidate in (path, f"text_model.{path}"):
        try:
            return component.get_submodule(candidate)
        except AttributeError:
            continue
    return None


def _fits(module: Any, down: torch.Tensor, up: torch.Tensor) -> bool:
    import torch

    shape = tuple(module.weight.shape)
    if isinstance(module, torch.nn.Linear):
        return (
            down.dim() == up.dim() == 2
            and (up.shape[0], down.shape[1]) == shape
            and up.shape[1] == down.shape[0]
        )
    if isinstance(module, torch.nn.Conv2d) and module.groups == 1:
        return (up.shape[0], *down.shape[1:]) == shape and tuple(up.shape[1:]) == (down.shape[0], 1, 1)
    return False
