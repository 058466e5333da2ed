"""Inputs of a task: eager ones are here before it starts, deferred ones when it asks."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from genserve.core.errors import StaleTensor, TensorError
from genserve.core.tensors.fetch import Inputs
from tests.core.tensors.conftest import Ends
from tests.core.tensors.peer import same_bytes, sample


def test_eager_inputs_are_here_before_the_task(ends: Ends):
    refs = {name: ends.put("float16", (50, 40), seed=seed) for seed, name in enumerate("abc")}
    with Inputs(ends.reader, eager=refs) as inputs:
        inputs.wait_eager(5)
        assert inputs.ready()
        for seed, name in enumerate("abc"):
            assert same_bytes(inputs[name], sample("float16", (50, 40), seed))
        assert list(inputs) == list("abc")
        inputs.check()


def test_a_task_blocks_where_it_uses_a_deferred_input(ends: Ends):
    """It starts, works, and meets a tensor that didn't exist when it started."""
    steps = []
    inputs = Inputs(ends.reader, eager={"x": ends.put(seed=1)}, deferred={"late": None}, timeout_s=5)

    def task() -> None:
        steps.append(("started", inputs["x"].shape))
        steps.append(("used", same_bytes(inputs["late"], sample("float32", (9,), 4))))

    inputs.wait_eager(5)
    assert inputs.ready()
    thread = threading.Thread(target=task)
    thread.start()
    while not steps:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(steps) == 1 and thread.is_alive()
    inputs.arrive("late", ends.put(shape=(9,), seed=4))
    thread.join(5)
    assert steps == [("started", (64,)), ("used", True)]


def test_a_deferred_input_that_is_known_is_fetched_meanwhile(ends: Ends):
    with Inputs(ends.reader, eager={}, deferred={"y": ends.put(seed=2)}) as inputs:
        assert inputs.ready()
        assert same_bytes(inputs["y"], sample("float32", (64,), 2))


def test_an_eager_input_that_is_gone_keeps_the_task_from_starting(ends: Ends):
    ref = ends.put()
    ends.owner.release(ref)
    with Inputs(ends.reader, eager={"x": ref}) as inputs:
        with pytest.raises(StaleTensor):
            inputs.wait_eager(5)
        assert inputs.ready()


def test_a_deferred_input_that_never_comes(ends: Ends):
    inputs = Inputs(ends.reader, eager={}, deferred={"late": None, "never": None}, timeout_s=0.05)
    with pytest.raises(TimeoutError, match="never"):
        inputs["never"]
    failed = []

    def task() -> None:
        try:
            inputs["late"]
        except TensorError as error:
            failed.append(str(error))

    inputs = Inputs(ends.reader, eager={}, deferred={"late": None}, timeout_s=5)
    thread = threading.Thread(target=task)
    thread.start()
    inputs.fail(TensorError("its producer failed"))
    thread.join(5)
    assert failed == ["its producer failed"]
    inputs.arrive("late", ends.put())  # too late: nobody waits
    with pytest.raises(TensorError, match="producer"):
        inputs["late"]


def test_after_cancel_nobody_waits(ends: Ends):
    inputs = Inputs(ends.reader, eager={"x": ends.put()}, deferred={"late": None})
    inputs.cancel()
    with pytest.raises(TensorError, match="cancelled"):
        inputs["late"]


def test_a_reference_that_cannot_be_ends_the_fetches_before_it(connect, monkeypatch):
    ends = connect("tcp")
    ref = ends.put()
    ends.owner.stop()  # so that what was begun doesn't end by itself
    begun = []
    get = ends.reader.get

    def seen(ref):
        begun.append(get(ref))
        return begun[-1]

    monkeypatch.setattr(ends.reader, "get", seen)
    bad = dataclasses.replace(ref, dtype="float31")
    with pytest.raises(TensorError, match="dtype"):
        Inputs(ends.reader, eager={"x": ref, "y": bad})
    assert len(begun) == 1 and begun[0].done()


def test_a_view_released_during_the_task_is_noticed(connect):
    ends = connect("shm")
    ref = ends.put()
    with Inputs(ends.reader, eager={"x": ref}) as inputs:
        inputs.wait_eager(5)
        inputs.check()
        ends.owner.release(ref)
        with pytest.raises(StaleTensor):
            inputs.check()


def test_names_that_are_no_inputs(ends: Ends):
    with Inputs(ends.reader, eager={"x": ends.put()}, deferred={"late": None}) as inputs:
        with pytest.raises(KeyError):
            inputs["y"]
        for name in ("x", "y"):
            with pytest.raises(TensorError, match=name):
                inputs.arrive(name, ends.put())
