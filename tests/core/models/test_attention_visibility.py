"""Rows that see more than their past, on every backend: whole canvases, and blocks up to their own."""

import numpy as np
import pytest
import torch

from genserve.core.models.attention.backend import AttentionRule
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.attention.reference import ReferenceAttention
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.layers import LayerSpec

HEADS, KV_HEADS, DIM = 4, 2, 32
RULE = AttentionRule(DIM**-0.5)
LENGTHS = [1, 16, 33, 70]
TABLE = np.random.default_rng(0).permutation(20).astype(np.int32).reshape(4, 5)
BLOCK = 8
LAYERS = [LayerSpec(HEADS, KV_HEADS, DIM, None, None, RULE.scale)]


def build(kind):
    if kind == "reference":
        return ReferenceAttention(LAYERS, 20, torch.float32)
    if kind == "cpu-threads":
        team = ThreadTeam(3)
        team.num_parts = lambda work: 3  # however little there is to do
        return CpuAttention(LAYERS, 20, torch.float32, team)
    backend = CpuAttention(LAYERS, 20, torch.float32)
    backend._wide = kind == "cpu"
    return backend


def sequences():
    torch.manual_seed(0)
    return [tuple(torch.randn(n, h, DIM) for h in (HEADS, KV_HEADS, KV_HEADS)) for n in LENGTHS]


