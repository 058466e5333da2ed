"""The nodes around the denoiser: random numbers, masks, pixels and the autoencoder equal diffusers' own."""

from __future__ import annotations

import diffusers
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor

from genserve.core.errors import InvalidRequest
from genserve.t2i.models.latents import (
    AddNoise,
    Guidance,
    InpaintBlend,
    InpaintMask,
    LatentsGenerator,
    Pixels,
    Sum,
    to_image,
    to_pixels,
)
from genserve.t2i.models.schedule import make_schedule
from genserve.t2i.models.vae import VAE
from tests.t2i.models.driver import mask, picture, pixels, run_model


def test_latents_are_the_draws_of_the_seeds_generator(tiny):
    generator = torch.Generator().manual_seed(3)
    first, second = (randn_tensor((1, 16, 8, 4), generator=generator) for _ in range(2))
    latents = LatentsGenerator(model_path=tiny("sd3"))
    assert torch.equal(run_model(latents, seed=3, height=64, width=32), first)
    assert torch.equal(run_model(latents, seed=3, height=64, width=32, draw=1), second)
    assert run_model(LatentsGenerator(channels=4, size=64), seed=3).shape == (1, 4, 8, 8)
    assert run_model(LatentsGenerator(), seed=0).shape == (1, 16, 128, 128)
    half = run_model(LatentsGenerator(dtype="float16", size=32), seed=1)
    assert half.dtype == torch.float16


def test_latents_are_scaled_to_the_solvers_first_sigma(tiny):
    schedule = make_schedule(tiny("sdxl"), 4)
    generator = LatentsGenerator(model_path=tiny("sdxl"))
    scheduler = diffusers.EulerDiscreteScheduler.from_pretrained(tiny("sdxl"), subfolder="scheduler")
    scheduler.set_timesteps(4)
    plain = run_model(generator, seed=1, height=64, width=64)
    scaled = run_model(generator, seed=1, height=64, width=64, schedule=schedule)
    assert torch.equal(scaled, plain * scheduler.init_noise_sigma) and scheduler.init_noise_sigma > 2


def test_guidance_of_at_most_one_is_none():
    cond, uncond = torch.randn(2, 1, 4, 2, 2).unbind(0)
    given = {"cond": cond, "uncond": uncond}
    assert run_model(Guidance(), **given, guidance_scale=1.0) is cond
    assert torch.equal(run_model(Guidance(), **given, guidance_scale=3.0), uncond + 3.0 * (cond - uncond))


@pytest.mark.parametrize("size", [(64, 64), (48, 32)])
def test_masks_and_pixels_equal_the_image_processors(tiny, size):
    height, width = size
    processor = VaeImageProcessor(do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    expected = processor.preprocess(mask(), height=height, width=width)
    expected = torch.nn.functional.interpolate(expected, size=(height // 8, width // 8))
    got = run_model(InpaintMask(model_path=tiny("sd3")), image=pixels(mask()), height=height, width=width)
    assert torch.equal(got, expected) and 0 < got.mean() < 1
    for normalize in (True, False):
        processor = VaeImageProcessor(do_normalize=normalize, do_convert_rgb=True)
        expected = processor.preprocess(picture(1, 80), height=height, width=width)
        node = Pixels(normalize=normalize)
        got = run_model(node, image=pixels(picture(1, 80)), height=height, width=width)
        assert torch.equal(got, expected)


def test_an_image_survives_the_way_to_pixels_and_back():
    image = pixels(picture(4))
    assert torch.equal(to_image(to_pixels(image)), image)


@pytest.mark.parametrize("family", ["sd3", "sdxl", "sd15"])
def test_the_autoencoder_equals_diffusers(tiny, family):
    vae = diffusers.AutoencoderKL.from_pretrained(tiny(family), subfolder="vae")
    shift = vae.config.shift_factor or 0.0
    node = VAE(model_path=tiny(family))
    with torch.no_grad():
        posterior = vae.encode(VaeImageProcessor().preprocess(picture(2))).latent_dist
    sampled = (posterior.sample(torch.Generator().manual_seed(9)) - shift) * vae.config.scaling_factor
    most_likely = (posterior.mode() - shift) * vae.config.scaling_factor
    image = pixels(picture(2))
    assert torch.equal(run_model(node, image=image, mode="encode", seed=9), sampled)
    assert torch.equal(run_model(node, image=image, mode="encode"), most_likely)
    with torch.no_grad():
        decoded = vae.decode((sampled / vae.config.scaling_factor + shift).contiguous()).sample
    expected = VaeImageProcessor().postprocess(decoded)[0]
    assert np.array_equal(run_model(node, latents=sampled).numpy(), np.array(expected))
    with pytest.raises(InvalidRequest, match="image"):
        run_model(node, mode="encode")


def test_outside_the_mask_the_image_stays(tiny):
    schedule = make_schedule(tiny("sd3"), 4)
    latents, image, noise = torch.randn(3, 1, 16, 8, 8).unbind(0)
    half = torch.zeros(1, 1, 8, 8)
    half[..., :4] = 1
    shared = {"latents": latents, "image_latents": image, "noise": noise, "mask": half, "schedule": schedule}
    end = run_model(InpaintBlend(), **shared, step=3)
    assert torch.equal(end[..., :4], latents[..., :4]) and torch.equal(end[..., 4:], image[..., 4:])
    middle = run_model(InpaintBlend(), **shared, step=1)
    noisy = run_model(AddNoise(), latents=image, noise=noise, schedule=schedule, first=2)
    assert torch.equal(middle[..., 4:], noisy[..., 4:])


def test_residuals_add_up_item_by_item():
    one, other = [torch.ones(2), torch.ones(3)], [torch.ones(2), torch.zeros(3)]
    total = run_model(Sum(), first=one, second=other)
    assert [each.tolist() for each in total] == [[2, 2], [1, 1, 1]]
    with pytest.raises(ValueError, match="2 and 1"):
        run_model(Sum(), first=one, second=other[:1])
