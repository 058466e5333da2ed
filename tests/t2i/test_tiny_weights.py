"""The tiny text-to-image model that is shipped: its folders load anywhere, it draws what it is asked, and how it is judged."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import genserve

ROOT = Path(__file__).parent.parent.parent
BUILTIN = Path(genserve.__file__).parent / "builtin"
BASE, CONTROLNET, LORA = (
    BUILTIN / name for name in ("tiny-sd3", "tiny-sd3-controlnet", "tiny-sd3-lora-outline")
)
STEPS, GUIDANCE, T5_TOKENS = 12, 3.0, 20


@pytest.fixture(scope="module", autouse=True)
def examples_importable():
    sys.path.insert(0, str(ROOT / "examples"))
    yield
    sys.path.remove(str(ROOT / "examples"))


def drawn(scenes, hollow=False):
    import tiny_t2i_data as data

    rng = random.Random(5)
    return [
        data.paint(
            data.coverage(*data.layout(scene, rng), hollow),
            data.COLOURS[scene.colour],
            data.COLOURS[scene.background],
        )
        for scene in scenes
    ]


@pytest.mark.parametrize("hollow", [False, True])
def test_the_judge_is_right_on_drawn_pictures(hollow):
    import tiny_t2i_data as data
    import tiny_t2i_judge as judge

    scenes = data.held_out(100)[-40:]
    scores = judge.score(drawn(scenes, hollow), [data.prompt_of(scene) for scene in scenes])
    assert scores.pop("hollow") == float(hollow)
    assert set(scores.values()) == {1.0}


def test_the_judge_sees_what_is_wrong():
    import tiny_t2i_data as data
    import tiny_t2i_judge as judge

    asked = [data.Scene("red", "blue", "circle", "on the left", "small")] * 5
    shown = [
        data.Scene("green", "blue", "circle", "on the left", "small"),
        data.Scene("red", "white", "circle", "on the left", "small"),
        data.Scene("red", "blue", "star", "on the left", "small"),
        data.Scene("red", "blue", "circle", "at the top", "small"),
        data.Scene("red", "blue", "circle", "on the left", "large"),
    ]
    scores = judge.score(drawn(shown), asked)
    assert {name: scores[name] for name in judge.ATTRIBUTES} == dict.fromkeys(judge.ATTRIBUTES, 0.8)
    assert scores["all"] == 0
    noise = np.random.default_rng(0).integers(0, 256, (3, data.SIDE, data.SIDE, 3)).astype(np.uint8)
    assert judge.score(noise, asked[:3])["shape"] == 0
    flat = np.full((1, data.SIDE, data.SIDE, 3), data.COLOURS["blue"], np.uint8)
    assert judge.score(flat, asked[:1])["colour"] == 0


def test_plain_prompts_are_read_back():
    import tiny_t2i_data as data

    for scene in (
        *data.held_out(50),
        data.Scene("red", "blue"),
        data.Scene("red", "blue", place="on the left"),
    ):
        assert data.scene_of(data.prompt_of(scene)) == scene
    for other in ("", "a red", "a red dog, blue background", "red circle on blue"):
        with pytest.raises(ValueError, match="plain"):
            data.scene_of(other)


def test_training_never_sees_what_is_held_out():
    import tiny_t2i_batches as batches
    import tiny_t2i_data as data

    held_out = set(data.held_out(100))
    assert len(held_out) == 100
    assert not held_out & {scene for scene, _ in batches.draw_scenes(0, 12_000, 0.08)}
    listed = json.loads((BASE / "held_out.json").read_text())
    assert [data.scene_of(item.pop("prompt")) for item in listed] == list(data.held_out(100))
    assert [data.Scene(**item) for item in listed] == list(data.held_out(100))


def test_the_folders_are_whole_small_and_in_half_precision():
    from safetensors import safe_open

    weights = {
        BASE: {"transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"},
        CONTROLNET: {"."},
        LORA: {"."},
    }
    for folder, places in weights.items():
        files = sorted(folder.rglob("*.safetensors"))
        assert {str(file.parent.relative_to(folder)) for file in files} == places
        assert "license: apache-2.0" in (folder / "README.md").read_text()
        for file in files:
            assert file.stat().st_size < 10_000_000
            with safe_open(file, "pt") as opened:
                assert {opened.get_slice(key).get_dtype() for key in opened.keys()} == {"F16"}  # noqa: SIM118
    for part in ("tokenizer", "tokenizer_2", "tokenizer_3", "scheduler"):
        assert any((BASE / part).iterdir())


@pytest.fixture(scope="module")
def pipeline():
    import tiny_t2i_parts as parts

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield parts.load_pipeline(BASE)
    torch.set_num_threads(before)


def draw(pipeline, prompts, **more):
    return pipeline(
        prompts,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        generator=[torch.Generator().manual_seed(index) for index in range(len(prompts))],
        output_type="np",
        **{"max_sequence_length": T5_TOKENS} | more,
    ).images


def test_the_stock_pipeline_draws_what_held_out_prompts_say(pipeline):
    import tiny_t2i_data as data
    import tiny_t2i_judge as judge

    scenes = data.held_out(12)
    scores = judge.score(draw(pipeline, [data.prompt_of(scene) for scene in scenes]) * 255, scenes)
    for name in ("background", "colour", "place"):
        assert scores[name] >= 11 / 12, scores
    assert scores["shape"] >= 9 / 12, scores


def test_other_wordings_lengths_and_unknown_words_do_no_harm(pipeline):
    import tiny_t2i_data as data
    import tiny_t2i_judge as judge

    scene = data.Scene("red", "white", "square", "on the right", "large")
    prompts = [
        "on a white background, a big red square on the right",
        "a large red square on the right, white background, zürich 12",
    ]
    for more in ({}, {"max_sequence_length": 256}):
        scores = judge.score(draw(pipeline, prompts, **more) * 255, [scene] * 2)
        assert scores["background"] == scores["colour"] == scores["place"] == 1.0, scores


def test_the_size_may_be_left_out(pipeline):
    import tiny_t2i_data as data
    import tiny_t2i_judge as judge

    scenes = [data.Scene("red", "blue", shape, "on the left") for shape in data.SHAPES]
    scores = judge.score(draw(pipeline, [data.prompt_of(scene) for scene in scenes]) * 255, scenes)
    assert scores["background"] == scores["colour"] == scores["place"] == 1.0, scores
    assert scores["shape"] >= 5 / 6, scores


def test_the_controlnet_puts_the_shape_where_its_layout_is(pipeline):
    import tiny_t2i_batches as batches
    import tiny_t2i_data as data
    import tiny_t2i_judge as judge
    from diffusers import SD3ControlNetModel, StableDiffusion3ControlNetPipeline
    from PIL import Image

    layouts = [
        ("square", 13.0, 24.0, 40.0),
        ("circle", 15.0, 42.0, 22.0),
        ("cross", 16.0, 30.0, 30.0),
        ("triangle", 16.0, 20.0, 20.0),
    ]
    covers = [data.coverage(*layout) for layout in layouts]
    controlnet = SD3ControlNetModel.from_pretrained(CONTROLNET, torch_dtype=torch.float32)
    controlled = StableDiffusion3ControlNetPipeline(**pipeline.components, controlnet=controlnet)
    controlled.set_progress_bar_config(disable=True)
    images = draw(
        controlled,
        ["a red shape, white background"] * 4,
        control_image=[Image.fromarray(batches.silhouette(cover)) for cover in covers],
    )
    overlaps = [judge.overlap_of(image * 255, cover) for image, cover in zip(images, covers, strict=True)]
    assert np.mean(overlaps) >= 0.7, overlaps


def test_the_lora_makes_shapes_hollow(pipeline):
    import tiny_t2i_data as data
    import tiny_t2i_judge as judge

    scenes = [scene for scene in data.held_out(40) if scene.shape != "ring"][:8]
    prompts = [data.prompt_of(scene) for scene in scenes]
    assert judge.score(draw(pipeline, prompts) * 255, scenes)["hollow"] <= 1 / 8
    pipeline.load_lora_weights(LORA)
    try:
        assert judge.score(draw(pipeline, prompts) * 255, scenes)["hollow"] >= 5 / 8
    finally:
        pipeline.unload_lora_weights()


def test_the_training_makes_folders_like_the_shipped_ones(tmp_path):
    import train_tiny_t2i as script

    script.main(out=tmp_path, seed=0, threads=torch.get_num_threads(), smoke=True)
    folders = [tmp_path / folder.name for folder in (BASE, CONTROLNET, LORA)]
    for shipped, folder in zip((BASE, CONTROLNET, LORA), folders, strict=True):
        made, wanted = (
            {str(file.relative_to(root)) for file in root.rglob("*")} for root in (folder, shipped)
        )
        assert made == wanted


def test_an_interrupted_stage_ends_with_the_same_weights_and_other_settings_are_refused(tmp_path):
    from tiny_t2i_stage import Settings, Stage

    def stage(folder, **other):
        torch.manual_seed(0)
        net = torch.nn.ModuleDict({"some_blocks": torch.nn.Linear(4, 4)})
        folder.mkdir(exist_ok=True)
        settings = Settings(
            **{"name": "one", "num_steps": 6, "num_rows": 2, "learning_rate": 1e-2, "muon_rate": 1e-2} | other
        )
        return Stage(
            settings, {"net": net}, folder
        ), lambda step: (net["some_blocks"](torch.ones(2, 4)) - step).square().mean()

    whole, loss = stage(tmp_path / "whole")
    assert whole.run(loss)
    for at_most in (2, 3, None):
        part, loss = stage(tmp_path / "parts")
        assert part.run(loss, at_most=at_most) == (at_most is None)
    assert all(torch.equal(whole.mean[name], part.mean[name]) for name in whole.mean)
    with pytest.raises(SystemExit, match="other settings"):
        stage(tmp_path / "parts", num_steps=7)
