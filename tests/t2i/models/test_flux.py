"""Flux as a workflow equals its diffusers pipelines, bit for bit in fp32."""

from __future__ import annotations

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image

from genserve.t2i.graph import FromNode, walk
from genserve.t2i.models.flux import Flux, FluxControlNet, FluxTextEncoder, FluxVAE, pack, unpack
from genserve.t2i.models.latents import Guidance, LatentsGenerator
from genserve.t2i.models.lazy import LazyTensors
from genserve.t2i.models.lora import LoRA
from genserve.t2i.models.schedule import Denoise, Schedule, make_schedule
from genserve.t2i.workflow import Workflow
from genserve.t2i.workflows import flux
from tests.t2i.models.driver import (
    mask,
    picture,
    render,
    rendered_with_adapters,
    run_model,
    saved_awake,
    stock,
)

ASKED = {"prompt": "a red cat", "height": 64, "width": 48, "max_sequence_length": 24}


def compare(pipeline, graph, stock_inputs, our_inputs, num_steps=3, **asked):
    """Both from seed 5: the latents and the picture are the same, bit for bit."""
    asked = {**ASKED, **asked}
    image, latents = stock(pipeline, **asked, **stock_inputs, num_inference_steps=num_steps)
    ours, our_latents = render(graph, **asked, **our_inputs, num_steps=num_steps, seed=5)
    assert torch.equal(pack(our_latents), latents)
    assert np.array_equal(ours, image) and image.std() > 5
    return ours


@pytest.mark.parametrize(("family", "scale"), [("flux", {"guidance_scale": 2.5}), ("flux-schnell", {})])
def test_text_to_image(tiny, family, scale):
    pipeline = diffusers.FluxPipeline.from_pretrained(tiny(family))
    graph = flux(tiny(family)).to_graph()
    image = compare(pipeline, graph, {}, {}, **scale)
    other, _ = render(graph, **{**ASKED, "prompt": "a dog"}, **scale, num_steps=3, seed=5)
    assert not np.array_equal(image, other)
    assert ("guidance_scale" in {each.name for each in graph.inputs}) == (family == "flux")


@pytest.mark.parametrize("scale", [3.0, 1.0])
def test_true_guidance(tiny, scale):
    pipeline = diffusers.FluxPipeline.from_pretrained(tiny("flux"))
    graph = flux(tiny("flux"), true_cfg=True).to_graph()
    compare(pipeline, graph, {}, {}, negative_prompt="blurry", true_cfg_scale=scale, guidance_scale=3.5)


def test_in_half_precision(tiny):
    net = diffusers.FluxControlNetModel.from_pretrained(tiny.controlnet("flux"), torch_dtype=torch.bfloat16)
    pipeline = diffusers.FluxControlNetPipeline.from_pretrained(
        tiny("flux"), controlnet=net, torch_dtype=torch.bfloat16
    )
    graph = flux(tiny("flux"), controlnet=tiny.controlnet("flux"), dtype="bfloat16").to_graph()
    compare(pipeline, graph, {}, {}, control_image=picture(2), guidance_scale=3.5)


def test_image_to_image(tiny):
    pipeline = diffusers.FluxImg2ImgPipeline.from_pretrained(tiny("flux"))
    graph = flux(tiny("flux"), mode="image").to_graph()
    asked = {"image": picture(1, 80), "strength": 0.6, "guidance_scale": 3.5}
    compare(pipeline, graph, {}, {}, num_steps=4, **asked)


def test_inpainting(tiny):
    pipeline = diffusers.FluxInpaintPipeline.from_pretrained(tiny("flux"))
    graph = flux(tiny("flux"), mode="inpaint").to_graph()
    asked = {"image": picture(1), "strength": 0.8, "guidance_scale": 3.5}
    # Its latents come back unpacked only as pictures, so the pictures are compared.
    image, latents = stock(pipeline, **ASKED, **asked, mask_image=mask(), num_inference_steps=4)
    ours, our_latents = render(graph, **ASKED, **asked, mask=mask(), num_steps=4, seed=5)
    assert torch.equal(pack(our_latents), latents) and np.array_equal(ours, image)


def test_controlnet(tiny):
    net = diffusers.FluxControlNetModel.from_pretrained(tiny.controlnet("flux"))
    pipeline = diffusers.FluxControlNetPipeline.from_pretrained(tiny("flux"), controlnet=net)
    graph = flux(tiny("flux"), controlnet=tiny.controlnet("flux")).to_graph()
    asked = {"control_image": picture(2), "guidance_scale": 3.5}
    stock_inputs = {"controlnet_conditioning_scale": 0.7, "control_guidance_start": 0.3}
    ours = compare(pipeline, graph, stock_inputs, {"conditioning_scale": 0.7, "control_start": 0.3}, **asked)
    without, _ = render(graph, **ASKED, **asked, conditioning_scale=0.0, num_steps=3, seed=5)
    assert not np.array_equal(ours, without)


