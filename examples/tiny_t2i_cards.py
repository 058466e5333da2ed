"""The cards and the scores of the tiny text-to-image model, its ControlNet and its LoRA. Texts only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tiny_t2i_data as data
import tiny_t2i_judge as judge

_HEAD = """---
license: apache-2.0
language: en
pipeline_tag: text-to-image
library_name: diffusers
tags: [toy, {tag}]
---

# {name}

**This is a toy.** {what} It was trained from nothing, on one CPU core, on pictures that a few lines of Python draw.
It exists so that a server has something real to serve without any download. Don't use it for anything else.

"""

_MADE = """
## How it was made

`examples/train_tiny_t2i.py`, seed 0; the pictures and the prompts are those of `examples/tiny_t2i_data.py`, and no
other data went in. {made}

## How it scores

{measured}

"""

_BASE = """It draws one coloured shape on a plain background, 64 x 64 pixels:

    a small red circle on the left, blue background

| part of the prompt | words |
| --- | --- |
| size | small, large (also little, big) |
| colour and background | {colours} |
| shape | {shapes} |
| place | {places} |

Name all five for the best results. The size may be left out, the background too as long as there is a place.
**Without a place the shape is often wrong** (about two times in three), and without a colour nearly always. The order
may change ("on a blue background, a red circle on the left"). Object and background must differ in colour. A few other
words do little harm and mean nothing; a prompt has room for 18 words and marks. Two objects, other sizes of picture and
anything else than these words are beyond it.

{steps} Euler steps, guidance 3 and `max_sequence_length=20` are what it is measured with. 8 steps do nearly as well; any
guidance from 1 to 7 does. Up to 256 T5 tokens, and none at all (`text_encoder_3=None`), work too.

The folder is that of a Stable Diffusion 3 in diffusers, in half precision:

    StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32)
"""

_CONTROL = """With it `tiny-sd3` puts the object where the control image has it: its filled silhouette, white on
black, 64 x 64 pixels, which the stock `StableDiffusion3ControlNetPipeline` encodes with the autoencoder. The prompt
gives the colours and may leave everything else to the picture: "a red shape, blue background". Silhouettes of the
shapes that `tiny-sd3` knows, anywhere in the picture, are what it has seen.
"""

_LORA = """With it `tiny-sd3` draws its shapes hollow: a line of about two and a half pixels in the colour asked for.
No trigger word; a weight of 1 is what it was trained with. Load it with `pipeline.load_lora_weights(folder)`.
"""


def _table(scores: Mapping[str, Mapping[str, float]], columns: tuple[str, ...]) -> str:
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name, values in scores.items():
        lines.append(
            f"| {name} | "
            + " | ".join(f"{values[one]:.2f}" if one in values else "" for one in columns)
            + " |"
        )
    return "\n".join(lines)


def write_cards(
    out: Path, scores: Mapping[str, Mapping[str, float]], num_steps: int, facts: Mapping[str, str]
) -> None:
    """Write README.md into each of the three folders, and scores.json into the first.

    `facts`: for each folder, how its weights were made.
    """
    names = tuple(
        word.removeprefix("in the ").removeprefix("on the ").removeprefix("at the ") for word in data.PLACES
    )
    attributes = (*judge.ATTRIBUTES, "all", "hollow")
    texts = {
        "tiny-sd3": (
            "stable-diffusion-3",
            "A Stable Diffusion 3 of 3.6 million parameters with its three text encoders and its autoencoder.",
            _BASE.format(
                colours=", ".join(data.COLOURS),
                shapes=", ".join(data.SHAPES),
                places="in the centre; on the left, right; at the top, bottom; at the "
                + ", ".join(names[5:]),
                steps=num_steps,
            ),
            "Share of 100 prompts (`held_out.json`, combinations that never occur in training) in which each part is\n"
            "right, told from the pixels by `examples/tiny_t2i_judge.py`; the stock pipeline in float32.\n\n"
            + _table({"tiny-sd3": scores["base"]}, attributes[:-1]),
        ),
        "tiny-sd3-controlnet": (
            "controlnet",
            "A ControlNet of two blocks for `tiny-sd3`.",
            _CONTROL,
            "Intersection over union of the object and the silhouette, mean of 50 prompts that name nothing but the\n"
            "colours, with layouts of any shape, size and position.\n\n"
            + _table(
                {"with it": scores["controlnet"], "without": scores["without controlnet"]},
                ("overlap", "background", "colour"),
            ),
        ),
        "tiny-sd3-lora-outline": (
            "lora",
            "A LoRA of rank 16 for the transformer of `tiny-sd3`.",
            _LORA,
            'As for `tiny-sd3`; "hollow" is the share of hollow shapes (rings left out).\n\n'
            + _table({"with it": scores["lora"], "without": scores["base"]}, attributes),
        ),
    }
    for name, (tag, what, use, measured) in texts.items():
        head = _HEAD.format(tag=tag, name=name, what=what)
        (out / name / "README.md").write_text(
            head + use + _MADE.format(made=facts[name], measured=measured).rstrip() + "\n"
        )
    (out / "tiny-sd3" / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
