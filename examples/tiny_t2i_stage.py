"""One stage of a training: weights, their running mean and the optimizer, saved and resumed step by step.

Knows nothing of pictures; a stage's loss is a function of the step's number, so a resumed run repeats exactly.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

console = Console()
CHECKPOINT_EVERY = 100
EMA_DECAY = 0.998


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides a stage's weights. A checkpoint of other settings is refused."""

    name: str
    num_steps: int
    num_rows: int
    learning_rate: float
    seed: int = 0
    weight_decay: float = 0.01
    muon_rate: float | None = None  # learning rate of the blocks' matrices, if they are to have Muon
    level_share: float = 0.0  # share of the steps at the full rate, before the cosine begins
    num_warm_steps: int = 100


class Stage:
    """The trainable weights of `parts`, their running mean, and the steps done so far."""

    def __init__(self, settings: Settings, parts: Mapping[str, nn.Module], folder: Path) -> None:
        self.settings, self.num_done, self.cpu_s = settings, 0, 0.0
        self.path = folder / f"{settings.name}.pt"
        self._weights = {
            f"{part}.{name}": weight
            for part, module in parts.items()
            for name, weight in module.named_parameters()
            if weight.requires_grad
        }
        self.mean = {name: weight.detach().clone() for name, weight in self._weights.items()}
        muon = settings.muon_rate is not None
        matrices = [w for name, w in self._weights.items() if muon and "_blocks." in name and w.ndim == 2]
        taken = {id(weight) for weight in matrices}
        others = [weight for weight in self._weights.values() if id(weight) not in taken]
        rate, decay = settings.learning_rate, settings.weight_decay
        adam = torch.optim.AdamW(others, lr=rate, weight_decay=decay, betas=(0.9, 0.98), fused=True)
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [(adam, rate)]
        if settings.muon_rate is not None:
            both = torch.optim.Muon(
                matrices, lr=settings.muon_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
            )
            self._optimizers.append((both, settings.muon_rate))
        if self.path.exists():
            self._resume()

    def _resume(self) -> None:
        state = torch.load(self.path, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SystemExit(f"{self.path} was made with other settings; choose another --out or remove it")
        self.num_done, self.cpu_s, self.mean = state["num_done"], state["cpu_s"], state["mean"]
        self._put(state["weights"])
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(weights[name])

    def save(self) -> None:
        """Write the checkpoint; the old one stays until the new one is whole."""
        state = {
            "settings": asdict(self.settings),
            "num_done": self.num_done,
            "cpu_s": self.cpu_s,
            "weights": {name: weight.detach() for name, weight in self._weights.items()},
            "mean": self.mean,
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
        }
        new = self.path.with_suffix(".new")
        torch.save(state, new)
        os.replace(new, self.path)

    def use_mean(self) -> None:
        """Put the running mean into the modules: the stage's result."""
        self._put(self.mean)

    @contextlib.contextmanager
    def mean_in_use(self) -> Iterator[None]:
        """The running mean is in the modules for a while; afterwards training can go on."""
        kept = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._put(self.mean)
        try:
            yield
        finally:
            self._put(kept)

    def _rate(self) -> float:
        steps, level = self.settings.num_steps, self.settings.level_share
        warm = min(1.0, (self.num_done + 1) / min(self.settings.num_warm_steps, max(1, steps // 10)))
        done = max(0.0, self.num_done / steps - level) / (1.0 - level)
        return warm * max(0.01, 0.5 * (1.0 + math.cos(math.pi * done)))

    def step(self, loss_of: Callable[[int], Tensor]) -> float:
        """One optimizer step on `loss_of(step)`; returns the loss."""
        start_s = time.process_time()
        loss = loss_of(self.num_done)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights.values(), 1.0)
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self._rate()
            optimizer.step()
            optimizer.zero_grad()
        keep = min(EMA_DECAY, (1 + self.num_done) / (10 + self.num_done))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.mean.values()), list(self._weights.values()), 1.0 - keep)
        self.num_done += 1
        self.cpu_s += time.process_time() - start_s
        return loss.item()

    def run(
        self,
        loss_of: Callable[[int], Tensor],
        at_most: int | None = None,
        look_every: int | None = None,
        look: Callable[[], None] | None = None,
    ) -> bool:
        """Do what is left, `at_most` steps of it; call `look` now and then. Returns whether the stage is done."""
        end = self.settings.num_steps
        if at_most is not None:
            end = min(end, self.num_done + at_most)
        name, mean = self.settings.name, None
        columns = (
            TextColumn(name),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(name, total=end, completed=self.num_done, loss="")
            start_s, first = time.monotonic(), self.num_done
            while self.num_done < end:
                loss = self.step(loss_of)
                mean = loss if mean is None else 0.98 * mean + 0.02 * loss
                progress.update(task, completed=self.num_done, loss=f"loss {mean:.4f}")
                if self.num_done % CHECKPOINT_EVERY == 0 or self.num_done == end:
                    self.save()
                    if not console.is_terminal:
                        per_step_s = (time.monotonic() - start_s) / (self.num_done - first)
                        console.print(
                            f"{name} step {self.num_done} of {self.settings.num_steps} loss {mean:.4f} "
                            f"cpu {self.cpu_s / 60:.1f} min, {per_step_s:.2f} s a step, "
                            f"{per_step_s * (end - self.num_done) / 60:.0f} min to go"
                        )
                if look is not None and look_every and self.num_done % look_every == 0:
                    look()
        return self.num_done == self.settings.num_steps
