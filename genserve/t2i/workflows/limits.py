"""What a model can make, known from its folder, and what of a request has no effect. Must not import torch.

Owns the numbers of `WorkflowInfo.limits` and the checks that concern several inputs at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from genserve.core.errors import ConfigError, InvalidRequest
from genserve.t2i.models.checkpoint import (
    denoiser_config,
    is_flux,
    patch_size,
    read_config,
    vae_scale_factor,
)
from genserve.t2i.models.schedule import MULTISTEP, STATELESS, first_step
from genserve.t2i.workflows.control import MAX_CONTROLNETS, suffix

_FAMILIES = {
    "StableDiffusion3": "sd3",
    "StableDiffusionXL": "sdxl",
    "StableDiffusion": "sd15",
    "Flux": "flux",
}
_MAX_TOKENS = 512


def family_of(model_path: str) -> str:
    """Which of `sd15`, `sdxl`, `sd3`, `flux` a checkpoint is; `InvalidRequest` if it is none of them."""
    name = str(read_config(model_path, "model_index.json").get("_class_name", ""))
    for prefix, family in _FAMILIES.items():
        if name.startswith(prefix):
            return family
    raise InvalidRequest("model_path", f"{model_path} is a {name or 'folder without model_index.json'}")


def expect(family: str, model_path: str) -> None:
    """Raise `ConfigError` if the checkpoint says that it is of another family."""
    name = str(read_config(model_path, "model_index.json").get("_class_name", ""))
    found = next((each for prefix, each in _FAMILIES.items() if name.startswith(prefix)), family)
    if found != family:
        raise ConfigError(f"model_path: {model_path} is a {name}, of the family {found}, not {family}")


def default_size(model_path: str) -> int:
    """Pixels of a side of the pictures that the model makes unless asked otherwise."""
    sample_size = 128 if is_flux(model_path) else int(denoiser_config(model_path).get("sample_size", 64))
    return sample_size * vae_scale_factor(model_path)


def limits(family: str, model_path: str) -> dict[str, dict[str, Any]]:
    """Of a family's inputs: "minimum", "maximum", "multiple_of". Sizes the model can't make are outside.

    Where the model itself has no largest size, it is four times the size that it was trained at.
    """
    step = vae_scale_factor(model_path) * patch_size(model_path)
    positions = denoiser_config(model_path).get("pos_embed_max_size")
    side = {
        "minimum": step,
        "maximum": positions * step if positions else 4 * default_size(model_path),
        "multiple_of": step,
    }
    train = read_config(model_path, "scheduler/scheduler_config.json").get("num_train_timesteps", 1000)
    found: dict[str, dict[str, Any]] = {
        "height": side,
        "width": side,
        "num_steps": {"minimum": 1, "maximum": train},
        "strength": {"minimum": 0.0, "maximum": 1.0},
        "guidance_scale": {"minimum": 0.0, "maximum": 100.0},
    }
    for name in _of_each_controlnet("control_start", "control_end"):
        found[name] = {"minimum": 0.0, "maximum": 1.0}
    if family in ("sd3", "flux"):
        found["max_sequence_length"] = {"minimum": 1, "maximum": _MAX_TOKENS}
        found["true_cfg_scale"] = found["guidance_scale"]
    if family in ("sd3", "sd15"):
        layers = int(read_config(model_path, "text_encoder/config.json").get("num_hidden_layers", 12))
        found["clip_skip"] = {"minimum": 0, "maximum": layers - 1}
    return found


def check(
    family: str, model_path: str, inputs: Mapping[str, Any]
) -> tuple[tuple[InvalidRequest, ...], tuple[str, ...]]:
    """What is wrong with the inputs taken together, and warnings of what has no effect.

    Takes a request's inputs with or without defaults filled in.
    """
    errors = [*_solver(family, model_path, inputs), *_steps(model_path, inputs)]
    for name in _of_each_controlnet("control_start"):
        start, end_name = inputs.get(name), name.replace("start", "end")
        end = inputs.get(end_name)
        if start is not None and end is not None and start > end:
            errors.append(InvalidRequest(name, f"{start} is after {end_name}, {end}"))
    return tuple(errors), tuple(_inert(family, inputs))


def _of_each_controlnet(*names: str) -> list[str]:
    return [f"{name}{suffix(number)}" for name in names for number in range(MAX_CONTROLNETS)]


def _solver(family: str, model_path: str, inputs: Mapping[str, Any]) -> list[InvalidRequest]:
    options = inputs.get("scheduler")
    if options is None:
        return []
    if not isinstance(options, Mapping):
        return [InvalidRequest("scheduler", "must be an object, such as {'shift': 1.5}")]
    known = STATELESS[:1] if family in ("sd3", "flux") else STATELESS[1:] + MULTISTEP
    name = options.get("name")
    if name is not None and name not in known:
        return [InvalidRequest("scheduler.name", f"{name!r} isn't served; there are: {', '.join(known)}")]
    own = read_config(model_path, "scheduler/scheduler_config.json")
    return [
        InvalidRequest(f"scheduler.{key}", f"{value!r} is no {_kind(own[key])}")
        for key, value in options.items()
        if own.get(key) is not None and value is not None and _kind(value) != _kind(own[key])
    ]


def _kind(value: Any) -> str:
    """Of a field of a scheduler's configuration."""
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "text" if isinstance(value, str) else "list"


def _steps(model_path: str, inputs: Mapping[str, Any]) -> list[InvalidRequest]:
    num_steps, strength = inputs.get("num_steps"), inputs.get("strength")
    if num_steps is None or strength is None:
        return []
    try:
        first = first_step(model_path, num_steps, strength)
    except InvalidRequest as error:
        return [error]
    if first >= num_steps:
        return [InvalidRequest("strength", f"{strength} of {num_steps} steps leaves none to run")]
    return []


def _inert(family: str, inputs: Mapping[str, Any]) -> list[str]:
    warnings = []
    name = "true_cfg_scale" if family == "flux" else "guidance_scale"
    scale = inputs.get(name)
    for negative in ("negative_prompt", "negative_prompt_2", "negative_prompt_3"):
        if inputs.get(negative) and scale is not None and scale <= 1:
            warnings.append(f"{negative} has no effect: {name} is {scale:g}, and guidance begins above 1")
    for scale_name in _of_each_controlnet("conditioning_scale"):
        if inputs.get(scale_name) == 0:
            image = scale_name.replace("conditioning_scale", "control_image")
            warnings.append(f"{image} has no effect: {scale_name} is 0")
    return warnings
