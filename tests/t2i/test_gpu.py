"""Models on a GPU, with a ControlNet, an adapter and less memory than two models need, make what they make on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genserve.t2i.compiler import compile_workflow
from genserve.t2i.graph import walk
from genserve.t2i.session import Session
from genserve.t2i.workflows import sd3
from tests.t2i.models.driver import picture

ASKED = {
    "prompt": "a red circle",
    "seed": 3,
    "num_steps": 3,
    "height": 32,
    "width": 32,
    "guidance_scale": 4.0,
}
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)


def rendered(tiny, device, **config):
    """Pictures without and with an adapter, and without again; and how many models were held at the end."""
    workflow = sd3(tiny("sd3"), controlnet=tiny.controlnet("sd3"))
    asked = ASKED | {"control_image": picture(size=32)}
    with Session(device=device, num_threads=1, loras={"style": tiny.lora("sd3")}, **config) as session:
        session.register(workflow)
        results = [session.run(workflow.name, loras=loras, **asked) for loras in ((), ("style",), ())]
        held = session.stats()["num_models"]
    return [np.asarray(result.outputs[0]["image"], dtype=np.int16) for result in results], held


@pytest.fixture(scope="module")
def on_cpu(tiny):
    return rendered(tiny, "cpu")


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("num_executors", [1, 2])
def test_pictures_equal_those_of_the_cpu_where_memory_is_short(tiny, on_cpu, device, num_executors):
    graph = compile_workflow(sd3(tiny("sd3"), controlnet=tiny.controlnet("sd3"))).graph
    largest = max(node.model.num_bytes for node in walk(graph.nodes))
    expected, all_held = on_cpu
    made, held = rendered(
        tiny, device, num_executors=num_executors, weights_budget=largest, host_budget="64MiB"
    )
    assert held < all_held * num_executors
    np.testing.assert_array_equal(made[0], made[2])
    assert np.abs(made[1] - made[0]).max() > 0
    for got, want in zip(made, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=0 if device == "cpu" else 3)
