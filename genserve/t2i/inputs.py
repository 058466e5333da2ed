"""What a request gives against what its workflow declares: checked before any work.

Owns the checks and the conversion of pictures to what nodes take, and back. Torch is imported where it is used.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from genserve.core.errors import InvalidRequest
from genserve.t2i.instance import SEED
from genserve.t2i.ports import REQUIRED, PortType
from genserve.t2i.request import InvokeRequest, WorkflowInfo

if TYPE_CHECKING:
    import torch

_MAX_SEED = 1 << 63
_MAX_SIDE = 1 << 14


def checked_inputs(request: InvokeRequest, info: WorkflowInfo, max_images: int) -> dict[str, Any]:
    """Every declared input by name, defaults filled in, a seed drawn where none was given; pictures as they came.

    Raises `InvalidRequest` that names the input.
    """
    declared = {each.name: each for each in info.inputs}
    for name in request.inputs:
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise InvalidRequest(name, f"workflow {info.name} has no such input (there is: {known})")
    if not 1 <= request.num_images <= max_images:
        raise InvalidRequest("num_images", f"must be from 1 to {max_images}, not {request.num_images}")
    if request.num_images > 1 and SEED not in declared:
        raise InvalidRequest(
            "num_images", f"workflow {info.name} has no seed: all its images would be the same"
        )
    values: dict[str, Any] = {}
    for name, each in declared.items():
        value = request.inputs.get(name)
        if value is None:
            value = None if each.default is REQUIRED else each.default
            if value is None and name == SEED and each.type.kind == "int":
                value = secrets.randbits(32)
            if value is None and each.default is REQUIRED:
                raise InvalidRequest(name, f"workflow {info.name} needs it")
        if value is not None:
            value = _checked(name, value, each.type)
            _check_limits(name, value, info.limits.get(name, {}))
        values[name] = value
    seed = values.get(SEED)
    if isinstance(seed, int) and not 0 <= seed < _MAX_SEED - max_images:
        raise InvalidRequest(SEED, f"must be from 0 to 2**63 - 1, not {seed}")
    _check_rest(request)
    return values


def _check_rest(request: InvokeRequest) -> None:
    if request.lora_max_late_steps < 0:
        raise InvalidRequest("lora_max_late_steps", "must not be negative")
    if request.preview_every_steps < 0:
        raise InvalidRequest("preview_every_steps", "must not be negative")
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise InvalidRequest("deadline_s", f"must be more than 0, not {request.deadline_s}")
    steps = request.lora_arrival_steps
    if steps is not None and len(steps) != request.num_images:
        raise InvalidRequest("lora_arrival_steps", f"must be {request.num_images}, one an image")


def _checked(name: str, value: Any, type: PortType) -> Any:
    kind = type.kind
    if kind == "list":
        assert type.item is not None
        if not isinstance(value, list | tuple):
            raise InvalidRequest(name, f"must be a list, not {_shown(value)}")
        return [_checked(f"{name}[{index}]", item, type.item) for index, item in enumerate(value)]
    if kind == "text" and not isinstance(value, str):
        raise InvalidRequest(name, f"must be text, not {_shown(value)}")
    if kind == "bool" and not isinstance(value, bool):
        raise InvalidRequest(name, f"must be true or false, not {_shown(value)}")
    if kind == "int" and (not isinstance(value, int) or isinstance(value, bool)):
        raise InvalidRequest(name, f"must be a whole number, not {_shown(value)}")
    if kind == "float":
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise InvalidRequest(name, f"must be a number, not {_shown(value)}")
        return float(value)
    if kind == "json":
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(name, f"must be JSON: {error}") from error
    if kind == "image":
        return _checked_picture(name, value)
    if kind in ("tensor", "tensors"):
        raise InvalidRequest(name, "a tensor can't be given with a request")
    return value


def _checked_picture(name: str, value: Any) -> Any:
    from PIL import Image

    if not isinstance(value, Image.Image):
        raise InvalidRequest(name, f"must be a picture, not {_shown(value)}")
    if not (1 <= value.width <= _MAX_SIDE and 1 <= value.height <= _MAX_SIDE):
        raise InvalidRequest(
            name, f"must be up to {_MAX_SIDE} pixels a side, not {value.width} x {value.height}"
        )
    return value


def _check_limits(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        if "enum" in limits and value not in limits["enum"]:
            raise InvalidRequest(
                name, f"must be one of {', '.join(map(str, limits['enum']))}, not {_shown(value)}"
            )
        return
    low, high, step = limits.get("minimum"), limits.get("maximum"), limits.get("multiple_of")
    if (low is not None and value < low) or (high is not None and value > high):
        lowest = "" if low is None else f"from {low} "
        highest = "on" if high is None else f"to {high}"
        raise InvalidRequest(name, f"must be {lowest}{highest}, not {value}")
    if step is not None and value % step:
        raise InvalidRequest(name, f"must be a multiple of {step}, not {value}")


def _shown(value: Any) -> str:
    if isinstance(value, str | int | float | bool):
        return repr(value)[:80]
    return type(value).__name__


def picture_tensor(picture: Any) -> torch.Tensor:
    """uint8, height x width x 3, from a PIL image; transparent parts become black."""
    import numpy as np
    import torch

    return torch.from_numpy(np.array(picture.convert("RGB"), dtype=np.uint8))


def told(value: Any, type: PortType) -> Any:
    """An output as clients get it: PIL images, numpy arrays, small data as it is."""
    import torch

    if type.kind == "list" or isinstance(value, list | tuple):
        item = type.item or type
        return [told(each, item) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    if type.kind == "image":
        from PIL import Image

        return Image.fromarray(value.detach().cpu().numpy())
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