def test_controlnet_of_image_to_image(tiny):
    net = diffusers.FluxControlNetModel.from_pretrained(tiny.controlnet("flux"))
    pipeline = diffusers.FluxControlNetImg2ImgPipeline.from_pretrained(tiny("flux"), controlnet=net)
    graph = flux(tiny("flux"), controlnet=tiny.controlnet("flux"), mode="image").to_graph()
    asked = {"control_image": picture(2), "image": picture(1), "strength": 0.6, "guidance_scale": 3.5}
    compare(
        pipeline,
        graph,
        {"controlnet_conditioning_scale": 0.7, "control_guidance_end": 0.7},
        {"conditioning_scale": 0.7, "control_end": 0.7},
        num_steps=4,
        **asked,
    )


@pytest.mark.parametrize(
    ("special", "stock_inputs", "our_inputs"),
    [
        ({"num_mode": 3, "num_single_layers": 1}, {"control_mode": 2}, {"control_mode": 2}),
        ({"patch_size": 2, "conditioning_embedding_channels": 16}, {}, {}),
    ],
    ids=["union", "reads pixels"],
)
def test_other_controlnets(tiny, tmp_path, special, stock_inputs, our_inputs):
    shape = {"attention_head_dim": 16, "num_attention_heads": 2, "axes_dims_rope": (4, 4, 8)}
    shape |= {"joint_attention_dim": 32, "pooled_projection_dim": 16, "guidance_embeds": True}
    torch.manual_seed(0)
    net = diffusers.FluxControlNetModel(**{"num_layers": 1, "num_single_layers": 0, **shape, **special})
    path = saved_awake(net, tmp_path / "net")
    pipeline = diffusers.FluxControlNetPipeline.from_pretrained(tiny("flux"), controlnet=net)
    graph = flux(tiny("flux"), controlnet=path).to_graph()
    asked = {"control_image": picture(2), "guidance_scale": 3.5}
    compare(
        pipeline,
        graph,
        stock_inputs | {"controlnet_conditioning_scale": 0.7},
        our_inputs | {"conditioning_scale": 0.7},
        **asked,
    )
    assert FluxControlNet(model_path=path).has_single_blocks == ("num_mode" in special)


def test_what_an_encoder_cannot_read_is_a_warning(tiny):
    encoder = FluxTextEncoder(model_path=tiny("flux"))
    out = run_model(encoder, prompt="a cat " * 30, max_sequence_length=24)
    assert [warning.split()[0] for warning in out["warnings"]] == ["text_encoder", "text_encoder_2"]


def test_packing_is_undone():
    latents = torch.randn(2, 16, 6, 8)
    assert torch.equal(unpack(pack(latents), 6, 8), latents)
    assert torch.equal(pack(latents), diffusers.FluxPipeline._pack_latents(latents, 2, 16, 6, 8))


def step_inputs(tiny):
    encoder = FluxTextEncoder(model_path=tiny("flux"))
    prompt, negative = (
        run_model(encoder, prompt=text, max_sequence_length=24)["prompt_embeds"] for text in ("cat", "blurry")
    )
    latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    shared = {"latents": latents, "schedule": make_schedule(tiny("flux"), 4, 8, 8), "step": 1}
    return shared, prompt, negative


def test_residuals_are_fetched_by_the_blocks_that_add_them(tiny):
    events = []
    shared, prompt, _ = step_inputs(tiny)
    net = FluxControlNet(model_path=tiny.controlnet("flux"))
    assert [port.type.length for port in net.output_ports] == [2, 1]
    residuals = run_model(net, **shared, prompt_embeds=prompt, control=shared["latents"].flip(2), num_steps=4)

    def lazy(name):
        def fetch(index):
            events.append(f"{name} {index}")
            return residuals[name][index]

        return LazyTensors(len(residuals[name]), fetch)

    model = Flux(model_path=tiny("flux"))
    components = model.load(tiny("flux"), "cpu")
    blocks = components["transformer"]
    for number, block in enumerate([*blocks.transformer_blocks, *blocks.single_transformer_blocks]):
        block.register_forward_hook(lambda *_, number=number: events.append(f"block {number}"))
    with torch.no_grad():
        deferred = model.execute(
            components, **shared, prompt_embeds=prompt, **{name: lazy(name) for name in residuals}
        )
    assert events == ["block 0", "residuals 0", "block 1", "residuals 1", "block 2", "single_residuals 0"]
    assert torch.equal(deferred["noise_pred"], run_model(model, **shared, prompt_embeds=prompt, **residuals))


