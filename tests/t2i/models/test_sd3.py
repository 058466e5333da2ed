"""Stable Diffusion 3 as a workflow equals its diffusers pipelines, bit for bit in fp32."""

from __future__ import annotations

from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from genserve.t2i.models.lazy import LazyTensors
from genserve.t2i.models.lora import LoRA
from genserve.t2i.models.schedule import make_schedule
from genserve.t2i.models.sd3 import SD3ControlNet, SD3TextEncoder, SD3Transformer
from genserve.t2i.workflows import sd3
from tests.t2i.models.driver import (
    mask,
    picture,
    render,
    rendered_with_adapters,
    run_model,
    saved_awake,
    stock,
)

ASKED = {
    "prompt": "a red cat",
    "negative_prompt": "blurry",
    "guidance_scale": 5.0,
    "height": 64,
    "width": 48,
    "max_sequence_length": 24,
}


@pytest.mark.parametrize("family", ["sd3", "sd35"])
@pytest.mark.parametrize("guidance_scale", [5.0, 1.0])
def test_text_to_image(tiny, family, guidance_scale):
    asked = {**ASKED, "guidance_scale": guidance_scale}
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(tiny(family))
    image, latents = stock(pipeline, **asked, num_inference_steps=3)
    ours, our_latents = render(sd3(tiny(family)).to_graph(), **asked, num_steps=3, seed=5)
    assert torch.equal(our_latents, latents)
    assert np.array_equal(ours, image) and image.std() > 10
    other, _ = render(sd3(tiny(family)).to_graph(), **{**asked, "prompt": "a dog"}, num_steps=3, seed=5)
    assert not np.array_equal(ours, other)


def test_in_half_precision(tiny):
    bf16 = torch.bfloat16
    pipeline = diffusers.StableDiffusion3Img2ImgPipeline.from_pretrained(tiny("sd3"), torch_dtype=bf16)
    asked = {**ASKED, "image": picture(1), "strength": 0.6}
    image, latents = stock(pipeline, **asked, num_inference_steps=3)
    graph = sd3(tiny("sd3"), mode="image", dtype="bfloat16").to_graph()
    ours, our_latents = render(graph, **asked, num_steps=3, seed=5)
    assert our_latents.dtype == bf16 and torch.equal(our_latents, latents) and np.array_equal(ours, image)


def test_schedule_options_and_clip_skip(tiny):
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(tiny("sd3"))
    shifted = pipeline.scheduler.from_config(pipeline.scheduler.config, shift=1.5, use_karras_sigmas=True)
    pipeline.scheduler = shifted
    _, latents = stock(pipeline, **ASKED, num_inference_steps=3, clip_skip=1, prompt_3="a green dog")
    options = {"shift": 1.5, "use_karras_sigmas": True}
    _, ours = render(
        sd3(tiny("sd3")).to_graph(),
        **ASKED,
        num_steps=3,
        seed=5,
        clip_skip=1,
        prompt_3="a green dog",
        scheduler=options,
    )
    assert torch.equal(ours, latents)


def test_image_to_image(tiny):
    pipeline = diffusers.StableDiffusion3Img2ImgPipeline.from_pretrained(tiny("sd3"))
    asked = {**ASKED, "image": picture(1, 80), "strength": 0.6}
    image, latents = stock(pipeline, **asked, num_inference_steps=4)
    ours, our_latents = render(sd3(tiny("sd3"), mode="image").to_graph(), **asked, num_steps=4, seed=5)
    assert torch.equal(our_latents, latents) and np.array_equal(ours, image)


@pytest.mark.parametrize("strength", [0.6, 1.0])
def test_inpainting(tiny, strength):
    """The pictures differ by the autoencoder's shift, which the stock pipeline forgets when it decodes."""
    pipeline = diffusers.StableDiffusion3InpaintPipeline.from_pretrained(tiny("sd3"))
    asked = {**ASKED, "image": picture(1), "strength": strength}
    pipeline.set_progress_bar_config(disable=True)
    latents = pipeline(
        **asked,
        mask_image=mask(),
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(5),
        callback_on_step_end=(kept := Kept()),
    )
    ours, our_latents = render(
        sd3(tiny("sd3"), mode="inpaint").to_graph(), **asked, mask=mask(), num_steps=4, seed=5
    )
    assert torch.equal(our_latents, kept.latents) and len(latents.images) == 1
    shifted = kept.latents / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor
    with torch.no_grad():
        decoded = pipeline.image_processor.postprocess(pipeline.vae.decode(shifted).sample)[0]
    assert np.array_equal(ours, np.array(decoded))


