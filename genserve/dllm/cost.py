"""How long a diffusion step takes on a device: matrix products, attention and overhead, added up.

Owns model shapes and two sources of kernel times: a roofline, and measured tables in the format of
NVIDIA AIConfigurator (`gemm`, `context_attention`, `generation_attention` csv files, which stay where
they are). A step is priced from the rows of its passes and the context that each attends to.

The calibration was chosen by hand to come near two published means of LLaDA-8B on H100s (Sangam §6.2, §6.3): one request at a
time is served in 1.87 s (what makes a queue of 20.7 s at 0.5 requests/s), and 8 workers take 7.1 s for a
request at 7.5 requests/s. `docs/studies/deficit_budget.md` shows what follows.
"""

from __future__ import annotations

import csv
import gzip
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from genserve.core.control import Run
from genserve.core.errors import ConfigError
from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.dllm.step import FETCH, STEP, StepArgs


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a dense diffusion transformer in bf16."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    context_tokens: int
    shifted: bool = False
    head_dim: int = 128

    @property
    def kv_bytes_per_token(self) -> int:
        return 4 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(output, input) sizes of a layer's products."""
        d, ff = self.hidden_size, self.intermediate_size
        heads = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        return ((heads + 2 * kv, d), (d, heads), (ff, d), (ff, d), (d, ff))

    @property
    def weight_bytes(self) -> int:
        layer = sum([n * k for n, k in self.matrices])
        return 2 * (self.num_layers * layer + 2 * self.vocab_size * self.hidden_size)

    @property
    def row_bytes(self) -> int:
        """Memory traffic of a row outside products and attention: norms, rotation, gate, residuals."""
        return 2 * self.num_layers * (8 * self.hidden_size + 3 * self.intermediate_size)


