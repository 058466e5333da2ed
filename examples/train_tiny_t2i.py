"""Train the tiny text-to-image model that genserve ships, its ControlNet and its LoRA.

    python examples/train_tiny_t2i.py --out ./tiny-t2i-training

Two hours of one CPU core. Interrupt it at will: started again with the same settings it goes on from the last
checkpoint. The results are the folders `tiny-sd3`, `tiny-sd3-controlnet` and `tiny-sd3-lora-outline` in --out. What
is measured, is measured on these folders with the stock pipelines of diffusers, never on the training's own modules.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tiny_t2i_batches as batches
import tiny_t2i_data as data
import tiny_t2i_judge as judge
import tiny_t2i_parts as parts_of
import torch
import typer
from tiny_t2i_cards import write_cards
from tiny_t2i_scores import NUM_INFERENCE_STEPS, contact_sheet, draw, judge_all, told
from tiny_t2i_stage import Settings, Stage, console
from torch import Tensor
from torch.nn import functional as F

T5_LENGTHS = (16, 20, 24, 32, 77, 256)  # tokens; the number of padding tokens must not matter
T5_LENGTH_WEIGHTS = (0.62, 0.2, 0.08, 0.05, 0.03, 0.02)
NO_T5_SHARE = 0.08  # of the rows, with zeros in the place of what T5 says


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything; the defaults make the model that is shipped."""

    vae_steps: int = 1600
    vae_rows: int = 16
    decoder_steps: int = 400
    bank: int = 16_000
    base_steps: int = 6300
    freer_steps: int = 600
    base_rows: int = 32
    look_every: int = 1000
    control_bank: int = 4000
    control_steps: int = 500
    lora_bank: int = 2000
    lora_steps: int = 400
    judged: int = 100


SMOKE = Sizes(2, 2, 2, 8, 2, 2, 2, 2, 4, 2, 4, 2, 2)


