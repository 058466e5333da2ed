"""Steps taken as pure functions equal a diffusers scheduler stepped normally, bit for bit."""

from __future__ import annotations

import inspect
import json

import diffusers
import numpy as np
import pytest
import torch

from genserve.core.errors import InvalidRequest
from genserve.t2i.models.schedule import (
    Denoise,
    MultistepDenoise,
    Schedule,
    add_noise,
    first_step,
    init_noise_sigma,
    is_multistep,
    make_schedule,
    num_iterations,
    scale_input,
    step,
    stream_seed,
    template,
    timestep,
)

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SOLVERS = {
    "flow": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "flow-karras": ("FlowMatchEulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "flow-dynamic": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    "flow-stochastic": ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}),
    "euler": ("EulerDiscreteScheduler", SD),
    "euler-karras": ("EulerDiscreteScheduler", {**SD, "use_karras_sigmas": True}),
    "euler-ancestral": ("EulerAncestralDiscreteScheduler", SD),
    "ddim": ("DDIMScheduler", {**SD, "clip_sample": False}),
    "pndm": ("PNDMScheduler", {**SD, "skip_prk_steps": True}),
    "dpm": ("DPMSolverMultistepScheduler", SD),
    "dpm-3": ("DPMSolverMultistepScheduler", {**SD, "solver_order": 3, "use_karras_sigmas": True}),
    "dpm-sde": ("DPMSolverMultistepScheduler", {**SD, "algorithm_type": "sde-dpmsolver++"}),
    "unipc": ("UniPCMultistepScheduler", SD),
    "unipc-3": ("UniPCMultistepScheduler", {**SD, "solver_order": 3}),
}


@pytest.fixture
def folder(tmp_path, request):
    """A checkpoint's folder with nothing but configurations."""
    name, config = request.param

    def write(path, content):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(json.dumps(content))

    write("scheduler/scheduler_config.json", {"_class_name": name, **config})
    write("vae/config.json", {"block_out_channels": [8, 8], "latent_channels": 4})
    write("transformer/config.json", {"_class_name": "SD3Transformer2DModel", "patch_size": 2})
    return str(tmp_path)


def model(latents, t):
    return torch.sin(latents * 3) + t / 1000


def ours(schedule, latents, first=0, seed=7):
    history = []
    for index in range(first, num_iterations(schedule)):
        scaled = scale_input(schedule, index, latents)
        noise_pred = model(scaled, timestep(schedule, index))
        # Through JSON, and twice: a step leaves nothing behind.
        schedule = json.loads(json.dumps(schedule))
        step(schedule, index, noise_pred, latents, history, seed)
        latents, history = step(schedule, index, noise_pred, latents, history, seed)
    return latents


def theirs(scheduler, latents, first=0, seed=7):
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    for index, t in list(enumerate(scheduler.timesteps))[first:]:
        scaled = (
            scheduler.scale_model_input(latents, t) if hasattr(scheduler, "scale_model_input") else latents
        )
        noise_pred = model(scaled, t)
        extra = {}
        if "generator" in inspect.signature(scheduler.step).parameters:
            extra["generator"] = torch.Generator().manual_seed(stream_seed(seed, "step", index))
        latents = scheduler.step(noise_pred, t, latents, return_dict=False, **extra)[0]
    return latents


@pytest.mark.parametrize("folder", SOLVERS.values(), ids=SOLVERS, indirect=True)
@pytest.mark.parametrize(("num_steps", "first"), [(7, 0), (20, 0), (7, 3)])
def test_steps_equal_diffusers(folder, num_steps, first):
    schedule = make_schedule(folder, num_steps, 8, 16)
    scheduler = getattr(diffusers, schedule["class"]).from_pretrained(folder, subfolder="scheduler")
    mu = {"mu": schedule["mu"]} if schedule["mu"] is not None else {}
    scheduler.set_timesteps(num_steps, **mu)
    start = torch.randn((1, 4, 8, 16), generator=torch.Generator().manual_seed(1))
    start = start * getattr(scheduler, "init_noise_sigma", 1.0)
    assert torch.equal(timestep(schedule, first), scheduler.timesteps[first])
    assert init_noise_sigma(schedule) == getattr(scheduler, "init_noise_sigma", 1.0)
    assert torch.equal(ours(schedule, start, first), theirs(scheduler, start, first))
    assert torch.equal(template(schedule).timesteps, scheduler.timesteps)


@pytest.mark.parametrize("folder", SOLVERS.values(), ids=SOLVERS, indirect=True)
def test_noise_added_to_an_image_equals_diffusers(folder):
    schedule = make_schedule(folder, 6, 8, 8)
    scheduler = getattr(diffusers, schedule["class"]).from_pretrained(folder, subfolder="scheduler")
    scheduler.set_timesteps(6, **({"mu": schedule["mu"]} if schedule["mu"] is not None else {}))
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(2)
    image, noise = torch.randn(2, 1, 4, 8, 8).unbind(0)
    add = scheduler.scale_noise if hasattr(scheduler, "scale_noise") else scheduler.add_noise
    times = scheduler.timesteps[2:3]
    expected = add(image, times, noise) if hasattr(scheduler, "scale_noise") else add(image, noise, times)
    assert torch.equal(add_noise(schedule, 2, image, noise), expected)


@pytest.mark.parametrize("folder", [SOLVERS["dpm"]], indirect=True)
def test_what_is_no_option_of_the_solver_is_refused(folder):
    with pytest.raises(InvalidRequest, match=r"options\.use_karas"):
        make_schedule(folder, 4, options={"use_karas": True})
    with pytest.raises(InvalidRequest, match="no solver"):
        make_schedule(folder, 4, options={"name": "Heun"})
    with pytest.raises(InvalidRequest, match=r"options\.eta"):
        make_schedule(folder, 4, options={"eta": 1.0})
    changed = make_schedule(folder, 4, options={"name": "EulerDiscreteScheduler", "use_karras_sigmas": True})
    assert changed["config"]["beta_end"] == SD["beta_end"] and not is_multistep(changed)


@pytest.mark.parametrize("folder", [SOLVERS["ddim"]], indirect=True)
def test_eta_makes_ddim_draw_from_the_stream_of_seed_and_step(folder):
    schedule = make_schedule(folder, 4, options={"eta": 1.0})
    start = torch.randn(1, 4, 8, 8)
    assert torch.equal(ours(schedule, start), ours(schedule, start))
    assert not torch.equal(ours(schedule, start), ours(schedule, start, seed=8))
    with pytest.raises(ValueError, match="needs a seed"):
        step(schedule, 0, start, start)


@pytest.mark.parametrize("folder", [SOLVERS["flow-dynamic"], SOLVERS["pndm"]], indirect=True)
def test_nodes_take_the_same_steps(folder):
    out = Schedule(model_path=folder).execute({}, num_steps=5, height=16, width=32, strength=0.5)
    schedule, first = out["schedule"], out["first"]
    assert first == 2 and out["count"] == len(template(schedule).timesteps)
    latents = torch.randn(1, 4, 8, 16)
    many = MultistepDenoise(model_path=folder)
    expected, history = step(schedule, first, latents.cos(), latents)
    got = many.execute({}, latents.cos(), latents, None, schedule, step=first)
    assert torch.equal(got["latents"], expected) and len(got["history"]) == len(history)
    if is_multistep(schedule):
        with pytest.raises(InvalidRequest, match="MultistepDenoise"):
            Denoise().execute({}, latents, latents, schedule, step=first)
    else:
        assert torch.equal(
            Denoise(model_path=folder).execute({}, latents.cos(), latents, step=first, num_steps=5)[
                "latents"
            ],
            expected,
        )


@pytest.mark.parametrize("folder", [SOLVERS["flow"]], indirect=True)
def test_image_to_image_begins_where_the_familys_pipeline_does(folder, tmp_path):
    assert first_step(folder, 4, 0.6) == 1
    (tmp_path / "transformer/config.json").unlink()
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet/config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    assert first_step(folder, 4, 0.6) == 2
    with pytest.raises(InvalidRequest, match="strength"):
        first_step(folder, 4, 0)
    with pytest.raises(InvalidRequest, match="leaves none"):
        Schedule(model_path=folder).execute({}, num_steps=4, strength=0.1)


@pytest.mark.parametrize("folder", [SOLVERS["flow-dynamic"]], indirect=True)
def test_flux_schedules_start_from_linear_sigmas(folder, tmp_path):
    (tmp_path / "transformer/config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    schedule = make_schedule(folder, 4, 8, 8)
    assert schedule["mu"] == calculate_shift(16, 256, 4096, 0.5, 1.15)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    scheduler.set_timesteps(4, sigmas=np.linspace(1.0, 0.25, 4), mu=schedule["mu"])
    assert torch.equal(template(schedule).sigmas, scheduler.sigmas)
