"""Models that left an executor's GPU stay in host memory for a while: coming back costs a copy, not a load. (torch)"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch


class HostMemory:
    """Loaded parts of models by identity, up to `budget_bytes`; the least recently used go first."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._kept: OrderedDict[str, tuple[Any, dict[str, Any], int]] = OrderedDict()
        self.used_bytes = 0

    def keep(self, identity: str, owner: Any, components: dict[str, Any]) -> None:
        """Move the parts here; dropped at once if they don't fit. `owner` is handed back with them."""
        modules = list(modules_in(components))
        num_bytes = sum(
            tensor.nbytes for module in modules for tensor in (*module.parameters(), *module.buffers())
        )
        if not num_bytes or num_bytes > self._budget_bytes:
            return
        for module in modules:
            module.to("cpu")
        self._kept[identity] = owner, components, num_bytes
        self.used_bytes += num_bytes
        while self.used_bytes > self._budget_bytes:
            _, (_, _, gone_bytes) = self._kept.popitem(last=False)
            self.used_bytes -= gone_bytes

    def take(self, identity: str, device: str) -> Any:
        """The owner, its parts back on `device`; None if they aren't here."""
        found = self._kept.pop(identity, None)
        if found is None:
            return None
        owner, components, num_bytes = found
        self.used_bytes -= num_bytes
        for module in modules_in(components):
            module.to(device)
        return owner


def modules_in(value: Any) -> Iterator[torch.nn.Module]:
    """The modules among loaded parts, however they are put together."""
    if isinstance(value, torch.nn.Module):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from modules_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from modules_in(item)
