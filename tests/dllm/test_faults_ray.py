"""Workers in actors that die, hang and break off, with real requests on them: every answer as undisturbed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from genserve.dllm import serve_ray
from genserve.dllm.models.tiny import write_tiny

from .faulty import Faults, build_faulty
from .served import Served

pytestmark = pytest.mark.ray

SHARED_MEMORY = Path("/dev/shm")
LONG: dict[str, Any] = {"max_tokens": 64, "block_length": 16, "unmasking": "quota", "steps": 64}
WAYS: list[dict[str, Any]] = [
    LONG,
    {**LONG, "cache": "prefix", "temperature": 1.0, "seed": 3},
    {**LONG, "cache": "dkv", "refresh_interval": 5},
    {**LONG, "cache": "none", "steps": 24},
    {**LONG, "temperature": 0.8, "seed": 4, "n": 2, "steps": 32},
]


def answers(server: Served) -> list[list[str]]:
    """All at once, streamed: nothing may come twice."""

    def one(fields: dict[str, Any]) -> list[str]:
        texts = [""] * fields.get("n", 1)
        for chunk in server.complete(stream=True, **fields):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts

    with ThreadPoolExecutor(len(WAYS)) as threads:
        return list(threads.map(one, WAYS))


class Deployment:
    """A prefill worker and two colocated ones. `check` runs all requests with a fault on the way."""

    def __init__(self, server: Served, faults: Faults, expected: list[list[str]]) -> None:
        self.server, self.faults, self.expected = server, faults, expected
        self.membership = server.served[0].membership
        assert self.membership is not None

    def pids(self, role: str) -> list[int]:
        return [w.pid for w in self.membership.workers() if w.role == role and w.state == "running" and w.pid]

    def ready(self, num_prefill: int = 1, num_colocated: int = 2) -> None:
        end = time.monotonic() + 60
        while len(self.pids("prefill")) < num_prefill or len(self.pids("colocated")) < num_colocated:
            assert time.monotonic() < end, self.membership.workers()
            time.sleep(0.02)

    def check(self, kind: str | None = None, action: str = "", times: int = 1) -> dict[str, float]:
        """What the figures grew by."""
        before = self.server.stats()
        if kind is not None:
            self.faults.arm(kind, action, times)
        assert answers(self.server) == self.expected
        if kind is not None:
            self.faults.wait_until_taken()
        assert self.server.settled()
        after = self.server.stats()
        return {name: after[name] - before.get(name, 0) for name in after}


@pytest.fixture(scope="module")
def deployment(ray_session, tmp_path_factory) -> Iterator[Deployment]:
    folder = write_tiny("llada", tmp_path_factory.mktemp("faults") / "llada")
    with Served((str(folder), {})) as one:
        expected = answers(one)
    options = {
        "executor": "ray", "num_threads": 3, "num_workers": 3, "num_prefill_workers": 1,
        "overflow_tokens": 200, "heartbeat_s": 3.0,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve_ray, "build_remote", build_faulty)
        faults = Faults(folder.parent / "faults")
        with Served((str(folder), options)) as server:
            yield Deployment(server, faults, expected)
    assert not pools(), "pools of closed workers are left"


def pools() -> list[str]:
    return [path.name for path in SHARED_MEMORY.glob("genserve-*")]


def test_undisturbed(deployment):
    grown = deployment.check()
    assert grown["num_handed_over"] > 4 and grown["num_fetched"] > 4 and grown["num_restarts"] == 0


@pytest.mark.parametrize(("times", "num_restarts"), [(1, 0), (3, 1)])
def test_a_transfer_that_fails(deployment, times, num_restarts):
    # One request at a time: the three tries are then one request's.
    deployment.faults.arm("fetch", "fail", times)
    before = deployment.server.stats()["num_restarts"]
    assert deployment.server.complete(**LONG).choices[0].text == deployment.expected[0][0]
    deployment.faults.wait_until_taken()
    assert deployment.server.stats()["num_restarts"] == before + num_restarts
    assert deployment.server.settled()


def test_cancel_during_a_transfer(deployment):
    before = deployment.server.stats()["num_fetched"]
    deployment.faults.arm("fetch", "slow")
    stream = deployment.server.complete(stream=True, stream_options={"include_unmasking": True}, **LONG)
    next(iter(stream))
    deployment.faults.wait_until_taken()
    stream.close()
    assert deployment.server.settled()
    assert deployment.server.stats()["num_fetched"] == before


def test_a_request_larger_than_any_pool_is_refused_before_it_starts(deployment):
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        deployment.server.complete(max_tokens=100_000)
    assert deployment.server.settled()


@pytest.mark.parametrize("kind", ["prefill", "decode", "fetch"])
def test_kill_9_of_a_worker_in_the_middle_of(deployment, kind):
    deployment.ready()
    grown = deployment.check(kind, "kill")
    assert grown["num_restarts"] >= 1


def test_the_worker_that_keeps_the_kv_dies_during_the_transfer(deployment):
    deployment.ready()
    (pid,) = deployment.pids("prefill")
    deployment.faults.arm("fetch", "slow")
    stream = deployment.server.complete(stream=True, **LONG)
    deployment.faults.wait_until_taken()
    os.kill(pid, signal.SIGKILL)
    assert "".join(chunk.choices[0].text for chunk in stream) == deployment.expected[0][0]
    assert deployment.server.settled()


@pytest.mark.slow
def test_a_worker_that_hangs(deployment):
    deployment.ready()
    grown = deployment.check("decode", "stop")
    assert grown["num_restarts"] >= 1


@pytest.mark.slow
def test_all_workers_lost_and_back(deployment):
    deployment.ready()
    streams = [iter(deployment.server.complete(stream=True, **LONG)) for _ in range(3)]
    texts = [next(stream).choices[0].text for stream in streams]
    for pid in deployment.pids("prefill") + deployment.pids("colocated"):
        os.kill(pid, signal.SIGKILL)
    for index, stream in enumerate(streams):
        texts[index] += "".join(chunk.choices[0].text for chunk in stream)
    assert texts == [deployment.expected[0][0]] * 3
    assert deployment.server.settled()
    deployment.ready()
    assert len(pools()) == 3, "the pools of the dead were removed"