class Kept:
    """Remembers the latents after the last step."""

    def __call__(self, pipeline, step, time, values):
        self.latents = values["latents"]
        return values


@pytest.mark.parametrize("is_encoded_once", [True, False])
def test_controlnet(tiny, monkeypatch, is_encoded_once):
    """The stock pipeline samples the control image's latents without the request's generator; we take their mode.
    It also encodes the image twice in a batch of two, which gives other roundings than once: 1e-4 then."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    net = diffusers.SD3ControlNetModel.from_pretrained(tiny.controlnet("sd3"))
    pipeline = diffusers.StableDiffusion3ControlNetPipeline.from_pretrained(tiny("sd3"), controlnet=net)
    if is_encoded_once:
        encode = pipeline.vae.encode

        def encode_once(pair):
            parameters = encode(pair[:1]).latent_dist.parameters
            return SimpleNamespace(latent_dist=DiagonalGaussianDistribution(torch.cat([parameters] * 2)))

        monkeypatch.setattr(pipeline.vae, "encode", encode_once)
    control = {"control_image": picture(2)}
    image, latents = stock(
        pipeline,
        **ASKED,
        **control,
        num_inference_steps=3,
        controlnet_conditioning_scale=0.8,
        control_guidance_end=0.7,
    )
    graph = sd3(tiny("sd3"), controlnet=tiny.controlnet("sd3")).to_graph()
    asked = {**ASKED, **control, "num_steps": 3, "seed": 5, "control_end": 0.7}
    ours, our_latents = render(graph, **asked, conditioning_scale=0.8)
    if is_encoded_once:
        assert torch.equal(our_latents, latents) and np.array_equal(ours, image)
    else:
        assert torch.allclose(our_latents, latents, atol=1e-4)
    without, _ = render(graph, **asked, conditioning_scale=0.0)
    assert not np.array_equal(without, image)


def test_a_controlnet_that_shares_its_transformers_positions(tiny, monkeypatch, tmp_path):
    """As those of SD3.5 Large, which read no text either. The stock pipeline encodes the image in a pair: 1e-4."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    torch.manual_seed(0)
    net = diffusers.SD3ControlNetModel(
        sample_size=8,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=None,
        pooled_projection_dim=32,
        pos_embed_max_size=None,
        use_pos_embed=False,
        force_zeros_for_pooled_projection=False,
    )
    path = saved_awake(net, tmp_path)
    pipeline = diffusers.StableDiffusion3ControlNetPipeline.from_pretrained(tiny("sd35"), controlnet=net)
    asked = {**ASKED, "control_image": picture(2)}
    _, latents = stock(pipeline, **asked, num_inference_steps=3)
    graph = sd3(tiny("sd35"), controlnet=path).to_graph()
    _, ours = render(graph, **asked, num_steps=3, seed=5)
    without, _ = render(graph, **asked, num_steps=3, seed=5, conditioning_scale=0.0)
    assert torch.allclose(ours, latents, atol=1e-4) and not np.array_equal(ours, without)


def embeds_of(tiny, prompt):
    return run_model(SD3TextEncoder(model_path=tiny("sd3")), prompt=prompt, max_sequence_length=24)


def test_what_an_encoder_cannot_read_is_a_warning(tiny):
    prompt = "a " + "very " * 20 + "red cat"
    warnings = embeds_of(tiny, prompt)["warnings"]
    assert [warning.split()[0] for warning in warnings] == [
        "text_encoder",
        "text_encoder_2",
        "text_encoder_3",
    ]
    assert "reads 24 tokens" in warnings[2] and "red cat" in warnings[2].replace(" ", "").replace(
        "redcat", "red cat"
    )
    assert embeds_of(tiny, "a cat")["warnings"] == []


