"""First-block caching: when the first transformer block changes its input as it did a step ago, the others are
taken to do so too, and their joint effect of then is added instead of running them.

Owns the decision and the arithmetic, equal to diffusers' FirstBlockCache; works on unmodified transformers, through a
view of the module whose lists of blocks are wrapped for one call. Nothing is kept: what one step leaves for the next is
a list of tensors, [number of steps skipped, what the first block added, what the others added to the image tokens,
what they added to the text tokens (not where those end before)].
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from genserve.t2i.ports import tensors

if TYPE_CHECKING:
    import torch

    from genserve.t2i.model import Model

THRESHOLD = "step_cache_threshold"
"""The parameter of models that have it."""

BLOCK_LISTS = ("transformer_blocks", "single_transformer_blocks")


class StepCache:
    """One call of a transformer: `call = StepCache(state, threshold)`, `call.view(module)(...)`, `call.state`.

    `threshold`: the largest change of the first block's effect, relative to it, at which the others are skipped; 0
    skips none and leaves no state.
    """

    def __init__(self, state: Sequence[torch.Tensor] | None, threshold: float) -> None:
        self.threshold = threshold
        self.state: list[torch.Tensor] = list(state or ())
        self._is_skipping = False
        self._head: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def has_skipped(self) -> bool:
        """Whether the call left blocks out."""
        return self._is_skipping

    def view(self, module: Any) -> Any:
        """The module, for one call."""
        if self.threshold <= 0:
            self.state = []
            return module
        view = copy.copy(module)
        names = [name for name in BLOCK_LISTS if module._modules.get(name)]
        last = sum(len(module._modules[name]) for name in names) - 1
        if last < 1:
            return module
        blocks = [_Block(block, self) for name in names for block in module._modules[name]]
        blocks[0].run, blocks[last].run = self._run_head, self._run_tail
        modules = dict(module._modules)
        for name in names:
            modules[name] = blocks[: len(module._modules[name])]
            blocks = blocks[len(module._modules[name]) :]
        view.__dict__["_modules"] = modules
        return view

    def run_between(self, block: Any, inputs: dict[str, Any]) -> Any:
        if self._is_skipping:
            return inputs["encoder_hidden_states"], inputs["hidden_states"]
        return block(**inputs)

    def _run_head(self, block: Any, inputs: dict[str, Any]) -> Any:
        text, image = block(**inputs)
        added = image - inputs["hidden_states"]
        self._head = (text, image)
        self._is_skipping = bool(self.state) and self._is_alike(added, self.state[1])
        if self._is_skipping:
            self.state[0] = self.state[0] + 1
        else:
            self.state = [self.state[0] if self.state else _zero(), added]
        return text, image

    def _run_tail(self, block: Any, inputs: dict[str, Any]) -> Any:
        assert self._head is not None
        head_text, head_image = self._head
        if self._is_skipping:
            text = self.state[3] + head_text if len(self.state) > 3 else None
            return text, self.state[2] + head_image
        text, image = block(**inputs)
        self.state += [image - head_image, *([] if text is None else [text - head_text])]
        return text, image

    def _is_alike(self, added: torch.Tensor, before: torch.Tensor) -> bool:
        if added.shape != before.shape:
            return False
        change = (added - before).abs().mean() / before.abs().mean()
        return change.item() <= self.threshold


def _zero() -> torch.Tensor:
    import torch

    return torch.tensor(0)


class _Block:
    """Stands for a block in a module's list; what else is asked of it, the block answers."""

    def __init__(self, block: Any, call: StepCache) -> None:
        self._block = block
        self.run = call.run_between

    def __call__(self, **inputs: Any) -> Any:
        return self.run(self._block, inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


def add_ports(model: Model) -> None:
    """What a model has besides, if it has the parameter; `hit` is None, or says that the step left blocks out."""
    if model.params.get(THRESHOLD) is not None:
        model.add_input("step_cache", tensors(), default=None)
        model.add_output("step_cache", tensors())
        model.add_output("hit", dict)


def hit(step: int, calls: Sequence[StepCache]) -> dict[str, Any] | None:
    """What `hit` says of a step: how many of its calls of the transformer left blocks out, if any."""
    num_calls = sum(call.has_skipped for call in calls)
    return {"step": step, "threshold": calls[0].threshold, "num_calls": num_calls} if num_calls else None


def num_skipped(state: Sequence[torch.Tensor]) -> int:
    """How many steps were skipped so far."""
    return int(state[0]) if state else 0