def vae_batch(seed: int, step: int, num_rows: int, side: int = data.SIDE) -> tuple[Tensor, Tensor]:
    """Windows [rows, 3, side, side] of pictures, from -1 to 1, and the weight of each pixel, greater at edges."""
    rng = random.Random(f"vae {seed} {step}")
    pictures, covers = [], []
    for _ in range(num_rows):
        scene = data.Scene("white", "black")
        shape, radius, cx, cy = data.layout(scene, rng, anywhere=rng.random() < 0.5)
        covered = data.coverage(shape, radius, cx, cy, hollow=rng.random() < 0.2)
        left, top = (
            min(max(int(at) - side // 2 + rng.randint(-14, 14), 0), data.SIDE - side) for at in (cx, cy)
        )
        covered = covered[top : top + side, left : left + side]
        pictures.append(data.paint(covered, *rng.sample(tuple(data.COLOURS.values()), 2)))
        covers.append(covered)
    cover = torch.from_numpy(np.stack(covers))[:, None]
    edge = F.max_pool2d(cover, 3, 1, 1) + F.max_pool2d(-cover, 3, 1, 1)
    return batches.to_pixels(pictures), 1 + 4 * edge


def train_vae(out: Path, sizes: Sizes, seed: int) -> Any:
    """The autoencoder, trained on windows of pictures (most of a picture is flat), and with its scaling measured."""
    torch.manual_seed(seed)
    vae, rows, side = parts_of.make_vae(), sizes.vae_rows, data.SIDE // 2
    stage = Stage(Settings("vae", sizes.vae_steps, rows, 1.5e-3, seed, level_share=0.6), {"vae": vae}, out)

    def loss_of(step: int) -> Tensor:
        images, weight = vae_batch(seed, step, rows, side)
        generator = torch.Generator().manual_seed(seed * 10**6 + step)
        noise = torch.randn(rows, 4, side // 4, side // 4, generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            posterior = vae.encode(images).latent_dist
            mean, log_var = posterior.mean.float(), posterior.logvar.float()
            again = vae.decode(mean + noise * torch.exp(0.5 * log_var)).sample
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).mean()
        return (weight * (again.float() - images).abs()).mean() + 2e-4 * kl

    stage.run(loss_of)
    stage.use_mean()
    vae.requires_grad_(False)
    drawn = [(scene, data.coverage(*at)) for scene, at in batches.draw_scenes(seed, 64, 0.0)]
    pictures = [
        data.paint(cover, data.COLOURS[one.colour], data.COLOURS[one.background]) for one, cover in drawn
    ]
    parts_of.measure_scaling(vae, batches.encode(vae, pictures))
    return vae


def train_decoder(out: Path, vae: Any, sizes: Sizes, seed: int) -> None:
    """Whole pictures for the decoder alone: latents stay what they are, and a little wrong ones are put right."""
    rows = sizes.vae_rows
    vae.decoder.requires_grad_(True)
    stage = Stage(Settings("decoder", sizes.decoder_steps, rows, 1e-3, seed), {"decoder": vae.decoder}, out)

    def loss_of(step: int) -> Tensor:
        images, weight = vae_batch(seed + 1, step, rows)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                latents = vae.encode(images).latent_dist.mean.float()
            generator = torch.Generator().manual_seed(seed * 10**6 + step)
            noise = torch.randn(latents.shape, generator=generator) * 0.08 / vae.config.scaling_factor
            again = vae.decode(latents + noise).sample
        return (weight * (again.float() - images).abs()).mean()

    stage.run(loss_of)
    stage.use_mean()
    vae.requires_grad_(False)


def bank_of(out: Path, name: str, vae: Any, seed: int, num: int, **how: Any) -> batches.Bank:
    """A bank, from the file where an earlier run left it."""
    path = out / f"bank-{name}.pt"
    if path.exists():
        kept = torch.load(path, weights_only=True)
        if len(kept["latents"]) == num:
            drawn = batches.draw_scenes(seed, num, how.get("anywhere_share", batches.ANYWHERE_SHARE))
            return batches.Bank(kept["latents"], tuple(scene for scene, _ in drawn), kept["layouts"])
    console.print(f"encoding {num} pictures for {name}")
    bank = batches.make_bank(vae, seed, num, **how)
    torch.save({"latents": bank.latents, "layouts": bank.layouts}, path)
    return bank


def encoded(parts: parts_of.Parts, batch: batches.Batch, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Embeddings of a batch's prompts, with a random number of T5's tokens and without T5 in some rows."""
    num_tokens = rng.choices(T5_LENGTHS, T5_LENGTH_WEIGHTS)[0]
    states, pooled = parts_of.encode_prompts(parts, batch.prompts, num_tokens)
    kept = torch.tensor([rng.random() >= NO_T5_SHARE for _ in batch.prompts])
    states = torch.cat(
        [states[:, : parts_of.CLIP_TOKENS], states[:, parts_of.CLIP_TOKENS :] * kept[:, None, None]], 1
    )
    return states, pooled


def train_base(out: Path, parts: parts_of.Parts, sizes: Sizes, seed: int) -> None:
    """The transformer and the text encoders, together: first with plain prompts, then with freer ones."""
    bank = bank_of(out, "base", parts.vae, seed, sizes.bank)
    trained = {name: module for name, module in parts.modules().items() if name != "vae"}
    parts.transformer.set_attn_processor(parts_of.PlainAttention())
    plain = Settings("base", sizes.base_steps, sizes.base_rows, 1e-3, seed, muon_rate=2e-3, level_share=0.5)
    freer = Settings("freer", sizes.freer_steps, sizes.base_rows, 4e-4, seed, muon_rate=8e-4)
    for settings in (plain, freer):
        stage = Stage(settings, trained, out)
        loss_of = partial(_base_loss, parts, bank, settings)
        stage.run(loss_of, look_every=sizes.look_every, look=partial(_look, out, parts, stage, sizes.judged))
        stage.use_mean()


def _base_loss(parts: parts_of.Parts, bank: batches.Bank, settings: Settings, step: int) -> Tensor:
    name, seed = settings.name, settings.seed
    asking = batches.FREER if name == "freer" else batches.PLAIN
    batch = batches.draw_batch(bank, name, seed, step, settings.num_rows, asking)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, pooled = encoded(parts, batch, random.Random(f"t5 {seed} {step}"))
        found = parts.transformer(batch.noised, states, pooled, batch.timesteps).sample
    return F.mse_loss(found.float(), batch.velocity)


def _look(out: Path, parts: parts_of.Parts, stage: Stage, num_judged: int) -> None:
    with stage.mean_in_use():
        parts_of.save_pipeline(parts, out / "tiny-sd3")
    scenes = data.held_out(num_judged)[-50:]
    images = draw(parts_of.load_pipeline(out / "tiny-sd3"), scenes)
    console.print(f"step {stage.num_done}: {told(judge.score(images, scenes))}")
    contact_sheet(images, out / f"{stage.settings.name}-{stage.num_done}.png")


def train_controlnet(out: Path, parts: parts_of.Parts, sizes: Sizes, seed: int) -> Any:
    """A ControlNet that puts the shape where a white silhouette on black is, whatever the prompt leaves open."""
    bank = bank_of(out, "control", parts.vae, seed + 1, sizes.control_bank, anywhere_share=0.5, layouts=True)
    for module in parts.modules().values():
        module.requires_grad_(False)
    controlnet = parts_of.make_controlnet(parts.transformer)
    controlnet.set_attn_processor(parts_of.PlainAttention())
    settings = Settings("controlnet", sizes.control_steps, sizes.base_rows, 1e-3, seed, muon_rate=1e-3)
    stage = Stage(settings, {"controlnet": controlnet}, out)

    def loss_of(step: int) -> Tensor:
        batch = batches.draw_batch(bank, "control", seed, step, sizes.base_rows, batches.LAYOUTS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                states, pooled = encoded(parts, batch, random.Random(f"control t5 {seed} {step}"))
            added = controlnet(
                batch.noised,
                batch.layouts,
                encoder_hidden_states=states,
                pooled_projections=torch.zeros_like(pooled),  # as the stock pipeline does for this kind
                timestep=batch.timesteps,
                return_dict=False,
            )[0]
            found = parts.transformer(batch.noised, states, pooled, batch.timesteps, added).sample
        return F.mse_loss(found.float(), batch.velocity)

    stage.run(loss_of)
    stage.use_mean()
    return controlnet


def train_lora(out: Path, parts: parts_of.Parts, sizes: Sizes, seed: int) -> None:
    """An adapter with which every shape is drawn hollow; `parts.transformer` has it afterwards."""
    bank = bank_of(out, "lora", parts.vae, seed + 2, sizes.lora_bank, hollow=True)
    for module in parts.modules().values():
        module.requires_grad_(False)
    torch.manual_seed(seed + 2)
    parts_of.add_lora(parts.transformer, rank=16)
    settings = Settings("lora", sizes.lora_steps, sizes.base_rows, 2e-3, seed, level_share=0.3)
    stage = Stage(settings, {"transformer": parts.transformer}, out)

    def loss_of(step: int) -> Tensor:
        batch = batches.draw_batch(bank, "lora", seed, step, sizes.base_rows, batches.FREER)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                states, pooled = encoded(parts, batch, random.Random(f"lora t5 {seed} {step}"))
            found = parts.transformer(batch.noised, states, pooled, batch.timesteps).sample
        return F.mse_loss(found.float(), batch.velocity)

    stage.run(loss_of)
    stage.use_mean()


def how_made(sizes: Sizes) -> dict[str, str]:
    """For each folder a sentence for its card."""
    rows = sizes.base_rows
    return {
        "tiny-sd3": f"The autoencoder took {sizes.vae_steps} steps and its decoder {sizes.decoder_steps} more. The "
        "transformer and the text\nencoders were trained together by flow matching with logit-normal timesteps: "
        f"{sizes.base_steps} steps of {rows} rows\nwith plain prompts and {sizes.freer_steps} with freer ones.",
        "tiny-sd3-controlnet": f"{sizes.control_steps} steps of {rows} rows, everything else frozen.",
        "tiny-sd3-lora-outline": f"{sizes.lora_steps} steps of {rows} rows, everything else frozen.",
    }


def main(
    out: Annotated[Path, typer.Option(help="Folder of checkpoints and results.")] = Path("tiny-t2i-training"),
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and noise.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads to compute with.")] = 1,
    smoke: Annotated[bool, typer.Option(help="A few steps of everything, only to see that it runs.")] = False,
) -> None:
    """Train, save and judge the tiny text-to-image model, its ControlNet and its LoRA."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    sizes = SMOKE if smoke else Sizes()
    vae = train_vae(out, sizes, seed)
    torch.manual_seed(seed + 1)
    parts = parts_of.make_parts(vae)
    train_base(out, parts, sizes, seed)
    train_decoder(out, vae, sizes, seed)
    parts_of.save_pipeline(parts, out / "tiny-sd3")
    held_out = [{"prompt": data.prompt_of(scene), **asdict(scene)} for scene in data.held_out()]
    (out / "tiny-sd3" / "held_out.json").write_text(json.dumps(held_out, indent=1) + "\n")
    controlnet = train_controlnet(out, parts, sizes, seed)
    parts_of.save_controlnet(controlnet, out / "tiny-sd3-controlnet")
    train_lora(out, parts, sizes, seed)
    parts_of.save_lora(parts.transformer, out / "tiny-sd3-lora-outline")
    scores = judge_all(out, sizes.judged)
    for name, values in scores.items():
        console.print(f"{name}: {told(values)}")
    write_cards(out, scores, NUM_INFERENCE_STEPS, how_made(sizes))


if __name__ == "__main__":
    typer.run(main)
