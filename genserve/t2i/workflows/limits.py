"""What a model can make, known from its folder; must not import torch."""

from __future__ import annotations

from genserve.t2i.models.checkpoint import denoiser_config, is_flux, vae_scale_factor


def default_size(model_path: str) -> int:
    """Pixels of a side of the pictures that the model makes unless asked otherwise."""
    sample_size = 128 if is_flux(model_path) else int(denoiser_config(model_path).get("sample_size", 64))
    return sample_size * vae_scale_factor(model_path)
