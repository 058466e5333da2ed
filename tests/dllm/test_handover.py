"""A request's passes on two workers, its KV moved between them: bit for bit what one worker gives."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from genserve.core.errors import StaleTensor, TensorError
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.attention.transfer import KvTransfer
from genserve.core.tensors.store import TensorStore
from genserve.dllm.cache import LASTING
from genserve.dllm.models.interface import LoadedDiffusionModel
from genserve.dllm.models.registry import load_diffusion_model
from genserve.dllm.models.tiny import write_tiny
from genserve.dllm.request import DiffusionParams, Unmasking
from genserve.dllm.step import FETCH, RELEASE, STEP, Admit, FetchArgs, Handover, Pass, ReleaseArgs, StepArgs
from genserve.dllm.worker import DllmWorker

from .test_worker import BLOCK_RAGGED, PAGES, RAGGED, Request, drawn, drive, models, run

__all__ = ["models"]

MORE = [
    Request(DiffusionParams(cache="dual", block_length=8, unmasking=Unmasking("quota", steps=9)), drawn(7)),
    Request(DiffusionParams(cache="dkv", block_length=8, refresh_interval=1, unmasking=Unmasking("random", steps=12)), drawn(8)),
    Request(DiffusionParams(cache="prefix", block_length=8, unmasking=Unmasking("sequential", steps=12))),
]  # fmt: skip


@pytest.fixture
def store() -> Any:
    store = TensorStore.open(pool_bytes=8 << 20)
    yield store
    assert store.stats()["num_tensors"] == 0, "something is still kept"
    store.close()


class Node:
    """A worker with its own pool, whose pages begin elsewhere than the other's."""

    def __init__(self, loaded: LoadedDiffusionModel, store: TensorStore, first_page: int) -> None:
        specs = loaded.model.layer_specs
        backend = CpuAttention(specs, 64, torch.float32)
        transfer = KvTransfer(store, backend, len(specs), part_bytes=6000)
        self.worker = DllmWorker(loaded, backend, 8, PAGES, transfer=transfer)
        self.first_page = first_page

    def pages(self, slot: int) -> tuple[int, ...]:
        return tuple(range(self.first_page + slot * PAGES, self.first_page + (slot + 1) * PAGES))

    def step(self, admits: list[Admit], passes: list[Pass], freed: tuple[int, ...] = ()) -> Any:
        return self.worker.perform(STEP, StepArgs(freed, tuple(admits), tuple(passes))).denoised


def play(loaded: LoadedDiffusionModel, requests: list[Request], store: TensorStore) -> int:
    """Prefills on one worker, all else on another; requests move together. Returns the number of handovers."""
    first, second = Node(loaded, store, 0), Node(loaded, store, 3)
    handovers: dict[int, Handover] = {}
    seated: set[int] = set()
    num_handovers = 0
    for slot, request in enumerate(requests):
        request.begin(slot, loaded)
    for _ in range(1000):
        running = [request for request in requests if not request.is_done]
        if not running:
            return num_handovers
        here = [r for r in running if r.next().is_start and not (r.trace and r.params.cache in LASTING)]
        node = first if here else second
        admits, passes = [], []
        now = here or running
        for request in now:
            handover = handovers.pop(request.slot, None)
            if node is first or request.slot not in seated:
                resume = None if handover is None else handover.state
                admits.append(replace(request.admit(), ids=tuple(request.canvas.ids), resume=resume))
            if handover is not None:
                pages = node.pages(request.slot)[: handover.num_pages]
                if handover.num_pages:
                    args = FetchArgs(f"r{request.slot}", pages, handover.parts)
                    node.worker.perform(FETCH, args)
                    first.worker.perform(RELEASE, ReleaseArgs(f"r{request.slot}", handover.parts))
            new = node.pages(request.slot) if admits and admits[-1].slot == request.slot else ()
            passes.append(request.next()._replace(new_pages=new, hand_over=node is first))
            (seated.discard if node is first else seated.add)(request.slot)
        for request, denoised in zip(now, node.step(admits, passes), strict=True):
            request.took(denoised, 490)
            assert denoised.error is None
            if denoised.handover is not None:
                handovers[request.slot] = denoised.handover
                num_handovers += 1
                assert node is first
                if request.is_done:
                    first.worker.perform(RELEASE, ReleaseArgs(f"r{request.slot}", denoised.handover.parts))
    raise AssertionError("the requests do not end")


@pytest.mark.parametrize(
    ("name", "requests"),
    [("llada-a", RAGGED + MORE), ("dream-a", RAGGED + MORE), ("llada2-a", BLOCK_RAGGED)],
)
def test_handed_over_requests_commit_the_same(models, store, name, requests) -> None:
    together = [replace(request, starts_at=0) for request in requests][:8]
    num_handovers = play(models(name), together, store)
    assert num_handovers >= len(together)
    for request in together:
        alone = replace(request)
        run(models(name), [alone])
        assert request.trace == alone.trace


