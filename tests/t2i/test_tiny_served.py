"""The shipped text-to-image model through the runtime: a hundred prompts that it was never trained on, judged by pixels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import genserve
from genserve.t2i.request import LoraUse
from genserve.t2i.session import Session
from genserve.t2i.workflows import sd3

ROOT = Path(__file__).parent.parent.parent
BUILTIN = Path(genserve.__file__).parent / "builtin"
ASKED = {"num_steps": 12, "guidance_scale": 3.0, "max_sequence_length": 20}


@pytest.fixture(scope="module", autouse=True)
def examples_importable():
    sys.path.insert(0, str(ROOT / "examples"))
    yield
    sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def session():
    with Session(num_threads=1, loras={"outline": str(BUILTIN / "tiny-sd3-lora-outline")}) as session:
        session.register(sd3("tiny-sd3"))
        session.register(sd3("tiny-sd3", controlnet=str(BUILTIN / "tiny-sd3-controlnet")))
        yield session


def pictures(session, workflow, asked, **more):
    running = [
        session.submit(workflow, seed=seed, **ASKED, **inputs, **more) for seed, inputs in enumerate(asked)
    ]
    return [np.asarray(each.result().outputs[0]["image"]) for each in running]


def test_it_draws_what_a_hundred_held_out_prompts_say(session):
    import tiny_t2i_data as data
    import tiny_t2i_judge as judge

    prompts = [data.prompt_of(scene) for scene in data.held_out(100)]
    scores = judge.score(pictures(session, "sd3", [{"prompt": prompt} for prompt in prompts]), prompts)
    assert min(scores[name] for name in ("background", "colour", "place")) >= 0.95, scores
    assert scores["shape"] >= 0.85, scores


def test_the_controlnet_obeys_its_layout(session):
    import tiny_t2i_batches as batches
    import tiny_t2i_data as data
    import tiny_t2i_judge as judge
    from PIL import Image

    layouts = [
        ("square", 14.0, 22.0, 40.0),
        ("circle", 15.0, 42.0, 24.0),
        ("cross", 16.0, 34.0, 30.0),
        ("triangle", 16.0, 22.0, 22.0),
        ("star", 16.0, 40.0, 40.0),
        ("circle", 12.0, 20.0, 20.0),
    ]
    covers = [data.coverage(*layout) for layout in layouts]
    asked = [
        {
            "prompt": "a red shape, white background",
            "control_image": Image.fromarray(batches.silhouette(cover)).convert("RGB"),
        }
        for cover in covers
    ]
    made = pictures(session, "sd3_controlnet", asked)
    overlaps = [judge.overlap_of(image, cover) for image, cover in zip(made, covers, strict=True)]
    assert np.mean(overlaps) >= 0.7, overlaps


def test_the_adapter_makes_shapes_hollow_and_leaves_no_trace(session):
    import tiny_t2i_data as data
    import tiny_t2i_judge as judge

    scenes = [scene for scene in data.held_out(40) if scene.shape != "ring"][:8]
    asked = [{"prompt": data.prompt_of(scene)} for scene in scenes]
    before = pictures(session, "sd3", asked)
    assert judge.score(before, scenes)["hollow"] <= 1 / 8
    styled = pictures(session, "sd3", asked, loras=(LoraUse("outline"),))
    assert judge.score(styled, scenes)["hollow"] >= 5 / 8
    assert all(map(np.array_equal, pictures(session, "sd3", asked), before))
