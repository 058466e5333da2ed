"""What is known of a model from its diffusers folder's JSON files, without reading weights.

Owns finding and reading configurations; must not import torch nor diffusers, so that workflows are composed
in milliseconds.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from genserve.core.errors import ModelNotFound
from genserve.core.models.registry import located

SIZES = ("vae/config.json", "transformer/config.json", "unet/config.json")
"""What tells how large latents are; for `Model.content`."""


def find_file(model_path: str, name: str) -> Path | None:
    """The local path of a file of the checkpoint, fetched from the hub where `model_path` is an id; None: it has none.

    Raises `ModelNotFound` if there is no such checkpoint.
    """
    folder = Path(located(model_path))
    if folder.is_dir():
        path = folder / name
        return path if path.is_file() else None
    if model_path.startswith((".", "/", "~")) or model_path.count("/") != 1:
        raise ModelNotFound(f"model_path: no folder {model_path}, and it is no hub id")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model_path, name))
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(f"model_path: {model_path} is not here, and can't be fetched: {error}") from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # many kinds: no such repository, no access
        raise ModelNotFound(f"model_path: {model_path} can't be fetched: {error}") from error


def read_config(model_path: str, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint, such as "vae/config.json"; {} if there is none."""
    path = find_file(model_path, name)
    return {} if path is None else dict(_parse(path, path.stat().st_mtime_ns))


@lru_cache(maxsize=256)
def _parse(path: Path, changed: int) -> dict[str, Any]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def denoiser_config(model_path: str) -> dict[str, Any]:
    """The configuration of the transformer or the UNet; {} if there is neither."""
    return read_config(model_path, "transformer/config.json") or read_config(model_path, "unet/config.json")


def vae_scale_factor(model_path: str) -> int:
    """Pixels per latent along each side; 8 where the checkpoint doesn't say."""
    channels = read_config(model_path, "vae/config.json").get("block_out_channels")
    return 2 ** (len(channels) - 1) if channels else 8


def is_flux(model_path: str) -> bool:
    return bool(denoiser_config(model_path).get("_class_name") == "FluxTransformer2DModel")


def patch_size(model_path: str) -> int:
    """Latents per token along each side: what a latent's height and width must be a multiple of."""
    if is_flux(model_path):
        return 2
    return int(denoiser_config(model_path).get("patch_size") or 1)


def latent_channels(model_path: str) -> int:
    return int(read_config(model_path, "vae/config.json").get("latent_channels", 16))
