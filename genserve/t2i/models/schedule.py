"""The scheduler as pure functions: diffusers' solvers, with every state that a step leaves behind made explicit.

Owns which solvers there are, how a request's schedule is built as each family's pipeline builds it, and one step
of denoising. A schedule travels as JSON ("which solver, how configured, how many steps"); the diffusers object made
from it is cached and never changed: each step works on a shallow copy set to that step, so that requests cannot
disturb each other and a step can be run again. Deviation from LegoDiffusion Figure 7: its `denoise` hides this state.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from genserve.core.errors import InvalidRequest
from genserve.t2i.model import Model
from genserve.t2i.models.checkpoint import (
    SIZES,
    denoiser_config,
    find_file,
    is_flux,
    patch_size,
    read_config,
    vae_scale_factor,
)
from genserve.t2i.ports import LOOP_COUNT, LOOP_INDEX, tensor, tensors

if TYPE_CHECKING:
    import torch

Json = Mapping[str, Any]

FLOW = "FlowMatchEulerDiscreteScheduler"
STATELESS = (FLOW, "EulerDiscreteScheduler", "EulerAncestralDiscreteScheduler", "DDIMScheduler")
MULTISTEP = ("PNDMScheduler", "DPMSolverMultistepScheduler", "UniPCMultistepScheduler")


def is_multistep(schedule: Json) -> bool:
    """Whether its steps need the history that `MultistepDenoise` carries."""
    return schedule["class"] in MULTISTEP


def is_stochastic(schedule: Json) -> bool:
    """Whether its steps draw noise, and so need a seed."""
    config = schedule["config"]
    return bool(
        schedule["class"] == "EulerAncestralDiscreteScheduler"
        or schedule.get("eta")
        or config.get("stochastic_sampling")
        or str(config.get("algorithm_type", "")).startswith("sde")
    )


def stream_seed(seed: int, *names: int | str) -> int:
    """The seed of a stream of its own for each (seed, names), such as a step."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def make_schedule(
    model_path: str,
    num_steps: int,
    latent_height: int | None = None,
    latent_width: int | None = None,
    options: Json | None = None,
) -> dict[str, Any]:
    """The schedule that the checkpoint's pipeline would use, as JSON.

    Latents' height and width are needed where the shift depends on the image's size (Flux, some SD3). `options`:
    "name" (a solver's class), "eta" (DDIM), and any field of the solver's configuration. Raises `InvalidRequest`.
    """
    config = read_config(model_path, "scheduler/scheduler_config.json")
    name = config.get("_class_name", FLOW)
    options = dict(options or {})
    chosen = options.pop("name", None) or name
    if chosen not in STATELESS + MULTISTEP:
        raise InvalidRequest("options.name", f"{chosen!r} is no solver; there are: {STATELESS + MULTISTEP}")
    eta = float(options.pop("eta", 0.0))
    if eta and chosen != "DDIMScheduler":
        raise InvalidRequest("options.eta", "only DDIMScheduler has it")
    full = _full_config(chosen, config, options)
    flux = is_flux(model_path)
    mu = None
    if flux or full.get("use_dynamic_shifting"):
        if latent_height is None or latent_width is None:
            raise ValueError("this model's schedule depends on the image: height and width are needed")
        patch = patch_size(model_path)
        mu = _shift((latent_height // patch) * (latent_width // patch), full, 1.15 if flux else 1.16)
    return {
        "class": chosen,
        "config": full,
        "num_steps": num_steps,
        "mu": mu,
        "linear_sigmas": flux and not full.get("use_flow_sigmas"),
        "eta": eta,
    }


def _full_config(name: str, config: Json, options: Json) -> dict[str, Any]:
    known = _fields(name, json.dumps(config, sort_keys=True))
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InvalidRequest(f"options.{unknown[0]}", f"{name} has no such field; it has {sorted(known)}")
    return {**known, **json.loads(json.dumps(options))}


@lru_cache(maxsize=256)
def _fields(name: str, config: str) -> dict[str, Any]:
    """All fields of a solver, of the checkpoint's configuration or at their defaults."""
    import diffusers

    solver = getattr(diffusers, name).from_config(json.loads(config))
    known = {key: value for key, value in solver.config.items() if not key.startswith("_")}
    return json.loads(json.dumps(known, default=list))  # type: ignore[no-any-return]


def _shift(num_tokens: int, config: Json, max_shift: float) -> float:
    """How far larger images move the schedule towards noise: linear in the number of image tokens."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    bottom, top = config.get("base_shift", 0.5), config.get("max_shift", max_shift)
    slope = (top - bottom) / (high - low)
    return float(num_tokens * slope + (bottom - slope * low))


def first_step(model_path: str, num_steps: int, strength: float) -> int:
    """The step at which image-to-image begins, by the rule of the checkpoint's pipeline."""
    if not 0 < strength <= 1:
        raise InvalidRequest("strength", f"is {strength}; must be above 0 and at most 1")
    if "transformer" in str(denoiser_config(model_path).get("_class_name", "")).lower():
        return int(max(num_steps - min(num_steps * strength, num_steps), 0))
    return max(num_steps - min(int(num_steps * strength), num_steps), 0)


def template(schedule: Json) -> Any:
    """The diffusers scheduler of `schedule`, shared and cached: copy it before any use that changes it."""
    return _template(json.dumps(schedule, sort_keys=True))


@lru_cache(maxsize=256)
def _template(text: str) -> Any:
    import diffusers
    import numpy as np

    schedule = json.loads(text)
    solver = getattr(diffusers, schedule["class"]).from_config(schedule["config"])
    if schedule["class"] == "PNDMScheduler" and not solver.config.skip_prk_steps:
        raise InvalidRequest("options.skip_prk_steps", "must be true: Runge-Kutta warm-up isn't supported")
    num_steps, extra = schedule["num_steps"], {}
    if schedule["mu"] is not None:
        extra["mu"] = schedule["mu"]
    if schedule["linear_sigmas"]:
        extra["sigmas"] = np.linspace(1.0, 1 / num_steps, num_steps)
    solver.set_timesteps(num_steps, **extra)
    solver.is_scale_input_called = True
    return solver


def num_iterations(schedule: Json) -> int:
    """How often the model is called: PNDM's is one more than its steps."""
    return len(template(schedule).timesteps)


def _at(schedule: Json, step: int) -> Any:
    solver = copy.copy(template(schedule))
    if not 0 <= step < len(solver.timesteps):
        raise ValueError(f"step {step} of a schedule of {len(solver.timesteps)}")
    if hasattr(solver, "_step_index"):
        solver._step_index = step
    return solver


def timestep(schedule: Json, step: int) -> torch.Tensor:
    """The time of `step`, a scalar tensor on the CPU, as models are told it."""
    return template(schedule).timesteps[step]  # type: ignore[no-any-return]


def init_noise_sigma(schedule: Json) -> float | torch.Tensor:
    """What unit noise is multiplied with to be the first latents."""
    return getattr(template(schedule), "init_noise_sigma", 1.0)


def scale_input(schedule: Json, step: int, latents: torch.Tensor) -> torch.Tensor:
    """Latents as the model expects them at `step`; the same tensor for most solvers."""
    solver = _at(schedule, step)
    if not hasattr(solver, "scale_model_input"):
        return latents
    return solver.scale_model_input(latents, solver.timesteps[step])  # type: ignore[no-any-return]


def add_noise(schedule: Json, step: int, clean: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """What `clean` latents look like when `step` begins."""
    solver = _at(schedule, step)
    solver._begin_index = step
    times = solver.timesteps[step : step + 1]
    if hasattr(solver, "scale_noise"):
        return solver.scale_noise(clean, times, noise)  # type: ignore[no-any-return]
    return solver.add_noise(clean, noise, times)  # type: ignore[no-any-return]


def step(
    schedule: Json,
    step: int,
    model_output: torch.Tensor,
    latents: torch.Tensor,
    history: Sequence[torch.Tensor] = (),
    seed: int | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One step of denoising: the next latents and the history that the next step needs.

    History is empty at the first step, whichever that is, and always for stateless solvers. Noise of stochastic
    solvers comes from a stream of its own for each (seed, step). Nothing is changed in place.
    """
    import torch

    solver = _at(schedule, step)
    extra: dict[str, Any] = {}
    if is_stochastic(schedule):
        if seed is None:
            raise ValueError(f"{schedule['class']} draws noise: it needs a seed")
        extra["generator"] = torch.Generator().manual_seed(stream_seed(seed, "step", step))
    if schedule.get("eta"):
        extra["eta"] = schedule["eta"]
    _restore(solver, step, list(history))
    after = solver.step(model_output, solver.timesteps[step], latents, return_dict=False, **extra)[0]
    return after, _state(solver)


def _restore(solver: Any, step: int, history: list[torch.Tensor]) -> None:
    name = type(solver).__name__
    if name == "PNDMScheduler":
        solver.counter, solver.ets, solver.cur_sample = 0, [], None
        if history:
            solver.counter = int(history[0])
            # The second call repeats the first step from the sample that it began with.
            solver.cur_sample = history[-1] if solver.counter == 1 else None
            solver.ets = history[1:-1] if solver.counter == 1 else history[1:]
    elif name in MULTISTEP:
        order = solver.config.solver_order
        outputs = history[:-1] if name == "UniPCMultistepScheduler" else history
        solver.lower_order_nums = len(outputs)
        solver.model_outputs = [None] * (order - len(outputs)) + outputs
        if name == "UniPCMultistepScheduler":
            times = list(solver.timesteps[step - len(outputs) : step])
            solver.timestep_list = [None] * (order - len(times)) + times
            solver.last_sample = history[-1] if history else None
            left = len(solver.timesteps) - (step - 1) if solver.config.lower_order_final else order
            solver.this_order = min(order, left, max(len(outputs), 1))


def _state(solver: Any) -> list[torch.Tensor]:
    import torch

    name = type(solver).__name__
    if name == "PNDMScheduler":
        last = [] if solver.cur_sample is None else [solver.cur_sample]
        return [torch.tensor(solver.counter), *solver.ets[-3:], *last]
    if name in MULTISTEP:
        outputs = [output for output in solver.model_outputs if output is not None]
        return [*outputs, solver.last_sample] if name == "UniPCMultistepScheduler" else outputs
    return []


def control_scale(scale: float, step: int, num_steps: int, start: float, end: float) -> float:
    """The strength of a ControlNet at `step`: 0 outside of the share of steps from `start` to `end`."""
    return scale * (1.0 - float(step / num_steps < start or (step + 1) / num_steps > end))


class Schedule(Model):
    """A request's schedule: no weights, and nothing but numbers in and out. Not `foldable`: it needs diffusers.

    `count` is how many iterations the loop has (PNDM: one more than `num_steps`), `first` the index that
    image-to-image begins at (0 without `strength`).
    """

    content: ClassVar[tuple[str, ...]] = ("scheduler/scheduler_config.json", *SIZES)

    def setup_io(self) -> None:
        self.add_input("num_steps", int)
        self.add_input("height", int, default=None)
        self.add_input("width", int, default=None)
        self.add_input("strength", float, default=None)
        self.add_input("options", dict, default=None)
        self.add_output("schedule", dict)
        self.add_output("first", int)
        self.add_output("count", int)

    def execute(
        self,
        model_components: dict[str, Any],
        num_steps: int,
        height: int | None = None,
        width: int | None = None,
        strength: float | None = None,
        options: Json | None = None,
    ) -> dict[str, Any]:
        path = self.params["model_path"]
        scale = vae_scale_factor(path)
        schedule = make_schedule(
            path, num_steps, height and height // scale, width and width // scale, options
        )
        first = 0 if strength is None else first_step(path, num_steps, strength)
        count = num_iterations(schedule)
        if first >= count:
            raise InvalidRequest("strength", f"{strength} of {num_steps} steps leaves none to run")
        return {"schedule": schedule, "first": first, "count": count}


def schedule_or_default(
    schedule: Json | None, model_path: str | None, num_steps: int | None, latents: torch.Tensor
) -> Json:
    """`schedule`, or that of the checkpoint itself for nodes that are called without one."""
    if schedule is not None:
        return schedule
    if model_path is None or num_steps is None:
        raise ValueError(
            "without `schedule`, a `model_path` with a scheduler and the number of steps are needed"
        )
    if find_file(model_path, "scheduler/scheduler_config.json") is None:
        raise ValueError(f"{model_path} has no scheduler: pass `schedule`")
    return make_schedule(model_path, num_steps, *latents.shape[-2:])


take_step = step  # nodes have a port named `step`


class Denoise(Model):
    """One step of a solver that needs nothing of the steps before it: flow-matching Euler, Euler, DDIM."""

    content: ClassVar[tuple[str, ...]] = ("scheduler/scheduler_config.json", *SIZES)

    def setup_io(self) -> None:
        self.add_input("noise_pred", tensor())
        self.add_input("latents", tensor())
        self.add_input("schedule", dict, default=None)
        self.add_input("seed", int, default=None)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_input("num_steps", int, default=LOOP_COUNT)
        self.add_output("latents", tensor())

    def execute(
        self,
        model_components: dict[str, Any],
        noise_pred: torch.Tensor,
        latents: torch.Tensor,
        schedule: Json | None = None,
        seed: int | None = None,
        step: int = 0,
        num_steps: int | None = None,
    ) -> dict[str, Any]:
        schedule = schedule_or_default(schedule, self.params.get("model_path"), num_steps, latents)
        if is_multistep(schedule):
            raise InvalidRequest(
                "options.name",
                f"{schedule['class']} needs a workflow that carries its history (MultistepDenoise)",
            )
        return {"latents": take_step(schedule, step, noise_pred, latents, (), seed)[0]}


class MultistepDenoise(Model):
    """One step of any solver; `history` is what a loop carries from step to step, absent at the first."""

    content: ClassVar[tuple[str, ...]] = ("scheduler/scheduler_config.json", *SIZES)

    def setup_io(self) -> None:
        self.add_input("noise_pred", tensor())
        self.add_input("latents", tensor())
        self.add_input("history", tensors(), default=None)
        self.add_input("schedule", dict, default=None)
        self.add_input("seed", int, default=None)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_input("num_steps", int, default=LOOP_COUNT)
        self.add_output("latents", tensor())
        self.add_output("history", tensors())

    def execute(
        self,
        model_components: dict[str, Any],
        noise_pred: torch.Tensor,
        latents: torch.Tensor,
        history: Sequence[torch.Tensor] | None = None,
        schedule: Json | None = None,
        seed: int | None = None,
        step: int = 0,
        num_steps: int | None = None,
    ) -> dict[str, Any]:
        schedule = schedule_or_default(schedule, self.params.get("model_path"), num_steps, latents)
        after, state = take_step(schedule, step, noise_pred, latents, history or (), seed)
        return {"latents": after, "history": state}
