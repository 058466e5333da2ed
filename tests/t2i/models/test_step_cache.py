"""First-block caching: equal to diffusers' own, bit for bit, and pure."""

from __future__ import annotations

import diffusers
import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache

from genserve.t2i.models.flux import Flux, FluxTextEncoder, pack
from genserve.t2i.models.schedule import make_schedule, num_iterations, step
from genserve.t2i.models.sd3 import SD3TextEncoder, SD3Transformer
from genserve.t2i.models.step_cache import num_skipped
from genserve.t2i.passes import step_cache
from genserve.t2i.workflows import FAMILIES
from tests.t2i.models.driver import picture, render, run_model

NUM_STEPS = 6


def denoised(model, encoder, path, prompts, **inputs):
    """The latents after all steps from seed 5, and how many calls skipped blocks in each step."""
    embeds = [
        run_model(encoder, prompt=text, max_sequence_length=24)["prompt_embeds"] if text else None
        for text in prompts
    ]
    schedule = make_schedule(path, NUM_STEPS, 8, 8)
    latents = torch.randn((1, 16, 8, 8), generator=torch.Generator().manual_seed(5))
    cache, skipped = None, []
    for index in range(num_iterations(schedule)):
        shared = {"latents": latents, "prompt_embeds": embeds[0], "negative_prompt_embeds": embeds[1]}
        out = run_model(model, **shared, schedule=schedule, step=index, step_cache=cache, **inputs)
        # The same call again gives the same: nothing stays in the module.
        again = run_model(model, **shared, schedule=schedule, step=index, step_cache=cache, **inputs)
        assert torch.equal(out["noise_pred"], again["noise_pred"])
        cache = out["step_cache"]
        skipped.append(num_skipped(cache))
        latents, _ = step(schedule, index, out["noise_pred"], latents)
    return latents, skipped


@pytest.mark.parametrize("negative", [None, "blurry"])
@pytest.mark.parametrize("threshold", [1.0, 1e-6])
def test_flux_equals_diffusers_first_block_cache(tiny, threshold, negative):
    pipeline = diffusers.FluxPipeline.from_pretrained(tiny("flux"))
    pipeline.set_progress_bar_config(disable=True)
    apply_first_block_cache(pipeline.transformer, FirstBlockCacheConfig(threshold=threshold))
    asked = {"prompt": "a red cat", "height": 64, "width": 64, "max_sequence_length": 24}
    if negative:
        asked |= {"negative_prompt": negative, "true_cfg_scale": 3.0}
    expected = pipeline(
        **asked,
        guidance_scale=3.5,
        num_inference_steps=NUM_STEPS,
        generator=torch.Generator().manual_seed(5),
        output_type="latent",
    ).images
    model = Flux(model_path=tiny("flux"), step_cache_threshold=threshold)
    encoder = FluxTextEncoder(model_path=tiny("flux"))
    prompts = ("a red cat", negative)
    latents, skipped = denoised(
        model,
        encoder,
        tiny("flux"),
        prompts,
        guidance_scale=3.5,
        true_cfg_scale=3.0,
    )
    assert torch.equal(pack(latents), expected)
    assert (skipped[-1] > 0) == (threshold > 0.1)


def sd3(tiny, threshold):
    return SD3Transformer(model_path=tiny("sd3"), step_cache_threshold=threshold)


def test_sd3_skips_steps_and_stays_close(tiny):
    encoder, prompts = SD3TextEncoder(model_path=tiny("sd3")), ("a red cat", "blurry")
    exact, none = denoised(sd3(tiny, 0.0), encoder, tiny("sd3"), prompts)
    cached, skipped = denoised(sd3(tiny, 0.3), encoder, tiny("sd3"), prompts)
    assert none == [0] * NUM_STEPS and 0 < skipped[-1] < NUM_STEPS
    assert not torch.equal(cached, exact)
    assert (cached - exact).abs().mean() < 0.3 * exact.abs().mean()


def test_a_threshold_of_zero_changes_nothing_and_leaves_no_state(tiny):
    encoder = SD3TextEncoder(model_path=tiny("sd3"))
    given = {
        "latents": torch.ones(1, 16, 8, 8),
        "prompt_embeds": run_model(encoder, prompt="a cat", max_sequence_length=24)["prompt_embeds"],
        "schedule": make_schedule(tiny("sd3"), 4),
    }
    out = run_model(sd3(tiny, 0.0), **given)
    assert out["step_cache"] == []
    assert torch.equal(out["noise_pred"], run_model(SD3Transformer(model_path=tiny("sd3")), **given))


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_pass_makes_a_loop_carry_it(tiny, family):
    """Residuals of a ControlNet included, which the skipped blocks would have added one by one."""
    graph = FAMILIES[family](tiny(family), controlnet=tiny.controlnet(family)).to_graph()
    asked = {"prompt": "a red cat", "height": 64, "width": 64, "control_image": picture(2)}
    asked |= {"num_steps": NUM_STEPS, "seed": 5, "max_sequence_length": 24}
    _, exact = render(graph, **asked)
    _, always = render(step_cache.apply(graph, threshold=0.0), **asked)
    _, cached = render(step_cache.apply(graph, threshold=2.0), **asked)
    assert torch.equal(always, exact) and not torch.equal(cached, exact)
    assert (cached - exact).abs().mean() < exact.abs().mean()
