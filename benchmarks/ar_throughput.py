"""Offline throughput of AR engines on the same tokens, in one run.

    python benchmarks/ar_throughput.py --out out/ar            # both models, every engine found
    python benchmarks/ar_throughput.py --vllm-python /path/to/other/venv/bin/python

Each engine runs in a process of its own, on one thread, and generates for the same requests, greedily
and without stopping at end-of-sequence. Rounds are interleaved over the engines; the table shows the
median of output tokens per CPU second of the process, and whether all tokens are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from report import save, table

HERE = Path(__file__).resolve()
ENGINES = ("transformers generate", "transformers continuous batching", "vllm", "genserve")


def requests(num: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """(prompt ids, output tokens): prompts of 8 to 200 tokens, outputs of 16 to 96."""
    import random

    source = random.Random(0)
    return [
        ([source.randrange(5, vocab_size) for _ in range(source.randint(8, 200))], source.randint(16, 96))
        for _ in range(num)
    ]


def make_model(name: str, folder: Path) -> Path:
    """An fp32 Hugging Face folder of the benchmark's model."""
    import torch

    target = folder / name
    if not (target / "config.json").exists():
        if name == "small":
            from transformers import LlamaConfig, LlamaForCausalLM

            torch.manual_seed(0)
            config = LlamaConfig(
                hidden_size=512,
                num_hidden_layers=8,
                num_attention_heads=8,
                num_key_value_heads=8,
                intermediate_size=1376,
                vocab_size=32_000,
                max_position_embeddings=2048,
                initializer_range=0.05,
            )
            LlamaForCausalLM(config).float().save_pretrained(target)
        else:
            from genserve.core.models.loading import load_model

            loaded = load_model(name, dtype="float32")
            loaded.model.save_pretrained(target)
    return target


class Transformers:
    """One request after another through `generate`."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Every request runs to its length. `min_new_tokens` would forbid the end-of-sequence token,
        # which the other engines may choose and go on.
        self.model.generation_config.eos_token_id = None

    def run(self, work):
        results = []
        for prompt, num_new in work:
            ids = self.torch.tensor([prompt])
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_new,
                pad_token_id=0,
            )
            results.append(out[0, len(prompt) :].tolist())
        return results


class ContinuousBatching:
    """`transformers`' own continuous batching, sized for the work."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        # No end-of-sequence id ever comes, so that every request runs to its length.
        self.generation = GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=96
        )

    def run(self, work):
        from transformers import ContinuousBatchingConfig

        config = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=512, allow_block_sharing=False)
        results = {}
        with self.model.continuous_batching_context_manager(
            generation_config=self.generation, continuous_batching_config=config, block=True, timeout=5
        ) as manager:
            ids = [
                manager.add_request(prompt, request_id=f"r{i}", max_new_tokens=num_new, eos_token_id=-1)
                for i, (prompt, num_new) in enumerate(work)
            ]
            while len(results) < len(work):
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("continuous batching gave no result within a minute")
                if result.error:
                    raise RuntimeError(result.error)
                if result.is_finished():
                    results[result.request_id] = list(result.generated_tokens)
        return [results[request_id] for request_id in ids]


class Vllm:
    """vLLM's CPU build, if it can be imported."""

    def __init__(self, folder: str) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import torch
        from vllm import LLM

        self.llm = LLM(
            folder,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
            max_model_len=2048,
        )
        torch.set_num_threads(1)

    def run(self, work):
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)
            for _, num_new in work
        ]
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in work], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


class Genserve:
    """Our engine, through the library's own loop."""

    def __init__(self, folder: str) -> None:
        import asyncio

        import torch
        from transformers import AutoModelForCausalLM

        from genserve.ar.config import ArConfig
        from genserve.ar.serve import assemble
        from genserve.core.models.attention.backend import PAGED, register
        from genserve.core.models.loading import wrap_model

        register()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=PAGED)
        config = ArConfig(
            model=folder,
            dtype="float32",
            num_threads=1,
            prefix_cache=False,
            max_queued_requests=4096,
            budget_tokens=512,
        )
        self.parts = assemble(config, wrap_model(model))
        self.aio = asyncio.new_event_loop()

    def run(self, work):
        import asyncio

        from genserve.ar.serve import start_local
        from genserve.core.types import SamplingParams, Submit

        async def main():
            engine = await start_local(self.parts)

            async def one(index, prompt, num_new):
                sampling = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
                stream = engine.submit(Submit(f"r{index}", tuple(prompt), sampling))
                return [token async for output in stream for token in output.token_ids]

            results = await asyncio.gather(*(one(i, *item) for i, item in enumerate(work)))
            await engine.aclose()
            return list(results)

        return self.aio.run_until_complete(main())


