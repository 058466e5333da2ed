"""The example script as a person runs it, and the command line with a diffusion model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from genserve.cli import app
from genserve.dllm.models.tiny import write_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(write_tiny("llada", tmp_path_factory.mktemp("models") / "llada"))


def test_the_example_shows_answers_settling_out_of_order(folder):
    done = subprocess.run(
        [sys.executable, "examples/serve_dllm.py", "--model", folder, "--pause", "0", "Where is the fox?"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    drawn = [line.split("| ", 1)[1] for line in done.stdout.splitlines() if line.startswith("pass")]
    assert len(drawn) > 2 and "▒" in drawn[0] and "▒" not in drawn[-1]
    assert any(re.search("▒[^▒]+▒", line) for line in drawn), "nothing settled between open places"
    assert "infill | " in done.stdout and "tokens a pass" in done.stdout


def cli(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exit_code, result.output
    return result.output if exit_code else result.stdout


def test_generate_takes_options_of_the_family(folder):
    command = ["generate", "One page", "-m", folder, "--max-tokens", "16", "--json"]
    plain = json.loads(cli(*command))
    assert (plain["num_output_tokens"], plain["finish_reason"]) == (16, "length")
    assert plain["text"] == json.loads(cli(*command, "-o", "cache=dual", "-o", "threshold=0.9"))["text"]
    assert plain["text"] != json.loads(cli(*command, "-o", "unmasking={kind: sequential, steps: 4}"))["text"]
    refused = cli(*command, "-o", "cache=lru", exit_code=2)
    assert "Error: cache: no 'lru'" in refused
    assert "expected KEY=VALUE" in cli(*command, "-o", "cache", exit_code=2)


def test_bench_offline_takes_either_family(folder):
    options = ["--num-requests", "4", "--max-output-tokens", "8", "--json"]
    report = json.loads(cli("bench", "offline", "-m", f"dllm:{folder}", *options))
    assert report["summary"]["num_ok"] == 4
    assert report["engine"]["num_commits"] == report["summary"]["num_output_tokens"]
