"""Executors in Ray actors: the same images as anywhere, also when one is killed in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from genserve.core.tensors.store import remove_leftovers
from tests.t2i.running import expected, result, runtime, same, settled
from tests.t2i.toys import diffusion

pytestmark = pytest.mark.ray


def pids(client):
    return [
        executor.pid
        for lane, executor in client.executors.items()
        if lane.startswith("executor") and "/" not in lane
    ]


def test_actors(ray_session):
    plain, controlled = diffusion(), diffusion("controlled", control=True, sleep_s=0.01)
    asked = [{"prompt": f"p{i}", "seed": i, "steps": 2 + i % 4, "size": 4 + i % 3} for i in range(6)]

    async def all_of_them(client):
        t = time.perf_counter()
        got = await asyncio.gather(
            *(result(client, name, **inputs) for inputs in asked for name in ("toy", "controlled"))
        )
        print("took", time.perf_counter() - t)
        wanted = [expected(workflow, **inputs) for inputs in asked for workflow in (plain, controlled)]
        for each, want in zip(got, wanted, strict=True):
            same(each.outputs[0], want)
        return got

    async def main():
        async with runtime(
            plain, controlled, num_executors=2, executor="ray", tensor_pool=16 << 20
        ) as client:
            got = await all_of_them(client)
            assert any(len(node["executors"]) > 1 for each in got for node in each.receipt["nodes"].values())
            await settled(client)
            for _ in range(2):
                running = asyncio.create_task(all_of_them(client))
                await asyncio.sleep(0.15)
                os.kill(pids(client)[0], signal.SIGKILL)
                got = await running
                await settled(client, 10)

    asyncio.run(main())
    assert remove_leftovers() == 0
