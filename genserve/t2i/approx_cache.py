"""Approximate caching: start from the latents that a similar prompt had after k of n steps (Nirvana, NSDI '24).

Owns which entry is similar enough, how many steps that saves, and which entry goes when there is no room. Plain
Python: latents are opaque, embeddings are lists of numbers of length 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# (least similarity, share of the steps to skip): the more alike two prompts, the more they share.
SKIPS = ((0.95, 0.5), (0.9, 0.4), (0.85, 0.3), (0.8, 0.2), (0.75, 0.1))


def normalized(vector: Sequence[float]) -> list[float]:
    """The vector at length 1; a zero vector, which is like nothing, stays."""
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector] if length > 0 else list(vector)


def kept_steps(num_steps: int, skips: Sequence[tuple[float, float]] = SKIPS) -> tuple[int, ...]:
    """After how many steps latents are kept: those that some similarity may skip."""
    return tuple(sorted({math.floor(share * num_steps) for _, share in skips} - {0}))


def skipped(similarity: float, num_steps: int, skips: Sequence[tuple[float, float]] = SKIPS) -> int:
    """How many of `num_steps` steps a similarity lets skip; 0 for none."""
    shares = [share for least, share in skips if similarity >= least]
    return math.floor(max(shares, default=0.0) * num_steps)


@dataclass(slots=True)
class Entry:
    """What one request left: `latents` by the number of steps behind them."""

    id: int
    vector: list[float]
    latents: dict[int, Any] = field(default_factory=dict)
    num_saved: int = 0
    """Steps that others did not make thanks to it."""


@dataclass(frozen=True, slots=True)
class Hit:
    entry: int
    similarity: float
    step: int
    latents: Any


class ApproximateCache:
    """Entries by `scope`: only requests of the same scope (steps, size, schedule) can share latents.

    `max_entries` over all scopes. The entry that goes is the one that has saved the fewest steps, of those the
    oldest. (Nirvana's policy also weighs the cost of a miss, which is the same for all entries here.)
    """

    def __init__(self, max_entries: int = 1000) -> None:
        self._max_entries = max_entries
        self._scopes: dict[str, dict[int, Entry]] = {}
        self._num_made = 0

    def __len__(self) -> int:
        return sum(map(len, self._scopes.values()))

    def find(
        self,
        scope: str,
        vector: Sequence[float],
        num_steps: int,
        skips: Sequence[tuple[float, float]] = SKIPS,
    ) -> Hit | None:
        """The most similar entry, and the latents after as many steps as its similarity and content allow."""
        best: tuple[float, Entry] | None = None
        for entry in self._scopes.get(scope, {}).values():
            similarity = math.fsum(a * b for a, b in zip(vector, entry.vector, strict=True))
            if best is None or similarity > best[0]:
                best = similarity, entry
        if best is None:
            return None
        similarity, entry = best
        most = skipped(similarity, num_steps, skips)
        steps = [step for step in entry.latents if step <= most]
        if not steps:
            return None
        step = max(steps)
        entry.num_saved += step
        return Hit(entry.id, similarity, step, entry.latents[step])

    def keep(self, scope: str, vector: Sequence[float], step: int, latents: Any) -> int:
        """Keep what a request has after `step` steps; the id of its entry."""
        entries = self._scopes.setdefault(scope, {})
        entry = next((each for each in entries.values() if each.vector == list(vector)), None)
        if entry is None:
            self._num_made += 1
            entry = entries[self._num_made] = Entry(self._num_made, list(vector))
        entry.latents[step] = latents
        self._make_room(entry)
        return entry.id

    def _make_room(self, newest: Entry) -> None:
        while len(self) > self._max_entries:
            others = [
                (entry.num_saved, entry.id, scope)
                for scope, entries in self._scopes.items()
                for entry in entries.values()
                if entry is not newest
            ]
            if not others:
                return
            _, id_, scope = min(others)
            del self._scopes[scope][id_]

    def stats(self) -> Mapping[str, int]:
        saved = sum(entry.num_saved for entries in self._scopes.values() for entry in entries.values())
        return {"num_entries": len(self), "num_steps_saved": saved}
