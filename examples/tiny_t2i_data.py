"""One coloured shape on a plain background: how such a picture is drawn, and how one asks for it.

Owns the words, the drawing and the held-out combinations; knows nothing of models or training. NumPy only.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

SIDE = 64  # pixels
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 150, 50),
    "blue": (30, 60, 220),
    "yellow": (245, 220, 40),
    "cyan": (60, 210, 230),
    "pink": (240, 100, 200),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring", "star")
RADII = {"small": 11.0, "large": 17.0}  # pixels; half of about what a shape is across
OFFSETS = {"small": 17.0, "large": 13.0}  # pixels from the middle to the place of a column or row
PLACES: dict[str, tuple[int, int]] = {
    "in the centre": (0, 0),
    "on the left": (-1, 0),
    "on the right": (1, 0),
    "at the top": (0, -1),
    "at the bottom": (0, 1),
    "at the top left": (-1, -1),
    "at the top right": (1, -1),
    "at the bottom left": (-1, 1),
    "at the bottom right": (1, 1),
}
OUTLINE_PX = 2.5  # breadth of the line of a hollow shape

Mask = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a prompt asks for; None where it leaves the choice open."""

    colour: str | None
    background: str | None
    shape: str | None = None
    place: str | None = None
    size: str | None = None


def _corners(shape: str) -> NDArray[np.float64]:
    """Corners of a polygon whose half breadth is about 1, in order around it; y points down."""
    if shape == "square":
        return np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * 0.88
    if shape == "triangle":
        return np.array([(0, -1.05), (1.12, 0.92), (-1.12, 0.92)])
    if shape == "cross":
        a, b = 1.05, 0.36
        quarter = [(-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b)]
        return np.array([*quarter, *((-x, -y) for x, y in quarter)])[:12]
    if shape == "star":
        turns = np.arange(10) * np.pi / 5
        radii = np.where(np.arange(10) % 2 == 0, 1.22, 0.50)
        return np.stack([radii * np.sin(turns), 0.08 - radii * np.cos(turns)], 1)
    raise ValueError(shape)


def _distance(shape: str, radius: float, cx: float, cy: float) -> NDArray[np.float64]:
    """Signed distance in pixels to the shape's edge, negative inside, at the middle of each pixel."""
    grid = np.arange(SIDE) + 0.5
    x, y = np.meshgrid(grid - cx, grid - cy)
    if shape in ("circle", "ring"):
        away = np.hypot(x, y)
        outer = away - radius
        return outer if shape == "circle" else np.maximum(outer, 0.52 * radius - away)
    corners = _corners(shape) * radius
    squared, inside = np.full(x.shape, np.inf), np.zeros(x.shape, bool)
    for (ax, ay), (bx, by) in zip(corners, np.roll(corners, -1, 0), strict=True):
        ex, ey = bx - ax, by - ay
        along = np.clip(((x - ax) * ex + (y - ay) * ey) / (ex * ex + ey * ey), 0, 1)
        squared = np.minimum(squared, (x - ax - along * ex) ** 2 + (y - ay - along * ey) ** 2)
        if ay != by:
            inside ^= ((ay > y) != (by > y)) & (x < ex * (y - ay) / ey + ax)
    return np.where(inside, -1, 1) * np.sqrt(squared)


@functools.lru_cache(maxsize=20_000)
def coverage(shape: str, radius: float, cx: float, cy: float, hollow: bool = False) -> Mask:
    """Share of each pixel that the shape covers, [SIDE, SIDE], from 0 to 1; its centre (cx, cy) in pixels."""
    away = _distance(shape, radius, cx, cy)
    if hollow:
        away = np.abs(away + OUTLINE_PX / 2) - OUTLINE_PX / 2
    covered: Mask = np.clip(0.5 - away, 0, 1).astype(np.float32)
    covered.setflags(write=False)
    return covered


def place_of(cx: float, cy: float) -> str:
    """The place whose middle is nearest to a centre given in pixels."""
    column, row = (0 if abs(at - SIDE / 2) < 7.5 else int(np.sign(at - SIDE / 2)) for at in (cx, cy))
    return next(name for name, cell in PLACES.items() if cell == (column, row))


def layout(scene: Scene, rng: random.Random, anywhere: bool = False) -> tuple[str, float, float, float]:
    """Shape, radius and centre (pixels, in halves) that fit a scene; what it leaves open is drawn by `rng`.

    `anywhere`: an open place may be any position, not only one of the nine.
    """
    shape = scene.shape or rng.choice(SHAPES)
    size = scene.size or rng.choice(tuple(RADII))
    radius = RADII[size] + rng.choice((-0.5, 0.0, 0.5))
    if scene.place is None and anywhere:
        room = int(2 * (SIDE / 2 - radius - 2))
        cx, cy = (SIDE / 2 + rng.randint(-room, room) / 2 for _ in range(2))
        return shape, radius, cx, cy
    column, row = PLACES[scene.place or rng.choice(tuple(PLACES))]
    jitter = (-1.0, -0.5, 0.0, 0.5, 1.0)
    cx, cy = (SIDE / 2 + OFFSETS[size] * cell + rng.choice(jitter) for cell in (column, row))
    return shape, radius, cx, cy