MODELS = {
    "llada-8b": ModelShape("llada-8b", 32, 4096, 32, 32, 12288, 126464, 4096),
    "dream-7b": ModelShape("dream-7b", 28, 3584, 28, 4, 18944, 152064, 8192, shifted=True),
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak rates of one device, and what real kernels reach of them. `link_bytes_per_s`: to another device."""

    name: str
    peak_flops: float
    bandwidth_bytes_per_s: float
    memory_bytes: float
    compute_efficiency: float = 0.75
    attention_efficiency: float = 0.5
    bandwidth_efficiency: float = 0.8
    link_bytes_per_s: float = 450e9
    profile_prefix: str | None = None


HARDWARE = {
    "h100": Hardware("h100", 989e12, 3.35e12, 80e9, profile_prefix="h100_sxm_"),
    "h200": Hardware("h200", 989e12, 4.8e12, 141e9, profile_prefix="h200_sxm_"),
    "a100": Hardware("a100", 312e12, 2.04e12, 80e9, link_bytes_per_s=300e9, profile_prefix="a100_sxm_"),
}


@dataclass(frozen=True, slots=True)
class Calibration:
    """From kernels measured alone to a server's steps.

    slowdown  of all time that grows with a step's rows; reading the weights is not slowed.
    step_overhead_s  what a step takes besides its kernels.
    pass_overhead_s  what each request in a step adds besides its rows.
    link_efficiency  of the link's rate, when KV moves.
    transfer_overhead_s  what moving a request's KV takes besides its bytes.
    """

    slowdown: float = 1.85
    step_overhead_s: float = 2.5e-3
    pass_overhead_s: float = 0.0
    link_efficiency: float = 0.6
    transfer_overhead_s: float = 5e-3


class KernelTimes(Protocol):
    """Seconds of one kernel on one device."""

    def product_s(self, rows: int, outputs: int, inputs: int) -> float: ...

    def attention_s(self, num_tokens: int) -> float:
        """One layer, `num_tokens` rows that all see each other."""
        ...

    def bandwidth_bytes_per_s(self) -> float:
        """At which attention reads KV."""
        ...


class Roofline:
    """Kernel times from peak rates alone."""

    def __init__(self, model: ModelShape, hardware: Hardware) -> None:
        self._flops = hardware.peak_flops * hardware.compute_efficiency
        self._attention_flops = hardware.peak_flops * hardware.attention_efficiency
        self._bandwidth = hardware.bandwidth_bytes_per_s * hardware.bandwidth_efficiency
        self._width = model.num_heads * model.head_dim

    def product_s(self, rows: int, outputs: int, inputs: int) -> float:
        moved = 2 * (rows * (outputs + inputs) + outputs * inputs)
        return max(2 * rows * outputs * inputs / self._flops, moved / self._bandwidth)

    def attention_s(self, num_tokens: int) -> float:
        return 4 * num_tokens * num_tokens * self._width / self._attention_flops

    def bandwidth_bytes_per_s(self) -> float:
        return self._bandwidth


class Profile:
    """Measured kernel times. Between sizes measured, rates are interpolated; beyond them they stay.

    `folder` holds the tables; raises `ConfigError` if one is missing or says nothing of bf16.
    """

    def __init__(self, folder: Path, model: ModelShape, hardware: Hardware) -> None:
        self._hardware = hardware
        self._products: dict[tuple[int, int], dict[int, float]] = {}
        for row in self._read(folder, "gemm"):
            if row["gemm_dtype"] == "bfloat16":
                key = (int(row["n"]), int(row["k"]))
                self._products.setdefault(key, {})[int(row["m"])] = float(row["latency_ms"]) / 1e3
        self._outputs = sorted({outputs for outputs, _ in self._products})
        self._inputs = sorted({inputs for _, inputs in self._products})
        causal: dict[tuple[int, int], dict[int, float]] = {}
        for row in self._read(folder, "context_attention"):
            plain = row["attn_dtype"] == row["kv_cache_dtype"] == "bfloat16"
            if plain and row["batch_size"] == "1" and int(row["head_dim"]) == model.head_dim:
                heads = (int(row["num_heads"]), int(row["num_key_value_heads"]))
                causal.setdefault(heads, {})[int(row["isl"])] = float(row["latency_ms"]) / 1e3
        if not self._products or not causal:
            raise ConfigError(f"profiles: {folder} has no bfloat16 rows for {hardware.name}")
        near = min(
            causal, key=lambda heads: (abs(heads[0] - model.num_heads), abs(heads[1] - model.num_kv_heads))
        )
        # Without the causal mask there are twice as many pairs.
        scale = 2 * model.num_heads / near[0]
        self._attention = {size: scale * seconds for size, seconds in causal[near].items()}
        self._bandwidth = max(
            int(row["batch_size"])
            * int(row["step"])
            * int(row["num_key_value_heads"])
            * 4
            * int(row["head_dim"])
            / (float(row["latency_ms"]) / 1e3)
            for row in self._read(folder, "generation_attention")
            if row["kv_cache_dtype"] == "bfloat16" and int(row["step"]) < 4096
        )

    def _read(self, folder: Path, table: str) -> Iterator[dict[str, str]]:
        found = sorted(folder.glob(f"{self._hardware.profile_prefix}*{table}.csv*"))
        if not found:
            raise ConfigError(f"profiles: no {table} table for {self._hardware.name} in {folder}")
        path = found[-1]
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            yield from csv.DictReader(file)

    def product_s(self, rows: int, outputs: int, inputs: int) -> float:
        n, n_scale = _nearest(self._outputs, outputs)
        k, k_scale = _nearest(self._inputs, inputs)
        return _interpolate(self._products[n, k], rows) * n_scale * k_scale

    def attention_s(self, num_tokens: int) -> float:
        return _interpolate(self._attention, num_tokens)

    def bandwidth_bytes_per_s(self) -> float:
        return self._bandwidth


def _nearest(sizes: Sequence[int], size: int) -> tuple[int, float]:
    """The measured size nearest in proportion, and by what to scale its time."""
    best = min(sizes, key=lambda known: max(known / size, size / known))
    return best, size / best


def _interpolate(table: dict[int, float], size: int) -> float:
    sizes = sorted(table)
    place = bisect_left(sizes, size)
    if place == len(sizes):
        return table[sizes[-1]] * size / sizes[-1]
    high = sizes[place]
    if high == size or place == 0:
        return table[high]
    low = sizes[place - 1]
    part = (size - low) / (high - low)
    return table[low] * (1 - part) + table[high] * part


class StepCost:
    """`CostModel` of diffusion steps. It follows which canvas is in which slot, as a worker does."""

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        kernels: KernelTimes,
        calibration: Calibration | None = None,
    ) -> None:
        self._model = model
        self._kernels = kernels
        self._calibration = calibration if calibration is not None else Calibration()
        self._kv_s = model.kv_bytes_per_token / kernels.bandwidth_bytes_per_s()
        self._row_s = model.row_bytes / (hardware.bandwidth_bytes_per_s * hardware.bandwidth_efficiency)
        free_bytes = 0.9 * hardware.memory_bytes - model.weight_bytes - 2e9
        self.kv_pool_tokens = max(0, int(free_bytes / model.kv_bytes_per_token))
        self._linear: dict[int, float] = {}
        self._head: dict[int, float] = {}
        self._attention: dict[tuple[int, int], float] = {}
        self._lengths: dict[tuple[str, int], tuple[int, int]] = {}
        # Reading the weights, which every step does once.
        self._floor_s = self._linear_s(1) + self._head_s(1)
        self._page_s = model.kv_bytes_per_token * PAGE_TOKENS / hardware.link_bytes_per_s

    def price_s(self, run: Run) -> float:
        if run.op != STEP:
            num_pages = len(run.args.pages) if run.op == FETCH else 0
            calibration = self._calibration
            return calibration.transfer_overhead_s + num_pages * self._page_s / calibration.link_efficiency
        args: StepArgs = run.args
        lengths, lane = self._lengths, run.lane
        for admit in args.admits:
            weight = 2 if admit.params.cfg_scale > 0 else 1
            length = 0 if admit.params.cache in ("block", "canvas") else len(admit.ids)
            lengths[lane, admit.slot] = (length, weight)
        num_rows = num_head_rows = 0
        attention_s = 0.0
        for asked in args.passes:
            slot, spans, (_, start, end) = asked.slot, asked.spans, asked.block
            length, weight = lengths[lane, slot]
            rows = sum([last - first for first, last in spans])
            num_rows += weight * rows
            num_head_rows += weight * min(rows, end - start)
            attention_s += weight * self._attention_s(rows, length or end)
        floor_s = self._floor_s
        grows_s = (
            attention_s
            + self._linear_s(num_rows)
            + self._head_s(num_head_rows)
            + num_rows * self._row_s
            - floor_s
        )
        overhead_s = self._calibration.step_overhead_s + len(args.passes) * self._calibration.pass_overhead_s
        return overhead_s + floor_s + grows_s * self._calibration.slowdown

    def _attention_s(self, rows: int, context: int) -> float:
        found = self._attention.get((rows, context))
        if found is None:
            compute_s = self._kernels.attention_s(context) * self._model.num_layers * rows / context
            found = self._attention[rows, context] = max(compute_s, context * self._kv_s)
        return found

    def _linear_s(self, rows: int) -> float:
        found = self._linear.get(rows)
        if found is None:
            layer_s = sum([self._kernels.product_s(rows, n, k) for n, k in self._model.matrices])
            found = self._linear[rows] = layer_s * self._model.num_layers
        return found

    def _head_s(self, rows: int) -> float:
        found = self._head.get(rows)
        if found is None:
            model = self._model
            found = self._kernels.product_s(rows, model.vocab_size, model.hidden_size)
            self._head[rows] = found
        return found


def open_cost(
    model: str, hardware: str = "h100", profiles: Path | None = None, calibration: Calibration | None = None
) -> StepCost:
    """The cost of `model` on `hardware`: from tables in `profiles` if given, else from a roofline."""
    if model not in MODELS:
        raise ConfigError(f"model: no {model!r}; there are: {', '.join(MODELS)}")
    if hardware not in HARDWARE:
        raise ConfigError(f"hardware: no {hardware!r}; there are: {', '.join(HARDWARE)}")
    shape, device = MODELS[model], HARDWARE[hardware]
    kernels: KernelTimes = (
        Profile(profiles, shape, device) if profiles is not None else Roofline(shape, device)
    )
    return StepCost(shape, device, kernels, calibration)
