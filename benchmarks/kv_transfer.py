"""Moving a request's KV between two workers: against a plain copy of the same bytes, and beside a pass.

    python benchmarks/kv_transfer.py --out out/kv

`copies`: KV of 128 scattered pages (2,048 tokens) of LLaDA-8B's layers in bfloat16, four of its 32: gathered
into the tensor store, fetched out of it into other pages, and a memcpy of as many bytes. `staging`: the first pass of
a block on a random LLaDA (width 512, 8 layers), kept for another worker or not; what staging adds to the
pass, and what the same copies take alone. Rounds are interleaved; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from report import save, table

from genserve.core.kv.parts import KvPart
from genserve.core.models.attention.cpu import CpuAttention
from genserve.core.models.attention.transfer import KvTransfer
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.layers import LayerSpec
from genserve.core.tensors.store import TensorStore
from genserve.core.types import SamplingParams
from genserve.dllm.canvas import OPEN
from genserve.dllm.models.registry import load_diffusion_model
from genserve.dllm.models.tiny import write_tiny
from genserve.dllm.request import DiffusionParams
from genserve.dllm.step import RELEASE, STEP, Admit, Pass, ReleaseArgs, StepArgs
from genserve.dllm.worker import DllmWorker

NUM_PAGES = 128


def medians(rounds: int, what: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each, in turn, a warm-up apart."""
    taken: dict[str, list[float]] = {name: [] for name in what}
    for number in range(rounds + 1):
        for name, do in what.items():
            began_s = time.perf_counter()
            do()
            if number:
                taken[name].append(time.perf_counter() - began_s)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def copies(rounds: int) -> list[dict[str, Any]]:
    layers = [LayerSpec(32, 32, 128, None, None, 128**-0.5)] * 4
    backend = CpuAttention(layers, 2 * NUM_PAGES, torch.bfloat16)
    for layer in range(len(layers)):
        for tensor in backend.page_tensors(layer):
            tensor.normal_()
    order = torch.randperm(2 * NUM_PAGES).tolist()
    pages, others = order[:NUM_PAGES], order[NUM_PAGES:]
    num_bytes = NUM_PAGES * CpuAttention.page_bytes(layers, torch.bfloat16)
    store = TensorStore.open(pool_bytes=2 * num_bytes)
    transfer = KvTransfer(store, backend, len(layers))
    parts: list[KvPart] = []

    def gather() -> None:
        staging = transfer.stage({"r": pages})
        for layer in range(len(layers)):
            staging._layer_written(layer)
        parts[:] = staging.take("r") or ()

    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    took_s = medians(
        rounds,
        {
            "memcpy": lambda: target.copy_(source),
            "gather into the store": gather,
            "fetch into pages": lambda: transfer.fetch(others, parts),
            "release": lambda: transfer.release("r", parts),
        },
    )
    store.close()
    rows = []
    for name in ("memcpy", "gather into the store", "fetch into pages"):
        rate = num_bytes / took_s[name] / 1e9
        of_memcpy = took_s["memcpy"] / took_s[name]
        rows.append({"copy": name, "ms": 1e3 * took_s[name], "GB/s": rate, "of memcpy": of_memcpy})
    return rows


def staging(rounds: int, num_threads: int) -> list[dict[str, Any]]:
    rows = []
    with TemporaryDirectory() as folder:
        path = write_tiny("llada", Path(folder) / "llada", d_model=512, n_layers=8, n_heads=8, n_kv_heads=8)
        torch.set_num_threads(num_threads)
        loaded = load_diffusion_model(str(path), team=ThreadTeam(num_threads))
        specs = loaded.model.layer_specs
        for num_tokens in (128, 512, 1024):
            num_pages = num_tokens // 16
            backend = CpuAttention(specs, num_pages, torch.float32, ThreadTeam(num_threads))
            num_bytes = num_pages * CpuAttention.page_bytes(specs, torch.float32)
            store = TensorStore.open(pool_bytes=2 * num_bytes + (1 << 20))
            transfer = KvTransfer(store, backend, len(specs))
            worker = DllmWorker(loaded, backend, 1, num_pages, transfer=transfer)
            ids = (*[5] * (num_tokens - 64), *[OPEN] * 64)
            admit = Admit(
                0, "r", ids, num_tokens - 64, num_tokens, SamplingParams(temperature=0), DiffusionParams()
            )

            def one_pass(hand_over: bool) -> None:
                block = (0, num_tokens - 64, num_tokens - 32)  # noqa: B023
                one = Pass(0, ((0, num_tokens),), tuple(range(num_pages)), block, True, hand_over)  # noqa: B023
                (done,) = worker.perform(STEP, StepArgs((), (admit,), (one,))).denoised  # noqa: B023
                if done.handover is not None:
                    worker.perform(RELEASE, ReleaseArgs("r", done.handover.parts))  # noqa: B023

            def alone() -> None:
                staged = transfer.stage({"r": range(num_pages)})  # noqa: B023
                for layer in range(len(specs)):
                    staged._layer_written(layer)
                transfer.release("r", staged.take("r") or ())  # noqa: B023

            took_s = medians(
                rounds,
                {"plain": lambda: one_pass(False), "kept": lambda: one_pass(True), "copies alone": alone},
            )
            store.close()
            rows.append(
                {
                    "tokens, threads": f"{num_tokens}, {num_threads}",
                    "KV MiB": num_bytes / 2**20,
                    "pass ms": 1e3 * took_s["plain"],
                    "pass, kept ms": 1e3 * took_s["kept"],
                    "added ms": 1e3 * (took_s["kept"] - took_s["plain"]),
                    "copies alone ms": 1e3 * took_s["copies alone"],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("out/kv"))
    arguments = parser.parse_args()
    sections = {
        "Copies": copies(arguments.rounds),
        "Staging": staging(arguments.rounds, 1) + staging(arguments.rounds, 2),
    }
    bars = {
        "Copies": ("copy", "GB/s", "GB/s"),
        "Staging": ("tokens, threads", "added ms", "ms that keeping the KV adds to the pass"),
    }
    save("kv_transfer", sections, bars, arguments.out)
    for title, rows in sections.items():
        print(f"\n## {title}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
