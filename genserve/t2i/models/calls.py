"""Models whose outputs depend on how they are called.

Owns the trick: a call is recorded through a view of the model that declares only the outputs of this call, and
is the same model (parameters, patches, identity) in all else.
"""

from __future__ import annotations

import copy
from typing import Any

from genserve.t2i.model import Model


def call_for(model: Model, outputs: tuple[str, ...], args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
    """Record a call of `model` that has just `outputs`, in their declared order."""
    from genserve.t2i.workflow import Workflow

    views: dict[tuple[str, ...], Model] = model.__dict__.setdefault("_views", {})
    if outputs not in views:
        view = copy.copy(model)
        view.output_ports = [port for port in model.output_ports if port.name in outputs]
        views[outputs] = view
    return Workflow.current().call(views[outputs], args, inputs)
