"""What serving adds to a model's own work: scheduling, first token, memory, and the simulator's speed.

    python benchmarks/ar_overheads.py scheduler ttft memory simulator --out out/overheads

scheduler  controller, packing and sampling per step at 64 running sequences, beside the model; the
           controller alone over batch sizes and queue lengths.
ttft       a lone request's first token through the library, beside `transformers` generate of one token.
memory     resident memory and page accounts over 10,000 requests.
simulator  events and tokens simulated per CPU second.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


def median(values: list[float]) -> float:
    return statistics.median(values)


def run_steps(engine: Any, perform: Callable[[Any], Any], num_steps: int) -> list[float]:
    """CPU seconds the controller spends on each of `num_steps` steps."""
    from genserve.core.control import Done, Run

    spent = []
    for _ in range(num_steps):
        start = time.process_time()
        run = next(effect for effect in engine.decide(0.0) if isinstance(effect, Run))
        decide_s = time.process_time() - start
        result = perform(run)
        start = time.process_time()
        engine.observe(Done(run.lane, run.run_id, result), 0.0)
        spent.append(decide_s + time.process_time() - start)
    return spent


def fill(engine: Any, num_requests: int, prompt: int = 16, output: int = 400) -> None:
    from genserve.core.control import Message
    from genserve.core.types import SamplingParams, Submit

    for index in range(num_requests):
        ids = tuple((index * 31 + k) % 1000 for k in range(prompt))
        sampling = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        engine.observe(Message("bench", Submit(f"r{index}", ids, sampling)), 0.0)


def scheduler(args: argparse.Namespace) -> list[dict]:
    from genserve.ar.config import ArConfig
    from genserve.ar.engine import Engine, EngineLimits
    from genserve.ar.serve import build_parts
    from genserve.ar.simulate import NeverEnding

    parts = build_parts(ArConfig(model=args.model, num_threads=1, prefix_cache=False, kv_pool="1GiB"))
    engine, worker = parts.controller, parts.worker
    fill(engine, 64)
    model_s: list[float] = []
    forward = worker._model

    def timed_forward(**kwargs):
        start = time.process_time()
        result = forward(**kwargs)
        model_s[-1] += time.process_time() - start
        return result

    worker._model = timed_forward
    step_s: list[float] = []

    def perform(run):
        model_s.append(0.0)
        start = time.process_time()
        result = worker.perform(run.op, run.args)
        step_s.append(time.process_time() - start)
        return result

    controller_s = run_steps(engine, perform, 30)[10:]
    step, model = median(step_s[10:]), median(model_s[10:])
    controller = median(controller_s)
    rows = [
        {
            "what": f"{args.model}, 64 running",
            "step_ms": 1e3 * (step + controller),
            "model_ms": 1e3 * model,
            "packing_and_sampling_ms": 1e3 * (step - model),
            "controller_ms": 1e3 * controller,
            "all_but_model_share": (step - model + controller) / (step + controller),
            "controller_share": controller / (step + controller),
        }
    ]
    outcomes = NeverEnding()
    for num_running, num_waiting in [(8, 0), (64, 0), (64, 10_000), (64, 100_000), (256, 0), (512, 0)]:
        engine = Engine(EngineLimits(num_running * 40, 4096, num_running, max(512, num_running)))
        fill(engine, num_running + num_waiting)
        spent = run_steps(engine, outcomes.outcome, 150)[50:]
        rows.append(
            {
                "what": f"controller alone, {num_running} running, {num_waiting} waiting",
                "controller_ms": 1e3 * median(spent),
                "us_per_sequence": 1e6 * median(spent) / num_running,
            }
        )
    return rows


def ttft(args: argparse.Namespace) -> list[dict]:
    import torch

    from genserve import LLM
    from genserve.core.models.loading import load_model

    torch.set_num_threads(1)
    plain = load_model(args.model, dtype="float32")
    rows = []
    with LLM(args.model, num_threads=1, prefix_cache=False, kv_pool="512MiB") as llm:
        for num_tokens in (16, 64, 256, 1024):
            ours, theirs = [], []
            for turn in range(args.rounds + 1):
                ids = [(turn * 7 + k * 13) % 40_000 + 100 for k in range(num_tokens)]
                start = time.perf_counter()
                next(iter(llm.stream(ids, temperature=0, max_tokens=2)))
                ours.append(time.perf_counter() - start)
                prompt = torch.tensor([ids])
                start = time.perf_counter()
                plain.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=1,
                    pad_token_id=0,
                )
                theirs.append(time.perf_counter() - start)
            mine, reference = median(ours[1:]), median(theirs[1:])
            rows.append(
                {
                    "what": f"{args.model}, lone prompt of {num_tokens} tokens",
                    "first_token_ms": 1e3 * mine,
                    "generate_ms": 1e3 * reference,
                    "ratio": mine / reference,
                }
            )
    return rows


def memory(args: argparse.Namespace) -> list[dict]:
    import tempfile

    from genserve import LLM
    from genserve.core.models.tiny import make_tiny_folder

    def resident_mib() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(make_tiny_folder(Path(folder) / "tiny", "llama"))
        with LLM(path, num_threads=1, kv_pool="4MiB", max_queued_requests=1000) as llm:
            for batch in range(args.num_requests // 1000 + 1):
                prompts = [[3 + (batch * 1000 + i) % 250, 5, 7 + i % 200, 9] * 6 for i in range(1000)]
                llm.generate(prompts, max_tokens=4, temperature=0, ignore_eos=True)
                stats = llm.stats()
                rows.append(
                    {
                        "what": f"after {1000 * (batch + 1)} requests",
                        "resident_mib": resident_mib(),
                        "used_pages": stats["num_used_pages"],
                        "sequences": stats["num_sequences"],
                    }
                )
    return rows


def simulator(args: argparse.Namespace) -> list[dict]:
    from genserve.ar.cost import HARDWARE, MODELS, RooflineCost
    from genserve.ar.engine import EngineLimits
    from genserve.ar.simulate import simulate
    from genserve.core.workload.presets import preset

    cost = RooflineCost(MODELS["llama-3-8b"], HARDWARE["h100"])
    limits = EngineLimits(cost.kv_pool_tokens // 16, 16_384, max_running=128, budget_tokens=2048)
    rows = []
    for name, rate in (("chat", 1.0), ("chat", 5.5), ("chat", 12.0)):
        workload = preset(name, 2000, 0).at_rate(rate)
        start = time.process_time()
        result = simulate(workload, limits, cost)
        spent = time.process_time() - start
        num_tokens = sum(timeline.num_output_tokens for timeline in result.timelines)
        rows.append(
            {
                "what": f"{name} at {rate}/s on llama-3-8b, h100, 2000 requests",
                "loop_events_per_cpu_s": result.num_events / spent,
                "token_events_per_cpu_s": num_tokens / spent,
                "mean_batch": num_tokens / result.engine["num_steps"],
                "virtual_s_per_cpu_s": result.duration_s / spent,
            }
        )
    return rows


def table(rows: list[dict]) -> str:
    lines = []
    shown: tuple[str, ...] = ()
    for row in rows:
        if tuple(row) != shown:
            shown = tuple(row)
            lines += ["", "| " + " | ".join(shown) + " |", "|" + "---|" * len(shown)]
        cells = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parts = {"scheduler": scheduler, "ttft": ttft, "memory": memory, "simulator": simulator}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(parts), metavar=f"{{{','.join(parts)}}}")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("out/overheads"))
    args = parser.parse_args()
    unknown = [name for name in args.parts if name not in parts]
    if unknown:
        parser.error(f"no such part: {unknown[0]} (there is: {', '.join(parts)})")
    args.out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name in args.parts:
        results[name] = parts[name](args)
        print(f"\n## {name}\n{table(results[name])}", flush=True)
    machine = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    (args.out / "ar_overheads.json").write_text(json.dumps({"machine": machine, **results}, indent=1))
    (args.out / "ar_overheads.md").write_text("\n".join(f"## {n}\n{table(r)}\n" for n, r in results.items()))


if __name__ == "__main__":
    main()
