"""A diffusion model whose workers are Ray actors: the same answers, freed pages, and one of them dying."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from genserve.dllm.models.tiny import write_tiny

from .served import Served

pytestmark = pytest.mark.ray


def all_texts(server: Served) -> list[str]:
    fields: dict[str, Any] = {"max_tokens": 16, "n": 4, "temperature": 1.0, "seed": 3, "block_length": 8}
    return [choice.text for choice in server.complete(**fields).choices]


def test_workers_in_actors(ray_session, tmp_path):
    folder = str(write_tiny("llada", tmp_path / "llada"))
    with Served((folder, {})) as local:
        expected = all_texts(local)
    with Served((folder, {"num_workers": 2, "executor": "ray", "num_threads": 2})) as server:
        assert all_texts(server) == expected
        stream = server.complete(max_tokens=12, stream=True, stream_options={"include_unmasking": True})
        events = [event for chunk in stream for event in getattr(chunk.choices[0], "unmasked", None) or []]
        assert {event["position"] for event in events} == set(range(12))
        left = server.complete(max_tokens=400, stream=True, unmasking="quota", steps=400)
        next(iter(left))
        left.close()
        assert server.settled()

        # The actor that holds a long answer dies; the other goes on where the answer's block began.
        fields = {"max_tokens": 300, "unmasking": "quota", "steps": 300}
        whole = server.complete(**fields).choices[0].text
        engine: Any = server.served[0].completer.engine
        stream = iter(server.complete(stream=True, **fields))
        pieces = [next(stream).choices[0].text]
        ledgers = engine._controller.pool.engines.values()
        (holder,) = [ledger.name for ledger in ledgers if ledger.held]
        os.kill(engine._remotes[holder].pid, signal.SIGKILL)
        pieces += [chunk.choices[0].text for chunk in stream]
        assert "".join(pieces) == whole
        assert server.stats()["num_restarts"] == 1
        assert all_texts(server) == expected and server.settled()
