"""How long an autoregressive step takes: a roofline over weights, KV and arithmetic.

A step reads the weights once and each row's KV, and computes two operations per weight and token.
Uncalibrated: use it for shapes and comparisons, and fit `efficiency` to measurements for figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from genserve.ar.step import StepArgs
from genserve.core.control import Run


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peak rates of one device, and the share of each that real steps reach."""

    name: str
    peak_flops: float
    bandwidth_bytes_per_s: float
    memory_bytes: float
    step_overhead_s: float
    compute_efficiency: float = 0.55
    bandwidth_efficiency: float = 0.8


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a transformer costs: parameters, and KV of one token over all layers."""

    name: str
    num_parameters: float
    num_layers: int
    hidden_size: int
    kv_bytes_per_token: float
    weight_bytes_each: float = 2.0

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.weight_bytes_each


HARDWARE = {
    "h100": Hardware("h100", 989e12, 3.35e12, 80e9, 1.5e-3),
    "h200": Hardware("h200", 989e12, 4.8e12, 141e9, 1.5e-3),
    "a100": Hardware("a100", 312e12, 2.04e12, 80e9, 1.5e-3),
    "laptop": Hardware("laptop", 200e9, 20e9, 16e9, 2e-3),
}

MODELS = {
    "llama-3-8b": ModelShape("llama-3-8b", 8.03e9, 32, 4096, 131_072),
    "llama-2-70b": ModelShape("llama-2-70b", 68.98e9, 80, 8192, 327_680),
    "smollm2": ModelShape("smollm2", 134.5e6, 30, 576, 23_040),
}


class RooflineCost:
    """`CostModel` of the AR engine's steps for one model on one device (or `tensor_parallel` of them)."""

    def __init__(self, model: ModelShape, hardware: Hardware, tensor_parallel: int = 1) -> None:
        flops = hardware.peak_flops * hardware.compute_efficiency * tensor_parallel
        bandwidth = hardware.bandwidth_bytes_per_s * hardware.bandwidth_efficiency * tensor_parallel
        self._token_s = 2 * model.num_parameters / flops
        self._attention_s = 4 * model.num_layers * model.hidden_size / flops
        self._weights_s = model.weight_bytes / bandwidth
        self._kv_s = model.kv_bytes_per_token / bandwidth
        self._overhead_s = hardware.step_overhead_s
        free_bytes = 0.9 * hardware.memory_bytes * tensor_parallel - model.weight_bytes
        self.kv_pool_tokens = max(0, int(free_bytes / model.kv_bytes_per_token))

    def price_s(self, run: Run) -> float:
        args: StepArgs = run.args
        num_tokens = context = cells = 0
        for _, start, count, _, _ in args.rows:
            num_tokens += count
            context += start + count
            cells += count * start + count * (count + 1) // 2
        compute_s = num_tokens * self._token_s + cells * self._attention_s
        memory_s = self._weights_s + context * self._kv_s
        return self._overhead_s + max(compute_s, memory_s)