def test_residuals_are_fetched_by_the_blocks_that_add_them(tiny):
    """Deferred residuals: nothing is asked for before the first block has run; the result is the same."""
    path, events = tiny("sd3"), []
    prompt, negative = (embeds_of(tiny, text)["prompt_embeds"] for text in ("a cat", "blurry"))
    latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    shared = {
        "latents": latents,
        "prompt_embeds": prompt,
        "negative_prompt_embeds": negative,
        "schedule": make_schedule(path, 4),
        "step": 1,
    }
    net = SD3ControlNet(model_path=tiny.controlnet("sd3"))
    assert net.output_ports[0].type.length == 2
    residuals = run_model(net, **shared, control_latents=latents.flip(0), num_steps=4)
    assert len(residuals) == 2 and residuals[0].shape[0] == 2

    def fetch(index):
        events.append(f"fetch {index}")
        return residuals[index]

    model = SD3Transformer(model_path=path)
    components = model.load(path, "cpu")
    for number, block in enumerate(components["transformer"].transformer_blocks):
        block.register_forward_hook(lambda *_, number=number: events.append(f"block {number}"))
    with torch.no_grad():
        lazy = model.execute(components, **shared, residuals=LazyTensors(2, fetch))
    # Three blocks; the last has no residual, and two blocks share the first.
    assert events == ["block 0", "fetch 0", "block 1", "block 2"] or events == [
        "block 0",
        "fetch 0",
        "block 1",
        "fetch 1",
        "block 2",
    ]
    eager = run_model(model, **shared, residuals=residuals)
    plain = run_model(model, **shared)
    assert torch.equal(lazy["noise_pred"], eager) and not torch.equal(eager, plain)


def test_halves_of_guidance_join_to_the_whole(tiny):
    """What splitting guidance into two nodes does, by hand; not bit for bit, since the batch is another."""
    from genserve.t2i.models.latents import Guidance

    path = tiny("sd3")
    prompt, negative = (embeds_of(tiny, text)["prompt_embeds"] for text in ("a cat", "blurry"))
    latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    shared = {"latents": latents, "schedule": make_schedule(path, 4), "step": 1, "guidance_scale": 5.0}
    net = SD3ControlNet(model_path=tiny.controlnet("sd3"))
    pair = {"prompt_embeds": prompt, "negative_prompt_embeds": negative}
    residuals = run_model(net, **shared, **pair, control_latents=latents, num_steps=4)
    model = SD3Transformer(model_path=path)
    whole = run_model(model, **shared, **pair, residuals=residuals)
    cond, uncond = (
        run_model(model, **shared, prompt_embeds=embeds, residuals=residuals, branch=branch)
        for embeds, branch in ((prompt, 1), (negative, 0))
    )
    joined = run_model(Guidance(), cond=cond, uncond=uncond, guidance_scale=5.0)
    assert torch.allclose(joined, whole, atol=2e-5) and not torch.allclose(cond, whole, atol=1e-3)


@pytest.mark.parametrize("text_encoders", [False, True])
def test_adapter(tiny, text_encoders):
    """Merged weights: bit for bit those of the stock pipeline's `fuse_lora`, within 1e-5 of its live branch."""
    path = tiny.lora("sd3", seed=1, text_encoders=text_encoders)
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(tiny("sd3"))
    pipeline.load_lora_weights(path, adapter_name="a")
    pipeline.set_adapters("a", 0.7)
    asked = {**ASKED, "guidance_scale": 3.0}
    _, live = stock(pipeline, **asked, num_inference_steps=3)
    pipeline.fuse_lora(components=pipeline._lora_loadable_modules, adapter_names=["a"])
    pipeline.unload_lora_weights()
    image, fused = stock(pipeline, **asked, num_inference_steps=3)
    graph = sd3(tiny("sd3"), loras=[LoRA(path, 0.7)]).to_graph()
    base, with_adapter, after = rendered_with_adapters(graph, **asked)
    assert np.array_equal(with_adapter[0], image)
    assert torch.equal(with_adapter[1], fused) and torch.allclose(fused, live, atol=1e-5)
    assert torch.equal(base[1], after[1]) and not torch.allclose(base[1], fused, atol=0.1)
