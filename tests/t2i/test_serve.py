"""Requests through the whole runtime in this process, against the reference interpreter."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from PIL import Image

from genserve.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from genserve.t2i.registration import registered
from genserve.t2i.request import LoraUse, Preview, Progress
from genserve.t2i.workflow import Workflow
from tests.t2i.running import expected, request, result, runtime, same, settled, updates
from tests.t2i.toys import LOGS, Decode, Draw, Length, Shrink, Slow, Solve, diffusion


def test_a_request_gives_what_the_interpreter_gives():
    workflow = diffusion()

    async def main():
        async with runtime(workflow) as client:
            got = await result(client, "toy", prompt="a cat", seed=3, steps=5)
            same(got.outputs[0], expected(workflow, prompt="a cat", seed=3, steps=5))

    asyncio.run(main())


def test_eight_requests_at_once_equal_their_solo_results():
    workflow = diffusion()
    asked = [{"prompt": f"p{i}", "seed": i, "steps": 1 + i % 5, "size": 4 + i % 3} for i in range(8)]

    async def main():
        async with runtime(workflow, num_executors=2) as client:
            got = await asyncio.gather(*(result(client, "toy", **inputs) for inputs in asked))
            for inputs, each in zip(asked, got, strict=True):
                same(each.outputs[0], expected(workflow, **inputs))

    asyncio.run(main())


def test_images_of_a_request_equal_requests_of_one_and_share_what_they_can():
    workflow = diffusion(control=True)

    async def main():
        async with runtime(workflow) as client:
            got = await result(client, "toy", 3, prompt="a dog", seed=7)
            for index, image in enumerate(got.outputs):
                same(image, expected(workflow, prompt="a dog", seed=7 + index))
            assert got.receipt["seeds"] == [7, 8, 9]
            runs = {node: each["runs"] for node, each in got.receipt["nodes"].items()}
            assert sorted(runs.values()) == [1, 3, 3, 12, 12, 12]

    asyncio.run(main())


def test_progress_and_previews():
    workflow = diffusion()

    async def main():
        async with runtime(workflow) as client:
            asked = request("toy", 2, prompt="x", seed=1, steps=6, preview_every_steps=2)
            got = await updates(client, asked)
            previews = {(u.image, u.step): u.picture for u in got if isinstance(u, Preview)}
            assert previews.keys() == {(image, step) for image in (0, 1) for step in (2, 4)}
            progress = [u for u in got if isinstance(u, Progress)]
            assert [u.done for u in progress] == list(range(1, progress[-1].total + 1))
            assert {(u.step, u.num_steps) for u in progress if u.step} == {(step, 6) for step in range(1, 7)}

    asyncio.run(main())


def test_a_cancelled_request_ends_within_a_step_and_frees_everything():
    with Workflow("slow") as wf:
        latents = Draw()(wf.add_input("seed", int))
        slow = Slow(sleep_s=0.02, log="cancel")
        for _ in wf.loop(200):
            latents = slow(latents)
        wf.add_output(Decode()(latents), "image")
    LOGS.pop("cancel", None)

    async def main():
        async with runtime(wf) as client:
            asked = request("slow", seed=1)
            stream = client.invoke(asked)
            for _ in range(4):
                await anext(stream)
            client.cancel(asked.request_id)
            with pytest.raises(Cancelled):
                async for _ in stream:
                    pass
            ran = len(LOGS["cancel"])
            await settled(client)
            assert len(LOGS["cancel"]) <= ran + 1 < 10
            with pytest.raises(DeadlineExceeded):
                await updates(client, request("slow", seed=1, deadline_s=0.1))
            await settled(client)
            left = client.invoke(request("slow", seed=2))
            await anext(left)
            await left.aclose()

    asyncio.run(main())


def test_bad_inputs_are_refused_before_any_work():
    workflow = diffusion()

    async def main():
        async with runtime(workflow, max_queued_requests=1) as client:
            for inputs, field in (
                ({}, "prompt"),
                ({"prompt": 3}, "prompt"),
                ({"prompt": "x", "steps": 1.5}, "steps"),
                ({"prompt": "x", "colour": 1}, "colour"),
                ({"prompt": "x", "seed": -1}, "seed"),
                ({"prompt": "x", "deadline_s": -1}, "deadline_s"),
                ({"prompt": "x", "num_images": 100}, "num_images"),
            ):
                with pytest.raises(InvalidRequest) as raised:
                    client.invoke(request("toy", inputs.pop("num_images", 1), **inputs))
                assert raised.value.field == field
            with pytest.raises(ModelNotFound):
                client.invoke(request("nothing", prompt="x"))
            got = await result(client, "toy", prompt="x")
            assert len(got.receipt["seeds"]) == 1
            same(got.outputs[0], expected(workflow, prompt="x", seed=got.receipt["seeds"][0]))
            first = client.invoke(request("toy", prompt="x"))
            with pytest.raises(Overloaded):
                await updates(client, request("toy", prompt="x"))
            async for _ in first:
                pass

    asyncio.run(main())


def test_loops_whose_count_a_node_makes_and_pictures_as_inputs():
    with Workflow("counted") as wf:
        steps = Length()(wf.add_input("prompt", str))
        latents = Shrink()(wf.add_input("picture", Image.Image), Draw()(wf.add_input("seed", int)))
        for _ in wf.loop(steps):
            latents = Solve()(latents, latents)
        wf.add_output(Decode()(latents), "image")
    picture = Image.new("RGB", (5, 7), (10, 90, 200))

    async def main():
        async with runtime(wf) as client:
            for prompt in ("", "abc"):
                inputs = {"prompt": prompt, "seed": 2, "picture": picture}
                same((await result(client, "counted", **inputs)).outputs[0], expected(wf, **inputs))

    asyncio.run(main())


def test_a_broken_picture_leaves_nothing_and_ids_can_be_used_again(tmp_path):
    with Workflow("pictured") as wf:
        first, second = wf.add_input("first", Image.Image), wf.add_input("second", Image.Image)
        latents = Shrink()(second, Shrink()(first, Draw()(wf.add_input("seed", int))))
        wf.add_output(Decode()(latents), "image")
    file = tmp_path / "broken.png"
    good = Image.effect_noise((64, 64), 50).convert("RGB")
    good.save(file)
    file.write_bytes(file.read_bytes()[:200])

    async def main():
        async with runtime(wf) as client:
            with pytest.raises(InvalidRequest, match="second: is a broken picture"):
                client.invoke(request("pictured", seed=1, first=good, second=Image.open(file)))
            await settled(client)
            asked = request("pictured", seed=1, first=good, second=good)
            for _ in range(3):  # what is left of a cancelled request takes nothing from the next of its name
                stream = client.invoke(asked)
                client.cancel(asked.request_id)
                with pytest.raises(Cancelled):
                    async for _ in stream:
                        pass
            *_, last = await updates(client, asked)
            same(last.outputs[0], expected(wf, seed=1, first=good, second=good))

    asyncio.run(main())


def test_adapters_at_any_number_of_scales_take_no_more_room(monkeypatch):
    monkeypatch.setattr("genserve.t2i.client._MAX_VARIANTS", 2)
    workflow = diffusion()

    async def main():
        async with runtime() as client:
            served, codes = registered(workflow)
            served = replace(
                served,
                info=replace(served.info, loras=("style",)),
                with_loras=lambda uses: (served.graph, codes),
            )
            client.serve(served, codes)
            for index in range(6):
                await result(client, "toy", prompt="x", steps=1, loras=(LoraUse("style", index / 7),))
            assert (await client.stats())["num_workflows"] == 3

    asyncio.run(main())
