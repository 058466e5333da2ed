"""The worker over real models and paged KV: a request's tokens are its own, whatever runs beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.types import SamplingParams
from genserve.dllm.cache import Passes
from genserve.dllm.canvas import OPEN, Canvas
from genserve.dllm.models.interface import LoadedDiffusionModel
from genserve.dllm.models.registry import load_diffusion_model
from genserve.dllm.request import DiffusionParams, Unmasking
from genserve.dllm.step import STEP, Admit, Commit, Denoised, Pass, StepArgs
from genserve.dllm.worker import DllmWorker

CHECKPOINTS = Path(__file__).parents[1] / "golden" / "dllm" / "checkpoints"
MASK = 500
PAGES = 8
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def models() -> Callable[[str], LoadedDiffusionModel]:
    loaded: dict[str, LoadedDiffusionModel] = {}

    def get(name: str) -> LoadedDiffusionModel:
        if name not in loaded:
            loaded[name] = load_diffusion_model(str(CHECKPOINTS / name), mask_token_id=MASK)
        return loaded[name]

    return get


@dataclass
class Request:
    """A request, and what its passes brought."""

    params: DiffusionParams
    sampling: SamplingParams = GREEDY
    prompt: tuple[int, ...] = tuple(range(40, 51))
    num_answer: int = 24
    starts_at: int = 0

    def begin(self, slot: int, loaded: LoadedDiffusionModel) -> None:
        self.slot = slot
        aligned = self.params.cache == "block"
        end = len(self.prompt) + self.num_answer
        if aligned:
            end = -(-end // self.params.block_length) * self.params.block_length
        ids = [*self.prompt, *[OPEN] * (end - len(self.prompt)), *self.params.suffix_token_ids]
        for offset, token in self.params.pinned:
            ids[len(self.prompt) + offset] = token
        self.start_ids = tuple(ids)
        self.canvas = Canvas(
            ids,
            len(self.prompt),
            end,
            self.params.block_length,
            aligned=aligned,
            stop_ids=self.sampling.stop_token_ids,
        )
        self.passes = Passes(self.params, len(ids), len(self.prompt), shifted=loaded.shift == 1)
        self.block = self.canvas.block(0)
        self.passes.begin(self.block)
        self.trace: list[tuple[Commit, ...]] = []
        self.error: str | None = None
        self.is_done = False

    def admit(self) -> Admit:
        canvas = self.canvas
        return Admit(
            self.slot,
            f"r{self.slot}",
            self.start_ids,
            canvas.prompt_len,
            canvas.answer_end,
            self.sampling,
            self.params,
        )

    def next(self) -> Pass:
        self.planned = self.passes.next(self.canvas)
        pages = () if self.trace else tuple(range(self.slot * PAGES, (self.slot + 1) * PAGES))
        block = (self.block.index, self.block.start, self.block.end)
        return Pass(self.slot, self.planned.spans, pages, block, self.planned.is_start)

    def took(self, done: Denoised, fill: int) -> None:
        if done.error is not None:
            self.error, self.is_done = done.error, True
            return
        self.trace.append(done.commits)
        for commit in done.commits:
            self.canvas.commit(commit.position, commit.token_id)
        if done.filled:
            self.canvas.fill_after_stop(fill)
        self.passes.ran(self.planned, [commit.position for commit in done.commits])
        if done.block_done:
            self.is_done = self.block.index + 1 == self.canvas.num_blocks
            if not self.is_done:
                self.block = self.canvas.block(self.block.index + 1)
                self.passes.begin(self.block)


def run(loaded: LoadedDiffusionModel, requests: list[Request], **options: Any) -> DllmWorker:
    backend = CpuAttention(loaded.model.layer_specs, len(requests) * PAGES, torch.float32)
    worker = DllmWorker(loaded, backend, len(requests), PAGES, **options)
    for slot, request in enumerate(requests):
        request.begin(slot, loaded)
    drive(worker, requests)
    return worker


def drive(worker: DllmWorker, requests: list[Request], fill: int = 490) -> None:
    for step in range(1000):
        waiting = any(request.starts_at > step for request in requests)
        running = [request for request in requests if request.starts_at <= step and not request.is_done]
        if not running and not waiting:
            return
        admits = tuple(request.admit() for request in requests if request.starts_at == step)
        passes = tuple(request.next() for request in running)
        for request, done in zip(
            running, worker.perform(STEP, StepArgs((), admits, passes)).denoised, strict=True
        ):
            request.took(done, fill)
    raise AssertionError("the requests do not end")


def drawn(seed: int, **options: Any) -> SamplingParams:
    return SamplingParams(seed=seed, **{"temperature": 0.9, **options})


RAGGED = [
    Request(DiffusionParams(cache="none", block_length=8)),
    Request(
        DiffusionParams(cache="dual", block_length=12, unmasking=Unmasking(threshold=0.5)),
        drawn(1),
        prompt=(3,),
    ),
    Request(
        DiffusionParams(cache="prefix", block_length=24, unmasking=Unmasking("entropy", steps=7)),
        drawn(2, temperature=0.4, top_p=0.8, logprobs=2),
        starts_at=2,
    ),
    Request(
        DiffusionParams(cache="dkv", block_length=16, refresh_interval=3, unmasking=Unmasking("random", steps=9)),
        drawn(3, top_k=9),
        num_answer=37,
        starts_at=1,
    ),
    Request(
        DiffusionParams(cache="none", cfg_scale=0.7, block_length=16, unmasking=Unmasking("margin", steps=8)),
        SamplingParams(temperature=0, logprobs=0),
        num_answer=16,
    ),
    Request(
        DiffusionParams(
            cache="dual", block_length=9, first_position="left_neighbour", pinned=((3, 77),),
            suffix_token_ids=(5, 6, 7), unmasking=Unmasking("factor", factor=1.2),
        ),
        starts_at=4,
    ),
    Request(
        DiffusionParams(cache="prefix", block_length=8, unmasking=Unmasking("entropy_bound", entropy_bound=0.5)),
        drawn(3, stop_token_ids=(490,)),
        prompt=tuple(range(70)),
    ),
]  # fmt: skip
BLOCK_RAGGED = [
    Request(
        DiffusionParams(
            cache="block", block_length=length, editing_threshold=editing, unmasking=Unmasking(threshold=threshold)
        ),
        sampling,
        prompt=tuple(range(7, 7 + 5 * length // 4)),
        starts_at=at,
    )
    for at, (length, editing, threshold, sampling) in enumerate(
        [(16, None, 0.9, GREEDY), (8, 0.8, 0.7, drawn(4)), (4, None, 0.3, drawn(5, top_p=0.7)), (16, 0.5, 0.9, GREEDY)]
    )
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ragged"), [("llada-a", RAGGED), ("dream-a", RAGGED), ("llada2-a", BLOCK_RAGGED)]
)
def test_a_ragged_batch_gives_each_request_its_lone_tokens_bit_for_bit(models, name, ragged) -> None:
    together = [replace(request) for request in ragged]
    run(models(name), together)
    for request in together:
        alone = replace(request, starts_at=0)
        # The slot is part of the request id alone; the noise must not see it.
        run(models(name), [alone])
        assert request.error is None
        assert alone.trace == request.trace
        assert OPEN not in alone.canvas.ids[: alone.canvas.answer_end]


def test_greedy_tokens_do_not_depend_on_the_seed_and_drawn_ones_do(models) -> None:
    params = DiffusionParams(block_length=12, unmasking=Unmasking("quota", steps=8))
    greedy = [Request(params, SamplingParams(temperature=0, seed=seed)) for seed in (None, 1, 2)]
    drawn_twice = [Request(params, drawn(seed, temperature=2.0)) for seed in (1, 1, 2)]
    run(models("llada-a"), greedy + drawn_twice)
    assert greedy[0].trace == greedy[1].trace == greedy[2].trace
    assert drawn_twice[0].trace == drawn_twice[1].trace != drawn_twice[2].trace


class Biased:
    """A model that wants one token above all."""

    def __init__(self, model: Any, token_id: int, bias: float) -> None:
        self.model, self.token_id, self.bias = model, token_id, bias
        self.layer_specs = model.layer_specs
        self.hidden = model.hidden

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        logits_RV = self.model.logits(hidden_RH).clone()
        logits_RV[:, self.token_id] += self.bias
        return logits_RV


@pytest.mark.parametrize("sampling", [GREEDY, drawn(1), drawn(1, top_p=0.9), drawn(1, top_k=4)])
def test_the_mask_and_padding_ids_are_never_proposed_although_they_win(models, sampling) -> None:
    loaded = models("llada-a")
    for token_id in (MASK, loaded.vocab_size - 1):
        biased = replace(
            loaded, model=Biased(loaded.model, token_id, 300.0), num_valid_tokens=loaded.vocab_size - 1
        )
        request = Request(DiffusionParams(block_length=8), sampling)
        run(biased, [request])
        assert request.error is None
        assert request.canvas.settled_end() == 35
        assert token_id not in request.canvas.ids
        assert all(commit.confidence < 1e-6 for commits in request.trace for commit in commits)


def test_a_request_with_nan_logits_fails_alone_and_its_pages_can_be_used_again(models) -> None:
    loaded = load_diffusion_model(str(CHECKPOINTS / "llada-a"), mask_token_id=MASK)
    poisoned = 123
    params = DiffusionParams(block_length=8)

    class Poisoned(Biased):
        def hidden_of(self, ids_T: torch.Tensor, positions_T: torch.Tensor, paged: Any) -> torch.Tensor:
            batch = paged.batch
            hidden_TH = self.model.hidden(ids_T, positions_T, paged)
            slots = batch.token_slots_T
            bad = {int(slot) for slot, token in zip(slots, ids_T.tolist(), strict=True) if token == poisoned}
            for layer, spec in enumerate(self.layer_specs):
                rows = [at for at, slot in enumerate(slots) if int(slot) in bad]
                for row in rows:
                    one = type(batch)(
                        batch.spans, slots[row : row + 1], batch.positions_T[row : row + 1],
                        batch.ends_T[row : row + 1], batch.page_table,
                    )  # fmt: skip
                    nan = torch.full((1, spec.num_kv_heads, spec.head_dim), math.nan)
                    paged.backend.write(layer, nan, nan, one)
                    hidden_TH[row] = math.nan
            return hidden_TH

    model = Poisoned(loaded.model, 0, 0.0)
    model.hidden = model.hidden_of
    loaded = replace(loaded, model=model)
    good = Request(params, prompt=tuple(range(30)))
    bad = Request(params, prompt=(1, poisoned, 2, *range(30)))
    worker = run(loaded, [good, bad])
    assert "NaN" in (bad.error or "")
    assert good.error is None
    lone = Request(params, prompt=(9, 8, 7))
    run(loaded, [lone])
    again = Request(params, prompt=(9, 8, 7))
    again.begin(1, loaded)
    worker.perform(STEP, StepArgs((0, 1), (), ()))
    drive(worker, [again])
    assert again.trace == lone.trace


def test_a_request_that_cannot_be_denoised_fails_alone(models) -> None:
    good = Request(DiffusionParams(block_length=8))
    seedless = Request(DiffusionParams(), SamplingParams(temperature=1))
    guided = Request(DiffusionParams(cache="dual", cfg_scale=1.0))
    foreign = Request(DiffusionParams(cache="block", block_length=8))
    run(models("llada-a"), [good, seedless, guided, foreign])
    assert good.error is None
    assert "seed" in (seedless.error or "")
    assert "cfg_scale" in (guided.error or "")
    assert "cache" in (foreign.error or "")


def test_a_small_logits_budget_changes_nothing(models) -> None:
    requests = [replace(request) for request in RAGGED[:5]]
    run(models("dream-a"), requests)
    chunked = [replace(request) for request in RAGGED[:5]]
    run(models("dream-a"), chunked, logits_budget_bytes=3 * 4 * 512)
    assert [request.trace for request in chunked] == [request.trace for request in requests]


def test_the_last_allowed_pass_commits_all(models) -> None:
    for name in ("llada-a", "dream-a"):
        for cap in (1, 3):
            params = DiffusionParams(block_length=12, max_block_steps=cap, unmasking=Unmasking(threshold=1.0))
            request = Request(params)
            run(models(name), [request])
            assert [len(commits) for commits in request.trace] == [*[1] * (cap - 1), 13 - cap] * 2


def test_a_shifted_model_commits_the_first_position_of_a_block_at_its_start(models) -> None:
    request = Request(DiffusionParams(cache="dual", block_length=8))
    neighbour = Request(DiffusionParams(cache="dual", block_length=8, first_position="left_neighbour"))
    run(models("dream-a"), [request, neighbour])

    def at_start(of: Request, start: int) -> list[int]:
        passes = [[commit.position for commit in commits] for commits in of.trace]
        return next(each for each in passes if start <= each[0] < start + 8)

    assert [at_start(request, start) for start in (11, 19, 27)] == [[11], [19], [27]]
    assert any(start not in at_start(neighbour, start) for start in (11, 19, 27))


def test_an_answer_is_filled_behind_its_first_stop_token(models) -> None:
    free = Request(DiffusionParams(block_length=12, early_stop=False))
    run(models("llada-a"), [free])
    stop = free.canvas.ids[14]
    filled = Request(DiffusionParams(block_length=12), SamplingParams(temperature=0, stop_token_ids=(stop,)))
    run(models("llada-a"), [filled], fill_token_id=490)
    at = filled.canvas.first_stop
    assert at is not None
    assert set(filled.canvas.ids[at + 1 :]) == {490}
    assert all(commit.position <= at for commits in filled.trace for commit in commits)


def test_logprobs_of_commits_are_the_models_own(models) -> None:
    plain = Request(DiffusionParams(block_length=8))
    asked = Request(DiffusionParams(block_length=8), SamplingParams(temperature=0, logprobs=3))
    run(models("llada-a"), [plain, asked])
    pairs = zip(plain.trace, asked.trace, strict=True)
    for without, commits in pairs:
        assert [commit._replace(logprobs=None) for commit in commits] == list(without)
        for commit in commits:
            assert commit.logprobs is not None
            assert commit.logprobs.top[0] == (
                commit.token_id,
                pytest.approx(math.log(commit.confidence), abs=1e-5),
            )
            assert len(commit.logprobs.top) == 3


@pytest.mark.parametrize("name", ["llada-a", "dream-a", "llada2-a"])
def test_warm_up_leaves_nothing_behind(models, name) -> None:
    loaded = models(name)
    backend = CpuAttention(loaded.model.layer_specs, PAGES, torch.float32)
    worker = DllmWorker(loaded, backend, 1, PAGES)
    worker.warm_up()
    params = DiffusionParams(cache="block" if name == "llada2-a" else "dual", block_length=8)
    request, lone = Request(params), Request(params)
    request.begin(0, loaded)
    drive(worker, [request])
    run(loaded, [lone])
    assert request.trace == lone.trace
