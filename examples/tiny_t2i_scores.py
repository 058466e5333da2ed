"""How the saved folders score: loaded by the stock pipelines, judged by pixels, shown on contact sheets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny_t2i_batches as batches
import tiny_t2i_data as data
import tiny_t2i_judge as judge
import tiny_t2i_parts as parts_of
import torch

NUM_INFERENCE_STEPS, GUIDANCE = 20, 3.0


def draw(
    pipeline: Any, scenes: Sequence[data.Scene], controls: Sequence[Any] | None = None
) -> list[np.ndarray]:
    """One picture, uint8, for each scene's plainest prompt, seeded by its place in the list."""
    images: list[np.ndarray] = []
    for at in range(0, len(scenes), 25):
        some = scenes[at : at + 25]
        out = pipeline(
            [data.prompt_of(scene) for scene in some],
            num_inference_steps=NUM_INFERENCE_STEPS,
            guidance_scale=GUIDANCE,
            max_sequence_length=parts_of.T5_TOKENS,
            generator=[torch.Generator().manual_seed(at + index) for index in range(len(some))],
            output_type="np",
            **({} if controls is None else {"control_image": list(controls[at : at + 25])}),
        )
        images += list(np.rint(out.images * 255).astype(np.uint8))
    return images


def contact_sheet(images: Sequence[np.ndarray], path: Path, columns: int = 10) -> None:
    """Write pictures side by side, for people to look at."""
    from PIL import Image

    rows = [
        np.concatenate(images[at : at + columns], 1)
        for at in range(0, len(images) // columns * columns, columns)
    ]
    if rows:
        Image.fromarray(np.concatenate(rows)).save(path)


def told(scores: dict[str, float]) -> str:
    """Scores on one line."""
    return ", ".join(f"{name} {value:.2f}" for name, value in scores.items())


def judge_all(out: Path, num_judged: int) -> dict[str, Any]:
    """Scores of the saved folders, each loaded by the stock pipelines; contact sheets go beside them."""
    from diffusers import SD3ControlNetModel, StableDiffusion3ControlNetPipeline
    from PIL import Image

    scenes = data.held_out(num_judged)
    pipeline = parts_of.load_pipeline(out / "tiny-sd3")
    images = draw(pipeline, scenes)
    contact_sheet(images, out / "base.png")
    scores: dict[str, Any] = {"base": judge.score(images, scenes)}

    rng = random.Random("layouts")
    free = [replace(scene, shape=None, place=None, size=None) for scene in scenes[: num_judged // 2]]
    covers = [data.coverage(*data.layout(scene, rng, anywhere=True)) for scene in free]
    controls = [Image.fromarray(batches.silhouette(cover)) for cover in covers]
    controlnet = SD3ControlNetModel.from_pretrained(out / "tiny-sd3-controlnet", torch_dtype=torch.float32)
    controlled: Any = StableDiffusion3ControlNetPipeline(**pipeline.components, controlnet=controlnet)
    controlled.set_progress_bar_config(disable=True)
    images = draw(controlled, free, controls)
    contact_sheet(
        [image for pair in zip(map(np.asarray, controls), images, strict=True) for image in pair],
        out / "controlnet.png",
    )
    scores["controlnet"] = judge.score(images, free) | {"overlap": _mean_overlap(images, covers)}
    scores["without controlnet"] = {"overlap": _mean_overlap(draw(pipeline, free), covers)}

    pipeline.load_lora_weights(out / "tiny-sd3-lora-outline")
    images = draw(pipeline, scenes)
    contact_sheet(images, out / "lora.png")
    scores["lora"] = judge.score(images, scenes)
    return scores


def _mean_overlap(images: Sequence[np.ndarray], covers: Sequence[data.Mask]) -> float:
    return float(np.mean([judge.overlap_of(*pair) for pair in zip(images, covers, strict=True)]))
