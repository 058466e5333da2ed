"""Real models through the runtime: tiny random Stable Diffusion 3 with ControlNet and adapters, in all arrangements."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from genserve.core.errors import ConfigError
from genserve.t2i.config import T2iConfig
from genserve.t2i.models.lora import LoRA
from genserve.t2i.registration import registered
from genserve.t2i.request import LoraUse
from genserve.t2i.serve import start
from genserve.t2i.workflows import sd3
from tests.t2i.models.driver import picture, render, rendered_with_adapters
from tests.t2i.running import result, runtime, settled

SMALL = {"height": 32, "width": 32, "max_sequence_length": 16}


def served(client, workflow, **options):
    client.serve(*registered(workflow, **options))


def asked(index):
    return {
        **SMALL,
        "prompt": ["a red cat", "a dog", "two birds"][index % 3],
        "guidance_scale": [5.0, 1.0, 3.5][index % 3],
        "seed": index,
        "num_steps": 1 + index % 3,
        "height": 32 + 16 * (index % 2),
    }


def test_what_a_step_cache_leaves_out_is_in_the_receipt(tiny):
    plain, cached = sd3(tiny("sd3")), sd3(tiny("sd3"), step_cache=2.0)
    inputs = {**SMALL, "prompt": "a red cat", "seed": 1, "num_steps": 4}
    wanted, exact = (render(each.to_graph(), **inputs)[0] for each in (cached, plain))

    async def main():
        async with runtime(cached, num_executors=2) as client:
            return await result(client, "sd3", **inputs)

    got = asyncio.run(main())
    assert np.array_equal(np.asarray(got.outputs[0]["image"]), wanted) and not np.array_equal(wanted, exact)
    hits = [each["hit"] for each in got.receipt["cache_hits"] if each["node"] == "sd3_transformer"]
    assert hits == [{"step": step, "threshold": 2.0, "num_calls": 1} for step in (1, 2, 3)]


def test_what_an_approximate_cache_saves_is_in_the_receipt(tiny):
    workflow = sd3(tiny("sd3"))
    inputs = {**SMALL, "prompt": "a red cat", "seed": 1, "num_steps": 4}

    async def main():
        async with runtime() as client:
            served(client, workflow, passes={"approximate_cache": {}})
            return [await result(client, "sd3", **inputs) for _ in range(2)]

    first, again = asyncio.run(main())
    assert first.receipt["cache_hits"] == [] and first.outputs[0]["image"] == again.outputs[0]["image"]
    (hit,) = again.receipt["cache_hits"]
    assert hit["node"] == "loop_cache_lookup" and hit["hit"]["step"] == 2
    assert again.receipt["nodes"]["sd3_transformer"]["runs"] == 2


def test_passes_of_a_served_workflow_are_checked(tiny):
    with pytest.raises(ConfigError, match="no pass 'fast'"):
        registered(sd3(tiny("sd3")), passes={"fast": {}})
    with pytest.raises(ConfigError, match="step_cache has no option 'least'; there are: threshold"):
        registered(sd3(tiny("sd3")), passes={"step_cache": {"least": 1}})


def test_requests_at_once_with_adapters_equal_the_plain_graphs(tiny):
    workflow, controlled = sd3(tiny("sd3")), sd3(tiny("sd3"), controlnet=tiny.controlnet("sd3"))
    adapters = {"a": tiny.lora("sd3", 1), "b": tiny.lora("sd3", 2)}
    graph, control_graph = workflow.to_graph(), controlled.to_graph()
    jobs, wanted = [], []
    for index in range(8):
        inputs = asked(index)
        if index % 4 == 3:
            inputs["control_image"] = picture(index)
            jobs.append((controlled, (), inputs))
            wanted.append(render(control_graph, **inputs)[0])
        elif index % 2:
            name = "ab"[index // 2 % 2]
            inputs |= {"num_steps": 3, "seed": 5}
            jobs.append((workflow, (LoraUse(name, 0.8),), inputs))
            patched_graph = sd3(tiny("sd3"), loras=[LoRA(adapters[name], 0.8)]).to_graph()
            _, patched, _ = rendered_with_adapters(patched_graph, **inputs)
            wanted.append(patched[0])
        else:
            jobs.append((workflow, (), inputs))
            wanted.append(render(graph, **inputs)[0])

    async def main(num_executors):
        client = await start(T2iConfig(num_executors=num_executors, num_threads=1))
        try:
            for each in (workflow, controlled):
                served(client, each, loras=adapters)
            got = await asyncio.gather(
                *(result(client, each.name, loras=loras, **inputs) for each, loras, inputs in jobs)
            )
            for each, want in zip(got, wanted, strict=True):
                assert np.array_equal(np.asarray(each.outputs[0]["image"]), want)
            await settled(client)
        finally:
            await client.aclose()

    for num_executors in (1, 2):
        asyncio.run(main(num_executors))
