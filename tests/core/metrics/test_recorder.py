"""Instruments and request logs."""

import timeit

import pytest

from genserve.core.errors import ConfigError
from genserve.core.metrics.recorder import Recorder
from genserve.core.metrics.timelines import RequestLog


def test_instruments_are_made_once_and_keep_their_labels():
    recorder = Recorder({"model": "m"})
    first = recorder.counter("requests", "Requests", outcome="stop")
    assert recorder.counter("requests", "Requests", outcome="stop") is first
    assert recorder.counter("requests", "Requests", outcome="length") is not first
    assert first.labels == (("model", "m"), ("outcome", "stop"))


def test_histogram_bounds_are_inclusive_and_the_last_bucket_open():
    histogram = Recorder().histogram("x_s", "X", bounds=(0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == pytest.approx(8.65)
    assert [histogram.quantile(q) for q in (0.0, 0.3, 0.8, 1.0)] == [0.0, 0.1, 1.0, 1.0]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda r: r.gauge("a", "A"), "already is a counter"),
        (lambda r: r.counter("Bad-name", "A"), "lower case"),
        (lambda r: r.histogram("h", "H", bounds=(2.0, 1.0)), "must rise"),
        (lambda r: (r.histogram("h", "H", bounds=(1.0,)), r.histogram("h", "H")), "other bucket bounds"),
    ],
)
def test_misuse_is_refused(use, message):
    recorder = Recorder()
    recorder.counter("a", "A")
    with pytest.raises(ConfigError, match=message):
        use(recorder)


def test_a_recorder_that_is_off_does_nothing():
    recorder = Recorder(enabled=False)
    counter, histogram = recorder.counter("a", "A"), recorder.histogram("b_s", "B")
    counter.add(5)
    histogram.observe(1.0)
    recorder.gauge("c", "C").set(3)
    log = RequestLog(recorder)
    log.arrived("r", 0.0, 10)
    log.tokens("r", 1.0)
    log.finished("r", 2.0, "stop")
    assert (counter.value, histogram.num_observations, list(recorder), log.timelines) == (0, 0, [], ())


def test_observations_cost_about_a_microsecond():
    recorder = Recorder()
    log = RequestLog(recorder)
    log.arrived("r", 0.0, 10)
    histogram = recorder.histogram("x_s", "X")
    for call in (lambda: histogram.observe(0.2), lambda: log.tokens("r", 1.0)):
        best_s = min(timeit.repeat(call, number=5000, repeat=7)) / 5000
        assert best_s < 5e-6  # 0.2 and 0.4 us on an idle core


def test_request_log_follows_a_life():
    recorder = Recorder()
    log = RequestLog(recorder, max_timelines=10, keep_token_times=True)
    log.arrived("r", 10.0, 100, kind="chat")
    assert recorder.gauge("requests_in_flight", "").value == 1
    log.cached("r", 48)
    log.tokens("r", 10.5)
    log.preempted("r")
    log.tokens("r", 10.75, 2)
    log.finished("r", 11.0, "length")
    (timeline,) = log.timelines
    assert (timeline.ttft_s, timeline.tpot_s, timeline.e2e_s) == (0.5, 0.25, 1.0)
    assert (timeline.num_prompt_tokens, timeline.num_output_tokens, timeline.num_cached_tokens) == (
        100,
        3,
        48,
    )
    assert (timeline.num_preemptions, timeline.outcome, timeline.kind) == (1, "length", "chat")
    assert timeline.token_times_s == (10.5, 10.75)
    assert recorder.counter("output_tokens", "").value == 3
    assert recorder.histogram("inter_token_s", "").num_observations == 1
    assert recorder.gauge("requests_in_flight", "").value == 0


def test_request_log_ignores_what_is_unknown_and_bounds_its_memory():
    log = RequestLog(Recorder(), max_timelines=3)
    log.tokens("ghost", 1.0)
    log.finished("ghost", 1.0, "stop")
    for index in range(10):
        log.arrived(str(index), 0.0, 1)
        log.finished(str(index), 1.0, "abort", ok=False)
        log.finished(str(index), 2.0, "stop")
    assert [t.request_id for t in log.timelines] == ["7", "8", "9"]
    assert not any(t.ok for t in log.timelines)
