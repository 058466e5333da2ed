"""Adapters' files: what diffusers, peft and kohya's trainers write, read into one form.

Owns `Adapter` and the names in it. Knows no loaded model; `lora` puts adapters on models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from genserve.core.errors import ConfigError
from genserve.t2i.models.checkpoint import find_file

if TYPE_CHECKING:
    import torch

COMPONENTS = ("unet", "transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
_FILE_NAME = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter. `identity` is what two equal ones have in common, such as a hash of the file.

    Names are "<component>.<path of the module>.<down|up|alpha>", one for each tensor, three for each module.
    The tensors are never changed here, and must not be by others.
    """

    identity: str
    names: tuple[str, ...]
    weights: tuple[torch.Tensor, ...]


def read_adapter(model_path: str, weight_name: str | None = None, identity: str = "") -> Adapter:
    """Read an adapter's file. Raises `ConfigError` for what is no plain low-rank adapter."""
    path = _find(model_path, weight_name)
    state, metadata = _read(path)
    state, alphas = _to_components(path, state)
    names: list[str] = []
    weights: list[torch.Tensor] = []
    for component in COMPONENTS:
        pairs, scales = _pairs(path, component, state), _alphas(component, alphas)
        config = _config(component, metadata)
        for module in sorted(pairs):
            if set(pairs[module]) != {"down", "up"}:
                raise ConfigError(f"{path}: {component}.{module} has only one of its two matrices")
            down, up = pairs[module]["down"], pairs[module]["up"]
            alpha = _alpha(module, up.shape[1], scales, config)
            for part, tensor in (("down", down), ("up", up), ("alpha", alpha)):
                names.append(f"{component}.{module}.{part}")
                weights.append(tensor)
    strange = [key for key in state if key.split(".")[0] not in COMPONENTS]
    if strange or not names:
        raise ConfigError(f"{path} is of no known format: {', '.join(strange[:3]) or 'it has no weights'}")
    return Adapter(identity or str(path), tuple(names), tuple(weights))


def targets_text(model_path: str, weight_name: str | None = None) -> bool:
    """Whether an adapter changes text encoders too. Reads the file's header only, and needs no torch."""
    from safetensors import safe_open

    with safe_open(str(_find(model_path, weight_name)), framework="np") as file:
        return any(key.startswith(("text_encoder", "lora_te")) for key in file.keys())  # noqa: SIM118


def _find(model_path: str, weight_name: str | None) -> Path:
    path = Path(model_path)
    if path.is_file():
        return path
    found = find_file(model_path, weight_name or _FILE_NAME)
    if found is None and weight_name is None and path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        found = files[0] if len(files) == 1 else None
    if found is None:
        raise ConfigError(f"{model_path}: no adapter there ({weight_name or _FILE_NAME})")
    return found


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
            return state, json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    except SafetensorError as error:
        raise ConfigError(f"{path} is no safetensors file: {error}") from error


def _to_components(path: Path, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and alphas under names that begin with the component, whichever trainer wrote them."""
    from diffusers.loaders import FluxLoraLoaderMixin, StableDiffusionXLLoraLoaderMixin

    unsupported = [key for key in state if "dora_scale" in key or "magnitude" in key or key.endswith(".bias")]
    if unsupported:
        raise ConfigError(f"{path} is no plain low-rank adapter (DoRA, biases): {', '.join(unsupported[:3])}")
    try:
        if any(part in key for key in state for part in ("double_blocks", "single_blocks")):
            return FluxLoraLoaderMixin.lora_state_dict(state, return_alphas=True)
        # Blocks of kohya's SDXL files are numbered through: all SDXL models have two layers a block.
        layers = SimpleNamespace(layers_per_block=2)
        converted, alphas = StableDiffusionXLLoraLoaderMixin.lora_state_dict(state, unet_config=layers)
    except (ValueError, KeyError, IndexError) as error:
        raise ConfigError(f"{path} is of no known format: {error}") from error
    alphas = dict(alphas or {})
    return {key: tensor for key, tensor in converted.items() if not _is_alpha(key, tensor, alphas)}, alphas


def _is_alpha(key: str, tensor: Any, alphas: dict[str, Any]) -> bool:
    if key.endswith(".alpha"):
        alphas[key] = float(tensor)
        return True
    return False


def _convert(component: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Names without the component, as peft spells them: "<module>.lora_A.weight"."""
    from diffusers.utils import (
        convert_state_dict_to_diffusers,
        convert_state_dict_to_peft,
        convert_unet_state_dict_to_peft,
    )

    own = {
        key.removeprefix(f"{component}."): value
        for key, value in named.items()
        if key.startswith(f"{component}.")
    }
    if not own or all(".lora_A" in key or ".lora_B" in key for key in own):
        return own
    if component.startswith("text_encoder"):
        return dict(convert_state_dict_to_peft(convert_state_dict_to_diffusers(own)))
    return dict(convert_unet_state_dict_to_peft(own))


def _pairs(path: Path, component: str, state: Mapping[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    try:
        converted = _convert(component, state)
    except ValueError as error:
        raise ConfigError(f"{path}: weights of {component} are of no known format: {error}") from error
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in converted.items():
        module, _, rest = key.partition(".lora_")
        part = {"A.weight": "down", "B.weight": "up"}.get(rest)
        if part is None:
            raise ConfigError(f"{path}: {component}.{key} is no weight of a low-rank adapter")
        pairs.setdefault(module, {})[part] = tensor.clone().contiguous()
    return pairs


def _alphas(component: str, alphas: Mapping[str, Any]) -> dict[str, float]:
    named = {key.removesuffix(".alpha"): float(value) for key, value in alphas.items()}
    plain = {key: value for key, value in named.items() if "lora" not in key}
    spelled = _convert(component, {key: value for key, value in named.items() if "lora" in key})
    own = {
        key.removeprefix(f"{component}."): value
        for key, value in plain.items()
        if key.startswith(f"{component}.")
    }
    return own | {key.partition(".lora_")[0]: value for key, value in spelled.items()}


def _config(component: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.removeprefix(f"{component}."): value
        for key, value in metadata.items()
        if key.startswith(f"{component}.")
    }


def _alpha(module: str, rank: int, alphas: Mapping[str, float], config: Mapping[str, Any]) -> torch.Tensor:
    """The number of which `alpha / rank` multiplies the adapter: as the file says, else as its configuration does."""
    import torch
    from peft.utils.other import get_pattern_key

    value = alphas.get(module)
    if value is None and "lora_alpha" in config:
        patterns = config.get("alpha_pattern") or {}
        value = float(patterns.get(get_pattern_key(list(patterns), module), config["lora_alpha"]))
        if config.get("use_rslora"):
            value = value * math.sqrt(rank)
    return torch.tensor(float(rank if value is None else value), dtype=torch.float64)
