"""Receipts: what a result says of how it was made, enough to make it again and to tell when that can't be.

A receipt is JSON: the request with its seeds, the content hash of each node's model, batch sizes, the step at which
adapters arrived, versions, and the hashes of the pictures. Pictures among the inputs are noted by hash; a replay is
given them again. Owns the format and its reading; the runtime fills it in (`client`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from genserve.core.errors import ConfigError, InvalidRequest
from genserve.t2i.request import InvokeRequest, LoraUse

VERSION = 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """A receipt that has been read. `image` and `picture` are of the file that it was in, if that is a picture."""

    data: Mapping[str, Any]
    image: int | None = None
    picture: Any = None

    @property
    def workflow(self) -> str:
        return str(self.data["workflow"])

    @property
    def model(self) -> str | None:
        """What the server called the model."""
        model = self.data.get("model")
        return None if model is None else str(model)

    @property
    def loras(self) -> tuple[LoraUse, ...]:
        return tuple(LoraUse(lora["name"], lora["scale"]) for lora in self.data.get("loras", ()))

    @property
    def pictures(self) -> dict[str, Mapping[str, Any]]:
        """The notes of pictures among the inputs, by name."""
        return {name: value for name, value in self.data["inputs"].items() if is_note(value)}

    def one_image(self, image: int) -> Receipt:
        """That of one image alone, as a request of its own would have it."""
        seeds = self.data.get("seeds")
        count = int(self.data.get("num_images", 1))
        if not 0 <= image < count:
            raise ConfigError(f"the receipt is of {count} images; there is no image {image}")
        data = {**self.data, "num_images": 1}
        if seeds is not None:
            data["seeds"] = [seeds[image]]
            data["inputs"] = {**self.data["inputs"], "seed": seeds[image]}
        data["cache_hits"] = [
            hit for hit in self.data.get("cache_hits") or () if hit.get("image") in (None, image)
        ]
        for name in ("lora_arrival_steps", "outputs"):
            each = self.data.get(name)
            data[name] = None if each is None else [each[image]]
        return replace(self, data=data)

    def request(self, request_id: str, pictures: Mapping[str, Any] | None = None) -> InvokeRequest:
        """The same request again. `pictures` are PIL images, equal to those that were given then.

        `InvalidRequest` names an input whose picture is missing or another.
        """
        given = dict(pictures or {})
        inputs: dict[str, Any] = {}
        for name, value in self.data["inputs"].items():
            if value is None:
                continue
            inputs[name] = value
            if is_note(value):
                if name not in given:
                    raise InvalidRequest(
                        name, f"a picture of {value['width']}x{value['height']} was given; give it again"
                    )
                inputs[name] = given.pop(name)
                if noted(inputs[name])["sha256"] != value["sha256"]:
                    raise InvalidRequest(name, "is another picture than the receipt's")
        if given:
            raise InvalidRequest(next(iter(given)), "the receipt has no such picture")
        steps = self.data.get("lora_arrival_steps")
        return InvokeRequest(
            request_id,
            self.workflow,
            inputs,
            num_images=int(self.data.get("num_images", 1)),
            loras=self.loras,
            lora_max_late_steps=int(self.data.get("lora_max_late_steps", 0)),
            lora_arrival_steps=None if steps is None else tuple(steps),
        )

    def other_models(self, identities: Mapping[str, str]) -> list[str]:
        """What differs between the models of the receipt and those that `identities` has by node, in words."""
        noted_models = {node: each.get("model") for node, each in self.data.get("nodes", {}).items()}
        problems = []
        for node, identity in identities.items():
            then = noted_models.get(node)
            if then and then != identity:
                problems.append(f"{node}: the receipt's model is {then[:12]}, this one {identity[:12]}")
        missing = [node for node, then in noted_models.items() if then and node not in identities]
        return problems + [f"{node}: this workflow has no such node" for node in missing]


def parse(text: str, source: str = "receipt") -> Receipt:
    """The receipt in JSON text; `ConfigError` if it is none."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source}: no JSON: {error}") from None
    if isinstance(data, dict) and "receipt" in data:  # a whole answer of the server
        data = data["receipt"]
    if not isinstance(data, dict) or not isinstance(data.get("inputs"), dict) or "workflow" not in data:
        raise ConfigError(f"{source}: no receipt")
    if data.get("version") != VERSION:
        raise ConfigError(
            f"{source}: a receipt of version {data.get('version')}; this reads version {VERSION}"
        )
    image = data.pop("image", None)
    return Receipt(data, image if isinstance(image, int) else None)


def read(path: str | Path) -> Receipt:
    """The receipt in a JSON file, or in a picture that carries one. Raises `ConfigError`."""
    file = Path(path).expanduser()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if file.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        return parse(content.decode(errors="replace"), str(path))
    from genserve.core.server.pictures import decode, receipt_text

    picture = decode(content, str(path)).convert("RGB")
    text = receipt_text(content)
    if text is None:
        raise ConfigError(f"{path}: the picture carries no receipt")
    found = parse(text, str(path))
    lossless = picture if file.suffix.lower() == ".png" else None
    return replace(found, image=found.image or 0, picture=lossless)


def noted(value: Any) -> Any:
    """A value in a receipt: small data as it is, a picture by its size and the hash of its pixels."""
    if isinstance(value, list | tuple):
        return [noted(item) for item in value]
    if hasattr(value, "convert"):
        digest = hashlib.sha256(value.convert("RGB").tobytes()).hexdigest()
        return {"width": value.width, "height": value.height, "sha256": digest}
    if hasattr(value, "tobytes"):
        return {"shape": list(value.shape), "sha256": hashlib.sha256(value.tobytes()).hexdigest()}
    return value


def is_note(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"width", "height", "sha256"}


def compared(made: Any, other: Any) -> str:
    """How two pictures differ, in words; empty if they are equal."""
    from PIL import ImageChops

    if made.size != other.size:
        return "sizes {}x{} and {}x{}".format(*made.size, *other.size)
    difference = ImageChops.difference(made.convert("RGB"), other.convert("RGB"))
    if difference.getbbox() is None:
        return ""
    pixels = list(difference.convert("RGB").getdata())
    num_other = sum(any(pixel) for pixel in pixels)
    return f"{num_other} of {len(pixels)} pixels differ, by {max(map(max, pixels))} of 255 at most"
