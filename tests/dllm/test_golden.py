"""Recorded reference runs through the worker: every pass, packed together and one by one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from genserve.dllm.golden import main, replay_folder

FOLDER = Path(__file__).parents[1] / "golden" / "dllm"


@pytest.mark.parametrize("alone", [False, True])
def test_every_recorded_run_is_repeated(alone: bool) -> None:
    verdicts = list(replay_folder(FOLDER, alone=alone))
    assert [verdict for verdict in verdicts if verdict.differences] == []
    assert sum(verdict.name.startswith(("llada", "dream")) for verdict in verdicts) == 37
    assert sum(verdict.name.startswith("sampler/") for verdict in verdicts) == 423


def changed(folder: Path, name: str, **fields: object) -> None:
    path = next(FOLDER.glob(f"cases/*/{name}.json"))
    case = json.loads(path.read_text())
    for key, value in fields.items():
        if value is None:
            del case[key]
        else:
            case[key] = value
    target = folder / "cases" / path.parent.name
    target.mkdir(parents=True, exist_ok=True)
    (target / path.name).write_text(json.dumps(case))


def test_what_differs_or_cannot_be_said_fails_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    shutil.copytree(FOLDER / "checkpoints" / "llada-a", tmp_path / "checkpoints" / "llada-a")
    changed(tmp_path, "llada-a-13-dual-threshold")
    changed(tmp_path, "llada-a-15-none-threshold", strategy={"kind": "threshold", "threshold": 0.3})
    changed(tmp_path, "llada-a-16-none-quota", strategy={"kind": "oracle"})
    changed(tmp_path, "llada-a-17-dual-random", rand=None)
    changed(tmp_path, "llada-a-08-dual-quota", mask_id=None)
    changed(tmp_path, "dream-a-05-none-conf")
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "1 passed, 5 failed" in out
    for reason in (
        "llada-a-15-none-threshold: pass 0: pos [",
        "llada-a-16-none-quota: cannot be replayed: strategy kind 'oracle'",
        "llada-a-17-dual-random: error: 'rand'",
        "llada-a-08-dual-quota: the case has no field 'mask_id'",
        "dream-a-05-none-conf: ",
    ):
        assert reason in out


def test_an_eos_in_the_prompt_is_the_first_of_the_canvas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "llada-a-15-none-threshold"
    case = json.loads((FOLDER / "cases" / "llada" / f"{name}.json").read_text())
    eos_id, prompt = case["eos_id"], case["prompt"]
    prompt[3] = eos_id
    final = [*prompt[:3], *[eos_id] * (len(case["final"]) - 3)]
    nothing = case["steps"][0] | {"pos": [], "tok": [], "conf": [], "eos_fill_from": 4}
    shutil.copytree(FOLDER / "checkpoints" / "llada-a", tmp_path / "checkpoints" / "llada-a")
    changed(tmp_path, name, prompt=prompt, steps=[nothing], nfe=1, nfe_without_idle=0, final=final)
    assert main([str(tmp_path)]) == 0, capsys.readouterr().out


def test_a_folder_with_nothing_to_replay_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 1
    assert "has no cases/" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 1
    assert "absent is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2]", "cannot be replayed: not a JSON object"),
        ("{", "cannot be replayed: JSONDecodeError: "),
        (
            '{"format": 1, "arch": "bert", "cache": "none", "prompt": [], "prompt_len": 0, "gen_length": 1}',
            "arch",
        ),
        ('{"format": 1, "arch": "llada2", "cache": "none", "prompt": 3}', "cannot be replayed: TypeError: "),
    ],
)
def test_a_case_that_is_none_fails_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    (tmp_path / "cases" / "any").mkdir(parents=True)
    (tmp_path / "cases" / "any" / "one.json").write_text(text)
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "FAILED any/one: " in out
    assert reason in out
    assert "0 passed, 1 failed" in out
