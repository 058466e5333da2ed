"""What a model is, by content: equal identities load the same, wherever the files lie.

Owns hashing of checkpoints. Reads files, and fetches them where `model_path` is a hub id; loads nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from genserve.core.errors import ConfigError, ModelNotFound
from genserve.core.models.registry import BUILTIN_MODELS, cache_dir, located
from genserve.t2i.graph import Graph, Loop, ModelSpec, Node
from genserve.t2i.model import Model, model_class

_KEPT = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json", ".txt", ".model")
_SMALL_BYTES = 1 << 20
_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def identified(graph: Graph) -> Graph:
    """The graph with the identity and size of each model and adapter. Raises `ModelNotFound`, `ConfigError`."""
    known: dict[str, ModelSpec] = {}

    def spec(given: ModelSpec) -> ModelSpec:
        key = repr((given.cls, given.params))
        if key not in known:
            known[key] = identify(given)
        return known[key]

    def changed(item: Node | Loop) -> Node | Loop:
        if isinstance(item, Loop):
            return replace(item, body=tuple(map(changed, item.body)))
        patches = tuple(replace(patch, model=spec(patch.model)) for patch in item.patches)
        return replace(item, model=spec(item.model), patches=patches)

    return replace(graph, nodes=tuple(map(changed, graph.nodes)))


def identify(spec: ModelSpec) -> ModelSpec:
    """The spec with its identity: a hash of what tells apart what is loaded, and of the files' content."""
    cls = model_class(spec.cls)
    params = dict(spec.params)
    path = params.get("model_path")
    weights: tuple[str, ...]
    if issubclass(cls, Model):
        key, loading = cls.loading(params)
        weights, others = cls.weights, cls.content
    else:
        key, loading, weights, others = "adapter", {}, (), ("",)
    files: dict[str, Path] = {}
    if path is not None and (weights or others):
        files = dict(_files(str(path), (*weights, *others)))
        if weights and not any(_is_weight(file) for file in files.values()):
            raise ModelNotFound(f"model_path: no weights of {spec.cls} ({', '.join(weights)}) in {path}")
        if not files:
            raise ModelNotFound(f"model_path: no files of {spec.cls} in {path}")
    hashes = HashCache()
    content = [[name, hashes.of(file)] for name, file in sorted(files.items())]
    hashes.save()
    if not content and path is not None:
        loading["model_path"] = path
    text = json.dumps([key, loading, content], sort_keys=True)
    num_bytes = _num_bytes(files, weights, params.get("dtype"))
    return replace(spec, identity=hashlib.sha256(text.encode()).hexdigest(), num_bytes=num_bytes)


def _files(model_path: str, parts: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """(name, path) of the files of these parts, folders or files in `model_path`; "" is its own files."""
    folder = Path(located(model_path)).expanduser()
    if model_path in BUILTIN_MODELS:
        from genserve.core.models.fetch import fetch

        folder = fetch(model_path)
    if folder.is_file():
        yield "", folder
        return
    if not folder.is_dir():
        folder = _fetched(model_path, parts)
    for part in parts:
        place = folder / part if part else folder
        if place.is_file():
            yield part, place
        elif place.is_dir():
            for file in sorted(place.iterdir()):
                if file.is_file() and file.suffix in _KEPT and not file.name.startswith("."):
                    yield f"{part}/{file.name}" if part else file.name, file


def _fetched(model_path: str, parts: tuple[str, ...]) -> Path:
    if model_path.startswith((".", "/", "~")) or model_path.count("/") != 1:
        raise ModelNotFound(f"model_path: no file or folder {model_path}, and it is no hub id")
    from huggingface_hub import snapshot_download

    patterns = [name for part in parts for name in ((part, f"{part}/*") if part else ("*",))]
    try:
        return Path(snapshot_download(model_path, allow_patterns=patterns))
    except Exception as error:  # many kinds: offline, no such repository, no access
        raise ModelNotFound(
            f"model_path: {model_path} can be neither found here nor fetched: {error}"
        ) from error


def _is_weight(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def _num_bytes(files: dict[str, Path], weights: tuple[str, ...], dtype: Any) -> int:
    """Of the weights in memory. Of several spellings of one part, safetensors without a variant count."""
    total = 0
    for part in weights:
        own = {name: file for name, file in files.items() if name.rpartition("/")[0] == part}
        found = [file for file in own.values() if _is_weight(file)]
        tensors = [file for file in found if file.suffix == ".safetensors"] or found
        plain = [file for file in tensors if file.stem.count(".") == 0] or tensors
        total += sum(_loaded_bytes(file, dtype or "float32") for file in plain)
    return total


def _loaded_bytes(file: Path, dtype: str) -> int:
    size = _DTYPE_BYTES.get(dtype)
    if file.suffix != ".safetensors" or size is None:
        return file.stat().st_size
    with file.open("rb") as opened:
        length = opened.read(8)
        if len(length) < 8 or struct.unpack("<Q", length)[0] > 100 << 20:
            raise ConfigError(f"{file} is no safetensors file")
        try:
            header = json.loads(opened.read(struct.unpack("<Q", length)[0]))
        except ValueError as error:
            raise ConfigError(f"{file} is no safetensors file") from error
    return sum(math.prod(each["shape"]) * size for name, each in header.items() if name != "__metadata__")


class HashCache:
    """SHA-256 of files, kept in the user's cache folder by path, size and times of change."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_dir() / "hashes.json"
        self._known: dict[str, list[Any]] | None = None
        self._is_changed = False

    def of(self, file: Path) -> str:
        """The file's hash. A hub snapshot's large files carry it as the name that they link to."""
        blob = file.resolve()
        if blob.parent.name == "blobs" and len(blob.name) == 64:
            return blob.name
        status = blob.stat()
        if status.st_size <= _SMALL_BYTES:
            return _sha256(blob)
        mark = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        if self._known is None:
            self._known = self._read()
        found = self._known.get(str(blob))
        if found is not None and found[:3] == mark:
            return str(found[3])
        digest = _sha256(blob)
        self._known[str(blob)] = [*mark, digest]
        self._is_changed = True
        return digest

    def _read(self) -> dict[str, list[Any]]:
        try:
            known = json.loads(self._path.read_text())
        except (OSError, ValueError):  # none yet, or broken: hash again
            return {}
        good = isinstance(known, dict) and all(isinstance(v, list) and len(v) == 4 for v in known.values())
        return known if good else {}

    def save(self) -> None:
        """Keep what was hashed; a folder that cannot be written to only costs time."""
        if not self._is_changed or self._known is None:
            return
        merged = self._read() | self._known
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
                json.dump(merged, file)
            os.replace(file.name, self._path)
        except OSError:
            return
        self._is_changed = False


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
