"""The library from a plain script."""

from __future__ import annotations

import time

import pytest

from genserve.core.errors import Cancelled, ConfigError, ExecutionFailed, InvalidRequest
from genserve.t2i.request import Progress
from genserve.t2i.session import Session
from tests.t2i.running import expected, same
from tests.t2i.toys import diffusion


def test_run_submit_cancel_and_bad_input():
    workflow, slow = diffusion(), diffusion("slow", sleep_s=0.01)
    with Session(num_threads=1) as session:
        assert [each.name for each in session.register(workflow).inputs] == [
            "prompt",
            "seed",
            "steps",
            "size",
        ]
        session.register(slow)
        heard = []
        made = session.run("toy", prompt="x", seed=4, on_update=heard.append)
        same(made.outputs[0], expected(workflow, prompt="x", seed=4))
        assert sum(isinstance(update, Progress) for update in heard) == 11
        running = session.submit("slow", prompt="x", seed=1, steps=500)
        running.cancel()
        with pytest.raises(Cancelled):
            running.result(5)
        with pytest.raises(InvalidRequest, match="prompt"):
            session.run("toy", seed=1)
        assert session.stats()["num_running"] == 0
    session.close()


def test_a_model_that_cannot_fit_is_refused_at_registration(tiny):
    from genserve.t2i.workflows import sd3

    with Session(num_threads=1, weights_budget=1000) as session:
        with pytest.raises(ConfigError, match="weights_budget"):
            session.register(sd3(tiny("sd3")))


def test_further_passes_and_cache_hits_in_the_receipt(tiny):
    from genserve.t2i.workflows import sd3

    asked = {"prompt": "a cat", "seed": 1, "num_steps": 4, "height": 32, "width": 32}
    with Session(num_threads=1, passes={"cfg_split": {}}) as session:
        workflow = sd3(tiny("sd3"))
        session.register(workflow)
        split = session.run(workflow.name, **asked)
        assert {"sd3_transformer_cond", "sd3_transformer_uncond"} <= split.receipt["nodes"].keys()
        session.register(workflow, passes={"step_cache": {"threshold": 0.0}, "approximate_cache": {}})
        first = session.run(workflow.name, **asked)
        again = session.run(workflow.name, **asked)
        assert first.receipt["cache_hits"] == []
        (hit,) = again.receipt["cache_hits"]
        assert hit["hit"]["step"] == 2 and again.receipt["nodes"]["sd3_transformer"]["runs"] == 2
        assert again.outputs[0]["image"].tobytes() == first.outputs[0]["image"].tobytes()
        with pytest.raises(ConfigError, match="no pass 'faster'"):
            session.register(workflow, passes={"faster": {}})
    with pytest.raises(ConfigError, match=r"passes.*no pass 'faster'"):
        Session(passes={"faster": {}})


def test_what_the_model_cannot_make_is_refused_and_what_has_no_effect_is_told(tiny):
    from genserve.t2i.workflows import sd3

    asked = {"prompt": "a cat", "seed": 1, "num_steps": 1, "height": 32, "width": 32}
    workflow = sd3(tiny("sd3"))
    with Session(num_threads=1) as session:
        step = session.register(workflow).limits["height"]["multiple_of"]
        for wrong, field in (
            ({"height": 32 + step // 2}, "height"),
            ({"width": 1 << 16}, "width"),
            ({"num_steps": 0}, "num_steps"),
            ({"scheduler": {"name": "foo"}}, "scheduler.name"),
            ({"scheduler": {"shift": "x"}}, "scheduler.shift"),
            ({"scheduler": {"foo": 1}}, "options.foo"),
        ):
            with pytest.raises(InvalidRequest) as raised:
                session.run(workflow.name, **{**asked, **wrong})
            assert raised.value.field == field
        assert session.stats()["num_failed_tasks"] == 0
        inert = session.run(workflow.name, **asked, negative_prompt="a dog", guidance_scale=1.0)
        assert "negative_prompt has no effect" in inert.warnings[0]


def test_what_a_caller_breaks_ends_his_request_alone():
    slow = diffusion("slow", sleep_s=0.01)
    with pytest.raises(ConfigError, match="num_executors"):
        Session(num_executors=0)
    with Session(num_threads=1) as session:
        session.register(slow)

        def broken(update):
            raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            session.run("slow", prompt="x", steps=2000, on_update=broken)
        with pytest.raises(InvalidRequest, match=r"steps: .*too many"):
            session.run("slow", prompt="x", steps=10**9)
        end = time.monotonic() + 5
        while session.stats()["num_held"] and time.monotonic() < end:
            time.sleep(0.01)
        assert session.stats()["num_held"] == session.stats()["num_streams"] == 0
    with pytest.raises(ExecutionFailed, match="closed"):
        session.run("slow", prompt="x")
