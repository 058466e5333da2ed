"""The `genserve` command as a user meets it: in its own process where that matters."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai
import pytest
import typer
import yaml
from typer.testing import CliRunner

import genserve
from genserve.cli import app
from genserve.core.models.tiny import make_tiny_folder

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "genserve"]


def cli(*arguments, exit_code=0, stdin=None):
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"}, input=stdin)
    assert result.exit_code == exit_code, result.output
    return result


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(make_tiny_folder(tmp_path_factory.mktemp("models") / "tiny"))


def test_help_is_cheap():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "simulate" in done.stdout
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu_s < 1.0  # 0.35 s usually; the goal is 0.5 s on an idle machine


def test_the_command_line_imports_nothing_heavy():
    heavy = (
        "torch",
        "transformers",
        "ray",
        "fastapi",
        "numpy",
        "uvicorn",
        "openai",
        "matplotlib",
        "pydantic",
    )
    code = f"import sys, genserve.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def commands(command, path=()):
    yield path, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, (*path, name))


@pytest.mark.parametrize(("path", "command"), commands(typer.main.get_command(app)))
def test_help_fits_80_columns_and_cuts_nothing(path, command):
    text = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}).output
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text.replace("COMMAND [ARGS]...", "") and "…" not in text
    words = text.replace(",", " ").split()
    for option in command.params:
        assert {*option.opts, *option.secondary_opts} & set(words)


def test_help_tells_the_defaults_of_the_configuration():
    text = " ".join(cli("serve", "--help").output.split())
    for default in ("127.0.0.1", "8000", "1GiB", "64", "thread", "30", "warning"):
        assert f"[default: {default}]" in text


def test_version():
    assert cli("--version").stdout == f"genserve {genserve.__version__}\n"


def test_models():
    assert "Apache-2.0" in cli("models").stdout
    assert "packaged" in cli("models").stdout
    told = {model["name"]: model for model in json.loads(cli("models", "--json").stdout)}
    assert list(told) == ["tiny-llada", "tiny-llama", "tiny-sd3", "smollm2"]
    assert [model["packaged"] for model in told.values()] == [True, True, True, False]


def test_config_prints_what_serve_would_use(tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("api_keys: [hush]\nport: 1234\n")
    shown = yaml.safe_load(cli("config", "--config", str(path), "--set", "models.0.dtype=float32").stdout)
    assert (shown["port"], shown["models"][0]["dtype"]) == (1234, "float32")
    assert "hush" not in str(shown)
    assert shown["models"][0]["kv_pool"] == "1GiB" and None not in shown["models"][0].values()
    exact = json.loads(cli("config", "--json", "--set", "models.0.kv_pool=1000001").stdout)
    assert (exact["models"][0]["kv_pool"], exact["models"][0]["num_threads"]) == (1000001, None)


def test_what_config_prints_is_a_config(tmp_path):
    path = tmp_path / "server.yaml"
    options = ["--set", "models.0.kv_pool=256MiB", "--set", "max_body=1000001"]
    path.write_text(cli("config", *options).stdout)
    assert "256MiB" in path.read_text() and "1000001" in path.read_text()
    assert cli("config", "--config", str(path), "--json").stdout == cli("config", *options, "--json").stdout


def test_the_schema_describes_every_key():
    schema = json.loads(cli("config", "--schema").stdout)
    models = [schema["$defs"][name]["properties"] for name in ("ArModel", "DllmModel", "T2iModel")]
    keys = [item for part in (schema["properties"], *models) for item in part.items()]
    assert {"drain_timeout_s", "kv_pool", "threshold"} <= {name for name, _ in keys}
    assert [name for name, shown in keys if not shown.get("description")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--model", "video:wan"], "no family 'video'"),
        (["serve", "--model", "./nowhere.gguf", "--port", "0"], "no model './nowhere.gguf'"),
        (["serve", "--port", "99999"], "port"),
        (["serve", "--kv-pool", "lots"], "models.0.kv_pool"),
        (["serve", "--max-running", "0"], "models.0.max_running"),
        (["serve", "--config", "nowhere.yaml"], "cannot read nowhere.yaml"),
        (["serve", "--set", "prot=1"], "prot: unknown key"),
        (["config", "--set", "models.0.kvpool=1"], "models.0.kvpool: unknown key"),
        (["generate", "hi", "--json-schema", "nowhere.json"], "cannot read nowhere.json"),
        (["generate", "hi", "--top-p", "2", "-m", "never-looked-for"], "top_p: must be in (0, 1]"),
        (["generate", "hi", "--regex", "(", "-m", "never-looked-for"], "regex: "),
        (["generate", "hi", "--stop", "x" * 1025, "-m", "never-looked-for"], "stop: at most 1024"),
        (["chat", "--top-p", "2", "-m", "never-looked-for"], "top_p: must be in (0, 1]"),
        (["simulate", "ar", "--budget-tokens", "8"], "budget_tokens (8)"),
        (["serve", "--budget-tokens", "1"], "models.0: budget_tokens (1) must be"),
        (["chat", "--base-url", "http://127.0.0.1:1"], "cannot be reached"),
        (["chat", "--base-url", "foo"], "'foo' is not a URL (http://...)"),
        (["simulate", "ar", "--model", "gpt-5"], "there are: llama-3-8b"),
        (["simulate", "ar", "--hardware", "abacus"], "there are: h100"),
        (["simulate", "ar", "--model", "llama-2-70b", "--hardware", "laptop"], "leaves no room for KV"),
        (["simulate", "ar", "--workload", "nope"], "workload: 'nope'"),
        (["simulate", "ar", "--rate", "fast"], "rate: expected numbers"),
        (["simulate", "dllm", "--model", "gpt-5"], "there are: llada-8b"),
        (["simulate", "dllm", "--policy", "greedy"], "policy: no 'greedy'"),
        (["simulate", "dllm", "--profiles", "/nowhere"], "profiles: no gemm table"),
        (["simulate", "dllm", "--routing", "random"], "routing: no 'random'"),
        (["plan", "dllm", "--rate", "0"], "rate: must be above 0"),
        (["plan", "dllm", "--rate", "1", "--objective", "cost"], "objective: no 'cost'"),
        (["plan", "dllm", "--rate", "1", "--objective", "goodput"], "objective: goodput needs an slo"),
        (
            ["plan", "dllm", "--rate", "1", "--num-prefill-workers", "8"],
            "num_prefill_workers: 8 of 8 workers",
        ),
        (["plan", "dllm", "--rate", "1", "--budget-tokens", "0"], "budget_tokens: expected whole numbers"),
        (["plan", "dllm", "--rate", "1", "--overflow-tokens", "much"], "overflow_tokens: expected whole"),
        (["plan", "dllm", "--rate", "1", "--cache", "some"], "cache: no 'some'"),
        (["bench", "offline", "--workload", "nope"], "workload: 'nope'"),
    ],
)
def test_bad_input_is_one_line_and_status_two(arguments, message):
    result = cli(*arguments, exit_code=2)
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in result.output


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_in_the_environment_is_no_open_server(monkeypatch, key):
    monkeypatch.setenv("GENSERVE_API_KEY", key)
    refused = cli("serve", "-m", "./nowhere.gguf", "--port", "0", exit_code=2)
    assert "GENSERVE_API_KEY is set, but empty" in refused.stderr


def test_two_folders_of_one_name_are_refused_before_loading(tmp_path):
    for parent in ("a", "b"):
        folder = tmp_path / parent / "x"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")  # loading it would fail, and say so
    arguments = ["serve", "--port", "0", "-m", str(tmp_path / "a" / "x"), "-m", str(tmp_path / "b" / "x")]
    assert "are both called 'x'" in cli(*arguments, exit_code=2).stderr


def test_debug_shows_the_traceback():
    done = subprocess.run(
        [*COMMAND, "--debug", "serve", "--set", "prot=1"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_generate_streams_or_prints_json(tiny):
    options = ["generate", "One page", "--model", tiny, "--max-tokens", "8", "--temperature", "0"]
    told = json.loads(cli(*options, "--json").stdout)
    assert (told["num_output_tokens"], told["finish_reason"]) == (8, "length")
    streamed = cli(*options)
    assert streamed.stdout == told["text"] + "\n"
    assert "8 tokens, length" in streamed.stderr
    assert cli("generate", "-", *options[2:], stdin="One page").stdout == streamed.stdout
    assert cli(*options, "--regex", "(yes|no)").stdout in ("yes\n", "no\n")
    assert "top_p" in cli(*options, "--top-p", "7", exit_code=2).stderr


def test_chat_in_process(tiny):
    options = ["chat", "--model", tiny, "--max-tokens", "4", "--temperature", "0"]
    once = cli(*options, stdin="hello\n").stdout
    assert once.startswith("> hello\n") and once != "> hello\n"
    for new in ("/new", "/reset"):
        assert cli(*options, stdin=f"hello\n{new}\nhello\n").stdout == f"{once}> {new}\n{once}"
    assert cli(*options, stdin="hello\n/quit\nhello\n").stdout == f"{once}> /quit\n"
    unknown = cli(*options, stdin="/foo bar\nhello\n")
    assert unknown.stdout == f"> /foo bar\n{once}"
    assert "no command /foo; there are: /new" in unknown.stderr


def test_bench_offline(tiny):
    options = ["bench", "offline", "--model", tiny, "--num-requests", "4", "--max-output-tokens", "8"]
    assert "4 / 4" in cli(*options).stdout
    report = json.loads(cli(*options, "--json").stdout)
    assert report["summary"]["num_ok"] == 4
    assert report["summary"]["num_output_tokens"] == report["engine"]["num_decode_tokens"] + 4


def test_simulate_a_sweep(tmp_path):
    options = ["simulate", "ar", "--num-requests", "40", "--rate", "2,20", "--slo", "ttft=0.5"]
    assert "goodput" in cli(*options).stdout
    report = json.loads(cli(*options, "--json", "--out", str(tmp_path)).stdout)
    assert [point["label"] for point in report["points"]] == ["rate 2/s", "rate 20/s"]
    slow, fast = (point["summary"]["e2e_s"]["p50"] for point in report["points"])
    assert slow < fast
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert {"ttft_cdf.png", "sweep.png", "timeline_1.png"} <= {path.name for path in tmp_path.iterdir()}


def test_simulate_diffusion(tmp_path):
    options = ["simulate", "dllm", "--num-requests", "20", "--rate", "1,8", "--num-workers", "2"]
    told = cli(*options).stdout
    assert "s in prefills" in told and "20 / 20" in told
    report = json.loads(cli(*options, "--json", "--out", str(tmp_path)).stdout)
    slow, fast = report["points"]
    assert slow["summary"]["e2e_s"]["p50"] < fast["summary"]["e2e_s"]["p50"]
    parts = ("queue_s", "prefill_s", "decode_s")
    assert sum(slow["breakdown"][part] for part in parts) == pytest.approx(slow["breakdown"]["e2e_s"])
    assert (tmp_path / "sweep.png").exists()


def test_plan_ranks_and_tells_what_to_configure():
    options = [
        "plan",
        "dllm",
        "--workload",
        "tiny",
        "--num-requests",
        "20",
        "--rate",
        "9",
        "--num-workers",
        "2",
    ]
    options += ["--budget-tokens", "512", "--overflow-tokens", "2048,0", "--slo", "e2e=2"]
    result = cli(*options)
    assert "3 of 3: 1 of 2 prefill, no overflow, 20 requests" in result.stderr
    told = json.loads(cli(*options, "--json").stdout)
    ranked = [(each["num_prefill_workers"], each["mode"]) for each in told["ranked"]]
    assert sorted(ranked) == [(0, "colocated"), (1, "disaggregated"), (1, "hybrid")]
    for key, value in told["config"].items():
        assert f"{key}: {value}\n" in result.stdout
    assert max(map(len, CliRunner().invoke(app, options, env={"COLUMNS": "80"}).stdout.splitlines())) <= 80


def test_simulate_tells_how_many_requests_were_cut():
    options = ["simulate", "ar", "--num-requests", "20", "--kv-pool-tokens", "16"]
    assert "20 of 20 requests cut to fit: prompt and output to 8 tokens each" in cli(*options).stdout
    fitted = json.loads(cli(*options, "--json").stdout)["workload"]["fitted"]
    assert fitted == {"num_requests": 20, "num_cut": 20, "max_tokens_each": 8}
    assert "cut to fit" not in cli(*options[:-2]).stdout


def test_tables_fit_80_columns():
    options = ["simulate", "ar", "--num-requests", "20", "--rate", "2,2000", "--slo", "ttft=0.5"]
    told = CliRunner().invoke(app, options, env={"COLUMNS": "80"}).stdout
    assert max(map(len, told.splitlines())) <= 80
    for row in (r"rate 2/s +20 / 20 +\S+ +\S+ +\S+% +\S+ *\n", r"rate 2000/s +TTFT( +\S+ m?s){3} *\n"):
        assert re.search(row, told)


class Server:
    """`genserve serve` in a process of its own, ready."""

    def __init__(self, *options: str, **env: str) -> None:
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the process)
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, **env},
        )
        self.said = ""
        for line in self.process.stdout:
            self.said += line
            if line.startswith("Ready at "):
                self.url = line.split()[2].rstrip(";")
                return
        raise AssertionError(self._said_in_error())

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        # Not `communicate`: it reads past the lines that the loop above has already buffered.
        rest = self.process.stdout.read()
        assert self.process.wait(timeout=30) == 0, self._said_in_error()
        return rest

    def _said_in_error(self) -> str:
        self.errors.seek(0)
        return self.errors.read()


def test_serve_two_models_with_a_key_and_stop(tiny):
    server = Server("--model", f"one=ar:{tiny}", "--model", f"two={tiny}", GENSERVE_API_KEY="k")
    try:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0)
        assert [model.id for model in client.models.list()] == ["one", "two"]
        messages = [{"role": "user", "content": "hello"}]
        options = {"messages": messages, "max_tokens": 5, "temperature": 0}
        answers = {
            client.chat.completions.create(model=m, **options).choices[0].message.content
            for m in ("one", "two")
        }
        assert len(answers) == 1  # the same weights
        assert httpx.get(server.url + "/v1/models").status_code == 401
        metrics = httpx.get(server.url + "/metrics", headers={"authorization": "Bearer k"}).text
        assert 'genserve_engine_decode_tokens_total{model="two"} 4.0' in metrics
        talk = subprocess.run(
            [
                *COMMAND,
                "chat",
                "--base-url",
                server.url,
                "--model",
                "one",
                "--max-tokens",
                "5",
                "--temperature",
                "0",
            ],
            input="hello\n",
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "GENSERVE_API_KEY": "k"},
            check=True,
        )
        assert talk.stdout == f"> hello\n{answers.pop()}\n"
        refused = cli("chat", "--base-url", server.url, "--api-key", "no", exit_code=1, stdin="")
        assert refused.stderr == "Error: missing or wrong API key\n"
    finally:
        rest = server.stop()
    assert "curl" in server.said + rest and rest.rstrip().endswith("Stopped.")


def test_a_taken_port_is_said_before_anything_is_loaded(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = cli("serve", "--model", tiny, "--port", port, exit_code=2)
    assert result.stderr.splitlines() == [
        f"Error: host, port: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "give another --port, or --port 0 for a free one"
    ]


def test_interrupt_while_loading_ends_at_once(tiny):
    process = subprocess.Popen(
        [*COMMAND, "serve", "--model", tiny, "--port", "0"], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    with process:
        assert "importing torch" in process.stderr.readline()
        start_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert time.monotonic() - start_s < 5


def test_chat_stops_an_answer_on_interrupt(tiny):
    """Ctrl-C ends the answer, not the conversation."""
    process = subprocess.Popen(
        [*COMMAND, "chat", "--model", tiny, "--max-tokens", "400", "--seed", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    with process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert process.stdout.read(len("> hello\n") + 1)[-1:]  # the answer has begun
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(b"/new\n", timeout=30)
        assert process.returncode == 0, errors