CLASSES = dict(zip(ENGINES, (Transformers, ContinuousBatching, Vllm, Genserve), strict=True))


def child(engine: str, folder: str, num_requests: int, vocab_size: int) -> None:
    """Serve rounds: a line on stdin asks for one, a JSON line on stdout answers."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not disturb the answers
    work = requests(num_requests, vocab_size)
    runner = CLASSES[engine](folder)
    runner.run([(prompt, 4) for prompt, _ in work[:4]])
    print(json.dumps({"ready": True}), file=stdout, flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = runner.run(work)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(json.dumps({"cpu_s": cpu, "wall_s": wall, "tokens": tokens}), file=stdout, flush=True)


class Child:
    """An engine's process, or the reason why it does not run."""

    def __init__(self, engine: str, folder: Path, args: argparse.Namespace, vocab_size: int) -> None:
        python = args.vllm_python if engine == "vllm" and args.vllm_python else sys.executable
        path = os.pathsep.join(filter(None, (str(HERE.parent.parent), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [
                *(python, str(HERE), "--child", engine, "--folder", str(folder)),
                *("--num-requests", str(args.num_requests), "--vocab-size", str(vocab_size)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(args.out / f"{engine.replace(' ', '-')}.log", "w"),  # noqa: SIM115
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        self.error = None if self._read() else "did not start (see its log)"

    def _read(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def round(self):
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        result = self._read()
        if result is None:
            self.error = "failed (see its log)"
        return result

    def close(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def compare(name: str, args: argparse.Namespace) -> list[dict]:
    folder = make_model(name, args.cache)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    children = {engine: Child(engine, folder, args, vocab_size) for engine in args.engines}
    rounds: dict[str, list[dict]] = {engine: [] for engine in args.engines}
    for index in range(args.rounds):
        for engine, process in children.items():
            if process.error is None and (result := process.round()) is not None:
                rounds[engine].append(result)
                print(f"{name}: round {index + 1}, {engine}: {result['cpu_s']:.1f} CPU s", file=sys.stderr)
    for process in children.values():
        process.close()
    reference = next((r[0]["tokens"] for e, r in rounds.items() if r), None)
    rows = []
    for engine in args.engines:
        if not rounds[engine]:
            rows.append({"model": name, "engine": engine, "skipped": children[engine].error})
            continue
        num_tokens = sum(len(tokens) for tokens in rounds[engine][0]["tokens"])
        same = sum(a == b for a, b in zip(rounds[engine][0]["tokens"], reference, strict=True))
        per_cpu_s = sorted(num_tokens / item["cpu_s"] for item in rounds[engine])
        rows.append(
            {
                "model": name,
                "engine": engine,
                "num_output_tokens": num_tokens,
                "tokens_per_cpu_s": statistics.median(per_cpu_s),
                "tokens_per_cpu_s_all": per_cpu_s,
                "tokens_per_wall_s": statistics.median(num_tokens / r["wall_s"] for r in rounds[engine]),
                "identical_requests": f"{same}/{len(reference)}",
            }
        )
    return rows


def report(rows: list[dict], out: Path) -> None:
    base = {
        row["model"]: row["tokens_per_cpu_s"]
        for row in rows
        if row["engine"] == ENGINES[1] and "tokens_per_cpu_s" in row
    }
    sections: dict[str, list[dict]] = {}
    for row in rows:
        section = sections.setdefault(row["model"], [])
        if "skipped" in row:
            section.append({"engine": row["engine"], "skipped": row["skipped"]})
            continue
        speeds = row["tokens_per_cpu_s_all"]
        section.append(
            {
                "engine": row["engine"],
                "tokens per CPU s": row["tokens_per_cpu_s"],
                "min to max": f"{speeds[0]:.0f} to {speeds[-1]:.0f}",
                "x continuous batching": row["tokens_per_cpu_s"] / base.get(row["model"], float("nan")),
                "same tokens": row["identical_requests"],
            }
        )
    for model, section in sections.items():
        print(f"\n## {model}\n{table(section)}")
    label = "output tokens per CPU second, fp32, one thread"
    save("ar_throughput", sections, dict.fromkeys(sections, ("engine", "tokens per CPU s", label)), out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["small", "smollm2"])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/ar"))
    parser.add_argument("--cache", type=Path, default=Path("out/models"))
    parser.add_argument("--vllm-python", help="an interpreter that can import vllm")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--vocab-size", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.folder, args.num_requests, args.vocab_size)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    report([row for name in args.models for row in compare(name, args)], args.out)


if __name__ == "__main__":
    main()
