"""Summaries and SLOs by hand-made timelines, and that plots are drawn."""

import json
import subprocess
import sys

import pytest

from genserve.core.errors import ConfigError
from genserve.core.metrics import plots
from genserve.core.metrics.summary import SLO, Distribution, summarize
from genserve.core.metrics.timelines import Timeline


def timeline(index, ttft_s=0.2, tpot_s=0.1, num_output=11, **rest):
    first_s = index + ttft_s
    finish_s = first_s + tpot_s * (num_output - 1)
    return Timeline(str(index), float(index), first_s, finish_s, 50, num_output, **rest)


def failed(index):
    return Timeline(str(index), float(index), None, index + 0.01, 50, 0, outcome="http_500", ok=False)


def test_figures_of_a_run():
    run = [timeline(0), timeline(1, ttft_s=0.4), timeline(2, tpot_s=0.3), failed(3)]
    summary = summarize(run, duration_s=8.0, slo=SLO(ttft_s=0.3, tpot_s=0.2))
    assert (summary.num_requests, summary.num_ok) == (4, 3)
    assert summary.outcomes == {"http_500": 1, "stop": 3}
    assert summary.ttft_s.mean == pytest.approx(0.8 / 3)
    assert summary.tpot_s.p50 == pytest.approx(0.1)
    assert summary.e2e_s.max == pytest.approx(3.2)
    assert summary.output_tokens_per_s == pytest.approx(33 / 8)
    assert summary.total_tokens_per_s == pytest.approx((33 + 150) / 8)
    assert summary.requests_per_s == pytest.approx(3 / 8)
    assert summary.slo_attainment == pytest.approx(1 / 4)
    assert summary.goodput_per_s == pytest.approx(1 / 8)


def test_duration_defaults_to_first_arrival_until_last_finish():
    assert summarize([timeline(5), timeline(6)]).duration_s == pytest.approx(6 + 1.2 - 5)


def test_inter_token_times_are_pooled():
    summary = summarize([timeline(0, token_times_s=(0.2, 0.3, 0.7)), timeline(1, token_times_s=(1.2, 1.3))])
    assert summary.inter_token_s.num == 3
    assert summary.inter_token_s.max == pytest.approx(0.4)


def test_an_empty_or_all_failed_run_has_no_latency_and_is_valid_json():
    for run in ([], [failed(0)]):
        summary = summarize(run, slo=SLO(e2e_s=1.0))
        plain = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
        assert plain["ttft_s"]["p99"] is None
        assert plain["goodput_per_s"] in (None, 0.0)


def test_percentiles_are_linear_between_ranks():
    distribution = Distribution.of(range(1, 102))
    assert (distribution.p50, distribution.p90, distribution.p99) == (51, 91, 100)


def test_a_single_token_meets_any_tpot_and_no_token_misses_ttft():
    slo = SLO(ttft_s=1.0, tpot_s=0.001)
    assert slo.attained_by(timeline(0, num_output=1))
    assert not slo.attained_by(timeline(0, num_output=2))
    assert not slo.attained_by(Timeline("x", 0.0, None, 0.1, 5, 0))


def test_slo_reads_and_writes_the_same():
    slo = SLO.parse("ttft=0.5, tpot=0.05,e2e=10")
    assert slo == SLO(0.5, 0.05, 10.0)
    assert SLO.parse(str(slo)) == slo
    assert str(SLO(e2e_s=3.0)) == "e2e=3"


@pytest.mark.parametrize("text", ["", "ttft", "itl=3", "ttft=x", "ttft=-1", "ttft=nan", "ttft=1,ttft=2"])
def test_bad_slos_are_refused(text):
    with pytest.raises(ConfigError, match=r"^slo: "):
        SLO.parse(text)


def test_plots_are_drawn_even_of_little(tmp_path):
    run = [timeline(0), timeline(1, ttft_s=0.4), failed(2)]
    points = [(1.0, summarize(run, slo=SLO(ttft_s=0.3))), (2.0, summarize([failed(0)], slo=SLO(ttft_s=0.3)))]
    drawn = [
        plots.latency_cdf({"a": [0.1, 0.2], "b": []}, tmp_path / "new" / "cdf.png"),
        plots.latency_cdf({"zero": [0.0]}, tmp_path / "zero.png"),
        plots.rate_sweep(points, tmp_path / "sweep.png", title="sweep"),
        plots.timeline(run, tmp_path / "timeline.png"),
        plots.timeline([], tmp_path / "empty.png"),
        plots.bars(
            {"x": {"ours": 2.0, "theirs": 1.0}, "y": {"ours": 3.0}}, tmp_path / "b.png", ylabel="tokens/s"
        ),
    ]
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, genserve.core.metrics.plots; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
