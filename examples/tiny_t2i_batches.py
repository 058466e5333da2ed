"""Encoded pictures with their scenes, and the flow-matching batches drawn from them.

A bank is made once from a seed; a batch depends on the bank, the seed and the step alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tiny_t2i_data as data
import torch
from torch import Tensor

NUM_TIMESTEPS = 1000
ANYWHERE_SHARE = 0.08  # of a bank's pictures, away from the nine places


@dataclass(frozen=True, slots=True)
class Bank:
    """Scaled latents [pictures, channels, side, side] in bfloat16 and what each shows."""

    latents: Tensor
    scenes: tuple[data.Scene, ...]
    layouts: Tensor | None = None  # the latents of the silhouettes, as control images


@dataclass(frozen=True, slots=True)
class Batch:
    """Noised latents, their timesteps (0 to 1000), the velocity to be found, prompts and control latents."""

    noised: Tensor
    timesteps: Tensor
    velocity: Tensor
    prompts: list[str]
    layouts: Tensor | None


def to_pixels(pictures: list[np.ndarray]) -> Tensor:
    """uint8 pictures [side, side, 3] as one tensor [rows, 3, side, side] from -1 to 1."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def encode(vae: Any, pictures: list[np.ndarray]) -> Tensor:
    """Means of the pictures' latents, not scaled, in float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = [
            vae.encode(to_pixels(pictures[at : at + 32])).latent_dist.mean
            for at in range(0, len(pictures), 32)
        ]
    return torch.cat(rows).float()


def silhouette(covered: data.Mask) -> np.ndarray:
    """The control image of a shape: white on black."""
    return data.paint(covered, (255, 255, 255), (0, 0, 0))


def draw_scenes(
    seed: int, num: int, anywhere_share: float
) -> list[tuple[data.Scene, tuple[str, float, float, float]]]:
    """Scenes that training may see with their layouts; a share of them is off the nine places and names none."""
    rng = random.Random(f"scenes {seed}")
    allowed = [scene for scene in data.all_scenes() if not data.is_held_out(scene)]
    drawn: list[tuple[data.Scene, tuple[str, float, float, float]]] = []
    while len(drawn) < num:
        rng.shuffle(allowed)
        for scene in allowed:
            if rng.random() >= anywhere_share:
                drawn.append((scene, data.layout(scene, rng)))
                continue
            free = replace(scene, place=None)
            at = data.layout(free, rng, anywhere=True)
            if not data.is_held_out(replace(scene, place=data.place_of(*at[2:]))):
                drawn.append((free, at))
    return drawn[:num]


def make_bank(
    vae: Any,
    seed: int,
    num: int,
    anywhere_share: float = ANYWHERE_SHARE,
    hollow: bool = False,
    layouts: bool = False,
) -> Bank:
    """Draw and encode `num` pictures; with `layouts` their silhouettes too."""
    drawn = draw_scenes(seed, num, anywhere_share)
    covers = [data.coverage(*at, hollow=hollow) for _, at in drawn]
    pictures = [
        data.paint(covered, data.COLOURS[scene.colour], data.COLOURS[scene.background])
        for covered, (scene, _) in zip(covers, drawn, strict=True)
    ]
    raw, scale = encode(vae, pictures), vae.config.scaling_factor
    control = encode(vae, [silhouette(covered) for covered in covers]) * scale if layouts else None
    return Bank(
        ((raw - vae.config.shift_factor) * scale).bfloat16(),
        tuple(scene for scene, _ in drawn),
        None if control is None else control.bfloat16(),
    )


@dataclass(frozen=True, slots=True)
class Asking:
    """How prompts ask: the shares in which size, place and shape are left open, and the kind of wording."""

    size: float = 0.08
    place: float = 0.08
    shape: float = 0.08
    freer: bool = False

    def prompt(self, scene: data.Scene, rng: random.Random) -> str:
        """A prompt for a picture of `scene`; a tenth of them is empty."""
        if rng.random() < 0.1:
            return ""
        opened: dict[str, Any] = {
            name: None for name in ("size", "place", "shape") if rng.random() < getattr(self, name)
        }
        return (data.freer_wording if self.freer else data.wording)(replace(scene, **opened), rng)


PLAIN = Asking()
FREER = Asking(freer=True)
LAYOUTS = Asking(0.6, 0.6, 0.6, freer=True)


def draw_batch(bank: Bank, name: str, seed: int, step: int, num_rows: int, asking: Asking = PLAIN) -> Batch:
    """Rows of the bank at random noise levels (logit-normal), with prompts."""
    rng = random.Random(f"{name} {seed} {step}")
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    rows = [rng.randrange(len(bank.scenes)) for _ in range(num_rows)]
    prompts = [asking.prompt(bank.scenes[row], rng) for row in rows]
    clean = bank.latents[rows].float()
    noise = torch.randn(clean.shape, generator=generator)
    sigmas = torch.sigmoid(torch.randn(num_rows, generator=generator))
    share = sigmas[:, None, None, None]
    return Batch(
        (1 - share) * clean + share * noise,
        sigmas * NUM_TIMESTEPS,
        noise - clean,
        prompts,
        None if bank.layouts is None else bank.layouts[rows].float(),
    )
