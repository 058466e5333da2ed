"""Finds a model by what a person calls it. Imports no torch: a wrong name is told at once.

Owns the order in which names are tried; loading what was found is `core.models.loading`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from genserve.core.errors import ConfigError, ModelNotFound
from genserve.core.models.registry import BUILTIN_MODELS, PACKAGED_MODELS, builtin_names

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model is. `location` is a folder (of a packaged model, too), a GGUF file or a hub id; of a
    built-in that is fetched, its name."""

    kind: Literal["builtin", "folder", "gguf", "hub"]
    location: str
    name: str


def resolve(name_or_path: str) -> ModelSource:
    """Find a model: a built-in name, a Hugging Face folder, a `.gguf` file or a hub id, in this order.

    A hub id counts only if the local Hugging Face cache or the hub itself has it. `ModelNotFound`
    says what was tried, `ConfigError` what is wrong with a path that exists.
    """
    packaged = PACKAGED_MODELS.get(name_or_path)
    if packaged is not None:
        if not (packaged.folder / "config.json").is_file():
            raise ConfigError(f"{name_or_path}: the installed package lacks its folder {packaged.folder}")
        return ModelSource("folder", str(packaged.folder), name_or_path)
    if name_or_path in BUILTIN_MODELS:
        return ModelSource("builtin", name_or_path, name_or_path)
    tried = [f"a built-in model ({', '.join(builtin_names())})"]
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource("folder", str(path), path.resolve().name)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelSource("gguf", str(ggufs[0]), ggufs[0].stem)
        raise ConfigError(f"{name_or_path}: a folder with neither a config.json nor one single .gguf file")
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelSource("gguf", str(path), path.stem)
        raise ConfigError(f"{name_or_path}: a file, but not a .gguf one; give the model's folder")
    tried.append("a folder or file of that path")
    if _HUB_ID.fullmatch(name_or_path) and path.suffix != ".gguf":
        error = _missing_on_hub(name_or_path)
        if error is None:
            return ModelSource("hub", name_or_path, name_or_path)
        tried.append(f"a hub id ({error})")
    raise ModelNotFound(f"no model {name_or_path!r}; tried: {'; '.join(tried)}")


def _missing_on_hub(repo_id: str) -> str | None:
    """None if the local cache or the hub has that model, else why not."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(repo_id, "config.json"), str):
        return None
    if constants.HF_HUB_OFFLINE:
        return "not in the local cache, and the hub is switched off"
    try:
        HfApi().model_info(repo_id, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # any network or HTTP failure means the same: not reachable
        return f"not in the local cache, and the hub says: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return None