def dense(query, key, value, ends, window=0, anchors=None):
    group = HEADS // KV_HEADS
    key, value = key.repeat_interleave(group, 1).double(), value.repeat_interleave(group, 1).double()
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * RULE.scale
    at = torch.arange(len(query))
    hidden = at[None] >= torch.as_tensor(ends)[:, None]
    if window:
        hidden |= at[None] <= (at if anchors is None else torch.as_tensor(anchors))[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def rows_of(batch, made, part):
    return torch.stack(
        [
            made[s][part][p]
            for s, p in zip(batch.token_slots_T.tolist(), batch.positions_T.tolist(), strict=True)
        ]
    )


def run(backend, batch, made, rule=RULE):
    query, key, value = (rows_of(batch, made, part) for part in range(3))
    backend.write(0, key, value, batch)
    out = backend.attend(0, query, batch, rule)
    return {
        (slot, position): row
        for slot, position, row in zip(
            batch.token_slots_T.tolist(), batch.positions_T.tolist(), out, strict=True
        )
    }


def block_ends(slot):
    return np.minimum((np.arange(LENGTHS[slot]) // BLOCK + 1) * BLOCK, LENGTHS[slot])


KINDS = pytest.mark.parametrize("kind", ["cpu", "cpu-narrow", "cpu-threads", "reference"])


@KINDS
@pytest.mark.parametrize("visibility", ["bidirectional", "block-causal", "mixed"])
@pytest.mark.parametrize("window", [0, 20])
def test_a_ragged_batch_equals_dense_attention(kind, visibility, window):
    made = sequences()
    ends = []
    for slot, length in enumerate(LENGTHS):
        causal_across_blocks = visibility == "block-causal" or (visibility == "mixed" and slot % 2)
        ends.append(block_ends(slot) if causal_across_blocks else np.full(length, length))
    batch = PagedBatch.pack([(s, 0, n) for s, n in enumerate(LENGTHS)], TABLE, np.concatenate(ends))
    got = run(build(kind), batch, made, AttentionRule(RULE.scale, window))
    for slot, (query, key, value) in enumerate(made):
        expected = dense(query, key, value, ends[slot], window)
        rows = torch.stack([got[slot, position] for position in range(LENGTHS[slot])])
        torch.testing.assert_close(rows.double(), expected, atol=2e-6, rtol=2e-6)


@KINDS
def test_rows_that_skip_positions_see_the_kept_and_the_fresh(kind):
    """A later pass over two spans of one canvas: their KV is new, the rest is as an earlier pass left it."""
    backend, made, fresh = build(kind), sequences(), sequences()
    run(backend, PagedBatch.pack([(3, 0, 70), (2, 0, 33)], TABLE, [70, 33]), made)
    spans = [(3, 5, 1), (3, 40, 20), (2, 9, 8)]
    query, key, value = (tensor.clone() for tensor in made[3])
    for tensor in fresh[3]:
        tensor.add_(torch.randn(tensor.shape))
    rows = [5, *range(40, 60)]
    for tensor, new in zip((query, key, value), fresh[3], strict=True):
        tensor[rows] = new[rows]
    got = run(backend, PagedBatch.pack(spans, TABLE, [70, 70, 33]), fresh)
    expected = dense(query, key, value, [70] * 70)[rows]
    torch.testing.assert_close(
        torch.stack([got[3, p] for p in rows]).double(), expected, atol=2e-6, rtol=2e-6
    )


@pytest.mark.parametrize("other", ["cpu", "cpu-narrow", "cpu-threads"])
def test_a_row_does_not_depend_on_company_spans_or_threads(other):
    """Bit for bit, on the CPU kernels: alone in one span, and cut into pieces among others."""
    made = sequences()
    whole = run(build("cpu"), PagedBatch.pack([(3, 0, 70)], TABLE, [70]), made)
    spans = [(1, 0, 16), (3, 0, 7), (3, 7, 1), (2, 0, 33), (3, 8, 40), (0, 0, 1), (3, 48, 22)]
    together = run(build(other), PagedBatch.pack(spans, TABLE, [16, 70, 70, 33, 70, 1, 70]), made)
    assert all(torch.equal(whole[3, p], together[3, p]) for p in range(70))

    whole = run(build("cpu"), PagedBatch.pack([(3, 0, 70)], TABLE, block_ends(3)), made)
    spans = [(3, at, min(BLOCK, 70 - at)) for at in range(0, 70, BLOCK)]
    backend = build(other)
    for span in spans:  # a block at a time
        got = run(backend, PagedBatch.pack([(2, 0, 33), span], TABLE, [33, min(span[1] + BLOCK, 70)]), made)
        assert all(torch.equal(whole[3, p], got[3, p]) for p in range(span[1], span[1] + span[2]))


CANVAS_SPANS = [(3, 0, 50), (3, 50, 20), (2, 0, 33), (1, 0, 3), (1, 3, 13)]
CANVAS_AT = [None, 50, None, None, 3]


def canvas_batch(spans, starts):
    """Spans whose start is given see all of themselves, and a window that is counted from there."""
    ends = [
        np.arange(a, a + n) + 1 if at is None else np.full(n, a + n)
        for (_, a, n), at in zip(spans, starts, strict=True)
    ]
    anchors = [
        np.arange(a, a + n) if at is None else np.full(n, at)
        for (_, a, n), at in zip(spans, starts, strict=True)
    ]
    return PagedBatch.pack(spans, TABLE, np.concatenate(ends), np.concatenate(anchors))


@KINDS
@pytest.mark.parametrize("window", [0, 12, 30, 60])
def test_a_canvas_shares_a_window_that_ends_before_it(kind, window):
    """Causal rows and, behind them in one pass, a canvas, longer or shorter than the window."""
    made = sequences()
    batch = canvas_batch(CANVAS_SPANS, CANVAS_AT)
    got = run(build(kind), batch, made, AttentionRule(RULE.scale, window))
    for slot, canvas_at in ((1, 3), (2, 33), (3, 50)):
        at = np.arange(LENGTHS[slot])
        ends = np.where(at < canvas_at, at + 1, len(at))
        expected = dense(*made[slot], ends, window, np.minimum(at, canvas_at))
        rows = torch.stack([got[slot, position] for position in at.tolist()])
        torch.testing.assert_close(rows.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("other", ["cpu", "cpu-narrow", "cpu-threads"])
def test_a_canvas_does_not_depend_on_what_runs_beside_it(other):
    """Bit for bit, on the CPU kernels: in the pass of its prompt among others, and in one of its own."""
    made, rule = sequences(), AttentionRule(RULE.scale, 12)
    together = run(build(other), canvas_batch(CANVAS_SPANS, CANVAS_AT), made, rule)
    backend = build("cpu")
    run(backend, canvas_batch([(3, 0, 50)], [None]), made, rule)
    alone = run(backend, canvas_batch([(3, 50, 20)], [50]), made, rule)
    assert all(torch.equal(alone[3, p], together[3, p]) for p in range(50, 70))


def test_causal_is_what_a_batch_is_without_ends():
    spans = [(2, 10, 3), (3, 0, 4)]
    causal = PagedBatch.pack(spans, TABLE)
    assert causal.ends_T.tolist() == [11, 12, 13, 1, 2, 3, 4]
    assert causal.anchors_T.tolist() == [10, 11, 12, 0, 1, 2, 3]
    assert PagedBatch.pack(spans, TABLE, anchors=[9, 0]).anchors_T.tolist() == [9] * 3 + [0] * 4
    assert PagedBatch.pack(spans, TABLE, [20, 9]).ends_T.tolist() == [20] * 3 + [9] * 4
    assert [tuple(span) for span in causal.spans] == [(2, 0, 10, 3), (3, 3, 0, 4)]


@pytest.mark.parametrize("numbers", [[20], np.array([20, 20])])
@pytest.mark.parametrize("what", ["ends", "anchors"])
def test_ends_and_anchors_of_another_number_of_rows_are_refused(numbers, what):
    with pytest.raises(ValueError, match=rf"[12] {what} for"):
        PagedBatch.pack([(2, 10, 3), (3, 0, 4)], TABLE, **{what: numbers})
