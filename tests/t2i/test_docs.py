"""What docs/t2i.md and the examples show runs, with a tiny random model in place of the embedded one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml
from PIL import Image

from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway
from genserve.core.server.in_thread import Parts, ServerInThread
from genserve.families import start_configured
from genserve.server_config import ServerConfig, server_config

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/t2i.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_library_sample_and_the_node_of_ones_own_run(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    library, node, _ = blocks("python")
    exec(compile(library.replace('"tiny-sd3"', repr(tiny("sd3"))), "t2i.md", "exec"), {})
    assert Image.open("circle.png").size == (64, 64)
    names: dict = {}
    exec(compile(node, "t2i.md", "exec"), names)
    assert names["Shorten"]().execute({}, text="a b c", num_words=2) == {"text": "a b"}


def test_the_client_sample_runs_against_a_server(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = server_config(models=[f"tiny-sd3={tiny('sd3')}"], model_options={"num_threads": 1})

    async def build() -> Parts:
        served = await start_configured("t2i", config.models[0])
        gateway = Gateway([served])
        return Parts(create_app(gateway), gateway, served.client.aclose)

    sample = blocks("python")[2]
    with ServerInThread(build) as server:
        exec(compile(sample.replace("http://127.0.0.1:8000", server.url), "t2i.md", "exec"), {})
    assert [Image.open(f"star-{index}.png").size for index in (0, 1)] == [(64, 64)] * 2


def test_the_configuration_sample_is_valid():
    (text,) = blocks("yaml")
    config = ServerConfig.model_validate(yaml.safe_load(text))
    assert [(model.name or model.model, model.family) for model in config.models] == [
        ("sd35", "t2i"),
        ("smollm2", "ar"),
    ]


def test_the_workflow_example_writes_its_pictures(tiny, tmp_path, monkeypatch, capsys):
    models = ("--model", tiny("sd3"), "--controlnet", tiny.controlnet("sd3"), "--lora", tiny.lora("sd3"))
    monkeypatch.setattr(sys, "argv", ["t2i_workflow.py", *models, "--output", str(tmp_path)])
    names: dict = {"__name__": "t2i_workflow_example"}
    exec(compile((ROOT / "examples/t2i_workflow.py").read_text(), "t2i_workflow.py", "exec"), names)
    names["main"]()
    pictures = [Image.open(tmp_path / f"{name}.png") for name in ("plain", "controlled", "controlled_styled")]
    assert len({picture.tobytes() for picture in pictures}) == 3
