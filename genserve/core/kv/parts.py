"""How KV of a request lies in a tensor store: in parts, each some layers of all its pages. No torch."""

from __future__ import annotations

from typing import NamedTuple

from genserve.core.tensors.ref import TensorRef


class KvPart(NamedTuple):
    """KV of layers `[first_layer, end_layer)` for a run of a request's pages, gathered into one tensor.

    `layout` names how a page of these layers lies in memory; only pages of the same layout can take it.
    """

    first_layer: int
    end_layer: int
    ref: TensorRef
    layout: str = ""
