"""Renoised canvases through dispatcher, engine and worker: what the model's own `generate` gives."""

import pytest
import torch

from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.attention.reference import ReferenceAttention
from genserve.core.types import SamplingParams
from genserve.dllm.canvas import OPEN
from genserve.dllm.canvas_worker import CanvasWorker
from genserve.dllm.limits import EngineLimits
from genserve.dllm.request import DiffusionParams
from genserve.dllm.step import FETCH, RELEASE, STEP, Admit, FetchArgs, Pass, ReleaseArgs, StepArgs
from tests.dllm.canvas_oracle import EOS, generated, request, served
from tests.dllm.driver import Driver

LIMITS = EngineLimits(
    num_pages=40, max_context_tokens=256, max_running=4, budget_tokens=40, eos_token_ids=EOS, fill_token_id=2
)
# (prompt tokens, max_tokens, seed): shorter and longer than the window of 12; whole canvases of 16 and not.
SHAPES = [(5, 40, 0), (47, 33, 205), (1, 48, 3), (33, 20, 202), (20, 16, 201)]


class Performer:
    """The worker as the driver calls it."""

    def __init__(self, limits, backend=CpuAttention, model=None):
        loaded = served()
        pages = backend(loaded.model.layer_specs, limits.num_pages, torch.float32)
        self.worker = CanvasWorker(loaded, pages, limits.max_running, 16)
        if model is not None:
            self.worker._model = model
        self.slots = {}
        self.steps = []

    def perform(self, args):
        self.steps.append(args)
        return self.worker.perform(STEP, args)


def requests():
    return [request(f"r{at}", *shape) for at, shape in enumerate(SHAPES)]


def driver(num_engines=1, **options):
    return Driver(num_engines, limits=LIMITS, worker=Performer, **options)


@pytest.fixture(scope="module")
def answers():
    return {submit.request_id: generated(submit)[0] for submit in requests()}


@pytest.mark.parametrize("backend", [CpuAttention, ReferenceAttention])
def test_a_ragged_batch_gives_what_generate_gives(backend, answers):
    batch = driver(backend=backend)
    batch.run(*requests())
    assert {name: batch.tokens(name) for name in answers} == answers
    reasons = {name: batch.outputs[name][-1].finish_reason for name in answers}
    assert set(reasons.values()) == {"stop", "length"}
    steps = batch.workers["engine-0"].steps
    assert max(len(args.passes) for args in steps) == LIMITS.max_running
    kinds = {(p.is_start, p.spans[0][0] < p.block[1]) for args in steps for p in args.passes}
    assert kinds == {(True, True), (False, False)}, "only a canvas' first pass runs rows before it"
    cut_inside = [
        at for at, name in enumerate(answers) if reasons[name] == "stop" and len(answers[name]) % 16
    ]
    assert cut_inside, "no answer ends inside a canvas"


def test_alone_gives_what_the_batch_gives(answers):
    for submit in requests():
        alone = driver()
        alone.run(submit)
        assert alone.tokens(submit.request_id) == answers[submit.request_id]


def test_a_cancelled_canvas_leaves_nothing_behind(answers):
    for num_steps in (1, 2, 14):  # in the first pass, in the middle, in the second canvas
        batch = driver()
        batch.submit(*requests()[2:4])
        for _ in range(num_steps):
            batch.step()
        batch.abort("r2")
        while batch.step():
            pass
        batch.check_empty()
        assert batch.outputs["r2"][-1].finish_reason == "abort"
        assert batch.tokens("r3") == answers["r3"]


def test_a_lost_engine_s_canvases_begin_anew_elsewhere(answers):
    batch = driver(2)
    batch.submit(*requests()[2:])
    for _ in range(10):
        batch.step()
    assert batch.engines["engine-0"].stats()["num_running"]
    batch.lose("engine-0")
    batch.bring_back("engine-0")
    batch.run()
    assert all(batch.tokens(f"r{at}") == answers[f"r{at}"] for at in (2, 3, 4))


def test_what_requests_share_of_their_prompt_is_computed_once(answers):
    batch = driver()
    batch.run(requests()[1])
    again = batch.run(request("again", *SHAPES[1]))
    assert again["again"][0].num_cached_tokens == 32
    assert batch.tokens("again") == answers["r1"]


def test_steps_bound_the_passes_of_a_canvas():
    few, one = driver(), driver()
    few.run(request("r", 9, 32, 1, max_block_steps=3))
    one.run(request("r", 9, 32, 1, max_block_steps=1))
    assert len(few.workers["engine-0"].steps) == 6
    assert len(one.workers["engine-0"].steps) == 2
    assert len(few.tokens("r")) == len(one.tokens("r")) == 32


def test_temperature_zero_does_not_depend_on_the_seed():
    def answer(seed, temperature):
        alone = driver()
        submit = request("r", 9, 16, 1, temperature=temperature)
        sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=16)
        alone.run(type(submit)("r", submit.prompt_token_ids, sampling, options=submit.options))
        return alone.tokens("r")

    assert answer(1, 0.0) == answer(2, 0.0) == answer(None, 0.0)
    assert answer(1, 1.0) != answer(2, 1.0)


def test_logits_that_are_no_numbers_fail_their_request_alone(answers):
    class Poisoned:
        def __init__(self, model):
            self._model = model
            self.calls = 0

        def __getattr__(self, name):
            return getattr(self._model, name)

        def logits(self, hidden):
            self.calls += 1
            logits = self._model.logits(hidden)
            return logits.masked_fill(torch.tensor(self.calls == 8), torch.nan)

    batch = driver(model=Poisoned(served().model))
    batch.run(*requests()[3:])
    failed = [name for name in ("r3", "r4") if batch.outputs[name][-1].finish_reason == "error"]
    assert len(failed) == 1 and "NaN" in batch.outputs[failed[0]][-1].error
    for name in {"r3", "r4"} - set(failed):
        assert batch.tokens(name) == answers[name]


def test_warming_up_leaves_the_slots_free():
    performer = Performer(LIMITS)
    performer.worker.warm_up()
    assert not any(performer.worker._slots)


def test_a_block_that_is_no_canvas_is_refused():
    worker = Performer(LIMITS).worker
    sampling = SamplingParams(temperature=0, max_tokens=8)
    admit = Admit(0, "r", (5, 6, *(OPEN,) * 8), 2, 10, sampling, DiffusionParams("canvas", block_length=8))
    with pytest.raises(ValueError, match="8 positions; the model's canvas has 16"):
        worker.perform(STEP, StepArgs((), (admit,), (Pass(0, ((0, 10),), (0,), (0, 2, 10), True),)))
    with pytest.raises(ValueError, match="unknown operation"):
        worker.perform("other", None)


def test_a_canvas_is_never_handed_over():
    worker = Performer(LIMITS).worker
    departing = Pass(0, ((0, 18),), (0, 1), (0, 2, 18), True, hand_over=True)
    for op, args in (
        (STEP, StepArgs((), (), (departing,))),
        (FETCH, FetchArgs("r", (0,), ())),
        (RELEASE, ReleaseArgs("r", ())),
    ):
        with pytest.raises(RuntimeError, match="hands nothing over"):
            worker.perform(op, args)
