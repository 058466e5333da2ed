"""Recorded reference runs through dispatcher and engines: together, in little memory, moved from worker to worker."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.types import SamplingParams, Submit
from genserve.dllm.golden_cases import Replay, recorded_noise, replay_of
from genserve.dllm.limits import EngineLimits
from genserve.dllm.models.interface import LoadedDiffusionModel
from genserve.dllm.models.registry import load_diffusion_model
from genserve.dllm.step import STEP
from genserve.dllm.worker import DllmWorker
from tests.dllm.driver import Driver

FOLDER = Path(__file__).parents[1] / "golden" / "dllm"


@cache
def cases(arch: str) -> tuple[dict, ...]:
    found = [json.loads(path.read_text()) for path in sorted(FOLDER.glob(f"cases/{arch}/*.json"))]
    return tuple(found)


@cache
def model(arch: str) -> LoadedDiffusionModel:
    (case, *_) = cases(arch)
    folder = str(FOLDER / case["checkpoint"])
    return load_diffusion_model(folder, dtype="float32", mask_token_id=case["mask_id"])


class Worker:
    """The real one, with the draws of the references."""

    def __init__(self, limits: EngineLimits, arch: str, replays: list[Replay]) -> None:
        loaded = model(arch)
        recorded = recorded_noise(replays)
        self.worker = DllmWorker(
            loaded,
            CpuAttention(loaded.model.layer_specs, limits.num_pages, loaded.dtype),
            limits.max_running,
            -(-limits.max_context_tokens // PAGE_TOKENS),
            noise=lambda key, at: recorded(key._replace(request_id=key.request_id.partition("#")[0]), at),
            fill_token_id=limits.fill_token_id,
        )

    def perform(self, args):
        return self.worker.perform(STEP, args)


def request(replay: Replay) -> Submit:
    case = replay.case
    sampling = SamplingParams(
        temperature=0,
        seed=0,
        max_tokens=case["gen_length"],
        stop_token_ids=() if replay.eos_id is None else (replay.eos_id,),
    )
    params = replace(replay.params, include_unmasking=True)
    return Submit(case["id"], tuple(case["prompt"]), sampling, options=params)


def recorded(replay: Replay) -> list[list[tuple[int, int]]]:
    """What each pass put into the part of the answer that was asked for, passes that put nothing left out."""
    case = replay.case
    first, last = case["prompt_len"], case["prompt_len"] + case["gen_length"]
    passes = [
        [(at - first, token) for at, token in zip(step["pos"], step["tok"], strict=True) if at < last]
        for step in case["steps"]
    ]
    return [commits for commits in passes if commits]


def told(outputs) -> list[list[tuple[int, int]]]:
    passes = defaultdict(list)
    for output in outputs:
        for event in output.unmasked:
            passes[event.step].append((event.position, event.token_id))
    return [passes[step] for step in sorted(passes)]


def within(passes: list[list[tuple[int, int]]], end: int) -> list[list[tuple[int, int]]]:
    kept = [[(at, token) for at, token in commits if at < end] for commits in passes]
    return [commits for commits in kept if commits]


@pytest.mark.parametrize("arch", ["llada", "dream", "llada2"])
def test_engines_repeat_the_recorded_runs(arch):
    replays = [replay_of(case) for case in cases(arch)]
    groups = defaultdict(list)
    for replay in replays:
        groups[replay.eos_id].append(replay)
    for eos_id, members in groups.items():
        limits = EngineLimits(
            num_pages=32,
            max_context_tokens=256,
            max_running=6,
            budget_tokens=100,
            shifted=arch == "dream",
            fill_token_id=0 if eos_id is None else eos_id,
        )
        driver = Driver(2, limits, "round_robin", Worker, arch=arch, replays=replays)
        heard = driver.run(*map(request, members))
        for replay in members:
            name, want, got = replay.case["id"], recorded(replay), told(heard[replay.case["id"]])
            assert heard[name][-1].error is None
            first = replay.case["prompt_len"]
            answer = replay.case["final"][first : first + replay.case["gen_length"]]
            tokens = driver.tokens(name)
            assert tokens == answer[: len(tokens)], name
            if arch == "llada2":  # these references go on behind a stop token
                want, got = within(want, len(tokens)), within(got, len(tokens))
            assert got == want, name
            assert len(tokens) == len(answer) or tokens[-1] == eos_id
