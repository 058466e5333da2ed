"""What holds whichever way a tensor comes: from this process, from another one, from another machine."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from genserve.core.errors import StaleTensor, StoreFull, TensorError
from genserve.core.tensors.pool_file import DTYPES
from tests.core.tensors.conftest import POOL_BYTES, TOKEN, Ends
from tests.core.tensors.peer import same_bytes, sample

SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (3, 5, 2), (300, 257)]


def test_values_of_every_dtype_and_shape_arrive(ends: Ends):
    for dtype in DTYPES:
        for shape in SHAPES:
            ref = ends.put(dtype, shape, seed=7)
            assert ref.shape == shape and ref.dtype == dtype
            want = sample(dtype, shape, seed=7)
            assert same_bytes(ends.reader.get(ref).wait(5), want), (dtype, shape)
            out = torch.empty(shape, dtype=DTYPES[dtype])
            assert ends.reader.get(ref, out).wait(5) is out
            assert same_bytes(out, want), (dtype, shape)
            ends.owner.release(ref)
    assert ends.owner.stats()["used_bytes"] == 0


def test_many_tensors_lie_side_by_side(ends: Ends):
    refs = [ends.put("int16", (40 * seed,), seed=seed) for seed in range(40)]
    for seed, ref in enumerate(refs):
        assert same_bytes(ends.reader.get(ref).wait(5), sample("int16", (40 * seed,), seed))


def test_out_may_have_other_strides(ends: Ends):
    ref = ends.put("float32", (6, 4), seed=1)
    out = torch.zeros(4, 12)[:, ::2].T
    assert not out.is_contiguous()
    ends.reader.get(ref, out).wait(5)
    assert same_bytes(out, sample("float32", (6, 4), seed=1))


def test_an_out_that_does_not_fit_is_refused(ends: Ends):
    ref = ends.put("float32", (6, 4))
    for out in (torch.empty(4, 6), torch.empty(24), torch.empty(6, 4, dtype=torch.float16)):
        with pytest.raises(TensorError, match="out"):
            ends.reader.get(ref, out)


def test_a_released_tensor_is_stale(ends: Ends):
    ref = ends.put()
    other = ends.put()
    ends.owner.release(ref)
    with pytest.raises(StaleTensor):
        ends.reader.get(ref).wait(5)
    with pytest.raises(StaleTensor):
        ends.reader.get(ref, torch.empty(64)).wait(5)
    ends.reader.get(other).wait(5)


def test_a_reused_slot_is_stale_to_the_old_reference(ends: Ends):
    ref = ends.put(shape=(64,), seed=1)
    ends.owner.release(ref)
    new = ends.put(shape=(64,), seed=2)
    assert new.offset == ref.offset
    with pytest.raises(StaleTensor):
        ends.reader.get(ref).wait(5)
    assert same_bytes(ends.reader.get(new).wait(5), sample("float32", (64,), 2))


def test_a_tensor_stays_until_its_last_holder_lets_go(ends: Ends):
    ref = ends.put(holders=("a", "b"))
    ends.owner.release(ref, "a")
    ends.owner.release(ref, "a")
    ends.owner.release(ref, "a stranger")
    ends.reader.get(ref).wait(5)
    ends.owner.release(ref, "b")
    with pytest.raises(StaleTensor):
        ends.reader.get(ref).wait(5)
    ends.owner.release(ref, "b")
    assert ends.owner.stats()["num_tensors"] == 0


def test_a_dropped_holder_lets_go_of_everything(ends: Ends):
    alone = [ends.put(holders=("a",)) for _ in range(5)]
    shared = [ends.put(holders=("a", "b")) for _ in range(5)]
    ends.owner.drop_holder("a")
    ends.owner.drop_holder("a")
    for ref in alone:
        with pytest.raises(StaleTensor):
            ends.reader.get(ref).wait(5)
    for ref in shared:
        ends.reader.get(ref).wait(5)
    assert ends.owner.stats()["num_holders"] == 1


def test_a_stale_release_does_not_touch_the_new_tensor(ends: Ends):
    old = ends.put()
    ends.owner.release(old)
    new = ends.put()
    ends.owner.release(old)
    ends.owner.release(dataclasses.replace(new, epoch=new.epoch + 1))
    ends.reader.get(new).wait(5)


def test_a_closed_owner_is_stale(ends: Ends):
    ref = ends.put()
    ends.reader.get(ref).wait(5)
    ends.owner.close()
    with pytest.raises(TensorError):
        ends.reader.get(ref).wait(5)


def test_a_full_pool_refuses_and_says_why(ends: Ends):
    refs = [ends.put("uint8", (1 << 20,)) for _ in range(4)]
    with pytest.raises(StoreFull, match=r"do not fit now.*0 are free"):
        ends.put("uint8", (1,))
    with pytest.raises(StoreFull, match="can never fit"):
        ends.put("uint8", (POOL_BYTES + 1,))
    ends.owner.release(refs[1])
    ends.put("uint8", (1 << 20,))


def test_references_that_cannot_be_are_refused(ends: Ends):
    ref = ends.put("float32", (64,))
    ends.put("float32", (64,))
    twice = dataclasses.replace(ref, shape=(128,), nbytes=512)
    wrong = [
        twice,
        dataclasses.replace(ref, offset=ref.offset + 4),
        dataclasses.replace(ref, offset=1 << 40),
        dataclasses.replace(ref, offset=1 << 80),
        dataclasses.replace(ref, offset=-256),
        dataclasses.replace(ref, generation=0),
        dataclasses.replace(ref, generation=ref.generation + 100),
        dataclasses.replace(ref, epoch=ref.epoch + 1),
        dataclasses.replace(ref, dtype="float64"),
        dataclasses.replace(ref, dtype="os.system"),
        dataclasses.replace(ref, shape=(-64,)),
        dataclasses.replace(ref, shape=(1 << 62,), nbytes=1 << 64),
        dataclasses.replace(ref, owner=ref.owner._replace(name="../../etc/passwd")),
        dataclasses.replace(ref, owner=ref.owner._replace(name="0" * 32)),
    ]
    for bad in wrong:
        with pytest.raises(TensorError):
            ends.reader.get(bad).wait(5)
    ends.reader.get(ref).wait(5)


def test_a_view_is_refused_where_the_memory_is_far(ends: Ends):
    ref = ends.put(seed=3)
    if ends.reader.is_near(ref):
        ends.reader.check(ref)
        assert same_bytes(ends.reader.view(ref), sample("float32", (64,), 3))
    else:
        for ask in (ends.reader.view, ends.reader.check):
            with pytest.raises(TensorError, match="another machine"):
                ask(ref)


def test_a_killed_owner_is_an_error(apart: Ends):
    ref = apart.put()
    apart.reader.get(ref).wait(5)
    apart.owner.kill()
    with pytest.raises(TensorError):
        apart.reader.get(ref).wait(10)


def test_a_reopened_owner_is_stale(apart: Ends):
    ref = apart.put()
    apart.reader.get(ref).wait(5)
    apart.owner.close()
    listen = ("127.0.0.1", ref.owner.port) if ref.owner.port else None
    apart.owner.open(pool_bytes=POOL_BYTES, directory=apart.directory, listen=listen, token=TOKEN)
    again = apart.put()
    assert (again.offset, again.generation) == (ref.offset, ref.generation)
    with pytest.raises(StaleTensor):
        apart.reader.get(ref).wait(5)
    apart.reader.get(again).wait(5)
