"""The load generator against a real server with known delays and faults."""

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager

import pytest

from genserve.core.errors import ConfigError, ExecutionFailed
from genserve.core.metrics.summary import SLO
from genserve.core.server.loadgen import Progress, Target, _Stream, run_load, served_models
from genserve.core.workload.arrivals import constant
from genserve.core.workload.lengths import Fixed, Independent
from genserve.core.workload.spec import RequestSpec, synthesize_prompt
from genserve.core.workload.workload import Workload
from tests.core.server.openai_stub import TPOT_S, TTFT_S, Stub, serving


@pytest.fixture
def stub():
    return Stub()


@pytest.fixture
def url(stub):
    with serving(stub) as base_url:
        yield base_url


def workload(num_requests=8, rate=40.0, output=6) -> Workload:
    lengths = Independent(Fixed(20), Fixed(output))
    return Workload.generate(constant(rate), lengths, seed=0, num_requests=num_requests)


def run(target, load=None, **options):
    async def main():
        result = await run_load(target, load or workload(), **options)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(main())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_measured_latency_and_usage_agree_with_the_server(url, stub, endpoint):
    result = run(Target(url, "ok", endpoint))
    summary = result.summary(SLO(ttft_s=TTFT_S * 10, tpot_s=TPOT_S * 10))
    assert (summary.num_ok, result.num_errors, result.num_planned) == (8, {}, 8)
    assert TTFT_S <= summary.ttft_s.p50 < TTFT_S + 0.5
    assert TPOT_S <= summary.tpot_s.p50 < TPOT_S + 0.1
    assert summary.e2e_s.p50 == pytest.approx(TTFT_S + 5 * TPOT_S, abs=0.5)
    assert summary.inter_token_s.num == 8 * 5
    assert (summary.num_output_tokens, summary.num_prompt_tokens, summary.num_cached_tokens) == (48, 616, 256)
    assert summary.slo_attainment == 1.0
    assert summary.outcomes == {"length": 8}
    assert result.offered_rate_per_s == pytest.approx(40.0)
    assert result.send_lag_s.p50 < 0.02
    assert result.num_without_usage == 0


def test_open_loop_keeps_the_schedule_whatever_the_server_does(url, stub):
    result = run(Target(url, "ok"), workload(10, rate=50.0))
    assert [t.arrival_s for t in sorted(result.timelines, key=lambda t: int(t.request_id))] == pytest.approx(
        [index / 50 for index in range(10)]
    )
    assert stub.most_streaming > 5


def test_closed_loop_keeps_its_concurrency(url, stub):
    result = run(Target(url, "ok"), workload(9, output=3), concurrency=3)
    assert stub.most_streaming == 3
    assert len(stub.clients) == 3  # connections are kept and used again
    assert (result.concurrency, result.offered_rate_per_s) == (3, None)
    assert result.summary().num_ok == 9
    assert result.duration_s >= 3 * (TTFT_S + 2 * TPOT_S)


def test_requests_say_what_is_wanted(url, stub):
    load = workload(1)
    run(Target(url, "ok", "completions", api_key="secret", vocab_size=500, extra_body={"top_k": 3}), load)
    body = stub.bodies[0]
    assert body["prompt"] == synthesize_prompt(load.requests[0], 500)
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["top_k"]) == (6, 0.0, True, 3)
    assert body["stream_options"] == {"include_usage": True}
    assert stub.headers[0]["authorization"] == "Bearer secret"
    run(Target(f"{url}/v1/", "ok", ignore_eos=False), load)
    assert "ignore_eos" not in stub.bodies[1]
    assert len(stub.bodies[1]["messages"][0]["content"].split()) == 20
    assert "secret" not in repr(Target(url, "ok", api_key="secret"))


@pytest.mark.parametrize(
    ("model", "kind", "example"),
    [
        ("http_429", "http_429", "no http_429"),
        ("http_500", "http_500", "status 500"),
        ("cut", "disconnected", "before the response was complete"),
        ("error_event", "server_error", "engine lost"),
        ("bad_json", "bad_response", "oops"),
        ("plain", "bad_response", "not an event stream: hello"),
        ("no_finish", "truncated", "without a finish reason"),
    ],
)
def test_every_error_is_counted_by_kind(url, model, kind, example):
    result = run(Target(url, model), workload(3))
    assert result.num_errors == {kind: 3}
    assert example in result.error_examples[kind]
    summary = result.summary(SLO(e2e_s=100))
    assert (summary.num_requests, summary.num_ok, summary.slo_attainment) == (3, 0, 0.0)


def test_errors_and_successes_are_counted_apart(url):
    result = run(Target(url, "alternating"), workload(10))
    assert result.num_errors == {"http_429": 5}
    assert result.summary().num_ok == 5


def test_without_usage_tokens_are_counted_by_events_and_said_so(url):
    result = run(Target(url, "no_usage"), workload(4))
    assert result.num_without_usage == 4
    assert result.summary().num_output_tokens == 24


def test_nobody_listening_is_a_connect_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    result = run(Target(f"http://127.0.0.1:{port}", "ok"), workload(2))
    assert result.num_errors == {"connect": 2}


