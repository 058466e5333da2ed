"""Nodes that fail for real, on threads: again elsewhere, or a clear end, and no other request notices."""

from __future__ import annotations

import asyncio

import pytest

from genserve.core.errors import ExecutionFailed
from genserve.t2i.workflow import Workflow
from tests.t2i.running import expected, request, result, runtime, same, settled, updates
from tests.t2i.toys import FAILURES, LOGS, Decode, Draw, Fail, diffusion


def failing(name):
    with Workflow(name) as wf:
        latents = Draw()(wf.add_input("seed", int))
        fail = Fail(name=name)
        for _ in wf.loop(3):
            latents = fail(latents)
        wf.add_output(Decode()(latents), "image")
    return wf


@pytest.mark.parametrize("num_executors", [1, 2])
def test_a_node_that_fails_once_and_one_that_fails_twice(num_executors):
    once, plain = failing("once"), diffusion()

    async def main():
        async with runtime(once, plain, num_executors=num_executors) as client:
            others = asyncio.gather(*(result(client, "toy", prompt="x", seed=i, steps=20) for i in range(3)))
            FAILURES["once"] = 1
            got = await result(client, "once", seed=1)
            same(got.outputs[0], expected(once, seed=1))
            assert got.receipt["reexecutions"] >= 1
            FAILURES["once"] = 2
            with pytest.raises(
                ExecutionFailed, match=r"(?s)test_recovery.py:\d+.*failed twice.*made to fail"
            ):
                await updates(client, request("once", seed=1))
            assert FAILURES["once"] == 0
            for index, each in enumerate(await others):
                same(each.outputs[0], expected(plain, prompt="x", seed=index, steps=20))
            await settled(client)

    asyncio.run(main())


def test_a_controlnet_runs_beside_the_denoiser_that_needs_it():
    workflow = diffusion("beside", control=True, sleep_s=0.02, log="beside")

    async def main(num_executors):
        LOGS.pop("beside", None)
        async with runtime(workflow, num_executors=num_executors) as client:
            got = await result(client, "beside", prompt="x", seed=1, steps=4)
        same(got.outputs[0], expected(workflow, prompt="x", seed=1, steps=4))
        log = [(what, step) for what, step, _ in LOGS["beside"][: 4 * 5]]
        return [log.index(("predict begins", step)) < log.index(("control ends", step)) for step in range(4)]

    assert asyncio.run(main(2)) == [True] * 4
    assert asyncio.run(main(1)) == [False] * 4
