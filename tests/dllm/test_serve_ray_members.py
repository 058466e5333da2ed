"""Workers in actors that hand requests over, join, leave and change roles while requests run."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from genserve.core.tensors.store import remove_leftovers
from genserve.dllm.models.tiny import write_tiny

from .served import Served

pytestmark = pytest.mark.ray
FIELDS: dict[str, Any] = {"max_tokens": 48, "n": 4, "temperature": 1.0, "seed": 3, "block_length": 8}


def all_texts(server: Served) -> list[str]:
    return [choice.text for choice in server.complete(**FIELDS).choices]


def test_workers_hand_over_join_leave_and_change(ray_session, tmp_path):
    folder = str(write_tiny("llada", tmp_path / "llada"))
    with Served((folder, {})) as one:
        expected = all_texts(one)
    options = {"num_workers": 2, "num_prefill_workers": 1, "executor": "ray"}
    with Served((folder, options)) as server, ThreadPoolExecutor(1) as threads:

        def ask(method: str, name: str = "", **options: Any) -> Any:
            response = httpx.request(method, f"{server.url}/v1/workers{name}", timeout=60, **options)
            return response.json() if response.is_success else response.json()["error"]["message"]

        def roles() -> dict[str, str]:
            return {worker["name"]: worker["role"] for worker in ask("GET")["data"]}

        assert all_texts(server) == expected
        assert roles() == {"engine-0": "prefill", "engine-1": "colocated"}
        assert server.stats()["num_fetched"] > 0
        assert "left to decode" in ask("DELETE", "/engine-1")

        # One joins, the first becomes colocated, the second leaves, all while requests run.
        running = threads.submit(lambda: [all_texts(server) for _ in range(4)])
        assert ask("POST", json={"role": "prefill"})["name"] == "engine-2"
        assert ask("PATCH", "/engine-0", json={"role": "colocated"})["role"] == "colocated"
        assert ask("DELETE", "/engine-1")["deleted"]
        assert running.result(60) == [expected] * 4
        assert roles() == {"engine-0": "colocated", "engine-2": "prefill"}
        assert all_texts(server) == expected and server.settled()
        # It dies as the server stops, before a new one is up.
        left = ask("GET")["data"][1]
        os.kill(left["pid"], signal.SIGKILL)
    assert remove_leftovers() == 0