def test_a_request_that_takes_too_long_times_out(url):
    result = run(Target(url, "hangs", request_timeout_s=0.2), workload(2))
    assert result.num_errors == {"timeout": 2}


@pytest.mark.parametrize("concurrency", [None, 2])
def test_time_limit_cuts_off_and_counts_what_is_in_flight(url, stub, concurrency):
    result = run(Target(url, "hangs"), workload(8, rate=1000), concurrency=concurrency, time_limit_s=0.3)
    num_sent = concurrency or 8
    assert result.hit_time_limit
    assert result.num_errors == {"time_limit": num_sent}
    assert result.duration_s < 2
    assert wait_until(lambda: stub.num_streaming == 0)


def test_time_limit_stops_sending(url):
    result = run(Target(url, "fast"), workload(1000, rate=50), time_limit_s=0.5)
    assert result.hit_time_limit
    assert 10 <= len(result.timelines) <= 27
    assert result.num_planned == 1000


@pytest.mark.parametrize("concurrency", [None, 2])
def test_cancelling_leaves_no_task_and_no_connection(url, stub, concurrency):
    async def main():
        task = asyncio.create_task(run_load(Target(url, "hangs"), workload(6, 100), concurrency=concurrency))
        await asyncio.sleep(0.4)
        assert stub.num_streaming == (concurrency or 6)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert wait_until(lambda: stub.num_streaming == 0)


def test_progress_tells_of_every_request(url):
    seen: list[Progress] = []
    run(Target(url, "alternating"), workload(6), on_progress=seen.append)
    assert [p.num_done for p in seen] == sorted(p.num_done for p in seen)
    last = seen[-1]
    assert (last.num_total, last.num_sent, last.num_done, last.num_failed) == (6, 6, 6, 3)
    assert last.num_output_tokens == 18


def test_served_models(url):
    assert asyncio.run(served_models(Target(url, "x"))) == ["ok"]
    with pytest.raises(ExecutionFailed, match="status 404"):
        asyncio.run(served_models(Target(f"{url}/elsewhere", "x")))
    with pytest.raises(ExecutionFailed, match="cannot be reached"):
        asyncio.run(served_models(Target("http://127.0.0.1:1", "x")))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Target("http://x", "m", "images"), "endpoint"),
        (lambda: Target("http://x", "m", vocab_size=5), "vocab_size"),
        (lambda: Target("http://x", "m", request_timeout_s=0), "request_timeout_s"),
        (lambda: Target("x:80", "m").client(), "base_url"),
        (lambda: Target("http://x:99999", "m").client(), "base_url"),
        (lambda: Target("http://x", "m", api_key="a\r\nb: c").client(), "line breaks"),
        (lambda: run(Target("http://x", "m"), concurrency=0), "concurrency"),
        (lambda: run(Target("http://x", "m"), time_limit_s=-1), "time_limit_s"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_sent(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def event(text, finish_reason=None):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\r\n\r\n"


@asynccontextmanager
async def raw_server(answer):
    """Answers the n-th request of all connections with the pieces `answer(n)`; None closes at once."""
    count = 0

    async def handle(reader, writer):
        nonlocal count
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.split(b":")[1]))
                pieces = answer(count)
                count += 1
                if pieces is None:
                    break
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)
                if b"close" in pieces[0]:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def run_raw(answer, num_requests=1):
    async def main():
        async with raw_server(answer) as base_url:
            return await run_load(Target(base_url, "m"), workload(num_requests), concurrency=1)

    return asyncio.run(main())


BODY = (
    b": ping\r\n\r\n" + event("Gr\u00fc\u00df") + event(" dich") + event("", "stop") + b"data: [DONE]\r\n\r\n"
)


def test_events_may_be_split_at_any_byte_and_use_crlf():
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    result = run_raw(lambda _: [head, *(BODY[i : i + 1] for i in range(len(BODY)))])
    (timeline,) = result.timelines
    assert (timeline.ok, timeline.num_output_tokens, timeline.outcome) == (True, 2, "stop")


def test_a_body_may_end_with_the_connection():
    result = run_raw(lambda _: [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", BODY], 3)
    assert result.summary().num_ok == 3


def test_what_is_not_http_is_a_bad_response():
    assert run_raw(lambda _: [b"SSH-2.0-OpenSSH\r\n\r\n"]).num_errors == {"bad_response": 1}


def test_an_idle_connection_closed_by_the_server_is_replaced_once():
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    result = run_raw(lambda n: None if n == 1 else [head + BODY], 3)
    assert (result.summary().num_ok, result.num_errors) == (3, {})
    assert run_raw(lambda n: None).num_errors == {"disconnected": 1}


def test_reading_an_event_costs_little():
    stream, chunk = _Stream(time.perf_counter), event(" token")
    start_s = time.process_time()
    for _ in range(5000):
        stream.feed(200, chunk)
    assert len(stream.token_times_s) == 5000
    assert (time.process_time() - start_s) / 5000 < 50e-6  # about 5 us on an idle core


def wait_until(condition, timeout_s=3.0):
    end_s = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return condition()


def test_a_workload_of_one_request_has_no_rate(url):
    load = Workload("one", (RequestSpec(0.0, 5, 2),))
    assert run(Target(url, "ok"), load).summary().num_ok == 1
