"""Packed linear layers: equal to torch's, and each row bit for bit independent of its batch."""

import os
import subprocess
import sys

import pytest
import torch

from genserve.core.models.kernels.linear import PackedLinear, _multiply, pack_linears
from genserve.core.models.kernels.threads import ThreadTeam


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (7, 33), (64, 32), (300, 100), (513, 2049)])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 12, 27])
def test_equals_torch(num_rows, num_in, num_out, num_threads):
    torch.manual_seed(0)
    layer = torch.nn.Linear(num_in, num_out, bias=num_out % 2 == 1)
    packed = PackedLinear(layer.weight.detach(), layer.bias, ThreadTeam(num_threads))
    for shape in [(num_rows, num_in), (2, num_rows, num_in)]:
        x = torch.randn(shape)
        torch.testing.assert_close(packed(x), layer(x).detach(), atol=1e-5, rtol=1e-5)
        assert torch.equal(packed(x), packed(x)), "a call must not change the layer"


@pytest.mark.parametrize("wide", [True, False])
def test_a_row_does_not_depend_on_its_batch(wide):
    torch.manual_seed(0)
    packed = PackedLinear(torch.randn(70, 600), None, ThreadTeam())
    packed._wide = wide
    x = torch.randn(29, 600)
    whole = packed(x)
    for first, last in [(0, 1), (1, 3), (3, 8), (8, 21), (2, 29)]:
        assert torch.equal(packed(x[first:last]), whole[first:last])


@pytest.mark.parametrize("num_rows", [1, 2, 7, 12, 100])
def test_bf16_weights_give_the_float32_results_bit_for_bit(num_rows):
    torch.manual_seed(0)
    weight = torch.randn(70, 300).bfloat16().float()
    narrow = PackedLinear(weight, None, ThreadTeam())
    assert narrow.panels.dtype is torch.bfloat16
    weight[0, 0] += 1e-4
    wide = PackedLinear(weight, None, ThreadTeam())
    assert wide.panels.dtype is torch.float32
    x = torch.randn(num_rows, 300)
    assert torch.equal(narrow(x)[:, 1:], wide(x)[:, 1:])


def test_narrow_and_wide_registers_agree_bit_for_bit():
    """So that results do not depend on the processor's vector width."""
    torch.manual_seed(0)
    packed = PackedLinear(torch.randn(64, 100), None, ThreadTeam())
    x = torch.randn(17, 100)
    packed._wide = True
    wide = packed(x)
    packed._wide = False
    assert torch.equal(wide, packed(x))


def test_pack_linears_keeps_a_model_s_function():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99)).eval()
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(ids).logits
        assert pack_linears(model, ThreadTeam()) == 2 * 4 + 1
        torch.testing.assert_close(model(ids).logits, before, atol=1e-5, rtol=1e-5)
    assert _multiply.signatures


def test_threads_that_share_one_heap_get_right_results():
    """Scratch that lived only by its address once went back to the allocator while it was in use."""
    script = """
import torch
from genserve.core.models.attention.backend import AttentionRule
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.kernels.linear import PackedLinear
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.layers import LayerSpec
import numpy as np
torch.manual_seed(0)
weight = torch.randn(1024, 1024).bfloat16().float()
x = torch.randn(64, 1024)
alone = PackedLinear(weight, None, ThreadTeam())(x)
shared = PackedLinear(weight, None, ThreadTeam(2))
assert all(torch.equal(shared(x), alone) for _ in range(150))
table = np.arange(64, dtype=np.int32).reshape(4, 16)
batch = PagedBatch.pack([(slot, 0, 200) for slot in range(4)], table)
query, key, value = torch.randn(3, 800, 8, 32)
outs = []
for team in (ThreadTeam(), ThreadTeam(2)):
    backend = CpuAttention([LayerSpec(8, 8, 32, None, None, 0.2)], 64, torch.float32, team)
    backend.write(0, key, value, batch)
    outs += [backend.attend(0, query, batch, AttentionRule(0.2)) for _ in range(20)]
assert all(torch.equal(out, outs[0]) for out in outs)
"""
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
