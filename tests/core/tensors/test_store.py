"""The store itself: its file, what may be put, drafts, processes that die or fork."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
import torch

from genserve.core.errors import ConfigError, StaleTensor, StoreFull, TensorError
from genserve.core.tensors import pool_file
from genserve.core.tensors.ref import TensorRef
from genserve.core.tensors.store import TensorStore, remove_leftovers
from genserve.core.tensors.transports import shm
from tests.core.tensors.peer import same_bytes, sample


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("genserve-*"))


def test_the_file_is_private_reserved_and_removed(open_store, directory):
    store = open_store(1 << 20)
    (path,) = files(directory)
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_blocks * 512 >= found.st_size > 1 << 20
    assert store.address.name in path.name
    store.close()
    assert files(directory) == []
    store.close()


def test_names_are_never_used_twice(open_store):
    assert len({open_store(4096).address.name for _ in range(20)}) == 20


def test_a_store_that_is_dropped_removes_its_file(directory):
    store = TensorStore.open(pool_bytes=4096, directory=directory)
    assert len(files(directory)) == 1
    del store
    assert files(directory) == []


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_kept(open_store, new_peer, directory):
    dead, living = new_peer(), new_peer()
    dead.open(pool_bytes=4096, directory=directory)
    living.open(pool_bytes=4096, directory=directory)
    other = directory / "genserve-notes.txt"
    other.write_text("not a pool")
    dead.kill()
    assert len(files(directory)) == 3
    store = open_store(4096)
    assert {path.name for path in files(directory)} == {
        other.name,
        Path(living.path()).name,
        f"genserve-{store.address.name}.pool",
    }
    assert remove_leftovers(directory) == 0


def test_the_memory_of_dead_owners_is_let_go(open_store, new_peer, directory):
    """A reader that outlives many owners maps the living only."""
    reader = open_store()
    for _ in range(3):
        peer = new_peer()
        peer.open(pool_bytes=1 << 20, directory=directory)
        reader.get(peer.put("float32", (4,))).wait()
        peer.kill()
    mapped = {
        line.split("genserve-")[1][:32]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(directory) in line
    }
    assert reader.address.name in mapped and len(mapped) == 2


def test_a_pool_without_room_is_a_clear_error_at_the_start(directory, monkeypatch, caplog):
    with pytest.raises(ConfigError, match=r"pool_bytes.*1,125,899,906,842,624"):
        TensorStore.open(pool_bytes=1 << 50, directory=directory)
    with pytest.raises(ConfigError, match="pool_bytes"):
        TensorStore.open(pool_bytes=0, directory=directory)
    assert files(directory) == []
    monkeypatch.setattr(pool_file, "SHARED_MEMORY", Path("/nowhere"))
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    store = TensorStore.open(pool_bytes=4096)
    assert len(files(directory)) == 1
    store.close()
    assert "/nowhere" in caplog.text and "4,096" in caplog.text


def test_listening_needs_a_token(directory):
    with pytest.raises(ConfigError, match="token"):
        TensorStore.open(pool_bytes=4096, directory=directory, listen=("127.0.0.1", 0))


def test_what_can_be_put(open_store):
    store = open_store()
    grid = torch.arange(24.0).view(4, 6)
    leaf = torch.ones(3, requires_grad=True)
    negated = torch._neg_view(grid)  # contiguous, but its bytes are of the opposite sign
    for tensor in (
        grid.T,
        grid[::2, 1::2],
        grid.expand(2, 4, 6),
        leaf,
        leaf * 2,
        torch.tensor(5),
        negated,
        grid[:0],
    ):
        assert torch.equal(store.view(store.put(tensor, ["a"])), tensor)
    with torch.inference_mode():
        ref = store.put(torch.ones(5), ["a"])
    store.release(ref, "a")
    ref = store.put(torch.zeros(5), ["a"])
    assert torch.equal(store.view(ref), torch.zeros(5))
    before = store.stats()
    wrong = (torch.ones(2, dtype=torch.complex64), torch.eye(3).to_sparse(), torch.empty(3, device="meta"))
    for tensor in wrong:
        with pytest.raises(TensorError, match=r"dtype|tensor"):
            store.put(tensor, ["a"])
    with pytest.raises(TensorError, match="holders"):
        store.put(grid, [])
    assert store.stats() == before


def test_later_changes_of_the_source_do_not_show(open_store):
    store = open_store()
    source = torch.ones(10)
    ref = store.put(source, ["a"])
    source.zero_()
    assert store.view(ref).sum() == 10


def test_a_draft_is_seen_when_it_is_sealed(open_store):
    store, reader = open_store(), open_store()
    draft = store.allocate((2, 3), torch.bfloat16, ["a"])
    draft.tensor.fill_(2)
    ref = draft.seal()
    assert reader.view(ref).sum() == 12
    with pytest.raises(TensorError):
        draft.seal()
    draft.abandon()
    assert reader.view(ref).sum() == 12


def test_an_abandoned_draft_gives_its_room_back(open_store):
    store = open_store()
    with store.allocate((1000,), torch.float32, ["a"]):
        assert store.stats()["used_bytes"] > 0
    with pytest.raises(ZeroDivisionError), store.allocate((1000,), torch.float32, ["a"]):
        raise ZeroDivisionError
    assert store.stats()["used_bytes"] == 0
    with store.allocate((1000,), torch.float32, ["a"]) as draft:
        ref = draft.seal()
    store.check(ref)
    dead = store.allocate((1000,), torch.float32, ["b"])
    dead.abandon()
    with pytest.raises(TensorError):
        dead.seal()


def test_a_draft_whose_holders_went_keeps_its_room_until_it_is_sealed(open_store):
    store = open_store()
    draft = store.allocate((1000,), torch.float32, ["a"])
    store.drop_holder("a")
    assert store.stats()["used_bytes"] > 0
    ref = draft.seal()
    assert store.stats()["used_bytes"] == 0
    with pytest.raises(StaleTensor):
        store.view(ref)


def test_a_put_that_fails_gives_its_room_back(open_store, monkeypatch):
    store = open_store()

    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(torch.Tensor, "copy_", broken)
    with pytest.raises(RuntimeError):
        store.put(torch.ones(4, 4).T[1:], ["a"])
    assert store.stats()["num_tensors"] == 0


def test_references_are_small_and_travel(open_store):
    store = open_store()
    ref = store.put(torch.ones(3, 4), ["a"])
    data = pickle.dumps(ref)
    assert pickle.loads(data) == ref and hash(pickle.loads(data)) == hash(ref)
    assert len(data) < 400


def test_views_outlive_the_store(open_store):
    store = open_store()
    reader = open_store()
    ref = store.put(torch.ones(1000), ["a"])
    views = store.view(ref), reader.view(ref)
    store.close()
    reader.close()
    assert all(view.sum() == 1000 for view in views)


def test_a_closed_store_says_so(open_store):
    store, owner = open_store(), open_store()
    ref = owner.put(torch.ones(3), ["a"])
    own = store.put(torch.ones(3), ["a"])
    store.close()
    for ask in (
        lambda: store.put(torch.ones(3), ["a"]),
        lambda: store.view(own),
        lambda: store.view(ref),
        lambda: store.get(ref).wait(1),
    ):
        with pytest.raises(TensorError, match="closed"):
            ask()
    store.release(own, "a")
    store.drop_holder("a")


def test_writing_to_a_view_cannot_change_what_others_read(open_store, new_peer, directory):
    store = open_store()
    ref = store.put(torch.zeros(1000), ["a"])
    peer = new_peer()
    peer.open(pool_bytes=4096, directory=directory)
    with pytest.raises((EOFError, ConnectionError)):
        peer.scribble(ref)
    peer.process.join(5)
    assert peer.process.exitcode == -signal.SIGSEGV
    assert store.view(ref).sum() == 0


def test_ways_without_their_device_are_refused(open_store):
    import dataclasses

    store = open_store()
    ref = store.put(torch.ones(3), ["a"])
    for way in ("cuda_ipc", "nccl", "nvshmem"):
        with pytest.raises(TensorError, match=way):
            store.get(dataclasses.replace(ref, transport=way))
    with pytest.raises(TensorError, match="pigeon"):
        store.get(dataclasses.replace(ref, transport="pigeon"))


def is_there(reader: TensorStore, ref: TensorRef) -> bool:
    try:
        reader.view(ref)
    except StaleTensor:
        return False
    return True


def _in_child(store: TensorStore, ref, pipe) -> None:
    errors = []
    for ask in (lambda: store.put(torch.ones(3), ["a"]), lambda: store.view(ref)):
        try:
            ask()
        except TensorError as error:
            errors.append(str(error))
    store.close()
    pipe.send(errors)


def test_a_fork_leaves_the_store_to_its_parent(open_store, directory):
    store = open_store()
    ref = store.put(torch.ones(3), ["a"])
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(store, ref, theirs))
    child.start()
    assert ours.poll(10)
    errors = ours.recv()
    child.join(10)
    assert len(errors) == 2 and all("fork" in error for error in errors)
    assert len(files(directory)) == 1
    assert store.view(ref).sum() == 3


def test_a_forked_child_does_not_keep_a_dead_owner_alive(new_peer, directory, open_store):
    peer = new_peer()
    peer.open(pool_bytes=4096, directory=directory)
    ref = peer.put("float32", (4,))
    child = peer.fork_sleeper()
    try:
        peer.kill()
        reader = open_store()
        deadline_s = time.monotonic() + 5
        while is_there(reader, ref) and time.monotonic() < deadline_s:
            time.sleep(0.002)  # until the child has run its first instructions
        assert not is_there(reader, ref)
        remove_leftovers(directory)
        assert len(files(directory)) == 1
    finally:
        os.kill(child, signal.SIGKILL)


def test_threads_share_a_store(open_store):
    store, reader = open_store(8 << 20), open_store()
    wrong = []

    def work(seed: int) -> None:
        try:
            held = []
            for turn in range(150):
                tensor = sample("int32", ((seed * 37 + turn * 101) % 5000,), seed * 1000 + turn)
                held.append((store.put(tensor, [f"{seed}"]), tensor))
                if len(held) > 5:
                    ref, want = held.pop(turn % 5)
                    if not same_bytes(reader.get(ref, torch.empty_like(want)).wait(), want):
                        wrong.append(ref)
                    store.release(ref, f"{seed}")
            store.drop_holder(f"{seed}")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.stats()["used_bytes"] == 0


def test_a_slot_that_is_reused_while_it_is_copied_is_stale(open_store, monkeypatch):
    """The copy went wrong after the first check, before the second."""
    store, reader = open_store(), open_store()
    ref = store.put(torch.zeros(1000), ["a"])

    def reused_meanwhile(*args):
        monkeypatch.undo()
        store.release(ref, "a")
        store.put(torch.ones(1000), ["b"])
        pool_file.copy_bytes(*args)

    monkeypatch.setattr(shm, "copy_bytes", reused_meanwhile)
    with pytest.raises(StaleTensor):
        reader.get(ref, torch.empty(1000)).wait()


@pytest.mark.parametrize(
    "shape", [(-1,), (-4, 8), (-2, -2), (1.0, 2), ("3",), (None,), (0, 1 << 40, 1 << 40)]
)
def test_a_shape_that_cannot_be_takes_no_room(open_store, shape):
    store = open_store(4096)
    with pytest.raises(TensorError, match="shape"):
        store.allocate(shape, torch.float32, ["a"])
    assert store.stats()["used_bytes"] == store.stats()["num_tensors"] == 0
    store.allocate((1024,), torch.float32, ["a"]).seal()


def test_a_draft_that_cannot_be_made_gives_its_room_back(open_store, monkeypatch):
    store = open_store(4096)

    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(store._local, "writable", fails)
    with pytest.raises(MemoryError):
        store.allocate((4,), torch.float32, ["a"])
    assert store.stats()["used_bytes"] == 0


def test_a_pool_that_cannot_be_opened_is_the_fetch_s_error(open_store, directory):
    store, reader = open_store(), open_store()
    ref = store.put(torch.zeros(10), ["a"])
    (path,) = (path for path in files(directory) if store.address.name in path.name)
    aside = path.rename(directory / "aside")
    path.symlink_to(aside)
    fetch = reader.get(ref)
    with pytest.raises(TensorError, match="owner"):
        fetch.wait()
    path.unlink()
    aside.rename(path)
    reader.get(ref).wait()


def test_full_is_full_for_drafts_too(open_store):
    store = open_store(4096)
    with store.allocate((4096,), torch.uint8, ["a"]):
        with pytest.raises(StoreFull):
            store.allocate((0,), torch.uint8, ["a"])


def test_a_closed_store_closes_no_other_file_in_a_forked_child(tmp_path):
    store = TensorStore.open(pool_bytes=4096, directory=tmp_path)
    number = store._local.pool._fd
    store.close()
    fd = os.open(tmp_path, os.O_RDONLY)
    assert fd == number, "the number is free again"
    child = os.fork()
    if child == 0:
        try:
            os.fstat(fd)
        except OSError:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(fd)
