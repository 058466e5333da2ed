"""Denoising speed on one checkpoint and the same requests, in one run: a plain loop, and the engine.

    python benchmarks/dllm_throughput.py --out out/dllm

The plain loop serves one request at a time with the same caching and sampling, in torch alone: it is what a
person would write after reading Fast-dLLM. The checkpoint is a random LLaDA (width 256, 8 layers, vocabulary
2048) in the published layout, fp32. `alone` is one request of 64 prompt tokens and 128 answer tokens; `load`
is Poisson arrivals of mixed lengths, faster than the plain loop can serve. Rounds are interleaved; figures
are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from report import save, table
from safetensors.torch import load_file, save_file

BLOCK, THRESHOLD = 32, 0.9
# Makes the random model as sure of itself as a trained one: about 56 passes for 128 tokens.
HEAD_SCALE = 1.95


class PlainLoop:
    """LLaDA in plain torch, dual cache, confidence threshold, batch 1."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(path))
        self.weights = {name.removeprefix("model.transformer."): t.float() for name, t in tensors.items()}
        self.num_heads = self.config["n_heads"]
        self.head_dim = self.config["d_model"] // self.num_heads
        steps = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = torch.arange(4096)[:, None] / self.config["rope_theta"] ** steps[None]
        self.cos, self.sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        self.num_forwards = 0

    def norm(self, x, name):
        return F.rms_norm(x, x.shape[-1:], self.weights[name], self.config["rms_norm_eps"])

    def rotate(self, x, positions):
        half = self.head_dim // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * self.cos[positions] + turned * self.sin[positions]

    def forward(self, ids, start, end, kv):
        """Logits of rows [start, end) of the canvas; `kv` per layer is renewed there, read everywhere."""
        self.num_forwards += 1
        weights, positions = self.weights, torch.arange(start, end)
        x = weights["wte.weight"][ids[start:end]]
        for layer in range(self.config["n_layers"]):
            at = f"blocks.{layer}."
            h = self.norm(x, at + "attn_norm.weight")
            q, k, v = (
                F.linear(h, weights[f"{at}{name}_proj.weight"])
                .view(-1, self.num_heads, self.head_dim)
                .transpose(0, 1)
                for name in "qkv"
            )
            keys, values = kv[layer]
            keys[:, start:end], values[:, start:end] = self.rotate(k, positions), v
            o = F.scaled_dot_product_attention(self.rotate(q, positions)[None], keys[None], values[None])
            x = x + F.linear(o[0].transpose(0, 1).flatten(1), weights[at + "attn_out.weight"])
            h = self.norm(x, at + "ff_norm.weight")
            gated = F.silu(F.linear(h, weights[at + "ff_proj.weight"])) * F.linear(
                h, weights[at + "up_proj.weight"]
            )
            x = x + F.linear(gated, weights[at + "ff_out.weight"])
        return F.linear(self.norm(x, "ln_f.weight"), weights["ff_out.weight"])

    def generate(self, prompt, num_tokens):
        mask_id = self.config["mask_token_id"]
        ids = torch.tensor([*prompt, *([mask_id] * num_tokens)])
        total = len(ids)
        shape = (self.num_heads, total, self.head_dim)
        kv = [(torch.empty(shape), torch.empty(shape)) for _ in range(self.config["n_layers"])]
        for block_start in range(len(prompt), total, BLOCK):
            block_end = min(block_start + BLOCK, total)
            start, end = 0, total
            while True:
                logits = self.forward(ids, start, end, kv)[block_start - start : block_end - start]
                probs = torch.softmax(logits.double(), -1)
                confidence, tokens = probs.max(-1)
                is_open = ids[block_start:block_end] == mask_id
                confidence = torch.where(is_open, confidence, -1.0)
                take = confidence >= THRESHOLD
                take[confidence.argmax()] = True
                ids[block_start:block_end][take] = tokens[take]
                start, end = block_start, block_end
                if not (ids[start:end] == mask_id).any():
                    break
        return ids[len(prompt) :].tolist()

    def serve(self, work, arrivals_s):
        """One after another, in order of arrival. Returns answers and end-to-end latencies."""
        answers, latencies, begin = [], [], time.perf_counter()
        for (prompt, num_tokens), arrival_s in zip(work, arrivals_s, strict=True):
            time.sleep(max(0.0, begin + arrival_s - time.perf_counter()))
            answers.append(self.generate(prompt, num_tokens))
            latencies.append(time.perf_counter() - begin - arrival_s)
        return answers, latencies