def paint(covered: Mask, colour: tuple[int, int, int], background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """The picture, uint8 [SIDE, SIDE, 3], of a covering in one colour on another."""
    share = covered[..., None]
    return np.rint(share * np.array(colour) + (1 - share) * np.array(background)).astype(np.uint8)


def all_scenes() -> list[Scene]:
    """Every combination that leaves nothing open, in a fixed order."""
    return [
        Scene(colour, background, shape, place, size)
        for colour, background, shape, place, size in itertools.product(
            COLOURS, COLOURS, SHAPES, PLACES, RADII
        )
        if colour != background
    ]


@functools.cache
def held_out(num: int = 100) -> tuple[Scene, ...]:
    """The first `num` of the 604 combinations (one in ten) that training never sees."""
    scenes = all_scenes()
    random.Random(2024).shuffle(scenes)
    return tuple(scenes[: len(scenes) // 10][:num])


@functools.cache
def _kept_from_training() -> frozenset[Scene]:
    return frozenset(held_out(10**6))


def is_held_out(scene: Scene) -> bool:
    """Whether training must not see this combination."""
    return scene in _kept_from_training()


def prompt_of(scene: Scene) -> str:
    """The plainest wording, as in "a small red circle on the left, blue background"."""
    words = ["a", scene.size, scene.colour, scene.shape or "shape", scene.place]
    return " ".join(word for word in words if word) + (
        f", {scene.background} background" if scene.background else ""
    )


def scene_of(prompt: str) -> Scene:
    """The scene of a prompt in the plainest wording. Raises ValueError for any other."""
    thing, _, ground = prompt.partition(", ")
    found = thing.split()[1:] if thing.startswith("a ") else []
    size = found.pop(0) if found and found[0] in RADII else None
    if len(found) >= 2:
        shape = None if found[1] == "shape" else found[1]
        scene = Scene(
            found[0], ground.removesuffix(" background") or None, shape, " ".join(found[2:]) or None, size
        )
        if scene.shape in (None, *SHAPES) and scene.place in (None, *PLACES) and prompt_of(scene) == prompt:
            return scene
    raise ValueError(f"not a plain prompt: {prompt!r}")


SYNONYMS = {
    "large": ("large", "big"),
    "small": ("small", "little"),
    "in the centre": ("in the centre", "in the center", "in the middle"),
}


def wording(scene: Scene, rng: random.Random) -> str:
    """One of many wordings of a scene; the plainest half of the time."""
    if rng.random() < 0.5:
        return prompt_of(scene)
    size = rng.choice(SYNONYMS.get(scene.size, (scene.size,))) if scene.size else ""
    place = rng.choice(SYNONYMS.get(scene.place, (scene.place,))) if scene.place else ""
    if place.startswith(("at the top ", "at the bottom ")):
        place = rng.choice((place, place.replace("at ", "in ")))
    thing = " ".join(
        word for word in (rng.choice(("a", "a", "")), size, scene.colour, scene.shape or "shape") if word
    )
    ground = rng.choice(("{} background", "on a {} background", "on {}", "background {}")).format(
        scene.background
    )
    form = rng.randrange(4)
    if form == 0:
        text = f"{thing} {place}, {ground}"
    elif form == 1:
        text = f"{ground}, {thing} {place}"
    elif form == 2:
        text = f"{place}, {thing}, {ground}" if place else f"{thing}, {ground}"
    else:
        text = f"{thing}, {place}, {ground}" if place else f"{thing} {ground}"
    if scene.background is None:
        text = f"{thing} {place}" if form % 2 or not place else f"{place}, {thing}"
    text = " ".join(text.split()).replace(" ,", ",")
    return text[0].upper() + text[1:] if rng.random() < 0.1 else text


BEFORE = ("a picture of ", "an image of ", "draw ", "please draw ", "photo of ", "show me ", "i want ")
AFTER = (
    "masterpiece",
    "4k",
    "high quality",
    "detailed",
    "please",
    "simple",
    "flat",
    "art",
    "minimal",
    "sharp",
)


def freer_wording(scene: Scene, rng: random.Random) -> str:
    """A wording such as people write: background or colour may be missing, and words without meaning occur."""
    opened = rng.random()
    if opened < 0.18:
        scene = replace(scene, background=None)
    elif opened < 0.24:
        scene = replace(scene, colour=None)
    text = wording(scene, rng)
    if rng.random() < 0.1:
        text = rng.choice(BEFORE) + text
    if rng.random() < 0.12:
        made_up = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 8)))
        text += rng.choice((", ", " ")) + rng.choice((*AFTER, made_up))
    if rng.random() < 0.08:
        text += "."
    return text.upper() if rng.random() < 0.05 else text


@functools.cache
def words() -> frozenset[str]:
    """Every word and mark that wordings consist of."""
    texts = [*COLOURS, *SHAPES, *PLACES, *(word for words in SYNONYMS.values() for word in words)]
    lower = set(" ".join([*texts, "a on in at background shape"]).split())
    return frozenset(lower | {word.capitalize() for word in lower} | {","})
