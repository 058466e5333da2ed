"""One contract for every attention backend: equal to dense attention, row by row."""

import numpy as np
import pytest
import torch

from genserve.core.models.attention.backend import AttentionRule
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.attention.reference import ReferenceAttention
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.layers import LayerSpec

CASES = [
    # query heads, KV heads, head dim, window, softcap
    (4, 4, 64, 0, 0.0),
    (9, 3, 64, 0, 0.0),
    (4, 1, 80, 0, 0.0),
    (4, 2, 8, 0, 0.0),
    (2, 2, 20, 0, 0.0),
    (4, 2, 32, 20, 0.0),
    (4, 2, 128, 0, 30.0),
    (2, 1, 256, 17, 50.0),
]


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def build(kind, layers, num_pages, dtype):
    if kind == "cpu":
        return CpuAttention(layers, num_pages, dtype)
    if kind == "cpu-narrow":
        backend = CpuAttention(layers, num_pages, dtype)
        backend._wide = False
        return backend
    if kind == "cpu-threads":
        return CpuAttention(layers, num_pages, dtype, ThreadTeam(3))
    device = "cuda" if kind == "reference-cuda" else "cpu"
    return ReferenceAttention(layers, num_pages, dtype, device=device)


def dense(query, key, value, rule):
    """Attention of a whole sequence `[T, heads, dim]`, in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1).double(), value.repeat_interleave(group, 1).double()
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    at = torch.arange(len(query))
    hidden = at[None] > at[:, None]
    if rule.window_tokens:
        hidden |= at[None] <= at[:, None] - rule.window_tokens
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "cpu-narrow",
        "cpu-threads",
        "reference",
        pytest.param("reference-cuda", marks=[pytest.mark.gpu, NEEDS_CUDA]),
    ],
)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_ragged_chunks_equal_dense_attention(kind, case, dtype):
    heads, kv_heads, dim, window, softcap = case
    rule = AttentionRule(dim**-0.5, window, softcap)
    torch.manual_seed(0)
    lengths = [1, 15, 16, 17, 70]
    backend = build(kind, [LayerSpec(kv_heads, kv_heads, dim, None, None, 1.0)] * 2, 32, dtype)
    sequences = [
        tuple(torch.randn(n, h, dim).to(dtype) for h in (heads, kv_heads, kv_heads)) for n in lengths
    ]
    page_ids = iter(np.random.default_rng(0).permutation(32))
    table = np.full((len(lengths), 5), -1, np.int32)
    for slot, n in enumerate(lengths):
        for page in range(-(-n // 16)):
            table[slot, page] = next(page_ids)
    got = [torch.empty(n, heads, dim, dtype=dtype) for n in lengths]
    done = [0] * len(lengths)
    rng = np.random.default_rng(1)
    while any(done[i] < n for i, n in enumerate(lengths)):
        spans = []
        for slot in rng.permutation(len(lengths)).tolist():
            left = lengths[slot] - done[slot]
            if left:
                spans.append((slot, done[slot], int(rng.integers(1, left + 1))))
        batch = PagedBatch.pack(spans, table)
        parts = [
            torch.cat([sequences[slot][part][start : start + n] for slot, start, n in spans])
            for part in range(3)
        ]
        # The layout that models hand over: [heads, tokens, dim], transposed.
        query, key, value = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts)
        device = "cuda" if kind.endswith("cuda") else "cpu"
        backend.write(1, key.to(device), value.to(device), batch)
        out = backend.attend(1, query.to(device), batch, rule).cpu()
        assert out.shape == query.shape
        assert out.dtype == dtype
        for span in batch.spans:
            got[span.slot][span.start : span.start + span.num_tokens] = out[span.row :][: span.num_tokens]
            done[span.slot] += span.num_tokens
    for slot, (query, key, value) in enumerate(sequences):
        expected = dense(query, key, value, rule)
        tolerance = 2e-6 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(got[slot].double(), expected, atol=tolerance, rtol=tolerance)


def test_leftovers_of_others_never_leak():
    """NaN in slots beyond a sequence's end (a broken predecessor's) must not reach it."""
    backend = CpuAttention([LayerSpec(2, 2, 16, None, None, 1.0)], 2, torch.float32)
    table = np.array([[0, 1]], np.int32)
    poison = torch.full((32, 2, 16), torch.nan)
    backend.write(0, poison, poison, PagedBatch.pack([(0, 0, 32)], table))
    good = torch.randn(5, 2, 16)
    batch = PagedBatch.pack([(0, 0, 5)], table)
    backend.write(0, good, good, batch)
    out = backend.attend(0, good, batch, AttentionRule(0.25))
    torch.testing.assert_close(
        out.double(), dense(good, good, good, AttentionRule(0.25)), atol=1e-6, rtol=1e-6
    )


def test_a_row_does_not_depend_on_chunking_or_company():
    """Bit for bit, on the CPU kernels."""
    torch.manual_seed(0)
    tensors = torch.randn(3, 40, 4, 32)
    table = np.array([[3, 1, 0], [4, 5, 2]], np.int32)
    rule = AttentionRule(0.2)

    def run(spans, wide=True):
        backend = CpuAttention([LayerSpec(4, 4, 32, None, None, 1.0)], 6, torch.float32)
        backend._wide = wide
        out = {}
        for step in spans:
            batch = PagedBatch.pack(step, table)
            rows = torch.from_numpy(batch.positions_T)
            query, key, value = tensors[:, rows]
            backend.write(0, key, value, batch)
            result = backend.attend(0, query, batch, rule)
            for slot, position, row in zip(batch.token_slots_T, batch.positions_T, result, strict=True):
                out[int(slot), int(position)] = row
        return torch.stack([out[0, position] for position in range(40)])

    whole = run([[(0, 0, 40)]])
    assert torch.equal(whole, run([[(0, 0, 7), (1, 0, 9)], [(1, 9, 1), (0, 7, 30)], [(0, 37, 3)]]))
    assert torch.equal(whole, run([[(0, 0, 5), (1, 0, 9)], [(0, 5, 35)]], wide=False))


@pytest.mark.parametrize("kind", [CpuAttention, ReferenceAttention])
@pytest.mark.parametrize("head_dim", [8, 16, 20, 64, 72])
def test_a_page_costs_what_the_backend_says(kind, head_dim):
    layers = [LayerSpec(4, 2, head_dim, None, None, 1.0), LayerSpec(4, 1, head_dim, None, None, 1.0)]
    for dtype in (torch.float32, torch.bfloat16):
        assert kind(layers, 5, dtype).num_bytes == 5 * kind.page_bytes(layers, dtype)