class Engine:
    """Ours, through the library's own loop, at most `concurrency` requests running."""

    def __init__(self, folder: Path, concurrency: int, num_threads: int) -> None:
        from genserve.dllm.config import DllmConfig
        from genserve.dllm.serve import assemble, load

        self.config = DllmConfig(
            model=str(folder),
            dtype="float32",
            num_threads=num_threads,
            max_running=concurrency,
            max_queued_requests=4096,
            budget_tokens=1024,
        )
        self.parts = assemble(self.config, load(self.config))
        self.aio = asyncio.new_event_loop()
        self.num_forwards = 0
        self.scheduler_s = self.step_s = 0.0
        for controller in (self.parts.dispatcher, *self.parts.engines.values()):
            for name in ("observe", "decide"):
                setattr(controller, name, self._timed(getattr(controller, name), "scheduler_s"))
        for worker in self.parts.workers.values():
            worker.perform = self._timed(worker.perform, "step_s")

    def _timed(self, function, total):
        """`function`, its CPU seconds added up; both kinds run on threads of their own."""

        def call(*args):
            begin = time.thread_time()
            try:
                return function(*args)
            finally:
                setattr(self, total, getattr(self, total) + time.thread_time() - begin)

        return call

    def serve(self, work, arrivals_s):
        from genserve.core.types import SamplingParams, Submit
        from genserve.dllm.request import DiffusionParams, Unmasking
        from genserve.dllm.serve import start_local

        params = DiffusionParams("dual", Unmasking("threshold", THRESHOLD), BLOCK, early_stop=False)

        async def main():
            engine = await start_local(self.parts)
            before = (await engine.stats())["num_steps"]
            begin = asyncio.get_running_loop().time()

            async def one(index, prompt, num_tokens, arrival_s):
                await asyncio.sleep(begin + arrival_s - asyncio.get_running_loop().time())
                sampling = SamplingParams(temperature=0, seed=0, max_tokens=num_tokens, ignore_eos=True)
                stream = engine.submit(Submit(f"r{index}", tuple(prompt), sampling, options=params))
                answer = [token async for output in stream for token in output.token_ids]
                return answer, asyncio.get_running_loop().time() - begin - arrival_s

            results = await asyncio.gather(
                *(one(i, *item, at) for i, (item, at) in enumerate(zip(work, arrivals_s, strict=True)))
            )
            self.num_forwards = int((await engine.stats())["num_steps"] - before)
            await engine.aclose()
            return [answer for answer, _ in results], [latency for _, latency in results]

        return self.aio.run_until_complete(main())


def measured(runner, work, arrivals_s):
    """One round: what came out and what it took."""
    runner.num_forwards = 0
    runner.scheduler_s = runner.step_s = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    answers, latencies = runner.serve(work, arrivals_s)
    return {
        "answers": answers,
        "latencies": sorted(latencies),
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "forwards": runner.num_forwards,
        "scheduler_share": runner.scheduler_s / runner.step_s if runner.step_s else 0.0,
    }


def compare(runners, work, arrivals_s, rounds, label):
    results = {name: [] for name in runners}
    for runner in runners.values():
        runner.serve(work[:1], [0.0])
    for index in range(rounds):
        for name, runner in runners.items():
            results[name].append(measured(runner, work, arrivals_s))
            print(f"{label}: round {index + 1}, {name}: {results[name][-1]['wall_s']:.2f} s", file=sys.stderr)
    num_tokens = sum(num for _, num in work)
    base_name = next(iter(results))
    expected = results[base_name][0]["answers"]

    def middle(name, value):
        return statistics.median(value(result) for result in results[name])

    rows = []
    for name, own in results.items():
        same = sum(a == b for a, b in zip(own[0]["answers"], expected, strict=True))
        rows.append(
            {
                "engine": name,
                "requests/s": middle(name, lambda r: len(work) / r["wall_s"]),
                "tokens/s": middle(name, lambda r: num_tokens / r["wall_s"]),
                "tokens per CPU s": middle(name, lambda r: num_tokens / r["cpu_s"]),
                "x plain loop": middle(name, lambda r: num_tokens / r["cpu_s"])
                / middle(base_name, lambda r: num_tokens / r["cpu_s"]),
                "forwards": own[0]["forwards"],
                "mean latency s": middle(name, lambda r: statistics.mean(r["latencies"])),
                "p99 latency s": middle(
                    name, lambda r: r["latencies"][min(len(work) - 1, int(0.99 * len(work)))]
                ),
                "scheduler % of a step": 100 * middle(name, lambda r: r["scheduler_share"]),
                "same answers": f"{same}/{len(work)}",
            }
        )
    return rows


def make_checkpoint(folder: Path) -> Path:
    from genserve.dllm.models.tiny import write_tiny

    target = folder / "llada-256"
    if not (target / "config.json").exists():
        config = {"d_model": 256, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 1024}
        write_tiny("llada", target, vocab_size=2048, embedding_size=2048, **config)
        for path in target.glob("token*"):  # its vocabulary is smaller, and ids beyond it are never proposed
            path.unlink()
        path = target / "model.safetensors"
        tensors = load_file(path)
        head = tensors["model.transformer.ff_out.weight"]
        head *= HEAD_SCALE
        head[json.loads((target / "config.json").read_text())["mask_token_id"]] = 0
        save_file(tensors, path)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=Path("out/dllm"))
    parser.add_argument("--cache", type=Path, default=Path("out/models"))
    args = parser.parse_args()
    folder = make_checkpoint(args.cache)
    source = random.Random(0)

    def prompt(length):
        return [source.randrange(5, 2000) for _ in range(length)]

    alone = [(prompt(64), 128)]
    load = [(prompt(source.randint(16, 192)), 32 * source.randint(1, 4)) for _ in range(args.num_requests)]
    sections = {}
    with torch.inference_mode():
        for num_threads in args.threads:
            torch.set_num_threads(num_threads)
            many = f"{num_threads} thread{'s' if num_threads > 1 else ''}"
            plain = PlainLoop(folder)
            engines = {f"genserve, {n} at once": Engine(folder, n, num_threads) for n in (1, 4, 16)}
            first = next(iter(engines))
            sections[f"alone, {many}"] = compare(
                {"plain loop": plain, "genserve": engines[first]}, alone, [0.0], 5 * args.rounds, "alone"
            )
            seconds = 1 / sections[f"alone, {many}"][0]["requests/s"]
            arrivals_s, now = [], 0.0
            for _ in load:
                arrivals_s.append(now)
                now += source.expovariate(4 / seconds)
            sections[f"load, {many}"] = compare(
                {"plain loop": plain, **engines}, load, arrivals_s, args.rounds, "load"
            )
    for title, rows in sections.items():
        print(f"\n## {title}\n{table(rows)}")
    label = "answer tokens per CPU second, fp32"
    save(
        "dllm_throughput", sections, dict.fromkeys(sections, ("engine", "tokens per CPU s", label)), args.out
    )


if __name__ == "__main__":
    main()
