"""What a server holds against clients that send too much, too slowly, or never read."""

from __future__ import annotations

import asyncio
import time

import pytest

from .conftest import make_engine


async def largest_gap_s(duration_s: float) -> float:
    """The longest time that the event loop did not get to its timers."""
    end_s, last_s, largest_s = time.monotonic() + duration_s, time.monotonic(), 0.0
    while last_s < end_s:
        await asyncio.sleep(0.001)
        now_s = time.monotonic()
        largest_s, last_s = max(largest_s, now_s - last_s), now_s
    return largest_s


@pytest.fixture(scope="module")
def plain(serve_engine):
    return serve_engine(lambda: make_engine(max_queued_requests=1024))


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x", "stop": ["ab" * 500_000] * 7, "n": 8},
        {"prompt": ["word " * 1600] * 256},
    ],
)
def test_large_requests_do_not_stall_the_loop(plain, body):
    with plain.open_post("/v1/completions", {"model": "tiny", "max_tokens": 1, **body}) as sock:
        assert plain.server.call(largest_gap_s(1.0)) < 0.25  # 1 s and more when done on the loop
        assert sock.recv(12) == b"HTTP/1.1 400"  # more than the context, or than a stop string may have
