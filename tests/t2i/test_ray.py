"""Executors in Ray actors: the same images as anywhere, also when they are killed in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np
import pytest

from genserve.core.tensors.store import remove_leftovers
from genserve.t2i.registration import registered
from genserve.t2i.request import LoraUse, Progress
from tests.t2i.running import expected, request, result, runtime, same, settled
from tests.t2i.test_adapters import latents
from tests.t2i.toys import adapter_file, diffusion, projection

pytestmark = pytest.mark.ray

ASKED = [{"prompt": f"p{i}", "seed": i, "steps": 3 + i % 4, "size": 4 + i % 3} for i in range(6)]

SCRIPT = """
import torch
from genserve.t2i.model import Model
from genserve.t2i.workflow import Workflow
from genserve.t2i.ports import tensor

SHIFT = 3

class Mine(Model):
    def setup_io(self):
        self.add_input("seed", int)
        self.add_output("out", tensor())

    def execute(self, model_components, seed):
        return {"out": torch.arange(4) + seed + SHIFT}

with Workflow("mine") as mine:
    mine.add_output(Mine()(mine.add_input("seed", int)), "out")
"""


def executors(client):
    return [client.executors[f"executor-{index}"] for index in range(2)]


async def killed(client, victims, plain, controlled):
    """Kill executors while requests are in the middle of denoising; nobody may notice."""
    got = {}

    async def ask(name, inputs):
        asked = request(name, **inputs)
        async for update in client.invoke(asked):
            got.setdefault(asked.request_id, []).append(update)
        return got[asked.request_id][-1]

    asked = [(workflow, inputs) for inputs in ASKED for workflow in (plain, controlled)]
    running = asyncio.gather(*(ask(workflow.name, inputs) for workflow, inputs in asked))
    while (
        sum(
            isinstance(update, Progress) and update.step is not None
            for each in got.values()
            for update in each
        )
        < 20
    ):
        await asyncio.sleep(0.002)
    for victim in victims:
        os.kill(executors(client)[victim].pid, signal.SIGKILL)
    ends = await asyncio.wait_for(running, 60)
    for (workflow, inputs), end in zip(asked, ends, strict=True):
        same(end.outputs[0], expected(workflow, **inputs))
    assert sum(end.receipt["reexecutions"] for end in ends) > 0
    while any(executor.pid is None for executor in executors(client)):
        await asyncio.sleep(0.05)
    await settled(client, 10)


def test_actors(ray_session, tmp_path):
    plain, controlled = diffusion(), diffusion("controlled", control=True, sleep_s=0.005)
    adapters = {"a": adapter_file(tmp_path, 1)}
    main_module = vars(sys.modules["__main__"])
    exec(SCRIPT, main_module)

    async def main():
        async with runtime(
            plain, controlled, main_module["mine"], num_executors=2, executor="ray", tensor_pool=16 << 20
        ) as client:
            client.serve(*registered(projection(), loras=adapters))
            got = await asyncio.gather(*(result(client, "controlled", **inputs) for inputs in ASKED))
            for inputs, each in zip(ASKED, got, strict=True):
                same(each.outputs[0], expected(controlled, **inputs))
            used = {
                name for each in got for node in each.receipt["nodes"].values() for name in node["executors"]
            }
            assert used == {"executor-0", "executor-1"}
            mine = await result(client, "mine", seed=2)
            np.testing.assert_array_equal(mine.outputs[0]["out"], [5, 6, 7, 8])
            for name in ("a", None, "a"):
                loras = () if name is None else (LoraUse(name),)
                made = await result(client, "project", loras=loras, seed=1)
                np.testing.assert_allclose(made.outputs[0]["latents"], latents(adapters.get(name)), atol=1e-5)
            stream = client.invoke(cancelled := request("toy", prompt="x", seed=1, steps=400))
            for _ in range(30):
                await anext(stream)
            client.cancel(cancelled.request_id)
            await settled(client, 5)
            await killed(client, (0,), plain, controlled)

    try:
        asyncio.run(main())
    finally:
        for name in ("Mine", "mine", "SHIFT"):
            del main_module[name]
    assert remove_leftovers() == 0
