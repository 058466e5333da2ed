"""The CPU kernels beside torch's own operators, on the same inputs, one thread, interleaved.

    python benchmarks/kernels.py [--out DIR]

linear     packed layers, with float32 and with bfloat16 weights, beside `torch.nn.functional.linear` in fp32.
attention  over paged KV, beside `scaled_dot_product_attention` over KV that already lies contiguously.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from report import save, table

from genserve.core.models.attention.backend import AttentionRule
from genserve.core.models.attention.batch import PagedBatch
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.kernels.linear import PackedLinear
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.layers import LayerSpec

ROUNDS = 9


def interleaved(*calls: Callable[[], object]) -> list[float]:
    """Median CPU seconds of each call."""
    for call in calls:
        call()
    spent: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, times in zip(calls, spent, strict=True):
            start = time.thread_time()
            call()
            times.append(time.thread_time() - start)
    return [statistics.median(times) for times in spent]


def through(layers: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def linear() -> list[dict]:
    team = ThreadTeam()
    rows = []
    for num_in, num_out in ((512, 2752), (576, 1536), (1376, 512)):
        # Several layers in turn, as a model has them: weights come from memory, not from cache.
        weights = [torch.randn(num_out, num_in) for _ in range(8)]
        plain = [partial(torch.nn.functional.linear, weight=weight) for weight in weights]
        packed = [PackedLinear(weight, None, team) for weight in weights]
        narrow = [PackedLinear(weight.bfloat16().float(), None, team) for weight in weights]
        for num_rows in (1, 8, 24, 128, 512):
            x = torch.randn(num_rows, num_in)
            ours, ours_bf16, theirs = interleaved(
                partial(through, packed, x), partial(through, narrow, x), partial(through, plain, x)
            )
            flops = 2 * num_rows * num_in * num_out * len(weights)
            rows.append(
                {
                    "what": f"{num_rows} rows, {num_in} to {num_out}",
                    "GFLOP/s": flops / ours / 1e9,
                    "bf16 weights": flops / ours_bf16 / 1e9,
                    "torch": flops / theirs / 1e9,
                    "ratio": theirs / ours,
                    "ratio, bf16 weights": theirs / ours_bf16,
                }
            )
    return rows


def attention() -> list[dict]:
    rows = []
    for num_heads, num_kv_heads in ((8, 8), (9, 3), (32, 8)):
        spec = LayerSpec(num_heads, num_kv_heads, 64, None, None, 0.125)
        backend = CpuAttention([spec], 2048, torch.float32)
        pages = np.random.default_rng(0).permutation(2048).astype(np.int32).reshape(32, 64)
        for name, spans in (
            ("32 decodes at 256", [(slot, 255, 1) for slot in range(32)]),
            ("a prompt of 512", [(0, 0, 512)]),
        ):
            batch = PagedBatch.pack(spans, pages)
            num_rows = len(batch.positions_T)
            query = torch.randn(num_rows, num_heads, 64)
            key, value = torch.randn(2, num_rows, num_kv_heads, 64)
            backend.write(0, key, value, batch)
            prompt = len(spans) == 1
            context = 512 if prompt else 256
            keys, values = torch.randn(2, len(spans), num_kv_heads, context, 64)
            queries = query.view(len(spans), -1, num_heads, 64).transpose(1, 2)
            ours, theirs = interleaved(
                partial(backend.attend, 0, query, batch, AttentionRule(0.125)),
                partial(
                    torch.nn.functional.scaled_dot_product_attention,
                    queries,
                    keys,
                    values,
                    is_causal=prompt,
                    enable_gqa=True,
                ),
            )
            rows.append(
                {
                    "what": f"{name}, {num_heads} heads over {num_kv_heads}",
                    "ms": 1e3 * ours,
                    "torch, contiguous KV, ms": 1e3 * theirs,
                    "ratio": theirs / ours,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/kernels"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sections = {"linear": linear(), "attention": attention()}
    for title, rows in sections.items():
        print(f"\n## {title}\n{table(rows)}")
    label = "times as fast as torch"
    save("kernels", sections, dict.fromkeys(sections, ("what", "ratio", label)), args.out)


if __name__ == "__main__":
    main()
