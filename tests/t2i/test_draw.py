"""Pictures: everything is on them, nothing on top of another; and the command that makes them."""

from __future__ import annotations

import re
import sys
from itertools import combinations
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from genserve.cli import app
from genserve.core.errors import CompileError, ConfigError
from genserve.t2i.compiler import compile_workflow
from genserve.t2i.files import load_workflow
from genserve.t2i.graph import walk_all
from genserve.t2i.layout import Level, laid_out
from tests.t2i.passes.test_passes import constants, denoising, guided, repeated, with_loras
from tests.t2i.test_serialize import everything
from tests.t2i.test_workflow import explicit, figure_7

GRAPHS = [
    compile_workflow(workflow, passes, identify=lambda graph: graph).graph
    for workflow in (figure_7(), explicit(None), everything(), constants(), repeated(), with_loras())
    for passes in ((), ("common_subexpressions", "lora"))
]
GRAPHS += [compile_workflow(guided(), ["cfg_split"], identify=lambda graph: graph).graph]
GRAPHS += [compile_workflow(denoising(), ["approximate_cache"], identify=lambda graph: graph).graph]


def overlap(one, other) -> bool:
    return (
        one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    )


def check(level: Level) -> None:
    for one, other in combinations(level.boxes.values(), 2):
        assert not overlap(one, other), (one.title, other.title)
    for box in level.boxes.values():
        assert box.x >= 0 and box.y >= 0
        assert box.x + box.width <= level.width + 1e-6 and box.y + box.height <= level.height + 1e-6
        if box.inner is not None:
            assert box.inner.width <= box.width and box.inner.height <= box.height
            check(box.inner)
    for wire in level.wires:
        assert wire.source.y + wire.source.height <= wire.target.y, (wire.source.title, wire.target.title)
        assert wire.source.x <= wire.start <= wire.source.x + wire.source.width
        assert wire.target.x <= wire.stop <= wire.target.x + wire.target.width


@pytest.mark.parametrize("number", range(len(GRAPHS)))
def test_no_boxes_overlap_and_wires_go_down(number):
    check(laid_out(GRAPHS[number]))


def boxes(level: Level) -> set[object]:
    inner = [boxes(box.inner) for box in level.boxes.values() if box.inner is not None]
    return set(level.boxes).union(*inner)


@pytest.mark.parametrize("number", range(len(GRAPHS)))
def test_every_node_and_loop_is_there(number):
    graph = GRAPHS[number]
    assert {item.id for item in walk_all(graph.nodes)} <= boxes(laid_out(graph))


PROGRAM = """
from genserve.t2i.model import Model
from genserve.t2i.workflow import Workflow

class Double(Model):
    foldable = True
    def setup_io(self):
        self.add_input("x", int)
        self.add_output("x", int)
    def execute(self, model_components, x):
        return {"x": 2 * x}

with Workflow("doubled") as wf:
    x = wf.add_input("x", int)
    double = Double()
    for i in range(double(double(3))):
        x = double(x)
    wf.add_output(x, "x")
"""
OTHER = 'with Workflow("other") as other:\n    other.add_output(double(other.add_input("x", int)), "x")\n'


@pytest.fixture
def program(tmp_path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def command(*arguments, exit_code=0):
    result = CliRunner().invoke(app, ["t2i", "graph", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == exit_code, result.output
    return result.output


def test_the_command_draws_before_and_after(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(program) == (
        "doubled.svg: 3 nodes as written, 1 nodes after "
        "fold_constants, common_subexpressions, lora, dead_nodes\n"
    )
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "doubled.svg").read_text())
    assert texts.count("double_3") == 2 and texts.count("double") == 1
    assert any("i from 0 to double_2.x - 1" in text for text in texts)
    assert any("i from 0 to 12 - 1" in text for text in texts)
    assert command(program, "--output", "x.png", "--pass", "dead_nodes") == (
        "x.png: 3 nodes as written, 3 nodes after dead_nodes\n"
    )
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.width > 300 and len(picture.convert("RGB").getcolors(1 << 20) or []) > 10


def test_the_command_reads_json(program, tmp_path):
    path = tmp_path / "workflow.json"
    path.write_text(load_workflow(program).to_json())
    assert "3 nodes as written" in command(path, "--output", tmp_path / "x.svg")


def test_a_picture_is_the_same_each_time(program, tmp_path):
    for name in ("a.svg", "b.svg"):
        command(program, "--output", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_file_of_several_workflows(program):
    program.write_text(PROGRAM + OTHER)
    assert load_workflow(program, "other").name == "other"
    with pytest.raises(ConfigError, match="several workflows, name one: doubled, other"):
        load_workflow(program)
    with pytest.raises(ConfigError, match="no workflow 'third'; there are: doubled, other"):
        load_workflow(program, "third")
    assert str(program.parent) not in sys.path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "no file nowhere.py"),
        (["PROGRAM", "--output", "x.gif"], "output: x.gif must end in one of .svg, .png, .pdf"),
        (["PROGRAM", "--output", "/nowhere/x.svg"], "output: no folder /nowhere"),
        (["PROGRAM", "--pass", "faster"], "no pass 'faster'; there are: fold_constants,"),
        (["PROGRAM", "--pass", "approximate_cache"], "approximate caching finds no loop"),
        (["PROGRAM", "--workflow", "x"], "no workflow 'x'; there are: doubled"),
    ],
)
def test_bad_input_is_one_line(program, arguments, message):
    told = command(*(program if word == "PROGRAM" else word for word in arguments), exit_code=2)
    assert told.startswith("Error: ") and message in told and told.count("\n") == 1


def test_mistakes_in_the_file_are_told_with_their_line(program, tmp_path):
    program.write_text(PROGRAM + 'wf.add_output(double("x"), "y")\n')
    told = command(program, exit_code=2)
    assert told == f"Error: program.py:{PROGRAM.count(chr(10)) + 1}: double.x: wants int, got 'x'\n"
    program.write_text(PROGRAM + "unknown(3)\n")
    told = command(program, exit_code=2)
    assert (
        told == f"Error: program.py:{PROGRAM.count(chr(10)) + 1}: NameError: name 'unknown' is not defined\n"
    )
    program.write_text("x = (1\n")
    assert command(program, exit_code=2) == "Error: program.py:1: SyntaxError: '(' was never closed\n"
    program.write_text("x = 1\n")
    assert "has no workflow among its global names" in command(program, exit_code=2)
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(ConfigError, match="neither a Python file nor JSON"):
        load_workflow(tmp_path / "x.txt")


def test_a_broken_workflow_is_no_picture(program):
    program.write_text(PROGRAM.replace('wf.add_output(x, "x")', "pass"))
    with pytest.raises(CompileError, match="has no output"):
        load_workflow(program).to_graph()