def test_a_model_whose_head_dims_are_padded_too(store, tmp_path) -> None:
    folder = write_tiny("sdar", tmp_path / "sdar", num_key_value_heads=1, head_dim=24)
    loaded = load_diffusion_model(str(folder))
    requests = [replace(request, starts_at=0) for request in BLOCK_RAGGED]
    assert play(loaded, requests, store) >= len(requests)
    for request in requests:
        alone = replace(request)
        run(loaded, [alone])
        assert request.trace == alone.trace


@pytest.mark.parametrize("request_", RAGGED[7:] + MORE, ids=lambda request: request.params.cache)
def test_each_alone_too(models, store, request_) -> None:
    moved, alone = replace(request_, starts_at=0), replace(request_, starts_at=0)
    play(models("llada-a"), [moved], store)
    run(models("llada-a"), [alone])
    assert moved.trace == alone.trace


def prefilled(node: Node, loaded: LoadedDiffusionModel) -> Any:
    request = Request(DiffusionParams(cache="dual", block_length=8))
    request.begin(0, loaded)
    one = request.next()._replace(new_pages=node.pages(0), hand_over=True)
    (denoised,) = node.step([request.admit()], [one])
    return denoised


def test_a_full_store_costs_the_handover_and_nothing_else(models) -> None:
    loaded = models("llada-a")
    with_room = TensorStore.open(pool_bytes=1 << 20)
    too_small = TensorStore.open(pool_bytes=4096)
    full = Node(loaded, too_small, 0)
    kept, lost = prefilled(Node(loaded, with_room, 0), loaded), prefilled(full, loaded)
    assert kept.handover is not None and lost.handover is None
    assert lost.commits == kept.commits and lost.error is None
    assert too_small.stats()["num_tensors"] == 0
    # It begins its block again, there or elsewhere.
    again, alone = (Request(DiffusionParams(cache="dual", block_length=8)) for _ in range(2))
    again.begin(0, loaded)
    full.step([], [], freed=(0,))
    drive(full.worker, [again])
    run(loaded, [alone])
    assert again.trace == alone.trace
    with_room.close()
    too_small.close()


def test_what_was_released_or_does_not_fit_is_not_fetched(models, store) -> None:
    loaded = models("llada-a")
    first, second = Node(loaded, store, 0), Node(loaded, store, 3)
    handover = prefilled(first, loaded).handover
    pages = second.pages(0)
    with pytest.raises(TensorError, match="pages of layers"):
        second.worker.perform(FETCH, FetchArgs("r0", pages[:-1], handover.parts[:1]))
    with pytest.raises(TensorError, match="layer"):
        second.worker.perform(FETCH, FetchArgs("r0", pages[: handover.num_pages], handover.parts[1:]))
    first.worker.perform(RELEASE, ReleaseArgs("r0", handover.parts))
    with pytest.raises(StaleTensor):
        second.worker.perform(FETCH, FetchArgs("r0", pages[: handover.num_pages], handover.parts))


def test_fetching_beside_steps_changes_neither(models, store) -> None:
    loaded = models("llada-a")
    first, second = Node(loaded, store, 0), Node(loaded, store, 3)
    handover = prefilled(first, loaded).handover
    busy = Request(
        DiffusionParams(cache="dual", block_length=8, unmasking=Unmasking("quota", steps=24)), num_answer=48
    )
    alone = replace(busy)
    run(loaded, [alone])
    busy.begin(1, loaded)
    stop = threading.Event()
    errors = []

    def fetch() -> None:
        try:
            while not stop.is_set():
                second.worker.perform(
                    FETCH, FetchArgs("r0", second.pages(0)[: handover.num_pages], handover.parts)
                )
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=fetch)
    thread.start()
    while not busy.is_done:
        admits = [] if busy.trace else [busy.admit()]
        one = busy.next()
        (denoised,) = second.step(admits, [one._replace(new_pages=second.pages(1) if admits else ())])
        busy.took(denoised, 490)
    stop.set()
    thread.join()
    assert not errors and busy.trace == alone.trace
    first.worker.perform(RELEASE, ReleaseArgs("r0", handover.parts))


def test_a_worker_without_a_store_says_so(models) -> None:
    loaded = models("llada-a")
    backend = CpuAttention(loaded.model.layer_specs, 8, torch.float32)
    worker = DllmWorker(loaded, backend, 1, PAGES)
    with pytest.raises(RuntimeError, match="built to hand nothing over"):
        worker.perform(RELEASE, ReleaseArgs("r0", ()))
