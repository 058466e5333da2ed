"""The nodes of approximate caching: one that looks for latents to begin with, one that keeps latents for others.

Owns how tensors become what `approx_cache` decides about. Both share one cache on an executor, which they load.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

from genserve.t2i.approx_cache import SKIPS, ApproximateCache, kept_steps, normalized
from genserve.t2i.model import Model
from genserve.t2i.ports import LOOP_COUNT, LOOP_INDEX, tensor, tensors


class _Cached(Model):
    """Parameters: `scope`, what tells apart models whose latents must not mix; `skips`, (least similarity, share of
    steps) pairs; `max_entries`; `num_embeddings`, how many tensors an embedding is (0: one tensor, no list)."""

    load_key: ClassVar[str] = "genserve.t2i.models.cache:ApproximateCache"
    load_params: ClassVar[tuple[str, ...]] = ("scope", "max_entries")
    pure: ClassVar[bool] = False

    def load(self, model_path: str | None, device: str) -> dict[str, Any]:
        return {"cache": ApproximateCache(self.params.get("max_entries", 1000))}

    def add_common(self) -> None:
        many = self.params.get("num_embeddings", 0)
        self.add_input("latents", tensor())
        self.add_input("embedding", tensors() if many else tensor())
        self.add_input("condition", dict, default=None)
        self.add_input("controls", tensors(), default=None)

    @property
    def skips(self) -> tuple[tuple[float, float], ...]:
        return tuple((least, share) for least, share in self.params.get("skips", SKIPS))


class CacheLookup(_Cached):
    """Begin with a similar prompt's latents, at a later step, or with those given.

    `first`: where the loop would begin; only loops from 0 on are shortened. `hit` is None, or says which entry.
    """

    def setup_io(self) -> None:
        self.add_common()
        self.add_input("num_steps", int)
        self.add_input("first", int, default=0)
        self.add_output("latents", tensor())
        self.add_output("first", int)
        self.add_output("hit", dict)

    def execute(
        self,
        model_components: dict[str, Any],
        latents: Any,
        embedding: Any,
        condition: Any,
        controls: Any,
        num_steps: int,
        first: int,
    ) -> dict[str, Any]:
        found = None
        if first == 0:
            scope = _scope(latents, condition, controls, num_steps)
            found = model_components["cache"].find(scope, _vector(embedding), num_steps, self.skips)
        if found is None:
            return {"latents": latents, "first": first, "hit": None}
        hit = {"entry": found.entry, "similarity": found.similarity, "step": found.step}
        return {"latents": found.latents, "first": found.step, "hit": hit}


class CacheStore(_Cached):
    """Keep the latents with which a step begins, at the steps from which others may begin. `kept`: whether it did.

    What began with another prompt's latents is kept for nobody: errors would add up.
    """

    def setup_io(self) -> None:
        self.add_common()
        self.add_input("hit", dict)
        self.add_input("first", int, default=0)
        self.add_input("step", int, default=LOOP_INDEX)
        self.add_input("num_steps", int, default=LOOP_COUNT)
        self.add_output("kept", bool)

    def execute(
        self,
        model_components: dict[str, Any],
        latents: Any,
        embedding: Any,
        condition: Any,
        controls: Any,
        hit: Any,
        first: int,
        step: int,
        num_steps: int,
    ) -> dict[str, Any]:
        if hit is not None or first != 0 or step not in kept_steps(num_steps, self.skips):
            return {"kept": False}
        own = latents.detach().clone() if hasattr(latents, "detach") else latents
        scope = _scope(latents, condition, controls, num_steps)
        model_components["cache"].keep(scope, _vector(embedding), step, own)
        return {"kept": True}


def _scope(latents: Any, condition: Any, controls: Any, num_steps: int) -> str:
    """Latents serve others only after as many steps, in the same shape, under the same schedule and control images."""
    shape = (*getattr(latents, "shape", ()), getattr(latents, "dtype", None))
    digest = hashlib.sha256()
    for each in controls or ():
        digest.update(each.detach().float().cpu().numpy().tobytes())
    return repr((num_steps, shape, condition, digest.hexdigest()))


def _vector(embedding: Any) -> list[float]:
    """One vector for a text: the pooled one where the encoder gives it (last, of one row), else the tokens' mean."""
    whole = list(embedding) if isinstance(embedding, list | tuple) else [embedding]
    last = whole[-1]
    if isinstance(last, int | float):
        return normalized([float(each) for each in whole])
    while last.dim() > 1:
        last = last.float().mean(dim=0)
    return normalized(last.float().tolist())
