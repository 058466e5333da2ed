"""Runs models and workflows as plainly as can be, and makes pictures for them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from genserve.t2i.graph import FromNode, Graph, Node, WorkflowOutput, walk
from genserve.t2i.model import Model
from genserve.t2i.models.lora import Patcher
from genserve.t2i.models.lora_file import read_adapter
from genserve.t2i.ports import tensor
from genserve.t2i.reference import evaluate, make_model

LOADED: dict[Any, Any] = {}
"""Of all tests: a checkpoint is loaded once."""


def run_model(model: Model, **inputs: Any) -> Any:
    """The outputs by name, or the one output."""
    key = type(model), json.dumps(model.params, sort_keys=True)
    if key not in LOADED:
        LOADED[key] = model.load(model.params.get("model_path"), "cpu")
    with torch.no_grad():
        outputs = model.execute(LOADED[key], **inputs)
    return outputs if len(outputs) > 1 else next(iter(outputs.values()))


def render(graph: Graph, **inputs: Any) -> tuple[np.ndarray, torch.Tensor]:
    """The picture (height x width x 3) and the latents that it was decoded from."""
    for name, value in inputs.items():
        if isinstance(value, Image.Image):
            inputs[name] = pixels(value)
    with torch.no_grad():
        out = evaluate(with_latents(graph), inputs, loaded=LOADED)
    return out["image"].numpy(), out["latents"]


def rendered_with_adapters(graph: Graph, **inputs: Any) -> list[Any]:
    """Renders before, while and after the workflow's adapters are on its models, in three steps from seed 5."""
    asked = {**inputs, "num_steps": 3, "seed": 5}
    base = render(graph, **asked)
    patched = {components_key(node): node.patches for node in walk(graph.nodes) if node.patches}
    patchers = {key: Patcher() for key in patched}
    try:
        for key, patches in patched.items():
            adapters = [(read_adapter(dict(each.model.params)["model_path"]), each.scale) for each in patches]
            patchers[key].apply(LOADED[key], adapters)
        changed = render(graph, **asked)
    finally:
        for key, patcher in patchers.items():
            patcher.restore(LOADED[key])
    return [base, changed, render(graph, **asked)]


def components_key(node: Node) -> Any:
    """By which the reference interpreter keeps what the node's model has loaded."""
    model = make_model(node.model)
    return (*map(repr, model.loading(model.params)), model.params.get("model_path"))


def with_latents(graph: Graph) -> Graph:
    """The same with one more output, what the node that makes the image is given."""
    edge = next(output.edge for output in graph.outputs if output.name == "image")
    assert isinstance(edge, FromNode)
    node = next(node for node in graph.nodes if isinstance(node, Node) and node.id == edge.node)
    latents = dict(node.inputs)["latents"]
    return replace(graph, outputs=(*graph.outputs, WorkflowOutput("latents", tensor(), latents)))


def stock(pipeline: Any, **inputs: Any) -> tuple[np.ndarray, torch.Tensor]:
    """The picture and the latents that a stock pipeline makes, from seed 5."""
    pipeline.set_progress_bar_config(disable=True)
    latents = pipeline(**inputs, generator=torch.Generator().manual_seed(5), output_type="latent").images
    image = pipeline(**inputs, generator=torch.Generator().manual_seed(5)).images[0]
    return np.array(image), latents


def saved_awake(net: Any, folder: Any) -> str:
    """A ControlNet saved after its zero convolutions were given weights."""
    for parameter in net.parameters():
        if parameter.dim() > 1 and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    net.save_pretrained(folder)
    return str(folder)


def picture(seed: int = 0, size: int = 64) -> Image.Image:
    """Smooth colours, unlike for each seed."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((size, size), Image.Resampling.BICUBIC)


def mask(size: int = 64) -> Image.Image:
    array = np.zeros((size, size), dtype=np.uint8)
    array[size // 4 : size // 2, : size // 2] = 255
    return Image.fromarray(array)


def pixels(image: Image.Image) -> torch.Tensor:
    """A picture as models are given it."""
    return torch.from_numpy(np.array(image.convert("RGB")))
