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
