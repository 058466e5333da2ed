"""The library from a plain script."""

from __future__ import annotations

import pytest

from genserve.core.errors import Cancelled, ConfigError, InvalidRequest
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
    with Session(num_threads=1, num_executors=2, passes={"cfg_split": {}}) as session:
        workflow = sd3(tiny("sd3"))
        session.register(workflow)
        split = session.run(workflow.name, **asked)
        assert {"sd3_transformer_cond", "sd3_transformer_uncond"} <= split.receipt["nodes"].keys()
        session.register(workflow, passes={"step_cache": {"threshold": 0.0}, "approximate_cache": {}})
        first = session.run(workflow.name, **asked)
        again = session.run(workflow.name, **asked)
        assert first.receipt["cache_hits"] == []
        (hit,) = again.receipt["cache_hits"]
        assert hit["hit"]["step"] == 2 and again.receipt["nodes"]["denoise"]["runs"] == 2
        assert again.outputs[0]["image"].tobytes() == first.outputs[0]["image"].tobytes()
        with pytest.raises(ConfigError, match="no pass 'faster'"):
            session.register(workflow, passes={"faster": {}})
    with pytest.raises(ConfigError, match=r"passes.*no pass 'faster'"):
        Session(passes={"faster": {}})
