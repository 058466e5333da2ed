"""What serving node by node costs: the coordinator beside the plain diffusers pipeline, in one run.

    python benchmarks/t2i_overhead.py [--families sd15 sdxl sd3 flux] [--rounds 7] [--executors 1] [--out DIR]

alone       one request, from the call to the picture: ours and the pipeline's, same tiny random checkpoint, seed,
            size and steps; the pictures must be equal. Interleaved within each round; medians over the rounds.
load        eight requests at once through the coordinator, the same eight one after the other through the pipeline.

Tiny checkpoints make a step 4 to 20 ms, so what is seen is the overhead of a node rather than a model. The goal
for one request is the pipeline's time plus 5 % and 10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from report import Row, save, table

from genserve.t2i.client import LocalWorkflows
from genserve.t2i.config import T2iConfig
from genserve.t2i.models.tiny import build_tiny
from genserve.t2i.registration import registered
from genserve.t2i.request import InvokeRequest, Result
from genserve.t2i.serve import start
from genserve.t2i.workflows import flux, sd3, sd15, sdxl

WORKFLOWS: dict[str, Callable[..., Any]] = {"sd15": sd15, "sdxl": sdxl, "sd3": sd3, "flux": flux}
PROMPT = "a red circle on a blue ground"
CONCURRENCY = 8


def pipeline_of(folder: Path) -> Any:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def stock(pipeline: Any, seed: int, steps: int, size: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    asked = {"num_inference_steps": steps, "height": size, "width": size, "generator": generator}
    return np.array(pipeline(PROMPT, **asked).images[0])


async def ours(client: LocalWorkflows, workflow: str, seed: int, steps: int, size: int) -> np.ndarray:
    asked = {"prompt": PROMPT, "seed": seed, "num_steps": steps, "height": size, "width": size}
    async for update in client.invoke(InvokeRequest(f"{workflow}-{seed}", workflow, asked)):
        if isinstance(update, Result):
            return np.array(update.outputs[0]["image"])
    raise RuntimeError("no result")


class Clock:
    """Wall and CPU seconds of a block, added to lists."""

    def __init__(self, wall_s: list[float], cpu_s: list[float]) -> None:
        self._wall_s, self._cpu_s = wall_s, cpu_s

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self._wall_s.append(time.perf_counter() - self._start[0])
        self._cpu_s.append(time.process_time() - self._start[1])


async def measured(family: str, folder: Path, args: argparse.Namespace) -> tuple[Row, Row]:
    pipeline = pipeline_of(folder)
    client = await start(T2iConfig(num_executors=args.executors, num_threads=args.executors))
    served, codes = registered(WORKFLOWS[family](str(folder)))
    client.serve(served, codes)
    name, steps, size = served.info.name, args.steps, args.size
    times: dict[str, list[float]] = {key: [] for key in ("wall", "cpu", "their_wall", "their_cpu")}
    load: dict[str, list[float]] = {key: [] for key in times}
    try:
        for seed in range(-1, args.rounds):  # the first warms both up
            with Clock(times["their_wall"], times["their_cpu"]):
                theirs = stock(pipeline, seed + 1, steps, size)
            with Clock(times["wall"], times["cpu"]):
                mine = await ours(client, name, seed + 1, steps, size)
            if not np.array_equal(mine, theirs):
                raise SystemExit(f"{family}: the pictures of seed {seed + 1} differ")
        seeds = range(100, 100 + CONCURRENCY)
        for _ in range(max(2, args.rounds // 2)):
            with Clock(load["their_wall"], load["their_cpu"]):
                expected = [stock(pipeline, seed, steps, size) for seed in seeds]
            with Clock(load["wall"], load["cpu"]):
                made = await asyncio.gather(*(ours(client, name, seed, steps, size) for seed in seeds))
            if not all(map(np.array_equal, made, expected)):
                raise SystemExit(f"{family}: a picture under load differs")
    finally:
        await client.aclose()
    middle = {key: statistics.median(values[1:]) for key, values in times.items()}
    under = {key: statistics.median(values) for key, values in load.items()}
    goal_s = middle["their_wall"] * 1.05 + 0.010
    alone: Row = {
        "family": family,
        "pipeline_ms": middle["their_wall"] * 1e3,
        "ours_ms": middle["wall"] * 1e3,
        "goal_ms": goal_s * 1e3,
        "met": "yes" if middle["wall"] <= goal_s else "no",
        "cpu_ratio": middle["cpu"] / middle["their_cpu"],
        "ratio": middle["wall"] / middle["their_wall"],
    }
    loaded: Row = {
        "family": family,
        "pipeline_images_per_s": CONCURRENCY / under["their_wall"],
        "ours_images_per_s": CONCURRENCY / under["wall"],
        "cpu_ratio": under["cpu"] / under["their_cpu"],
        "ratio": under["their_wall"] / under["wall"],
    }
    return alone, loaded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=list(WORKFLOWS), default=list(WORKFLOWS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--executors", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/t2i_overhead"))
    args = parser.parse_args()
    sections: dict[str, list[Row]] = {"alone": [], "load": []}
    with tempfile.TemporaryDirectory() as folder:
        for family in args.families:
            path = Path(folder) / family
            build_tiny(family, path)
            alone, loaded = asyncio.run(measured(family, path, args))
            sections["alone"].append(alone)
            sections["load"].append(loaded)
            print(f"{table([alone])}\n{table([loaded])}\n", flush=True)
    bars = {
        "alone": ("family", "ratio", "one request, ours / pipeline (1: equal)"),
        "load": ("family", "ratio", f"{CONCURRENCY} at once, images/s, ours / pipeline"),
    }
    save("t2i_overhead", sections, bars, args.out)


if __name__ == "__main__":
    main()
