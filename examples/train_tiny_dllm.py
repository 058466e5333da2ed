"""Train the two tiny models that genserve ships: a causal one, and from its weights a masked-diffusion model.

The causal model learns to look things up in the question many times faster, and the other one inherits it.

    python examples/train_tiny_dllm.py --threads 2 --out ./tiny-training

Half an hour of CPU. Interrupt it at will: started again with the same settings it goes on from the last
checkpoint and ends with the same weights. The results are the folders `tiny-llada` and `tiny-llama` in --out,
each with `scores.json`, measured on the saved weights.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import tiny_corpus
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tiny_batches import Encoder, attention_bias, causal_batch, masked_batch
from tiny_cards import card
from tiny_folders import load_llada, make_tokenizer, save_llada, save_llama
from tiny_net import Shape, TinyNet, decode_by_unmasking
from torch.nn import functional as F

console = Console()
ANSWER_ROOM_TOKENS = 96
NUM_EXPORTED = 120  # held-out items written next to the model, for tests
CHECKPOINT_EVERY = 100
WARM_UP_STEPS = 100
LEVEL_SHARE = 0.5
EMA_DECAY = 0.995
OTHERS_RATE = 0.5  # of the matrices' learning rate: embedding, output layer and norms


class Which(StrEnum):
    dllm = "dllm"
    ar = "ar"
    both = "both"


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the weights. A checkpoint of other settings is refused."""

    causal: bool
    num_steps: int
    num_rows: int
    seed: int
    shape: Shape
    learning_rate: float
    weight_decay: float = 0.05

    def facts(self) -> dict[str, Any]:
        """The settings as plain values."""
        return {name: getattr(self, name) for name in self.__slots__} | {"shape": asdict(self.shape)}


