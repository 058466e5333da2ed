"""How large a KV pool is and which backend holds it: what every family's composition root decides alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genserve.core.errors import ConfigError
from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.core.models.attention.backend import AttentionBackend
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.attention.reference import ReferenceAttention
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.layers import LayerSpec


def context_limit(name: str, most_tokens: int, wanted_tokens: int | None) -> int:
    """Tokens of context: the model's own, or fewer if so configured; `ConfigError` for more."""
    if wanted_tokens is None:
        return most_tokens
    if wanted_tokens > most_tokens:
        raise ConfigError(f"max_context_tokens: {name} has {most_tokens} at most, not {wanted_tokens}")
    return wanted_tokens


def pool_pages(
    pool_bytes: int,
    layers: Sequence[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    max_sequences: int,
    context_tokens: int,
    field: str = "kv_pool",
) -> int:
    """Pages that `pool_bytes` hold, no more than `max_sequences` full contexts; `ConfigError` if none.

    `field` is what the configuration calls it. Pages that no set of running sequences could ever fill would be memory for nothing.
    """
    per_page = page_bytes(layers, dtype, device)
    num_pages = pool_bytes // per_page
    if num_pages < 1:
        raise ConfigError(f"{field}: {pool_bytes} bytes hold no page; one takes {per_page} bytes")
    return min(num_pages, max_sequences * -(-context_tokens // PAGE_TOKENS))


def page_bytes(layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of one page over all layers."""
    return _kind(device).page_bytes(layers, dtype)


def make_backend(
    layers: Sequence[LayerSpec], num_pages: int, dtype: torch.dtype, device: torch.device, team: ThreadTeam
) -> AttentionBackend:
    """The pages, allocated now, on `device`; `team` computes attention on a CPU."""
    if device.type == "cpu":
        return CpuAttention(layers, num_pages, dtype, team)
    return ReferenceAttention(layers, num_pages, dtype, PAGE_TOKENS, device)


def _kind(device: torch.device) -> type[CpuAttention] | type[ReferenceAttention]:
    return CpuAttention if device.type == "cpu" else ReferenceAttention
