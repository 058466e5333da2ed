"""A model that is served by name: its folder, its ControlNets and adapters, and the workflows that they make.

Owns the names of those workflows: the model's own for an image from a prompt, with "-image" and "-inpaint" for the
other modes and "-CONTROLNET" for each ControlNet. Composition only; what runs them is `serve`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from genserve.core.errors import ConfigError, InvalidRequest
from genserve.core.models.registry import PACKAGED_MODELS, located
from genserve.t2i.config import T2iConfig
from genserve.t2i.graph import Graph

if TYPE_CHECKING:
    from genserve.core.server.gateway import ServedWorkflows
    from genserve.t2i.client import LocalWorkflows
    from genserve.t2i.workflow import Workflow
    from genserve.t2i.workflows.start import Mode

# Of the model that is part of the package: what is served with it.
_PACKAGED_CONTROLNETS = {"tiny-sd3": {"layout": "tiny-sd3-controlnet"}}
_PACKAGED_LORAS = {"tiny-sd3": {"outline": "tiny-sd3-lora-outline"}}
# What it is measured with.
_PACKAGED_DEFAULTS = {"tiny-sd3": {"num_steps": 20, "guidance_scale": 3.0, "max_sequence_length": 20}}
_INPAINTING_CHANNELS = 9  # of a denoiser that can do nothing else


class ImageModelConfig(T2iConfig):
    """One model that makes images, and the executors that run it."""

    model: str
    """A built-in name, or a diffusers folder or hub id."""
    name: str | None = None
    """What clients call it; by default the built-in's or folder's own name."""
    controlnets: Mapping[str, str] = {}
    """ControlNets: name to folder or hub id. Each makes a further workflow, MODEL-NAME."""
    workflows: tuple[str, ...] = ()
    """Further workflows: JSON files (`Workflow.to_json`), or Python files, of which every workflow is served."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A workflow to register, and what is known of its requests beyond its own declarations."""

    workflow: Workflow
    family: str = ""
    description: str = ""
    is_own: bool = True
    """Of the model, not of a file beside it."""


def display_name(config: ImageModelConfig) -> str:
    """What clients call the model."""
    if config.name or config.model in PACKAGED_MODELS:
        return config.name or config.model
    return Path(config.model).expanduser().resolve().name


def loras_of(config: ImageModelConfig) -> dict[str, str]:
    """The adapters that requests may name, and where they are."""
    return {**_PACKAGED_LORAS.get(config.model, {}), **config.loras}


def entries(config: ImageModelConfig) -> list[Entry]:
    """Every workflow of the model, and those of its files. Raises `ConfigError`."""
    from genserve.t2i.files import load_workflows
    from genserve.t2i.models.checkpoint import denoiser_config
    from genserve.t2i.workflows import FAMILIES, family_of

    path, name = os.path.expanduser(config.model), _identifier(display_name(config))
    if path in PACKAGED_MODELS and not Path(located(path)).is_dir():
        raise ConfigError(f"{path}: the installed package lacks its folder {located(path)}")
    try:
        family = family_of(path)
    except InvalidRequest as error:
        raise ConfigError(f"{config.model}: {error.message}") from error
    make = FAMILIES[family]
    what = {"text": "An image from a prompt.", "image": "An image from an image and a prompt.",
            "inpaint": "An image, in part made anew."}  # fmt: skip
    only_inpaints = denoiser_config(path).get("in_channels") == _INPAINTING_CHANNELS
    found = []
    modes: tuple[Mode, ...] = ("inpaint",) if only_inpaints else ("text", "image", "inpaint")
    for mode in modes:
        made = make(path, mode=mode)
        made.name = name if mode == "text" else f"{name}-{mode}"
        found.append(Entry(made, family, what[mode]))
    for control, folder in {**_PACKAGED_CONTROLNETS.get(path, {}), **config.controlnets}.items():
        made = make(path, controlnet=folder)
        made.name = f"{name}-{_identifier(control)}"
        found.append(Entry(made, family, f"An image from a prompt and a control image ({control})."))
    for entry in found:
        _set_defaults(entry.workflow, _PACKAGED_DEFAULTS.get(path, {}))
    for file in config.workflows:
        found.extend(Entry(workflow, "workflow", is_own=False) for workflow in load_workflows(file))
    names = [entry.workflow.name for entry in found]
    twice = {each for each in names if names.count(each) > 1}
    if twice:
        raise ConfigError(f"{display_name(config)}: two workflows are called {', '.join(sorted(twice))}")
    return found


def _set_defaults(workflow: Workflow, defaults: Mapping[str, Any]) -> None:
    for name, value in defaults.items():
        if name in workflow.inputs:
            workflow.inputs[name] = replace(workflow.inputs[name], default=value)


async def start_client(config: ImageModelConfig) -> LocalWorkflows:
    """Executors, with every workflow of the model registered."""
    from genserve.t2i.serve import start

    if config.num_threads is None and config.model in PACKAGED_MODELS:
        # So small that threads cost more than they give: one each.
        config = config.model_copy(update={"num_threads": config.num_executors})
    made = entries(config)  # before executors, and the imports that take seconds
    client = await start(config)
    client.note(model=display_name(config), **({"passes": dict(config.passes)} if config.passes else {}))
    try:
        for entry in made:
            register(client, config, entry)
    except BaseException:
        await client.aclose()
        raise
    return client


def register(client: LocalWorkflows, config: ImageModelConfig, entry: Entry) -> None:
    """Let requests name the entry's workflow."""
    from genserve.t2i.registration import registered

    served, codes = registered(
        entry.workflow,
        budget_bytes=config.weights_budget,
        loras=loras_of(config),
        family=entry.family,
        description=entry.description,
        passes=config.passes if entry.is_own else None,
    )
    client.serve(served, codes)


async def start_served(config: ImageModelConfig, on_progress: Any = None) -> ServedWorkflows:
    """Start a model and present it to a server."""
    import time

    from genserve.core.server.gateway import ServedWorkflows

    client = await start_client(config)
    return ServedWorkflows(
        display_name(config), int(time.time()), client, max_queued_images=config.max_queued_requests
    )


def identities(graph: Graph) -> dict[str, str]:
    """The content hash of each node's model, by node, of models that have one."""
    from genserve.t2i.graph import walk

    return {node.id: node.model.identity for node in walk(graph.nodes) if node.model.identity}


def _identifier(name: str) -> str:
    """A name for workflows: letters, digits, - and _."""
    text = re.sub(r"[^\w-]", "-", name)
    return text if text[:1].isalpha() or text[:1] == "_" else f"m-{text}"
