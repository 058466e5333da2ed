"""Simulated serving: plain arithmetic where it can be done by hand."""

from __future__ import annotations

import pytest

from genserve.t2i.cost import Profile
from genserve.t2i.graph import Const
from genserve.t2i.simulate import SimulatedRequest, simulate
from tests.t2i.cluster import denoising

PROFILE = Profile(
    node_s={"predict": 1.0, "control": 0.5, "solve": 0.1, "encode": 0.2, "draw": 0.1, "decode": 0.3},
    load_bytes_per_s=1e3,
    overhead_s=0.0,
)


def requests(num, every_s=0.0, **fields):
    return [
        SimulatedRequest(index * every_s, f"r{index}", "denoising", {"seed": index, "x": 1}, **fields)
        for index in range(num)
    ]


def test_one_request_takes_what_its_nodes_take():
    graph = denoising(Const(10), num_bytes=0)
    (end,) = simulate([graph], requests(1), PROFILE)
    assert end.latency_s == pytest.approx(0.3 + 10 * 1.6 + 0.3, rel=1e-3)
    (end,) = simulate([graph], requests(1), PROFILE, num_executors=2)
    # The ControlNet runs beside the denoiser.
    assert end.latency_s == pytest.approx(0.2 + 10 * 1.1 + 0.3, rel=1e-3)
    (end,) = simulate([denoising(Const(10), num_bytes=100)], requests(1), PROFILE)
    assert end.latency_s == pytest.approx(0.3 + 10 * 1.6 + 0.3 + 4 * 0.1, rel=1e-3)


def test_executors_share_the_load_and_deadlines_hold():
    graph = denoising(Const(10), num_bytes=0)
    alone, shared = (
        max(end.ended_s for end in simulate([graph], requests(8), PROFILE, num_executors=num))
        for num in (1, 4)
    )
    assert alone / shared > 3
    ends = simulate([graph], requests(8, deadline_s=60.0), PROFILE)
    late = [end for end in ends if end.error]
    assert 0 < len(late) < 8 and all(end.ended_s == 60.0 for end in late)
    assert [end for end in simulate([graph], requests(8), PROFILE)] == simulate([graph], requests(8), PROFILE)
