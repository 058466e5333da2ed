"""What a server holds against clients that send too much, too slowly, or never read."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import time
from contextlib import ExitStack

import pytest

from genserve.core.testing import Script

from .conftest import API_KEY, make_engine, read_response


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
    ids=["stop strings", "prompts"],
)
def test_large_requests_do_not_stall_the_loop(plain, body):
    with plain.open_post("/v1/completions", {"model": "tiny", "max_tokens": 1, **body}) as sock:
        assert plain.server.call(largest_gap_s(1.0)) < 0.5  # a second and more when done on the loop
        assert sock.recv(12) == b"HTTP/1.1 400"  # more than the context, or than a stop string may have


def send_all(sock: socket.socket, data: bytes, num_times: int) -> int:
    """Send `data` so often, as far as the other side takes it; the number of bytes that went."""
    for number in range(num_times):
        try:
            sock.sendall(data)
        except (ConnectionError, TimeoutError):
            return number * len(data)
    return num_times * len(data)


@pytest.mark.parametrize(
    "head",
    [
        (b"GET /health HTTP/1.1\r\n", b"x-a: " + b"b" * 1000 + b"\r\n"),
        (b"GET /health HTTP/1.1\r\nx-a: ", b"b" * 1000),
        (b"GET /", b"a" * 1000),
        (b"POST /health HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-a: ", b"b" * 1000),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nx-a: ", b"b" * 1000),
    ],
)
def test_heads_over_the_limit_are_431_and_no_more_is_taken(plain, head):
    with socket.create_connection(("127.0.0.1", plain.server.port), timeout=5) as sock:
        sock.sendall(head[0])
        assert send_all(sock, head[1] * 100, 300) < 20_000_000  # what socket buffers take
    with socket.create_connection(("127.0.0.1", plain.server.port), timeout=5) as sock:
        sock.sendall(head[0])
        for _ in range(100):
            sock.sendall(head[1])
            time.sleep(0.0005)
            if select.select([sock], [], [], 0)[0] and b" 431 " in sock.recv(4096):
                break
        else:
            assert b" 431 " in sock.recv(4096)


def test_a_head_within_the_limit_passes(plain):
    with socket.create_connection(("127.0.0.1", plain.server.port), timeout=5) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nx-a: " + b"b" * 60_000 + b"\r\nconnection: close\r\n\r\n")
        assert read_response(sock) == (200, {"status": "ok"})


def test_requests_count_before_their_body_is_read_and_a_body_that_stops_is_408(serve_engine):
    served = serve_engine(gateway_options={"max_inflight_requests": 2}, body_timeout_s=0.6)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n"
        "content-length: 1000\r\n\r\n"
    ).encode()
    with ExitStack() as stack:
        socks = [
            stack.enter_context(socket.create_connection(("127.0.0.1", served.server.port), timeout=5))
            for _ in range(2)
        ]
        for sock in socks:
            sock.sendall(head + b"{")
        end = time.monotonic() + 2
        while served.gateway.num_inflight_requests < 2:
            assert time.monotonic() < end
            time.sleep(0.005)
        status, answer = served.post("/v1/completions", {"model": "tiny", "prompt": "hi"})
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        for sock in socks:
            status, answer = read_response(sock)
            assert (status, answer["error"]["code"]) == (408, "request_timeout")
            assert "after 1 bytes" in answer["error"]["message"]
    assert served.settled()
    assert served.post("/v1/completions", {"model": "tiny", "prompt": "hi"})[0] == 200


def flood(num_tokens: int, delay_s: float = 0.0):
    return lambda request: Script([[5]] * num_tokens, step_delay_s=delay_s)


# Each chunk of the stream is some 3 kB, so the sockets' buffers are full after a few hundred.
WIDE = {"model": "tiny", "prompt": "hi", "stream": True, "ignore_eos": True, "logprobs": 20, "n": 2}


def unread(served, num_tokens: int) -> socket.socket:
    """A connection that asks for a stream and reads nothing of it."""
    # Accepted connections inherit it: what the kernel would take otherwise differs between machines.
    served.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", served.server.port))
    body = json.dumps({**WIDE, "max_tokens": num_tokens}).encode()
    sock.sendall(
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return sock


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    try:
        while part := sock.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


def wait_until(condition, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_never_reads_holds_no_sequence_after_the_engine_is_done(serve_engine):
    limits = {"max_context_tokens": 1 << 20, "kv_pool_tokens": 1 << 20, "max_queued_requests": 2}
    served = serve_engine(lambda: make_engine(flood(1500), **limits), write_timeout_s=4.0)
    with unread(served, 1500) as sock:
        wait_until(lambda: len(served.engine.submitted) == 2, 30)
        wait_until(lambda: served.num_live() == 0, 30)
        wait_until(lambda: served.gateway.num_inflight_sequences("tiny") == 0, 30)
        assert served.gateway.num_inflight_requests == 1
        assert served.post("/v1/completions", {"model": "tiny", "prompt": "hi", "n": 2})[0] == 200
        wait_until(lambda: served.gateway.num_inflight_requests == 0, 10)  # the write timeout
        data = read_to_end(sock)
        assert data and b"[DONE]" not in data


def test_a_client_that_reads_late_gets_all_of_its_stream(serve_engine):
    limits = {"max_context_tokens": 1 << 20, "kv_pool_tokens": 1 << 20, "max_queued_requests": 2}
    served = serve_engine(lambda: make_engine(flood(1500), **limits))
    with unread(served, 1500) as sock:
        wait_until(lambda: len(served.engine.submitted) == 2, 30)
        wait_until(lambda: served.gateway.num_inflight_sequences("tiny") == 0, 30)
        data = read_to_end(sock)
    assert data.count(b'"logprobs":{') == 3000 and b"data: [DONE]" in data[-30:]
    assert served.settled()


def test_a_stream_that_nobody_reads_is_ended_when_too_much_is_held(serve_engine):
    limits = {"max_context_tokens": 1 << 20, "kv_pool_tokens": 1 << 20, "max_queued_requests": 2}
    served = serve_engine(lambda: make_engine(flood(100_000), **limits))
    with unread(served, 100_000):
        wait_until(lambda: len(served.engine.submitted) == 2, 30)
        wait_until(lambda: served.num_live() == 0, 30)
        assert len(served.engine.aborted) == 2
    assert served.settled()
