"""The worker in plain torch, as on any device but a CPU, gives the tokens that the kernels give."""

from __future__ import annotations

import pytest
import torch

from genserve.core.models.attention.reference import ReferenceAttention
from genserve.core.types import SamplingParams
from genserve.dllm.models.registry import load_diffusion_model
from genserve.dllm.request import DiffusionParams, Unmasking
from genserve.dllm.worker import DllmWorker
from tests.dllm.test_worker import CHECKPOINTS, MASK, PAGES, Request, drive, run

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def requests(block_causal: bool) -> list[Request]:
    if block_causal:
        return [
            Request(DiffusionParams("block", Unmasking(threshold=0.8, strict=True), 8)),
            Request(DiffusionParams("block", Unmasking(threshold=0.5, strict=True), 8), prompt=(7, 9, 30)),
        ]
    return [
        Request(DiffusionParams("dual", Unmasking(threshold=0.8), 8)),
        Request(DiffusionParams("none", Unmasking("entropy", steps=12), 12), prompt=(7, 9, 30)),
        Request(DiffusionParams("prefix", Unmasking("margin", steps=12), 8)),
        Request(
            DiffusionParams("dkv", Unmasking("quota", steps=12), 8),
            SamplingParams(temperature=0.7, top_k=20, seed=3),
        ),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llada-a", "dream-a", "llada2-a"])
def test_tokens_are_those_of_the_kernels(name, device):
    by_kernels = load_diffusion_model(str(CHECKPOINTS / name), mask_token_id=MASK)
    expected = requests(by_kernels.family == "block_causal")
    run(by_kernels, expected)
    loaded = load_diffusion_model(str(CHECKPOINTS / name), dtype="float32", device=device, mask_token_id=MASK)
    mine = requests(loaded.family == "block_causal")
    backend = ReferenceAttention(
        loaded.model.layer_specs, len(mine) * PAGES, torch.float32, device=loaded.device
    )
    worker = DllmWorker(loaded, backend, len(mine), PAGES)
    for slot, request in enumerate(mine):
        request.begin(slot, loaded)
    drive(worker, mine)
    for own, want in zip(mine, expected, strict=True):
        assert own.error is None
        assert own.canvas.ids == want.canvas.ids
