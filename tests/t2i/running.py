"""A runtime for tests: workflows run on threads, results against the reference interpreter."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager

import numpy as np

from genserve.t2i.config import T2iConfig
from genserve.t2i.inputs import picture_tensor
from genserve.t2i.reference import evaluate
from genserve.t2i.registration import registered
from genserve.t2i.request import InvokeRequest, Result
from genserve.t2i.serve import start

_ids = itertools.count()


@asynccontextmanager
async def runtime(*workflows, **config):
    client = await start(T2iConfig(**{"num_threads": 1, **config}))
    try:
        for workflow in workflows:
            served, codes = registered(workflow, budget_bytes=config.get("weights_budget"))
            client.serve(served, codes)
        yield client
        await settled(client)
    finally:
        await client.aclose()


async def settled(client, timeout_s=5.0):
    """Nothing is held once nothing runs."""
    end = asyncio.get_running_loop().time() + timeout_s
    while True:
        stats = await client.stats()
        left = {
            name: stats[name]
            for name in ("num_held", "num_values", "home_num_values", "num_streams")
            if stats[name]
        }
        if not left:
            return
        assert asyncio.get_running_loop().time() < end, left
        await asyncio.sleep(0.01)


def request(workflow, num_images=1, **inputs):
    options = {
        name: inputs.pop(name)
        for name in (
            "loras",
            "lora_max_late_steps",
            "lora_arrival_steps",
            "preview_every_steps",
            "deadline_s",
        )
        if name in inputs
    }
    return InvokeRequest(f"r{next(_ids)}", workflow, inputs, num_images, **options)


async def updates(client, asked):
    return [update async for update in client.invoke(asked)]


async def result(client, workflow, num_images=1, **inputs) -> Result:
    *_, last = await updates(client, request(workflow, num_images, **inputs))
    assert isinstance(last, Result)
    return last


def expected(workflow, **inputs):
    """What the reference interpreter makes of it, pictures as arrays."""
    graph = workflow.to_graph()
    inputs = {
        name: picture_tensor(value) if hasattr(value, "convert") else value for name, value in inputs.items()
    }
    return {name: np.asarray(value) for name, value in evaluate(graph, inputs).items()}


def same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(np.asarray(got[name]), want[name])
