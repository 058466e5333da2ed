"""Runs models one by one, as a worker would: loaded once, without gradients."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from PIL import Image

from genserve.t2i.model import Model


class Driver:
    def __init__(self) -> None:
        self._loaded: dict[tuple[type[Model], str], dict[str, Any]] = {}

    def __call__(self, model: Model, **inputs: Any) -> Any:
        """The outputs by name, or the one output."""
        key = type(model), json.dumps(model.params, sort_keys=True)
        if key not in self._loaded:
            self._loaded[key] = model.load(model.params.get("model_path"), "cpu")
        with torch.no_grad():
            outputs = model.execute(self._loaded[key], **inputs)
        return outputs if len(outputs) > 1 else next(iter(outputs.values()))


def picture(seed: int = 0, size: int = 64) -> Image.Image:
    """Smooth colours, unlike for each seed."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC)


def mask(size: int = 64) -> Image.Image:
    array = np.zeros((size, size), dtype=np.uint8)
    array[size // 4 : size // 2, : size // 2] = 255
    return Image.fromarray(array)


def pixels(image: Image.Image) -> torch.Tensor:
    """A picture as models are given it."""
    return torch.from_numpy(np.array(image.convert("RGB")))
