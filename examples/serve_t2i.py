"""Serve the embedded text-to-image model, ask it with the official client, and write the pictures.

    python examples/serve_t2i.py [--model MODEL] [--output FOLDER] [PROMPT ...]

Everything is as a user would do it: a server process and an HTTP client. The first picture is streamed, with
previews of its latents; then one request makes four; then one is made anew in part.
"""

from __future__ import annotations

import argparse
import base64
import io
import time
from pathlib import Path
from typing import Any

from openai import OpenAI
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table
from rich.text import Text
from server_process import served

PROMPTS = (
    "a small red circle on the left, blue background",
    "a large yellow star at the top, black background",
)
SIZE = "64x64"
OPTIONS = {"num_steps": 20, "guidance_scale": 3.0}
ANOTHER = "a large green square, blue background"

console = Console(highlight=False)


def stream(client: OpenAI, model: str, prompt: str, output: Path) -> Any:
    """One picture and its previews."""
    console.print(Text(f"\nyou    | {prompt}"))
    events = client.images.generate(
        model=model,
        prompt=prompt,
        size=SIZE,
        stream=True,
        partial_images=3,
        extra_body={**OPTIONS, "seed": 1},
    )
    for event in events:
        data = base64.b64decode(event.b64_json)
        if event.type == "image_generation.completed":
            (output / "streamed.png").write_bytes(data)
            return event
        console.print(Text(f"server | preview {event.partial_image_index}, {len(data):,} bytes", style="dim"))
    raise SystemExit("the stream ended without a picture")


def inpaint(client: OpenAI, model: str, picture: bytes, prompt: str) -> Any:
    """The same picture with its right half made anew."""
    mask = Image.new("L", Image.open(io.BytesIO(picture)).size, "black")
    ImageDraw.Draw(mask).rectangle((mask.width // 2, 0, mask.width, mask.height), fill="white")
    data = io.BytesIO()
    mask.save(data, "PNG")
    return client.images.edit(
        model=model,
        image=("picture.png", picture),
        mask=("mask.png", data.getvalue()),
        prompt=prompt,
        extra_body={**OPTIONS, "seed": 2, "strength": 1.0},
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", default="tiny-sd3")
    parser.add_argument("--output", type=Path, default=Path())
    return parser.parse_args()


def main() -> None:
    given = _arguments()
    table = Table(title="Requests", title_justify="left")
    for name in ("request", "prompt", "seeds", "seconds", "files"):
        table.add_column(name)
    with (
        served(console, "t2i", "--model", given.model) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        (model,) = [served.id for served in client.models.list()]
        start_s = time.monotonic()
        event = stream(client, model, given.prompts[0], given.output)
        took = f"{time.monotonic() - start_s:.2f}"
        table.add_row("streamed", given.prompts[0], str(event.seed), took, "streamed.png")
        for index, prompt in enumerate(given.prompts):
            start_s = time.monotonic()
            answer = client.images.generate(model=model, prompt=prompt, n=4, size=SIZE, extra_body=OPTIONS)
            took = f"{time.monotonic() - start_s:.2f}"
            files = []
            for number, image in enumerate(answer.data or ()):
                files.append(f"{index}-{number}.png")
                (given.output / files[-1]).write_bytes(base64.b64decode(image.b64_json or ""))
            seeds = ", ".join(str(image.seed) for image in answer.data or ())  # type: ignore[attr-defined]
            table.add_row("four", prompt, seeds, took, ", ".join(files))
        start_s = time.monotonic()
        answer = inpaint(client, model, (given.output / "streamed.png").read_bytes(), ANOTHER)
        took = f"{time.monotonic() - start_s:.2f}"
        (given.output / "edited.png").write_bytes(base64.b64decode(answer.data[0].b64_json))
        table.add_row("edited", ANOTHER, str(answer.data[0].seed), took, "edited.png")
    console.print()
    console.print(table)
    console.print(
        Text("Each file carries its receipt: genserve t2i replay streamed.png --check", style="dim")
    )


if __name__ == "__main__":
    main()
