"""Documents: the paths they name exist, and the Python they show runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from genserve.core.models.tiny import make_tiny_folder
from genserve.server_config import ServerConfig

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"(?:genserve|tests|docs|examples|benchmarks)/[\w./*-]*[\w*/]")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_exist(document):
    text = document.read_text()
    named = set(PATH.findall(text)) | set(re.findall(r"\]\((?!http)([^)#]+)\)", text))
    missing = [name for name in named if not list(ROOT.glob(name)) and not (document.parent / name).exists()]
    assert not missing


def test_every_package_is_described():
    described = (ROOT / "docs/architecture.md").read_text()
    packages = {path.parent.relative_to(ROOT) for path in (ROOT / "genserve").glob("*/*/__init__.py")}
    packages |= {path.parent.relative_to(ROOT) for path in (ROOT / "genserve").glob("*/__init__.py")}
    packages.discard(Path("genserve/core"))
    assert [str(path) for path in sorted(packages) if str(path) not in described] == []


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(make_tiny_folder(tmp_path_factory.mktemp("models") / "smollm2"))


def run_with_tiny(source: str, tiny: str, capsys) -> str:
    assert '"smollm2"' in source
    exec(compile(source.replace('LLM("smollm2")', f"LLM({tiny!r})"), "README.md", "exec"), {})
    return capsys.readouterr().out


def test_the_library_example_runs(tiny, capsys):
    library, _ = blocks("python")
    assert run_with_tiny(library, tiny, capsys).strip()
    assert len(library.strip().splitlines()) <= 10


def test_the_client_example_runs_against_a_served_model(tiny, capsys):
    from genserve.ar.config import ArConfig
    from genserve.ar.serve import start_served
    from genserve.core.server.app import create_app
    from genserve.core.server.gateway import Gateway
    from genserve.core.server.in_thread import Parts, ServerInThread

    async def build() -> Parts:
        served = await start_served(ArConfig(model=tiny, num_threads=1))
        gateway = Gateway([served])
        return Parts(create_app(gateway), gateway, served.completer.engine.aclose)

    _, client = blocks("python")
    with ServerInThread(build) as server:
        assert run_with_tiny(client.replace("http://127.0.0.1:8000", server.url), tiny, capsys)


def test_the_example_script_runs(tiny, capsys):
    assert run_with_tiny((ROOT / "examples/generate.py").read_text(), tiny, capsys).count("tokens") == 2


def test_the_configuration_example_is_valid():
    configs = [ServerConfig.model_validate(yaml.safe_load(text)) for text in blocks("yaml")]
    assert [model.name or model.model for model in configs[0].models] == ["smollm2", "mine"]
    assert configs[1].models[0].num_prefill_workers == 5


def test_the_example_server_serves_and_stops(tiny):
    process = subprocess.Popen(
        [sys.executable, "examples/serve_ar.py", tiny, "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with process:
        url = process.stdout.readline().strip()
        body = {"model": "smollm2", "prompt": "One", "max_tokens": 2}
        assert httpx.post(url + "/v1/completions", json=body, timeout=30).status_code == 200
        process.terminate()
        assert process.wait(30) == 0
