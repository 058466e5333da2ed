"""Which family a model is of, and how a model of each is started. Here and in `server` alone families meet.

Owns the families' names; imports no torch until a model is started.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genserve.core.errors import ConfigError
from genserve.core.models.registry import builtin_family

if TYPE_CHECKING:
    from genserve.core.config import Config
    from genserve.core.server.gateway import ServedModel, ServedWorkflows

FAMILIES = ("ar", "dllm", "t2i")
# What `genserve serve FAMILY` serves if no model is named: part of the package, nothing is fetched.
DEFAULT_MODELS: Mapping[str, str] = {"ar": "tiny-llama", "dllm": "tiny-llada", "t2i": "tiny-sd3"}
DEFAULT_FAMILY = "ar"

Progress = Callable[[Any], None]


def family_of(model: str) -> str:
    """The family of a model as a person names it, from the registry or its folder; "ar" if neither says.

    A folder with `model_index.json` (diffusers) makes images; else `config.json` tells.
    """
    known = builtin_family(model)
    if known is not None:
        return known
    if _config_of(model, "model_index.json") is not None:
        return "t2i"
    from genserve.dllm.architectures import is_diffusion

    config = _config_of(model)
    return "dllm" if config is not None and is_diffusion(config) else "ar"


def _config_of(model: str, file: str = "config.json") -> dict[str, Any] | None:
    """A JSON file of a local folder, or of a hub id in the local cache."""
    path = Path(model).expanduser() / file
    if not path.is_file():
        if Path(model).exists() or model.endswith(".gguf") or model.count("/") != 1 or model[0] in "./~":
            return None
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(model, file)
        except ValueError:  # no hub id either: whoever loads it says so
            return None
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def split_family(text: str) -> tuple[str | None, str]:
    """`FAMILY:MODEL` in its two parts; the family is None if none is named."""
    family, colon, rest = text.partition(":")
    if colon and family in FAMILIES and not Path(text).exists():
        return family, rest
    return None, text


def config_kind(family: str) -> type[Config]:
    """The configuration model of a family; `ConfigError` names those there are."""
    if family == "ar":
        from genserve.ar.config import ArConfig

        return ArConfig
    if family == "dllm":
        from genserve.dllm.config import DllmConfig

        return DllmConfig
    if family == "t2i":
        from genserve.t2i.catalogue import ImageModelConfig

        return ImageModelConfig
    raise ConfigError(f"no family {family!r}; there is: {', '.join(FAMILIES)}")


async def start_model(
    model: str, options: Mapping[str, Any], on_progress: Progress | None = None
) -> ServedModel:
    """Start a language model with keyword options of its family's configuration."""
    from genserve.core.config import load

    values = dict(options)
    family = values.pop("family", None)
    if family is None:
        family, model = split_family(model)
    family = family or family_of(model)
    if family == "t2i":
        raise ConfigError(
            f"{model} makes images, it is no language model; see `genserve t2i` and genserve.t2i"
        )
    return await start_text(family, load(config_kind(family), model=model, **values), on_progress)


async def start_configured(
    family: str, config: Any, on_progress: Progress | None = None
) -> ServedModel | ServedWorkflows:
    """Start a model of `family` as its configuration says."""
    if family == "t2i":
        from genserve.t2i.catalogue import start_served as start_t2i

        return await start_t2i(config, on_progress)
    return await start_text(family, config, on_progress)


async def start_text(family: str, config: Any, on_progress: Progress | None = None) -> ServedModel:
    """Start a language model of `family` as its configuration says."""
    if family == "dllm":
        from genserve.dllm.serve import start_served as start_dllm

        return await start_dllm(config, on_progress)
    from genserve.ar.serve import start_served as start_ar

    return await start_ar(config, on_progress)
