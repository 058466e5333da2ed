"""Tells a diffusion language model by its `config.json`. No torch: a command line asks this first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# As published: LLaDA and LLaDA 1.5; Dream and DiffuCoder; LLaDA2; SDAR; DiffusionGemma.
_MODEL_TYPES = ("llada", "dream", "sdar", "diffusion_gemma", "diffusiongemma")


def is_diffusion(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is a diffusion language model's, by its type or its architecture's name."""
    names = [config.get("model_type"), *(config.get("architectures") or ())]
    return any(isinstance(name, str) and name.lower().startswith(_MODEL_TYPES) for name in names)
