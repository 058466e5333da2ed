"""The embedded diffusion model on workers in actors, colocated and disaggregated: one worker's answers.

Hybrid serving on actors, and their faults, are in `test_faults_ray`.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from genserve.core.tensors.store import remove_leftovers

from .served import Served

pytestmark = pytest.mark.ray

MODEL = "tiny-llada"
WAYS: list[dict[str, Any]] = [
    {"prompt": "The capital of France is", "max_tokens": 48},
    {"prompt": "cab", "max_tokens": 32, "n": 3, "temperature": 1.0, "seed": 3, "block_length": 8},
    {"prompt": "Sort 9 4 7 1:", "max_tokens": 48, "cache": "dkv", "unmasking": "quota", "steps": 30},
]


def answers(server: Served) -> list[list[str]]:
    with ThreadPoolExecutor(len(WAYS)) as threads:
        found = list(threads.map(lambda fields: server.complete(**fields), WAYS))
    return [[choice.text for choice in answer.choices] for answer in found]


def test_modes_in_actors_give_the_answers_of_one_worker(ray_session):
    with Served((MODEL, {"kv_pool": "32MiB"})) as one:
        expected = answers(one)
    options = {
        "executor": "ray", "kv_pool": "32MiB", "num_threads": 2,
        "num_workers": 2, "num_prefill_workers": 1, "overflow_tokens": "never",
    }  # fmt: skip
    with Served((MODEL, options)) as server, ThreadPoolExecutor(1) as threads:

        def ask(method: str, name: str = "", **body: Any) -> Any:
            response = httpx.request(method, f"{server.url}/v1/workers{name}", timeout=60, **body)
            return response.json() if response.is_success else response.json()["error"]["message"]

        assert [worker["role"] for worker in ask("GET")["data"]] == ["prefill", "colocated"]
        assert answers(server) == expected, "disaggregated"
        moved = server.stats()["num_fetched"]
        assert moved > 3 and server.stats()["num_overflows"] == 0
        stream = server.complete(max_tokens=12, stream=True, stream_options={"include_unmasking": True})
        events = [event for chunk in stream for event in getattr(chunk.choices[0], "unmasked", None) or []]
        assert {event["position"] for event in events} == set(range(12))
        assert "left to decode" in ask("DELETE", "/engine-1")
        left = server.complete(max_tokens=400, stream=True, unmasking="quota", steps=400)
        next(iter(left))
        left.close()
        assert server.settled()

        # The prefill worker becomes colocated and another one joins, all while requests run.
        running = threads.submit(lambda: [answers(server) for _ in range(4)])
        assert ask("PATCH", "/engine-0", json={"role": "colocated"})["role"] == "colocated"
        assert running.result(60) == [expected] * 4
        moved = server.stats()["num_fetched"]
        assert answers(server) == expected, "colocated"
        assert server.stats()["num_fetched"] == moved
        running = threads.submit(lambda: [answers(server) for _ in range(4)])
        assert ask("POST", json={"role": "prefill"})["name"] == "engine-2"
        assert ask("DELETE", "/engine-1")["deleted"]
        assert running.result(60) == [expected] * 4
        assert answers(server) == expected, "disaggregated again, with another worker"
        assert server.stats()["num_fetched"] > 0, "by the engine that is left"
        assert server.settled()
        # A worker dies as the server stops, before a new one is up.
        os.kill(ask("GET")["data"][1]["pid"], signal.SIGKILL)
    assert remove_leftovers() == 0
