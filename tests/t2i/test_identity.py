"""Models by content: copies are the same, whoever uses them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from genserve.core.errors import ModelNotFound
from genserve.t2i import identity
from genserve.t2i.compiler import compile_workflow
from genserve.t2i.graph import ModelSpec, walk
from genserve.t2i.identity import HashCache, identify
from genserve.t2i.model import Model
from genserve.t2i.workflow import Workflow
from tests.t2i.arithmetic import TENSOR, LoRA


class Encode(Model):
    weights = ("vae",)
    load_key = "vae"
    load_params = ("dtype",)

    def setup_io(self):
        self.add_input("image", TENSOR)
        self.add_output("latents", TENSOR)


class Decode(Encode):
    pass


class Unet(Encode):
    weights = ("unet",)
    load_key = ""
    load_params = None


class Plain(Model):
    def setup_io(self):
        self.add_output("x", TENSOR)


def safetensors(path: Path, *shapes, fill: bytes = b"\0") -> None:
    header = {
        f"w{i}": {"dtype": "F16", "shape": shape, "data_offsets": [0, 0]} for i, shape in enumerate(shapes)
    }
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + fill * 8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GENSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hashes.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    return checkpoint(tmp_path / "a")


def checkpoint(folder: Path) -> Path:
    safetensors(folder / "vae" / "diffusion_pytorch_model.safetensors", [3, 4], [5])
    safetensors(folder / "vae" / "diffusion_pytorch_model.fp16.safetensors", [3, 4], [5])
    (folder / "vae" / "config.json").write_text("{}")
    safetensors(folder / "unet" / "model-00001-of-00002.safetensors", [10])
    safetensors(folder / "unet" / "model-00002-of-00002.safetensors", [20])
    return folder


def found(cls, folder, **params) -> ModelSpec:
    given = tuple(sorted({"model_path": str(folder), **params}.items()))
    return identify(ModelSpec(f"{cls.__module__}:{cls.__qualname__}", given, ""))


def test_copies_are_the_same_and_changes_are_not(folder, tmp_path):
    copy = checkpoint(tmp_path / "b")
    first = found(Encode, folder)
    assert len(first.identity) == 64
    assert found(Encode, copy).identity == first.identity
    (copy / "unet" / "README.md").write_text("no part of it")
    (copy / "model_index.json").write_text("{}")
    assert found(Encode, copy).identity == first.identity
    (copy / "vae" / "config.json").write_text('{"scale": 2}')
    assert found(Encode, copy).identity != first.identity
    copy = checkpoint(tmp_path / "b")
    safetensors(copy / "vae" / "diffusion_pytorch_model.safetensors", [3, 4], [5], fill=b"\1")
    assert found(Encode, copy).identity != first.identity


def test_classes_share_by_key_and_parameters_count_where_loading_depends_on_them(folder):
    base = found(Encode, folder).identity
    assert found(Decode, folder).identity == found(Encode, folder, mode="x").identity == base
    assert found(Encode, folder, dtype="bfloat16").identity != base
    assert found(Unet, folder).identity not in (base, found(Unet, folder, mode="x").identity)


def test_size_in_memory(folder):
    assert found(Encode, folder).num_bytes == (12 + 5) * 4
    assert found(Encode, folder, dtype="bfloat16").num_bytes == (12 + 5) * 2
    assert found(Unet, folder).num_bytes == 30 * 4


def test_a_model_without_weights_reads_nothing():
    spec = identify(ModelSpec(f"{__name__}:Plain", (("model_path", "no/where"),), ""))
    other = identify(ModelSpec(f"{__name__}:Plain", (("model_path", "else/where"),), ""))
    assert spec.identity != other.identity and spec.num_bytes == 0


@pytest.mark.parametrize("path", ["/nowhere", "./nowhere", "nowhere"])
def test_no_folder(path):
    with pytest.raises(ModelNotFound, match="model_path: no file or folder"):
        found(Encode, path)


def test_a_folder_without_the_weights(tmp_path):
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="no weights of "):
        found(Encode, tmp_path)


def test_large_files_are_hashed_once(tmp_path, cache, monkeypatch):
    large = tmp_path / "large.safetensors"
    large.write_bytes(b"x" * (identity._SMALL_BYTES + 1))
    hashes = HashCache()
    digest = hashes.of(large)
    hashes.save()
    monkeypatch.setattr(identity, "_sha256", lambda file: "hashed again")
    assert HashCache().of(large) == digest
    large.write_bytes(b"y" * (identity._SMALL_BYTES + 1))
    assert HashCache().of(large) == "hashed again"
    cache.write_text("broken")
    assert HashCache().of(large) == "hashed again"


def test_the_hub_has_hashed_its_files(tmp_path, monkeypatch):
    blob = tmp_path / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    blob.write_bytes(b"weights")
    link = tmp_path / "snapshots" / "main" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    assert HashCache().of(link) == "a" * 64


def test_compiling_finds_identities_of_models_and_adapters(folder, tmp_path):
    safetensors(tmp_path / "lora.safetensors", [2])
    wf = Workflow("identified")
    x = wf.add_input("x", TENSOR)
    encode, decode = Encode(model_path=str(folder)), Decode(model_path=str(folder))
    encode.add_patch(LoRA(str(tmp_path / "lora.safetensors")))
    wf.add_output(decode(encode(x)), "x")
    graph = compile_workflow(wf).graph
    loader, first, second = walk(graph.nodes)
    assert first.model.identity == second.model.identity != ""
    assert first.patches[0].model.identity and loader.model.identity
    safetensors(tmp_path / "lora.safetensors", [2], fill=b"\1")
    changed = compile_workflow(wf).graph
    assert changed.nodes[0].model.identity != loader.model.identity
    assert changed.nodes[1].patches[0].model.identity != first.patches[0].model.identity