def test_halves_of_guidance_join_to_the_whole_bit_for_bit(tiny):
    shared, prompt, negative = step_inputs(tiny)
    model = Flux(model_path=tiny("flux"))
    whole = run_model(
        model, **shared, prompt_embeds=prompt, negative_prompt_embeds=negative, true_cfg_scale=3.0
    )
    cond, uncond = (
        run_model(model, **shared, prompt_embeds=each, true_cfg_scale=3.0) for each in (prompt, negative)
    )
    assert torch.equal(run_model(Guidance(), cond=cond, uncond=uncond, guidance_scale=3.0), whole)


@pytest.mark.parametrize("text_encoders", [False, True])
def test_adapter(tiny, text_encoders):
    """Merged weights: bit for bit those of the stock pipeline's `fuse_lora`, within 1e-5 of its live branch."""
    path = tiny.lora("flux", seed=1, text_encoders=text_encoders)
    pipeline = diffusers.FluxPipeline.from_pretrained(tiny("flux"))
    pipeline.load_lora_weights(path, adapter_name="a")
    pipeline.set_adapters("a", 0.7)
    asked = {**ASKED, "guidance_scale": 3.0}
    _, live = stock(pipeline, **asked, num_inference_steps=3)
    pipeline.fuse_lora(components=pipeline._lora_loadable_modules, adapter_names=["a"])
    pipeline.unload_lora_weights()
    image, fused = stock(pipeline, **asked, num_inference_steps=3)
    graph = flux(tiny("flux"), loras=[LoRA(path, 0.7)]).to_graph()
    base, with_adapter, after = rendered_with_adapters(graph, **asked)
    assert np.array_equal(with_adapter[0], image)
    assert torch.equal(pack(with_adapter[1]), fused) and torch.allclose(fused, live, atol=1e-5)
    assert torch.equal(base[1], after[1]) and not torch.allclose(pack(base[1]), fused, atol=0.1)


def figure_7(model_path: str, controlnet_path: str, lora_path: str) -> Workflow:
    """LegoDiffusion's Figure 7 as it is printed, with its dots filled in, and a size that fits a tiny model."""
    # create a workflow instance
    workflow = Workflow(name="flux_txt2img_workflow")
    # initialize models. All inherit the Model class
    latents_generator = LatentsGenerator(size=64)
    text_enc = FluxTextEncoder(model_path=model_path)
    flux = Flux(model_path=model_path)
    controlnet = FluxControlNet(model_path=controlnet_path)
    lora = LoRA(model_path=lora_path)
    vae = FluxVAE(model_path=model_path)
    denoise = Denoise(model_path=model_path)
    # initialize input placeholders for the workflow
    seed = workflow.add_input(name="seed", data_type=int)
    prompt = workflow.add_input(name="prompt", data_type=str)
    num_denoising_steps = workflow.add_input(name="num_denoising_steps", data_type=int)
    ref_image = workflow.add_input(name="ref_image", data_type=Image)
    # add_patch() registers a LoRA adapter with the flux
    flux.add_patch(lora)
    # Invoke models and establish their I/O dependencies.
    latents = latents_generator(seed)
    prompt_embeds = text_enc(prompt)
    ref_image = vae(image=ref_image, mode="encode")
    schedule, _, _ = Schedule(model_path=model_path)(num_denoising_steps, 64, 64)
    # Perform iterative denoising computation.
    for i in range(num_denoising_steps):
        controlnet_outputs = controlnet(latents, prompt_embeds, ref_image, schedule, step=i)
        noise_pred = flux(latents, prompt_embeds, controlnet_outputs, guidance_scale=3.5)
        latents = denoise(noise_pred, latents)
    output_img = vae(latents, mode="decode")
    workflow.add_output(output_img, name="image")
    return workflow


def test_figure_7_runs_as_printed(tiny, monkeypatch):
    """It takes the control image's most likely latents, and in another memory layout than the pipeline: 1e-4."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    net = diffusers.FluxControlNetModel.from_pretrained(tiny.controlnet("flux"))
    pipeline = diffusers.FluxControlNetPipeline.from_pretrained(tiny("flux"), controlnet=net)
    asked = {"prompt": "a red cat", "control_image": picture(2), "height": 64, "width": 64}
    _, latents = stock(pipeline, **asked, num_inference_steps=3, guidance_scale=3.5)
    written = figure_7(tiny("flux"), tiny.controlnet("flux"), tiny.lora("flux", seed=1)).to_graph()
    _, ours = render(written, seed=5, prompt="a red cat", num_denoising_steps=3, ref_image=picture(2))
    assert torch.allclose(pack(ours), latents, atol=1e-4)
    (node,) = (node for node in walk(written.nodes) if node.model.cls.endswith(":Flux"))
    assert node.where.startswith("test_flux.py:") and len(node.patches) == 1
    assert [port for port, edge in node.inputs if isinstance(edge, FromNode)] == [
        "prompt_embeds",
        "residuals",
        "single_residuals",
    ]
