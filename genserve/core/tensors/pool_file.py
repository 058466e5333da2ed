"""The file a pool lies in: created, mapped, found by other processes, and removed when its owner is dead. (torch)

    header (one page) | generations, 8 bytes for each 256 of the pool | the pool

The owner holds an flock on its file for as long as it lives, so anyone can tell whether it does. It knows
nothing of slots: who writes the table of generations, and when, is `slots`' business.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import secrets
import struct
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from genserve.core.errors import ConfigError, StaleTensor, TensorError
from genserve.core.tensors.allocator import ALIGNMENT
from genserve.core.tensors.ref import DTYPE_BYTES

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_FILE = re.compile(r"genserve-([0-9a-f]{32})\.pool")
_MAGIC = b"genserve tensors 1".ljust(24)
_HEADER = struct.Struct("<24sQQ")  # magic, epoch, bytes of the pool
_EPOCH_AT = 24
_PAGE = 4096

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}


def _table_bytes(pool_bytes: int) -> int:
    return -(-pool_bytes // ALIGNMENT * 8 // _PAGE) * _PAGE


@dataclass(frozen=True)
class Directories:
    """Where a store's pool may lie: `/dev/shm`, else the temporary folder; or one folder that was asked for."""

    paths: tuple[Path, ...]

    @staticmethod
    def of(directory: str | Path | None) -> Directories:
        if directory is not None:
            return Directories((Path(directory),))
        return Directories((SHARED_MEMORY, Path(tempfile.gettempdir())))

    def machine(self) -> str:
        """Equal where the same files can be opened: same kernel, same user, same folders."""
        parts = [str(os.getuid())]
        with contextlib.suppress(OSError):
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        for path in self.paths:
            with contextlib.suppress(OSError):
                found = path.stat()
                parts.append(f"{found.st_dev}:{found.st_ino}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def find(self, name: str) -> Path | None:
        if not _FILE.fullmatch(f"genserve-{name}.pool"):
            raise TensorError(f"owner: {name!r} is no store's name")
        files = (path / f"genserve-{name}.pool" for path in self.paths)
        return next((file for file in files if file.exists()), None)


def remove_leftovers(directory: str | Path | None = None) -> int:
    """Remove the pools of owners that have died; how many there were."""
    removed = 0
    for folder in Directories.of(directory).paths:
        if not folder.is_dir():
            continue
        for path in folder.iterdir():
            if _FILE.fullmatch(path.name):
                removed += _remove_if_dead(path)
    return removed


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # gone in the meantime, or another user's
        return False
    try:
        if os.fstat(fd).st_uid != os.getuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under the lock: an owner between creating and locking its file notices, and takes another name.
        path.unlink()
        logger.info("removed %s: its owner is gone", path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie one after the other in this process's memory, as a pool has them."""
    return tensor.layout is torch.strided and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Between addresses, without the interpreter's lock; up to a third faster than `Tensor.copy_`."""
    ctypes.memmove(target, source, num_bytes)


class PoolBytes:
    """A pool's memory, and the tensors that lie in it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.start = data.data_ptr()
        typed = {name: data.view(dtype) for name, dtype in DTYPES.items()}
        # Making a tensor for every call costs microseconds: of these, only a view is made.
        self._typed = {name: (all_, all_.storage_offset(), all_.itemsize) for name, all_ in typed.items()}

    def tensor_at(self, offset: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Contiguous; not checked: `offset` in bytes, aligned, and all of it within the pool."""
        typed, start, item = self._typed[dtype]
        strides = [1] * len(shape)
        for axis in range(len(shape) - 1, 0, -1):
            strides[axis - 1] = strides[axis] * (shape[axis] or 1)
        return torch.as_strided(typed, shape, strides, start + offset // item)


class OwnedPool:
    """A pool of this process. The file goes with `close`, or at the next start of anyone here after a crash."""

    def __init__(self, name: str, path: Path, fd: int, epoch: int, pool_bytes: int) -> None:
        self.name, self.path, self.epoch, self.pool_bytes = name, path, epoch, pool_bytes
        self._fd = fd
        start = _PAGE + _table_bytes(pool_bytes)
        # Outside of inference mode, whose tensors couldn't be written to later.
        with torch.inference_mode(False):
            whole = torch.from_file(str(path), shared=True, size=start + pool_bytes, dtype=torch.uint8)
            self.memory = PoolBytes(whole[start:])
        self.bytes = self.memory.data.numpy().data
        self._header = whole[:_PAGE].numpy().data
        _HEADER.pack_into(self._header, 0, _MAGIC, epoch, pool_bytes)
        self.generations = whole[_PAGE:start].numpy().data.cast("Q")

    @staticmethod
    def create(pool_bytes: int, directory: str | Path | None) -> OwnedPool:
        """All memory is reserved now. Raises `ConfigError` where it isn't there."""
        if pool_bytes < ALIGNMENT:
            raise ConfigError(f"pool_bytes: {pool_bytes} is less than {ALIGNMENT}")
        pool_bytes = -(-pool_bytes // ALIGNMENT) * ALIGNMENT
        *preferred, last = Directories.of(directory).paths
        for folder in preferred:
            try:
                return OwnedPool._create_in(folder, pool_bytes)
            except OSError as error:
                logger.warning(
                    "no tensor pool of %s bytes in %s (%s): using %s", f"{pool_bytes:,}", folder, error, last
                )
        try:
            return OwnedPool._create_in(last, pool_bytes)
        except OSError as error:
            raise ConfigError(f"pool_bytes: no room for {pool_bytes:,} bytes in {last}: {error}") from error

    @staticmethod
    def _create_in(folder: Path, pool_bytes: int) -> OwnedPool:
        size = _PAGE + _table_bytes(pool_bytes) + pool_bytes
        room = os.statvfs(folder)
        if room.f_bavail * room.f_frsize < size:  # faster to refuse than to fill it up and see
            raise OSError(errno.ENOSPC, f"{room.f_bavail * room.f_frsize:,} bytes are free")
        while True:
            name = secrets.token_hex(16)
            path = folder / f"genserve-{name}.pool"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if not _is_same_file(path, fd):
                    os.close(fd)
                    continue
                os.posix_fallocate(fd, 0, size)
                return OwnedPool(name, path, fd, secrets.randbits(62) | 1, pool_bytes)
            except BaseException:
                path.unlink(missing_ok=True)
                os.close(fd)
                raise

    def close(self) -> None:
        """Others find it closed, or not at all; views that are still there stay valid."""
        struct.pack_into("<Q", self._header, _EPOCH_AT, 0)
        self.path.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Close the descriptor only: in a forked child, the parent's file and lock stay.

        Once: a closed descriptor's number soon is another file's.
        """
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class PeerPool:
    """A pool of any process of this machine, mapped for reading: writing to it is a segmentation fault."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            if found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise TensorError(f"{path} is not this user's alone")
            if found.st_size <= _PAGE:
                raise StaleTensor(f"{path} is not complete")
            mapped = mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._header = memoryview(mapped)[:_PAGE].cast("Q")
        magic, _, self.pool_bytes = _HEADER.unpack_from(mapped)
        start = _PAGE + _table_bytes(self.pool_bytes)
        if magic != _MAGIC or start + self.pool_bytes != found.st_size:
            raise TensorError(f"{path} is no tensor pool")
        self.generations = memoryview(mapped)[_PAGE:start].cast("Q")
        with warnings.catch_warnings(), torch.inference_mode(False):
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self.memory = PoolBytes(torch.frombuffer(mapped, dtype=torch.uint8, offset=start))

    @property
    def epoch(self) -> int:
        return self._header[_EPOCH_AT // 8]

    def is_alive(self) -> bool:
        """Whether the owner still holds its lock and hasn't closed."""
        if not self._header[_EPOCH_AT // 8]:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def __del__(self) -> None:
        # The mapping goes with the last view of it.
        if (fd := getattr(self, "_fd", None)) is not None:
            os.close(fd)


def _is_same_file(path: Path, fd: int) -> bool:
    try:
        found, own = path.stat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)
