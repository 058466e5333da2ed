"""Adapters through the runtime: on and off, many times, late, and in other processes' reach."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import torch

from genserve.t2i.config import T2iConfig
from genserve.t2i.models.lora_file import read_adapter
from genserve.t2i.registration import registered
from genserve.t2i.request import LoraUse
from genserve.t2i.serve import start
from tests.t2i.running import result, settled
from tests.t2i.toys import adapter_file, projection


def latents(path=None, scale=1.0, seed=1, steps=4):
    """What the layer makes with the adapter on its weights."""
    weight = torch.eye(4) / 3 + 0.1
    if path is not None:
        parts = dict(zip(read_adapter(path).names, read_adapter(path).weights, strict=True))
        weight = weight + scale * parts["transformer.proj.up"] @ parts["transformer.proj.down"]
    made = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        made = made @ weight.T
    return made.numpy()


def with_adapters(tmp_path, run, **config):
    adapters = {name: adapter_file(tmp_path, seed) for seed, name in enumerate("ab")}

    async def main():
        client = await start(T2iConfig(num_threads=1, **config))
        try:
            client.serve(*registered(projection(), loras=adapters))
            await run(client, adapters)
            await settled(client)
        finally:
            await client.aclose()

    asyncio.run(main())


def test_two_hundred_swaps_leave_no_trace(tmp_path):
    async def run(client, adapters):
        made, num_tensors = {}, []
        for index in range(200):
            name = [None, "a", None, "b"][index % 4]
            loras = () if name is None else (LoraUse(name, 0.5),)
            got = (await result(client, "project", loras=loras, seed=1)).outputs[0]["latents"]
            np.testing.assert_allclose(got, latents(adapters.get(name), 0.5), atol=1e-6)
            np.testing.assert_array_equal(got, made.setdefault(name, got))
            if index in (40, 199):
                gc.collect()
                num_tensors.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
        assert num_tensors[1] <= num_tensors[0]

    with_adapters(tmp_path, run)


def test_requests_with_different_adapters_at_once_and_the_arrival_is_in_the_receipt(tmp_path):
    async def run(client, adapters):
        asked = [(name, seed) for seed in range(4) for name in (None, "a", "b")]
        got = await asyncio.gather(
            *(
                result(client, "project", loras=() if name is None else (LoraUse(name),), seed=seed)
                for name, seed in asked
            )
        )
        for (name, seed), each in zip(asked, got, strict=True):
            np.testing.assert_allclose(
                each.outputs[0]["latents"], latents(adapters.get(name), seed=seed), atol=1e-5
            )
            assert each.receipt["lora_arrival_steps"] == (None if name is None else [0])
        pinned = await result(client, "project", loras=(LoraUse("a"),), seed=1, lora_arrival_steps=(2,))
        half = torch.from_numpy(latents(steps=2))
        weight = torch.from_numpy(
            np.linalg.lstsq(latents(steps=0), latents(adapters["a"], steps=1), rcond=None)[0]
        )
        np.testing.assert_allclose(pinned.outputs[0]["latents"], half @ weight @ weight, atol=1e-4)
        assert pinned.receipt["lora_arrival_steps"] == [2]

    with_adapters(tmp_path, run, num_executors=2)
