"""Pages moved between backends through a store: the same bytes, by whatever thread, or an error."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from genserve.core.errors import StaleTensor, TensorError, TransferFailed
from genserve.core.kv.parts import KvPart
from genserve.core.models.attention.backend import AttentionRule
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.attention.reference import ReferenceAttention
from genserve.core.models.attention.transfer import KvTransfer
from genserve.core.models.layers import LayerSpec
from genserve.core.tensors.store import TensorStore

NUM_PAGES = 24
SCATTERED = (17, 2, 3, 20, 0, 11)
OTHERS = (5, 23, 1, 8, 9, 14)


def spec(num_kv_heads: int, head_dim: int) -> LayerSpec:
    return LayerSpec(2 * num_kv_heads, num_kv_heads, head_dim, None, None, head_dim**-0.5)


# Layers of unequal heads and dims, of which not all are multiples of 16; and some of a real model's size.
SMALL = [spec(2, 8), spec(1, 20), spec(4, 16), spec(2, 8), spec(3, 24)]
LARGE = [spec(4, 128)] * 5


@pytest.fixture
def store() -> Any:
    store = TensorStore.open(pool_bytes=16 << 20)
    yield store
    assert store.stats()["num_tensors"] == 0, "something is still kept"
    store.close()


def filled(kind: Any, layers: list[LayerSpec], dtype: torch.dtype, seed: int) -> Any:
    backend = kind(layers, NUM_PAGES, dtype)
    generator = torch.Generator().manual_seed(seed)
    for layer in range(len(layers)):
        for tensor in backend.page_tensors(layer):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return backend


def rows(backend: Any, num_layers: int, pages: Any) -> list[torch.Tensor]:
    return [
        tensor[list(pages)].clone() for layer in range(num_layers) for tensor in backend.page_tensors(layer)
    ]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def a_pass(backend: Any, layers: list[LayerSpec], pages: Any) -> list[torch.Tensor]:
    """Write and attend layer after layer as a model does; what attention gave."""
    table = np.array([pages], np.int32)
    num_tokens = 16 * len(pages) - 3
    batch = PagedBatch.pack([(0, 0, num_tokens)], table, [num_tokens])
    generator = torch.Generator().manual_seed(1)
    seen = []
    for layer, one in enumerate(layers):
        key, value = (
            torch.randn(num_tokens, one.num_kv_heads, one.head_dim, generator=generator) for _ in "kv"
        )
        query = torch.randn(num_tokens, one.num_heads, one.head_dim, generator=generator)
        backend.write(layer, key, value, batch)
        seen.append(backend.attend(layer, query, batch, AttentionRule(one.scaling)))
    return seen


@pytest.mark.parametrize("kind", [CpuAttention, ReferenceAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# A part for each layer, for some, for all; and parts that are gathered by the side thread.
@pytest.mark.parametrize(
    ("layers", "part_bytes"), [(SMALL, 1), (SMALL, 15_000), (SMALL, 1 << 30), (LARGE, 300_000)]
)
def test_a_pass_stages_what_it_writes_and_it_arrives_in_other_pages(
    kind, dtype, layers, part_bytes, store
) -> None:
    source, target = filled(kind, layers, dtype, 1), filled(kind, layers, dtype, 2)
    plain = filled(kind, layers, dtype, 1)
    others = [page for page in range(NUM_PAGES) if page not in OTHERS]
    before = rows(target, len(layers), others)
    out = KvTransfer(store, source, len(layers), part_bytes)
    with torch.inference_mode():
        staging = out.stage({"r": SCATTERED})
        seen = a_pass(staging.backend, layers, SCATTERED)
        parts = staging.take("r")
        staging.close()
    expected = a_pass(plain, layers, SCATTERED)
    assert same(seen, expected), "staging must not change the pass"
    assert parts is not None
    assert [part.first_layer for part in parts] == [0, *[part.end_layer for part in parts[:-1]]]
    if part_bytes == 1:
        assert len(parts) == len(layers)
    elif part_bytes < 1 << 30:
        assert 1 < len(parts) <= len(layers)
        assert all(part.ref.nbytes >= part_bytes for part in parts[:-1])
    else:
        assert len(parts) == 1
    with torch.inference_mode():
        KvTransfer(store, target, len(layers)).fetch(OTHERS, parts)
    assert same(rows(target, len(layers), OTHERS), rows(plain, len(layers), SCATTERED))
    assert same(rows(target, len(layers), others), before), "only the pages named are written"
    out.release("r", parts)
    with pytest.raises(StaleTensor):
        KvTransfer(store, target, len(layers)).fetch(OTHERS, parts)


EQUAL_BYTES = [
    (CpuAttention, [spec(4, 16)], torch.bfloat16, ReferenceAttention, [spec(4, 16)], torch.bfloat16),
    (CpuAttention, [spec(4, 16)], torch.bfloat16, CpuAttention, [spec(2, 32)], torch.bfloat16),
    (CpuAttention, [spec(4, 32)], torch.bfloat16, CpuAttention, [spec(4, 16)], torch.float32),
    (ReferenceAttention, [spec(4, 16)], torch.bfloat16, ReferenceAttention, [spec(4, 16)], torch.float16),
    (
        CpuAttention, [spec(4, 16), spec(2, 16)], torch.float32,
        CpuAttention, [spec(2, 16), spec(4, 16)], torch.float32,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "layers", "dtype", "kind_2", "layers_2", "dtype_2"), EQUAL_BYTES)
def test_pages_of_another_layout_are_refused_although_they_have_as_many_bytes(
    kind, layers, dtype, kind_2, layers_2, dtype_2, store
) -> None:
    source, target = filled(kind, layers, dtype, 1), filled(kind_2, layers_2, dtype_2, 2)
    before = rows(target, len(layers_2), range(NUM_PAGES))
    out = KvTransfer(store, source, len(layers))
    staging = out.stage({"r": SCATTERED})
    a_pass(staging.backend, layers, SCATTERED)
    parts = staging.take("r")
    assert parts is not None
    with pytest.raises(TensorError, match="layout"):
        KvTransfer(store, target, len(layers_2)).fetch(OTHERS, parts)
    assert same(rows(target, len(layers_2), range(NUM_PAGES)), before), "nothing was written"
    out.release("r", parts)


def test_a_holder_that_finds_no_room_or_whose_copy_fails_leaves_the_others_alone(store, caplog) -> None:
    backend = filled(CpuAttention, LARGE, torch.float32, 1)
    out = KvTransfer(store, backend, len(LARGE), part_bytes=300_000)
    huge = [page % NUM_PAGES for page in range(400)]
    no_such_page = (0, NUM_PAGES, *range(2, 22))
    with caplog.at_level(logging.WARNING):
        staging = out.stage(
            {"huge": huge, "good": SCATTERED, "bad": no_such_page, "bad-inline": (NUM_PAGES,)}
        )
        a_pass(staging.backend, LARGE, SCATTERED)
        good = staging.take("good")
        assert staging.take("huge") is staging.take("bad") is staging.take("bad-inline") is None
    staging.close()
    assert good is not None
    assert store.stats()["num_tensors"] == len(good)
    for holder in ("huge", "bad", "bad-inline"):
        assert any(f"KV of {holder} is not staged" in line for line in caplog.messages)
    out.release("good", good)


def test_a_pass_that_breaks_off_leaves_nothing_behind(store) -> None:
    backend = filled(CpuAttention, LARGE, torch.float32, 1)
    staging = KvTransfer(store, backend, len(LARGE), part_bytes=1).stage({"r": SCATTERED, "s": OTHERS})
    a_pass(staging.backend, LARGE[:3], SCATTERED)
    assert store.stats()["num_tensors"] > 0
    staging.close()
    assert store.stats()["num_tensors"] == 0


TOKEN = "a secret"


def test_parts_come_from_another_machine_and_what_does_not_come_is_an_error() -> None:
    far = TensorStore.open(pool_bytes=16 << 20, listen=("127.0.0.1", 0), token=TOKEN)
    near = TensorStore.open(pool_bytes=1 << 20, token=TOKEN)
    source, target = (
        filled(CpuAttention, LARGE, torch.float32, 1),
        filled(CpuAttention, LARGE, torch.float32, 2),
    )
    out = KvTransfer(far, source, len(LARGE), part_bytes=1)
    staging = out.stage({"r": SCATTERED})
    a_pass(staging.backend, LARGE, SCATTERED)
    taken = staging.take("r")
    assert taken is not None and len(taken) == 5

    def owned(part: KvPart, **owner: Any) -> KvPart:
        return part._replace(
            ref=replace(part.ref, owner=part.ref.owner._replace(machine="elsewhere", **owner))
        )

    parts = [owned(part) for part in taken]
    KvTransfer(near, target, len(LARGE)).fetch(OTHERS, parts)
    assert same(rows(target, len(LARGE), OTHERS), rows(source, len(LARGE), SCATTERED))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lost = [parts[0], owned(parts[1], port=silent.getsockname()[1]), *parts[2:]]
        with pytest.raises(TransferFailed, match=r"nothing came for 0\.1 s"):
            KvTransfer(near, target, len(LARGE), timeout_s=0.1).fetch(OTHERS, lost)
    out.release("r", taken)
    with pytest.raises(StaleTensor):
        KvTransfer(near, target, len(LARGE)).fetch(OTHERS, parts)
    assert far.stats()["num_tensors"] == 0
    near.close()
    far.close()