class Training:
    """Weights, their running mean and the optimizers' state; one step at a time, saved and resumed."""

    def __init__(self, settings: Settings, encoder: Encoder, checkpoint: Path) -> None:
        self.settings, self._encoder, self._checkpoint = settings, encoder, checkpoint
        torch.manual_seed(settings.seed)
        self.net = TinyNet(settings.shape)
        self.num_done, self.cpu_s = 0, 0.0
        self.mean = {name: weight.detach().clone() for name, weight in self.net.state_dict().items()}
        matrices = [w for name, w in self.net.named_parameters() if ".blocks." in name and w.ndim == 2]
        others = [w for name, w in self.net.named_parameters() if ".blocks." not in name or w.ndim != 2]
        lr, decay = settings.learning_rate, settings.weight_decay
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr * OTHERS_RATE, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
        ]
        if checkpoint.exists():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True)
        if state["settings"] != self.settings.facts():
            raise SystemExit(
                f"{self._checkpoint} was made with other settings; choose another --out or remove it"
            )
        self.num_done, self.cpu_s = state["num_done"], state["cpu_s"]
        self.net.load_state_dict(state["net"])
        self.mean = state["mean"]
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def begin_with(self, checkpoint: Path) -> None:
        """Take over the mean weights of another training as the first ones of this."""
        self.net.load_state_dict(torch.load(checkpoint, weights_only=True)["mean"])
        self.mean = {name: weight.detach().clone() for name, weight in self.net.state_dict().items()}

    def save(self) -> None:
        """Write the checkpoint; the old one stays until the new one is whole."""
        state = {
            "settings": self.settings.facts(),
            "num_done": self.num_done,
            "cpu_s": self.cpu_s,
            "net": self.net.state_dict(),
            "mean": self.mean,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        new = self._checkpoint.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, self._checkpoint)

    def step(self) -> float:
        """One optimizer step; returns its loss."""
        start_s = time.process_time()
        settings, step = self.settings, self.num_done
        make = causal_batch if settings.causal else masked_batch
        batch = make(self._encoder, settings.seed, step, settings.num_rows)
        bias = attention_bias(batch.lengths, batch.ids.shape[1], settings.causal)
        judged = batch.judged()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _ = self.net.hidden(batch.ids, bias)
            logits = self.net.head(hidden.flatten(0, 1)[judged])
        losses = F.cross_entropy(logits.float(), batch.targets.flatten()[judged], reduction="none")
        loss = (losses * batch.weights.flatten()[judged]).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        rate = settings.learning_rate * _schedule(step, settings.num_steps)
        for optimizer, share in zip(self._optimizers, (1.0, OTHERS_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad()
        keep = min(EMA_DECAY, (1 + step) / (10 + step))
        for name, weight in self.net.state_dict().items():
            self.mean[name].lerp_(weight, 1.0 - keep)
        self.num_done += 1
        self.cpu_s += time.process_time() - start_s
        return loss.item()


def _schedule(step: int, num_steps: int) -> float:
    """Share of the learning rate: a short rise, then level, in the last part half a cosine down to nearly nothing."""
    warm = min(1.0, (step + 1) / min(WARM_UP_STEPS, max(1, num_steps // 10)))
    done = max(0.0, step / num_steps - LEVEL_SHARE) / (1.0 - LEVEL_SHARE)
    return warm * max(0.01, 0.5 * (1.0 + math.cos(math.pi * done)))


def train(training: Training, name: str, at_most: int | None = None) -> None:
    """Run the remaining steps, no more than `at_most`, with checkpoints and a progress bar."""
    end = training.settings.num_steps
    if at_most is not None:
        end = min(end, training.num_done + at_most)
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=end, completed=training.num_done, loss="")
        mean = None
        while training.num_done < end:
            loss = training.step()
            mean = loss if mean is None else 0.98 * mean + 0.02 * loss
            progress.update(task, completed=training.num_done, loss=f"loss {mean:.4f}")
            if training.num_done % CHECKPOINT_EVERY == 0 or training.num_done == end:
                training.save()
                if not console.is_terminal:
                    minutes = training.cpu_s / 60
                    console.print(f"{name} step {training.num_done} loss {mean:.4f} cpu {minutes:.1f} min")


# Task (or "all") to the share of items answered word for word and the tokens before the end per forward pass.
Scores = dict[str, tuple[float, float]]
Answerer = Callable[[list[int]], tuple[list[int], int]]


def judge(items: Sequence[tiny_corpus.Item], encoder: Encoder, tokenizer: Any, answer: Answerer) -> Scores:
    """Score `answer`, which maps a prompt to (token ids, forward passes), by task and over all."""
    counts: dict[str, list[int]] = {"all": [0, 0, 0, 0]}
    for item in items:
        ids, num_forwards = answer(encoder.chat_prompt(("user", item.question)))
        right = tokenizer.decode(ids, skip_special_tokens=True) == item.answer
        for key in ("all", item.task):
            so_far = counts.setdefault(key, [0, 0, 0, 0])
            counts[key] = [a + b for a, b in zip(so_far, (1, right, len(ids), num_forwards), strict=True)]
    return {key: (right / num, tokens / forwards) for key, (num, right, tokens, forwards) in counts.items()}


def judge_llada(folder: Path, items: Sequence[tiny_corpus.Item]) -> dict[str, Scores]:
    """Scores of a saved LLaDA folder, without cache and with the dual cache, by plain decoding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder, net = Encoder(tokenizer), load_llada(folder)

    def answerer(dual_cache: bool) -> Answerer:
        def answer(prompt: list[int]) -> tuple[list[int], int]:
            done = decode_by_unmasking(
                net, prompt, ANSWER_ROOM_TOKENS, encoder.mask, encoder.eos, dual_cache=dual_cache
            )
            return done.ids, done.num_forwards

        return answer

    return {name: judge(items, encoder, tokenizer, answerer(name == "dual")) for name in ("none", "dual")}


def judge_llama(folder: Path, items: Sequence[tiny_corpus.Item]) -> dict[str, Scores]:
    """Scores of a saved Llama folder through `transformers`' own greedy generation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    encoder = Encoder(tokenizer)

    def answer(prompt: list[int]) -> tuple[list[int], int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER_ROOM_TOKENS, do_sample=False
        )
        new = out[0, len(prompt) :].tolist()
        return new[: new.index(encoder.eos)] if encoder.eos in new else new, len(new)

    return {"greedy": judge(items, encoder, tokenizer, answer)}


def show(name: str, scores: dict[str, Scores]) -> None:
    """Print scores as a table, a row for each task."""
    table = Table(
        "task", *(f"{mode}: {what}" for mode in scores for what in ("exact", "tokens/forward")), title=name
    )
    for task in next(iter(scores.values())):
        table.add_row(task, *(f"{number:.3f}" for mode in scores.values() for number in mode[task]))
    console.print(table)


def finish(training: Training, folder: Path, tokenizer: Any, items: Sequence[tiny_corpus.Item]) -> None:
    """Save the model's folder, judge what was saved, and write its scores and card beside it."""
    causal = training.settings.causal
    (save_llama if causal else save_llada)(training.mean, training.settings.shape, tokenizer, folder)
    scores = (judge_llama if causal else judge_llada)(folder, items)
    show(folder.name, scores)
    facts = {
        "steps": training.num_done,
        "cpu_minutes": training.cpu_s / 60,
        "items": len(items),
        "scores": scores,
    }
    (folder / "scores.json").write_text(json.dumps(facts, indent=1) + "\n")
    num_parameters = sum(weight.numel() for weight in training.mean.values())
    (folder / "README.md").write_text(card(folder.name, num_parameters, **facts))
    if not causal:
        exported = [asdict(item) for item in tiny_corpus.held_out(NUM_EXPORTED, seed=0)]
        (folder / "held_out.json").write_text(json.dumps(exported, indent=1) + "\n")


def main(
    which: Annotated[Which, typer.Option(help="Which of the two models to train.")] = Which.both,
    out: Annotated[Path, typer.Option(help="Folder of checkpoints and results.")] = Path("tiny-training"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps; 900 (causal) and 3600 if not given.")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads to compute with.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and masks.")] = 0,
    items: Annotated[int, typer.Option(min=1, help="Held-out items to be judged by.")] = 240,
    smoke: Annotated[bool, typer.Option(help="Tiny sizes, only to see that everything runs.")] = False,
    stop_after: Annotated[
        int | None, typer.Option(help="Leave after so many steps of this run, to go on later.")
    ] = None,
) -> None:
    """Train, save and judge the tiny models."""
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    shape = Shape(d_model=32, num_layers=1, d_ff=48, vocab_size=288) if smoke else Shape()
    tokenizer = make_tokenizer(tiny_corpus.tokenizer_texts(num=1000 if smoke else 8000), shape.vocab_size)
    encoder = Encoder(tokenizer)
    judged = tiny_corpus.held_out(items, seed=1)
    num_rows = 4 if smoke else 32
    twin = Settings(True, steps or 900, num_rows, seed, shape, learning_rate=4e-3)
    masked = replace(twin, causal=False, num_steps=steps or 3600, learning_rate=3e-3)
    num_left = stop_after
    for settings, name in ((twin, "ar"), (masked, "dllm")):
        training = Training(settings, encoder, out / f"{name}.pt")
        if not settings.causal and training.num_done == 0:
            training.begin_with(out / "ar.pt")
        if settings.causal or which is not Which.ar:  # the masked model needs its twin first
            before = training.num_done
            train(training, name, num_left)
            if num_left is not None:
                num_left -= training.num_done - before
            if training.num_done < settings.num_steps:
                console.print(f"stopped after step {training.num_done} of {name}; run again to go on")
                return
        if which in (Which.both, name):
            finish(training, out / ("tiny-llama" if settings.causal else "tiny-llada"), tokenizer, judged)


if __name__ == "__main__":
    typer.run(main)
