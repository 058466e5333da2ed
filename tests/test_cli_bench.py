"""`genserve bench serve` against a real server, and what it prints."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from genserve.cli_bench import app
from tests.core.server.openai_stub import Stub, serving


@pytest.fixture
def stub():
    return Stub()


@pytest.fixture
def url(stub):
    with serving(stub) as base_url:
        yield base_url


def bench(*arguments, exit_code=0):
    result = CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, result.output
    return result


def test_json_of_a_rate_sweep_and_nothing_else_on_stdout(url, stub):
    stub.model_ids = ["ok", "fast"]
    arguments = ["--base-url", url, "--model", "fast", "--workload", "chat", "--num-requests", "10"]
    result = bench(
        *arguments,
        "--rate",
        "50,100",
        "--rate",
        "inf",
        "--slo",
        "ttft=5,e2e=60",
        "--json",
        "--num-warmups",
        "2",
    )
    report = json.loads(result.stdout)
    assert [point["label"] for point in report["points"]] == ["rate 50/s", "rate 100/s", "rate inf/s"]
    assert [point["summary"]["num_ok"] for point in report["points"]] == [10, 10, 10]
    assert [point["summary"]["slo_attainment"] for point in report["points"]] == [1.0, 1.0, 1.0]
    assert report["points"][0]["offered_rate_per_s"] == pytest.approx(50.0)
    assert report["workload"]["name"] == "chat"
    prompts = [body["messages"][0]["content"] for body in stub.bodies]
    assert len(prompts) == len(set(prompts)) == 32  # no run can profit from another's prefix cache


def test_files_and_table_of_a_concurrency_sweep(url, tmp_path):
    out = tmp_path / "report"
    result = bench(
        "--base-url", url, "--concurrency", "2,4", "--num-requests", "6", "--slo", "tpot=1", "--out", str(out)
    )
    assert "concurrency 4" in result.stdout
    assert "goodput" in result.stdout
    assert "SLO: tpot=1" in result.stdout
    names = {path.name for path in out.iterdir()}
    assert {
        "report.json",
        "requests.jsonl",
        "ttft_cdf.png",
        "e2e_cdf.png",
        "timeline_1.png",
        "sweep.png",
    } <= names
    assert json.loads((out / "report.json").read_text())["target"]["model"] == "ok"  # found by asking
    assert len((out / "requests.jsonl").read_text().splitlines()) == 12


def test_api_key_is_sent_and_never_shown(url, stub, tmp_path):
    result = bench(
        "--base-url",
        url,
        "--api-key",
        "hush",
        "--rate",
        "50",
        "--num-requests",
        "2",
        "--json",
        "--out",
        str(tmp_path),
    )
    assert stub.headers[0]["authorization"] == "Bearer hush"
    assert "hush" not in result.output + (tmp_path / "report.json").read_text()


def test_a_trace_is_replayed_as_it_says(url, stub, tmp_path):
    trace = tmp_path / "azure.csv"
    rows = "".join(f"2023-11-16 18:15:4{second},{500 + second},{2 + second}\n" for second in range(2))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    report = json.loads(bench("--base-url", url, "--workload", str(trace), "--json").stdout)
    assert report["points"][0]["label"] == "as the workload says"
    assert [body["max_tokens"] for body in stub.bodies] == [2, 3]
    bench("--base-url", url, "--workload", str(trace), "--max-prompt-tokens", "9", "--max-output-tokens", "1")
    assert {body["max_tokens"] for body in stub.bodies[2:]} == {1}
    assert {len(body["messages"][0]["content"].split()) for body in stub.bodies[2:]} == {9}


def test_errors_are_shown_and_all_failing_is_exit_code_one(url, stub):
    stub.model_ids = ["http_429"]
    result = bench(
        "--base-url", url, "--model", "http_429", "--num-requests", "3", "--rate", "99", exit_code=1
    )
    assert "3 x http_429" in result.stdout
    assert "no http_429" in result.stdout


def test_a_model_that_the_server_lacks_is_refused_before_anything_is_sent(url, stub):
    assert (
        "model: no 'nope'; the server has: "
        in bench("--base-url", url, "--model", "nope", exit_code=2).stderr
    )
    assert stub.bodies == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "rate: expected numbers, got 'fast'"),
        (["--rate", "-1"], "rate: must be above 0"),
        (["--rate", "nan"], "rate: must be above 0"),
        (["--rate", "1", "--concurrency", "1"], "give one or the other"),
        (["--concurrency", "1.5"], "concurrency: expected numbers"),
        (["--slo", "speed=1"], "slo: expected"),
        (["--workload", "nope"], "workload: 'nope' is neither"),
        (["--base-url", "localhost"], "base_url: expected"),
        (["--vocab-size", "5", "--model", "m"], "vocab_size: chat prompts are text"),
        (["--base-url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--base-url", "http://127.0.0.1:1", "--model", "m"], "cannot be reached"),
    ],
)
def test_bad_options_name_the_option_and_exit_two(arguments, message):
    assert message in bench(*arguments, exit_code=2).stderr


def test_importing_the_command_is_cheap():
    code = (
        "import sys, genserve.cli_bench; "
        "print([m for m in ('numpy', 'torch', 'matplotlib', 'rich.progress', 'uvloop', 'httptools') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
