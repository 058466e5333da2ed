"""ControlNets of a workflow: what a request gives for each, and how several act together.

Owns the inputs `control_image` and those beside it; those of a second ControlNet end in "_2", and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from genserve.core.errors import ConfigError
from genserve.t2i.models.checkpoint import read_config
from genserve.t2i.models.latents import Sum, TensorSum
from genserve.t2i.ports import IMAGE
from genserve.t2i.workflow import Workflow

MAX_CONTROLNETS = 4
ControlNets = str | Sequence[str] | None
"""A folder or hub id, or several, whose effects add up."""


@dataclass(frozen=True)
class ControlInputs:
    """What a request says of one ControlNet: the picture, how strongly, and within which share of the steps."""

    image: Any
    scale: Any
    start: Any
    end: Any


def paths(controlnet: ControlNets, wanted: str) -> tuple[str, ...]:
    """Where the ControlNets are. Raises `ConfigError` for too many, and for one that is no `wanted`, a class."""
    found = () if controlnet is None else (controlnet,) if isinstance(controlnet, str) else tuple(controlnet)
    if len(found) > MAX_CONTROLNETS:
        raise ConfigError(f"controlnet: {len(found)} of them are more than {MAX_CONTROLNETS}")
    for path in found:
        name = read_config(path, "config.json").get("_class_name", wanted)
        if name != wanted:
            raise ConfigError(f"controlnet: {path} is a {name}; this family's are {wanted}s")
    return found


def suffix(number: int) -> str:
    """Of the inputs of ControlNet `number`, counted from 0."""
    return f"_{number + 1}" if number else ""


def control_inputs(wf: Workflow, number: int) -> ControlInputs:
    """Declares the inputs of ControlNet `number`, counted from 0."""
    end = suffix(number)
    return ControlInputs(
        wf.add_input(f"control_image{end}", IMAGE),
        wf.add_input(f"conditioning_scale{end}", float, default=1.0),
        wf.add_input(f"control_start{end}", float, default=0.0, description="Share of the steps"),
        wf.add_input(f"control_end{end}", float, default=1.0, description="Share of the steps"),
    )


def added(one: Any, other: Any) -> Any:
    """The residuals of ControlNets so far and those of another one; None is none."""
    if one is None or other is None:
        return other if one is None else one
    if one.type.kind == "tensor":
        return TensorSum()(one, other)
    if None not in (one.type.length, other.type.length) and one.type.length != other.type.length:
        raise ConfigError(
            f"controlnet: ControlNets with {one.type.length} and with {other.type.length} residuals don't add up"
        )
    return Sum()(one, other)
