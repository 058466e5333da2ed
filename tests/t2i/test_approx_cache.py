"""Which entry, how many steps, and which entry goes."""

from __future__ import annotations

import math

import pytest

from genserve.t2i.approx_cache import ApproximateCache, kept_steps, normalized, skipped


def direction(angle: float) -> list[float]:
    return [math.cos(angle), math.sin(angle)]


def test_the_more_alike_the_more_steps_are_skipped():
    assert kept_steps(20) == (2, 4, 6, 8, 10)
    assert kept_steps(3) == (1,)
    found = [skipped(similarity, 20) for similarity in (1.0, 0.95, 0.92, 0.85, 0.8, 0.75, 0.74, -1)]
    assert found == [10, 10, 8, 6, 4, 2, 0, 0]
    assert skipped(0.9, 10, [(0.8, 0.3)]) == 3


def test_the_most_similar_entry_and_its_latest_latents():
    cache = ApproximateCache()
    for angle, name in ((0.0, "a"), (0.3, "b")):
        for step in (2, 4, 10):
            cache.keep("s", direction(angle), step, f"{name}{step}")
    hit = cache.find("s", direction(0.25), 20)
    assert hit is not None and (hit.latents, hit.step) == ("b10", 10)
    assert hit.similarity == pytest.approx(math.cos(0.05))
    hit = cache.find("s", direction(-0.45), 20)  # 0.9: eight steps at most, and four are there
    assert hit is not None and (hit.latents, hit.step) == ("a4", 4)
    assert cache.find("s", direction(2), 20) is None
    assert cache.find("other", direction(0), 20) is None
    assert cache.stats() == {"num_entries": 2, "num_steps_saved": 14}


def test_what_has_saved_least_goes():
    cache = ApproximateCache(max_entries=2)
    cache.keep("s", direction(0), 2, "a")
    cache.keep("s", direction(1), 2, "b")
    assert cache.find("s", direction(0), 20) is not None
    cache.keep("t", direction(2), 2, "c")
    assert len(cache) == 2
    assert cache.find("s", direction(1), 20) is None
    assert cache.find("s", direction(0), 20) is not None
    assert cache.find("t", direction(2), 20) is not None


def test_normalized():
    assert normalized([3.0, 4.0]) == [0.6, 0.8]
    assert normalized([0.0, 0.0]) == [0.0, 0.0]
