"""One worker: inputs, outputs, models, and what it does when something isn't there."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from genserve.core.errors import ExecutionFailed
from genserve.core.tensors.store import TensorStore
from genserve.t2i import messages as m
from genserve.t2i.graph import ModelSpec
from genserve.t2i.model import Model
from genserve.t2i.space import Space
from genserve.t2i.worker import Keeper, T2iWorker
from tests.t2i.toys import Control, Draw, Predict


class Wrong(Model):
    def setup_io(self):
        self.add_output("out", int)

    def execute(self, model_components):
        return {"other": 1}


class Counted(Model):
    loads = 0

    def setup_io(self):
        self.add_output("out", int)

    def load(self, model_path, device):
        Counted.loads += 1
        return {}

    def execute(self, model_components):
        return {"out": Counted.loads}


def task(model, run=1, keep=("latents",), outputs=None, weights=None, **inputs):
    cls = type(model)
    spec = ModelSpec(f"{cls.__module__}:{cls.__qualname__}", tuple(model.params.items()), cls.__name__)
    outputs = outputs or tuple(port.name for port in model.output_ports)
    sources = tuple(
        (name, value if isinstance(value, tuple) else m.Given(value)) for name, value in inputs.items()
    )
    return m.RunTask(
        0, cls.__name__, cls.__name__, weights or cls.__name__, sources, outputs, keep,
        code=m.ModelCode(spec), run=run,
    )  # fmt: skip


def test_outputs_stay_where_they_were_made_and_are_released():
    space = Space()
    worker = T2iWorker(space)
    ran = worker.perform(m.TASK, task(Draw(), seed=1, size=2))
    assert ran.values["latents"] == m.Stored(16, None)
    made = space.get((1, "latents"))
    weight = {"residuals": None, "step": 0}
    again = worker.perform(
        m.TASK,
        task(Predict(), 2, ("noise",), latents=m.Here((1, "latents")), embeds=torch.zeros(()), **weight),
    )
    assert again.values.keys() == {"noise"}
    torch.testing.assert_close(space.get((2, "noise")), made * 0.3)
    worker.perform(m.RELEASE, ((1, "latents"), (2, "noise"), (9, "unknown")))
    assert space.stats() == {"num_values": 0}
    assert worker.perform(m.TASK, task(Draw(), keep=(), seed=1, size=2)).values == {}


def test_another_space_is_fetched_from_and_a_lost_one_is_missed():
    here, there = (Space(TensorStore.open(pool_bytes=1 << 20)) for _ in range(2))
    try:
        worker = T2iWorker(here)
        made = T2iWorker(there).perform(m.TASK, task(Draw(), seed=1, size=3)).values["latents"]
        source = m.There((1, "latents"), made.refs)
        worker.perform(
            m.TASK,
            task(Predict(), 2, ("noise",), latents=source, embeds=torch.zeros(()), residuals=None, step=0),
        )
        assert torch.equal(here.get((1, "latents")), there.get((1, "latents")))
        keeper = Keeper(here)
        (kept,) = keeper.perform(m.KEEP, m.Keep((m.There((7, "latents"), made.refs),)))
        assert kept.nbytes == made.nbytes
        there.release([(1, "latents")])
        here.release([(1, "latents")])
        missed = worker.perform(m.TASK, task(Predict(), 3, ("noise",), latents=source))
        assert isinstance(missed, m.Missed) and missed.keys == ((1, "latents"),)
        assert keeper.perform(m.KEEP, m.Keep((source,), ((7, "latents"), (2, "noise")))) == [None]
        assert (here.stats()["num_tensors"], here.stats()["num_values"]) == (0, 0)
        missed = worker.perform(m.TASK, task(Predict(), 3, ("noise",), latents=m.Here((1, "latents"))))
        assert isinstance(missed, m.Missed)
    finally:
        here.close()
        there.close()


def test_a_deferred_input_is_waited_for_where_it_is_used_and_can_be_given_up():
    space = Space()
    worker = T2iWorker(space, wait_s=5)
    ended = []
    inputs = {
        "latents": torch.zeros(2, 2), "embeds": torch.ones(()), "step": 0,
        "residuals": m.Later((7, "residuals"), "tensors", 2),
    }  # fmt: skip

    def run(number):
        ended.append(worker.perform(m.TASK, task(Predict(), number, ("noise",), **inputs)))

    thread = threading.Thread(target=run, args=(1,))
    thread.start()
    time.sleep(0.05)
    assert not ended
    space.put((7, "residuals"), [torch.full((2, 2), 10.0), torch.full((2, 2), 20.0)])
    thread.join(5)
    assert ended[0].values["noise"].nbytes == 16
    assert torch.equal(space.get((1, "noise")), torch.full((2, 2), 4.0))
    space.release([(7, "residuals")])
    thread = threading.Thread(target=run, args=(2,))
    thread.start()
    time.sleep(0.05)
    worker.perform(m.GIVE_UP, m.GiveUp((2, 3)))
    thread.join(5)
    run(3)
    assert ended[1:] == [m.Skipped(), m.Skipped()]
    assert worker.stats()["num_given_up"] == 0


def test_models_of_equal_identity_share_what_they_load_until_it_is_unloaded():
    worker = T2iWorker(Space())
    Counted.loads = 0
    assert [worker.perform(m.TASK, task(Counted(), keep=())).values["out"] for _ in range(3)] == [1, 1, 1]
    other = task(Counted(), keep=())
    assert worker.perform(m.TASK, other).values["out"] == 1
    worker.perform(m.TASK, m.RunTask(0, "n", "Counted", "Counted", (), ("out",), (), unload=("Counted",)))
    assert Counted.loads == 2


def test_a_model_that_returns_something_else_is_named():
    with pytest.raises(ExecutionFailed, match="Wrong must return a dict of out, not \\['other'\\]"):
        T2iWorker(Space()).perform(m.TASK, task(Wrong(), keep=()))


def test_residuals_of_a_model_travel_as_a_sequence():
    here, there = (Space(TensorStore.open(pool_bytes=1 << 20)) for _ in range(2))
    try:
        made = T2iWorker(there).perform(
            m.TASK, task(Control(), 1, ("residuals",), latents=torch.ones(2, 2), step=1)
        )
        fetched = here.fetch((1, "residuals"), made.values["residuals"].refs, "cpu")
        assert [torch.equal(a, b) for a, b in zip(fetched, there.get((1, "residuals")), strict=True)] == [
            True
        ] * 2
    finally:
        here.close()
        there.close()
