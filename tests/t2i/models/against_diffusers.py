"""Runs a workflow in the reference interpreter, and the stock pipeline of the same checkpoint, for comparison."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from genserve.t2i.reference import evaluate
from genserve.t2i.workflow import Workflow
from tests.t2i.models.driver import pixels, with_latents


@dataclass(frozen=True, eq=False)
class Made:
    """A picture (uint8) and the latents that it was decoded from."""

    image: torch.Tensor
    latents: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Made)
            and torch.equal(self.image, other.image)
            and torch.equal(self.latents, other.latents)
        )

    def distance(self, other: Made) -> float:
        return float((self.latents - other.latents).abs().max())


class Ours:
    """Models stay loaded from run to run."""

    def __init__(self) -> None:
        self.loaded: dict[tuple[Any, ...], dict[str, Any]] = {}

    def __call__(self, workflow: Workflow, **inputs: Any) -> Made:
        graph = with_latents(workflow.to_graph())
        given = {
            name: pixels(value) if hasattr(value, "convert") else value for name, value in inputs.items()
        }
        with torch.no_grad():
            outputs = evaluate(graph, given, loaded=self.loaded)
        return Made(outputs["image"], outputs["latents"])


class Theirs:
    """The checkpoint's stock pipelines, all on one copy of its modules."""

    def __init__(self, folder: str) -> None:
        import diffusers

        self.parts: dict[str, Any] = diffusers.DiffusionPipeline.from_pretrained(folder).components

    def __call__(
        self,
        cls: str,
        seed: int,
        solver: Mapping[str, Any] | None = None,
        drawn: tuple[int, ...] | None = None,
        **inputs: Any,
    ) -> Made:
        """`solver` replaces fields of the scheduler's configuration; "name" its class. Other parts of the pipeline,
        such as a ControlNet, are among `inputs`. `drawn`: the shape of what the seed's generator has drawn before."""
        import diffusers

        solver = dict(solver or {})
        scheduler = self.parts["scheduler"]
        scheduler_cls = getattr(diffusers, solver.pop("name", type(scheduler).__name__))
        parts = {**self.parts, "scheduler": scheduler_cls.from_config(scheduler.config, **solver)}
        known = inspect.signature(getattr(diffusers, cls).__init__).parameters
        parts |= {name: inputs.pop(name) for name in list(inputs) if name in known}
        if "requires_safety_checker" in known:
            parts["requires_safety_checker"] = False
        pipeline = getattr(diffusers, cls)(**{key: value for key, value in parts.items() if key in known})
        pipeline.set_progress_bar_config(disable=True)

        generator = torch.Generator().manual_seed(seed)
        if drawn is not None:
            torch.randn(drawn, generator=generator)
        seen: list[torch.Tensor] = []

        def see(pipeline: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
            seen.append(values["latents"])
            return values

        image = pipeline(generator=generator, callback_on_step_end=see, **inputs).images[0]
        return Made(torch.from_numpy(np.array(image)), seen[-1])
