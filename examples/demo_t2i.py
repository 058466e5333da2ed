"""Serve the embedded text-to-image model and write a contact sheet of what it draws.

    python examples/demo_t2i.py [--model MODEL] [--output FILE]

Run by `make demo`. A server process and an HTTP client; the requests of a row are sent at once. Rows: prompts; the
same with the adapter `outline`; the same laid out by the ControlNet `layout`.
"""

from __future__ import annotations

import argparse
import base64
import io
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from openai import OpenAI
from PIL import Image, ImageDraw
from rich.console import Console
from rich.progress import Progress
from rich.text import Text
from server_process import served

PROMPTS = (
    "a small red circle on the left, blue background",
    "a large yellow star at the top, black background",
    "a large green triangle at the bottom, white background",
    "a small pink square at the top right, green background",
    "a large cyan ring in the centre, red background",
    "a small black cross at the bottom left, yellow background",
)
# A ControlNet says where and what; the prompt leaves both open.
FREE_PROMPTS = tuple(f"a {prompt.split()[2]} circle, {prompt.split(', ')[1]}" for prompt in PROMPTS)
SIDE = 64
SCALE = 2
OPTIONS = {"num_steps": 20, "guidance_scale": 3.0}

console = Console(highlight=False)


def layout(column: int) -> Image.Image:
    """A silhouette for the ControlNet, white on black: a disc that moves from column to column."""
    image = Image.new("RGB", (SIDE, SIDE), "black")
    centre = 16 + column * (SIDE - 32) / (len(PROMPTS) - 1)
    ImageDraw.Draw(image).ellipse((centre - 13, 19, centre + 13, 45), fill="white")
    return image


def base64_of(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def draw(client: OpenAI, model: str, column: int, extra: dict[str, Any]) -> Image.Image:
    answer = client.images.generate(
        model=model,
        prompt=(FREE_PROMPTS if "control_image" in extra else PROMPTS)[column],
        size=f"{SIDE}x{SIDE}",
        extra_body={**OPTIONS, "seed": column, **extra},
    )
    return Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))  # type: ignore[index, arg-type]


def sheet(rows: list[tuple[str, list[Image.Image]]]) -> Image.Image:
    """The pictures of each row, under its title."""
    cell, title = SIDE * SCALE + 6, 18
    image = Image.new("RGB", (cell * len(PROMPTS) + 6, (cell + title) * len(rows) + 6), "white")
    pen = ImageDraw.Draw(image)
    for row, (name, pictures) in enumerate(rows):
        top = 6 + row * (cell + title)
        pen.text((6, top), name, fill="black")
        for column, picture in enumerate(pictures):
            large = picture.resize((SIDE * SCALE, SIDE * SCALE), Image.Resampling.NEAREST)
            image.paste(large, (6 + column * cell, top + title))
    return image


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-sd3")
    parser.add_argument("--output", type=Path, default=Path("out/contact_sheet.png"))
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    rows: list[tuple[str, list[Image.Image]]] = []
    with served(console, "t2i", "--model", given.model) as url, Progress(console=console) as progress:
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client, ThreadPoolExecutor(8) as threads:
            (model,) = client.models.list().data
            info = {each: url for each in model.workflows}  # type: ignore[attr-defined]
            plans: list[tuple[str, list[dict[str, Any]]]] = [("prompts", [{}] * len(PROMPTS))]
            if f"{model.id}-layout" in info:
                styled = {"loras": [{"name": "outline"}]}
                plans.append(("with the adapter outline", [styled] * len(PROMPTS)))
                laid_out = [{"control_image": base64_of(layout(column))} for column in range(len(PROMPTS))]
                plans.append(("laid out by a ControlNet: a disc, from left to right", laid_out))
            task = progress.add_task("drawing", total=len(plans) * len(PROMPTS))
            start_s = time.monotonic()
            for name, extras in plans:
                pending = [
                    threads.submit(draw, client, model.id, column, extra)
                    for column, extra in enumerate(extras)
                ]
                pictures = []
                for one in pending:
                    pictures.append(one.result())
                    progress.advance(task)
                rows.append((name, pictures))
            took_s = time.monotonic() - start_s
    given.output.parent.mkdir(parents=True, exist_ok=True)
    sheet(rows).save(given.output)
    num_images = sum(len(pictures) for _, pictures in rows)
    console.print(
        f"{num_images} images in {took_s:.1f} s, {num_images / took_s:.1f} a second: {given.output}"
    )
    for prompt in PROMPTS:
        console.print(Text(f"  {prompt}", style="dim"))


if __name__ == "__main__":
    main()
