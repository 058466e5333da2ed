"""What a picture shows, told from its pixels: background, colour, shape, size and place.

Compares with drawn templates; knows nothing of models.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tiny_t2i_data as data
from numpy.typing import NDArray

LEAST_OVERLAP = 0.6  # of shape and template, below which a picture shows no known shape
ATTRIBUTES = ("background", "colour", "place", "size", "shape")
_RADII = np.arange(8.0, 21.0)
_MOVES = [(dx, dy) for dx in range(-2, 3) for dy in range(-2, 3)]


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen; `overlap` is the intersection over union with the best template."""

    background: str
    colour: str
    shape: str | None
    place: str | None
    size: str | None
    hollow: bool
    overlap: float


def _nearest(colour: NDArray[np.float64]) -> str:
    return min(data.COLOURS, key=lambda name: float(np.abs(colour - np.array(data.COLOURS[name])).sum()))


@functools.cache
def _templates() -> tuple[list[tuple[str, float, bool]], NDArray[np.float32]]:
    keys = [(shape, radius, hollow) for hollow in (False, True) for shape in data.SHAPES for radius in _RADII]
    middle = data.SIDE / 2
    masks = [data.coverage(shape, radius, middle, middle, hollow) > 0.5 for shape, radius, hollow in keys]
    return keys, np.stack(masks).reshape(len(keys), -1).astype(np.float32)


def _ground(pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]), 0))


def silhouette_of(image: Any) -> NDArray[np.bool_]:
    """Which pixels, [SIDE, SIDE], of a picture (uint8, or a PIL image) are nearer to the object's colour than to the background."""
    pixels = np.asarray(image, dtype=np.float64)
    away = np.linalg.norm(pixels - _ground(pixels), axis=-1)
    if away.max() < 60:
        return np.zeros(away.shape, bool)
    strong = away > 0.75 * np.percentile(away[away > 0.5 * away.max()], 90)
    colour = np.median(pixels[strong], 0)
    return np.asarray(np.linalg.norm(pixels - colour, axis=-1) < away)


def look(image: Any) -> Sight:
    """Judge one picture of SIDE x SIDE pixels."""
    pixels = np.asarray(image, dtype=np.float64)
    background, mask = _nearest(_ground(pixels)), silhouette_of(image)
    if mask.sum() < 20:
        return Sight(background, background, None, None, None, False, 0.0)
    deep = mask & ~_near(~mask)  # without the blend at the edge
    colour = _nearest(np.median(pixels[deep if deep.sum() >= 8 else mask], 0))
    at = np.array([np.arange(data.SIDE)[mask.any(axis)][[0, -1]].mean() + 0.5 for axis in (0, 1)])
    dx, dy = (round(data.SIDE / 2 - value) for value in at)
    moved = np.stack([_shifted(mask, dx + mx, dy + my) for mx, my in _MOVES]).reshape(len(_MOVES), -1)
    keys, templates = _templates()
    common = moved.astype(np.float32) @ templates.T
    overlaps = common / (mask.sum() + templates.sum(1)[None] - common)
    move, key = np.unravel_index(int(overlaps.argmax()), overlaps.shape)
    shape, radius, hollow = keys[key]
    overlap = float(overlaps[move, key])
    cx, cy = data.SIDE / 2 - dx - _MOVES[move][0], data.SIDE / 2 - dy - _MOVES[move][1]
    size = "small" if radius <= sum(data.RADII.values()) / 2 else "large"
    return Sight(
        background,
        colour,
        shape if overlap >= LEAST_OVERLAP else None,
        data.place_of(cx, cy),
        size,
        hollow,
        overlap,
    )


def _near(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    padded = np.pad(mask, 1)
    return padded[:-2, 1:-1] | padded[2:, 1:-1] | padded[1:-1, :-2] | padded[1:-1, 2:] | mask


def _shifted(mask: NDArray[np.bool_], dx: int, dy: int) -> NDArray[np.bool_]:
    out, side = np.zeros_like(mask), data.SIDE
    ys, xs = slice(max(dy, 0), side + min(dy, 0)), slice(max(dx, 0), side + min(dx, 0))
    from_ys, from_xs = slice(max(-dy, 0), side - max(dy, 0)), slice(max(-dx, 0), side - max(dx, 0))
    out[ys, xs] = mask[from_ys, from_xs]
    return out


def overlap_of(image: Any, covered: data.Mask) -> float:
    """Intersection over union of the object in a picture and the shape it was to have."""
    seen, wanted = silhouette_of(image), covered > 0.5
    return float((seen & wanted).sum() / (seen | wanted).sum())


def score(images: Sequence[Any], wanted: Sequence[data.Scene | str]) -> dict[str, float]:
    """Shares of the pictures in which each attribute asked for is right, "all" of them, and the share of hollow shapes.

    `images`: uint8 arrays [SIDE, SIDE, 3] or PIL images, one for each scene or plain prompt in `wanted`. What is left
    open counts as right. Rings do not count for "hollow", as a small hollow one is hardly to be told from a full one.
    """
    right: dict[str, list[bool]] = {name: [] for name in (*ATTRIBUTES, "all", "hollow")}
    for image, asked in zip(images, wanted, strict=True):
        scene = data.scene_of(asked) if isinstance(asked, str) else asked
        seen = look(image)
        each = [getattr(scene, name) in (None, getattr(seen, name)) for name in ATTRIBUTES]
        for name, value in zip((*ATTRIBUTES, "all"), [*each, all(each)], strict=True):
            right[name].append(value)
        if "ring" not in (scene.shape, seen.shape):
            right["hollow"].append(seen.hollow)
    return {name: sum(values) / max(1, len(values)) for name, values in right.items()}
