"""Every family through the runtime, in all arrangements: equal to the stock pipelines, with ControlNet and adapter."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
import torch

from genserve.t2i.config import T2iConfig
from genserve.t2i.registration import registered
from genserve.t2i.request import LoraUse, Progress, Result
from genserve.t2i.serve import start
from genserve.t2i.workflows import flux, sd3, sd15, sdxl
from tests.t2i.models.driver import picture
from tests.t2i.running import expected, request, settled

FAMILIES = {"sd15": sd15, "sdxl": sdxl, "sd3": sd3, "flux": flux}
SCALE = 0.8


def stock(folder: str, asked: dict, adapter: str | None = None) -> np.ndarray:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    if adapter is not None:
        pipeline.load_lora_weights(adapter)
        pipeline.fuse_lora(lora_scale=SCALE)
        pipeline.unload_lora_weights()
        for name, part in pipeline.components.items():
            if name in ("unet", "transformer"):
                part.requires_grad_(True)  # frozen weights take other kernels
    asked = dict(asked)
    generator = torch.Generator().manual_seed(asked.pop("seed"))
    steps = asked.pop("num_steps")
    return np.array(pipeline(**asked, num_inference_steps=steps, generator=generator).images[0])


@pytest.fixture(scope="module")
def jobs(tiny):
    """(workflow, adapters, inputs, wanted picture): plain, with an adapter, and with a ControlNet, for each family."""
    made = []
    for index, (family, build) in enumerate(FAMILIES.items()):
        folder = tiny(family)
        plain, controlled = build(folder), build(folder, controlnet=tiny.controlnet(family))
        asked = {"prompt": f"{family} at work", "seed": index, "num_steps": 3, "height": 32, "width": 32}
        made.append((plain, (), asked, stock(folder, asked)))
        adapter = (LoraUse(family, SCALE),)
        made.append((plain, adapter, asked, stock(folder, asked, tiny.lora(family))))
        shown = {**asked, "control_image": picture(index, 32)}
        with torch.no_grad():
            made.append((controlled, (), shown, expected(controlled, **shown)["image"]))
    assert not np.array_equal(made[0][3], made[1][3]) and not np.array_equal(made[0][3], made[2][3])
    return made


def adapters(tiny) -> dict[str, str]:
    return {family: tiny.lora(family) for family in FAMILIES}


async def all_equal(client, jobs, on_progress=lambda num: None):
    steps = 0

    async def ask(workflow, loras, inputs):
        nonlocal steps
        async for update in client.invoke(request(workflow.name, loras=loras, **inputs)):
            if isinstance(update, Progress) and update.step is not None:
                steps += 1
                on_progress(steps)
            elif isinstance(update, Result):
                return update
        raise AssertionError("no result")

    results = await asyncio.gather(*(ask(*job[:3]) for job in jobs))
    for (workflow, loras, _, want), got in zip(jobs, results, strict=True):
        image = np.asarray(got.outputs[0]["image"])
        assert np.array_equal(image, want), (workflow.name, loras)
    await settled(client, 20)
    return results


def serve_all(client, jobs, tiny):
    for workflow in {id(job[0]): job[0] for job in jobs}.values():
        client.serve(*registered(workflow, loras=adapters(tiny)))


@pytest.mark.parametrize("num_executors", [1, 2])
def test_on_threads(jobs, tiny, num_executors):
    async def main():
        client = await start(T2iConfig(num_executors=num_executors, num_threads=1))
        try:
            serve_all(client, jobs, tiny)
            await all_equal(client, jobs)
        finally:
            await client.aclose()

    asyncio.run(main())


@pytest.mark.ray
def test_in_actors_of_which_one_is_killed(jobs, tiny, ray_session):
    async def main():
        client = await start(T2iConfig(executor="ray", num_executors=2, num_threads=2, tensor_pool=32 << 20))
        try:
            serve_all(client, jobs, tiny)
            await all_equal(client, jobs)
            victim = client.executors["executor-0"]

            def kill(num_steps):
                if num_steps == 20:
                    os.kill(victim.pid, signal.SIGKILL)

            results = await all_equal(client, jobs, kill)
            assert sum(each.receipt["reexecutions"] for each in results) > 0
        finally:
            await client.aclose()

    asyncio.run(main())
