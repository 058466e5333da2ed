"""`genserve t2i`: make an image, and make it again from its receipt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genserve import cli_options as opt
from genserve.core.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from genserve.core.server.pictures import OutputFormat
    from genserve.t2i.catalogue import ImageModelConfig

app = typer.Typer(help="Text-to-image workflows: make images, replay receipts.", no_args_is_help=True)

_FORMATS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}

ControlNets = Annotated[
    list[str] | None, typer.Option("--controlnet", metavar="NAME=FOLDER", help="Repeat for several.")
]
Loras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-file", metavar="NAME=PATH", help="An adapter that may be named; repeat for several."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Of the executors, e.g. num_executors=2."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the image shows.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help=".png, .jpg or .webp; with -n, NAME-0.png and so on.")
    ] = Path("image.png"),
    model: Annotated[
        str, typer.Option("--model", "-m", help="A built-in name, a folder or hub id.")
    ] = "tiny-sd3",
    num_images: Annotated[int, typer.Option("-n", min=1, help="Images; image i has seed + i.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="By default a random one, which is told.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="How closely the prompt is followed.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What the image must not show.")] = None,
    size: Annotated[str | None, typer.Option(metavar="WIDTHxHEIGHT")] = None,
    image: Annotated[Path | None, typer.Option(help="An image to begin with.")] = None,
    mask: Annotated[Path | None, typer.Option(help="White where IMAGE is made anew.")] = None,
    strength: Annotated[float | None, typer.Option(help="How far to go from IMAGE.")] = None,
    control_image: Annotated[Path | None, typer.Option(help="What a ControlNet follows.")] = None,
    loras: Annotated[
        list[str] | None, typer.Option("--lora", metavar="NAME[:SCALE]", help="Repeat for several.")
    ] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="A further input of the workflow."),
    ] = None,
    controlnets: ControlNets = None,
    lora_files: Loras = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
    as_json: opt.Json = False,
) -> None:
    """Make images from a prompt, in this process. Each file carries its receipt."""
    import asyncio

    from genserve.t2i.local import generate as make

    form = _format(output)
    fields = opt.given(
        prompt=prompt,
        n=num_images,
        seed=seed,
        num_steps=steps,
        guidance_scale=guidance_scale,
        negative_prompt=negative_prompt,
        size=size,
        strength=strength,
        image=_content(image, "image"),
        mask=_content(mask, "mask"),
        control_image=_content(control_image, "control_image"),
        loras=[_lora(text) for text in loras] if loras else None,
    )
    fields |= opt.parsed(options)
    config = _config(model, None, controlnets, lora_files, overrides)
    with _shown(quiet) as on_update:
        made = asyncio.run(make(config, fields, on_update))
    seeds = made.result.receipt.get("seeds") or [None] * len(made.pictures)
    files = []
    for index, picture in enumerate(made.pictures):
        path = output if len(made.pictures) == 1 else output.with_stem(f"{output.stem}-{index}")
        _write(path, picture, form, {**made.result.receipt, "image": index})
        files.append({"file": str(path), "seed": seeds[index]})
    for warning in made.result.warnings:
        typer.echo(f"Warning: {warning}", err=True)
    if as_json:
        typer.echo(json.dumps({"images": files, "receipt": made.result.receipt}, indent=2))
        return
    for each in files:
        typer.echo(f"{each['file']} (seed {each['seed']})")


@app.command()
def replay(
    receipt: Annotated[Path, typer.Argument(help="A receipt in JSON, or an image that carries one.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where the image goes.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Status 1 unless it is the same image.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Where the receipt's model is, unless it is built in.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="NAME=FILE", help="An image that was given then.")
    ] = None,
    controlnets: ControlNets = None,
    lora_files: Loras = None,
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Make the image of a receipt again and compare. Refused if a model is another."""
    import asyncio

    from genserve.core.server.pictures import decode, opaque
    from genserve.t2i import receipt as receipts
    from genserve.t2i.local import replay as make

    found = receipts.read(receipt)
    if found.image is not None:
        found = found.one_image(found.image)
    named = found.model
    if model is None and named is None:
        raise ConfigError(f"{receipt}: the receipt names no model; give --model")
    pictures = {
        name: opaque(decode(_content(Path(file), name) or b"", name))
        for name, file in _pairs(inputs, "--input").items()
    }
    config = _config(
        model or str(named), named, controlnets, lora_files, overrides, passes=found.data.get("passes")
    )
    if found.data.get("cache_hits"):
        typer.echo(
            "Warning: it began with another request's latents; alone it becomes another image", err=True
        )
    with _shown(quiet) as on_update:
        made = asyncio.run(make(config, found, pictures, on_update))
    differences = []
    for index, picture in enumerate(made.pictures):
        differs = _difference(found, made.result, picture, index)
        differences.append(differs)
        which = f"image {index}" if len(made.pictures) > 1 else "the image"
        typer.echo(f"{which} is the same" if not differs else f"{which} is another: {differs}")
        if output is not None:
            path = output if len(made.pictures) == 1 else output.with_stem(f"{output.stem}-{index}")
            _write(path, picture, _format(path), {**made.result.receipt, "image": index})
    if check and any(differences):
        raise typer.Exit(1)


def _difference(found: Any, result: Any, picture: Any, index: int) -> str:
    from genserve.t2i.receipt import compared

    if found.picture is not None:
        return compared(picture, found.picture)
    then = found.data.get("outputs")
    if not then:
        return "the receipt has no hash of it"
    return "" if then[index] == result.receipt["outputs"][index] else "the hashes of the pixels differ"


def _config(
    model: str,
    name: str | None,
    controlnets: list[str] | None,
    loras: list[str] | None,
    overrides: list[str] | None,
    passes: Any = None,
) -> ImageModelConfig:
    from genserve.core.config import load
    from genserve.t2i.catalogue import ImageModelConfig

    return load(
        ImageModelConfig,
        None,
        overrides or (),
        model=model,
        name=name,
        controlnets=_pairs(controlnets, "--controlnet") or None,
        loras=_pairs(loras, "--lora-file") or None,
        passes=passes,
    )


def _pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    found = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{option} {text}: expected NAME=PATH")
        found[name] = value
    return found


def _lora(text: str) -> dict[str, Any]:
    name, colon, scale = text.rpartition(":")
    if not colon:
        return {"name": text}
    try:
        return {"name": name, "scale": float(scale)}
    except ValueError:
        raise InvalidRequest("lora", f"{text}: expected NAME[:SCALE]") from None


def _content(path: Path | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequest(field, f"cannot read {path}: {error.strerror}") from error


def _format(path: Path) -> OutputFormat:
    form = _FORMATS.get(path.suffix.lower())
    if form is None:
        raise InvalidRequest("output", f"{path}: a name must end in {', '.join(_FORMATS)}")
    return form  # type: ignore[return-value]


def _write(path: Path, picture: Any, form: OutputFormat, receipt: dict[str, Any]) -> None:
    from genserve.core.server.pictures import encode

    try:
        path.write_bytes(encode(picture, form, receipt=json.dumps(receipt)))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def _shown(quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A bar on stderr that follows the updates of a request."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:24}"), BarColumn(bar_width=32), TimeElapsedColumn())
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("loading", total=None)

        def on_update(update: Any) -> None:
            total = getattr(update, "total", None)
            if total:
                step = "" if update.step is None else f" step {update.step}/{update.num_steps}"
                progress.update(
                    task, completed=update.done, total=total, description=f"{update.node[:14]}{step}"
                )

        yield on_update
