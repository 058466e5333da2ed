"""Mixed diffusion traffic on workers that are killed, join, leave and change roles: is every answer right,
and does anything grow?

    python benchmarks/dllm_soak.py --minutes 10 --out out/soak

A real server (`genserve serve`, executor ray) with one prefill worker and two colocated ones. Clients ask
over HTTP for the same requests over and over: streamed and whole, all caches, several samplers, some given
up in the middle. What the undisturbed server answered at first is what it has to answer ever after. Meanwhile
a random worker is killed (SIGKILL) every `--kill-s` seconds or so, and now and then one joins, is drained or
changes its role. Memory, file descriptors, threads and shared-memory pools are sampled; at the end
nothing may be held.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from report import save, table

PROMPTS = ("The capital of France is", "cab", "Sort 9 4 7 1:", "Tom went to the river and")
EXTRAS: list[dict[str, Any]] = [
    {},
    {"cache": "prefix"},
    {"cache": "none", "block_length": 16},
    {"cache": "dkv", "refresh_interval": 4},
    {"unmasking": "quota", "steps": 24},
    {"temperature": 0.9, "seed": 7},
    {"unmasking": "random", "steps": 16, "seed": 9, "temperature": 0.5},
]
REQUESTS = [
    {"prompt": prompt, "max_tokens": 16 + 16 * ((i + j) % 5), "stream": bool((i + j) % 2), **extra}
    for i, prompt in enumerate(PROMPTS)
    for j, extra in enumerate(EXTRAS)
]


class Server:
    """The server's process, and what its operators and clients ask of it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "genserve", "serve", "dllm", "--port", "0", "--executor", "ray"]
        for option in ("num_workers=3", "num_prefill_workers=1", "overflow_tokens=256", "kv_pool=32MiB"):
            command += ["--set", f"models.0.{option}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("Ready at "):
                self.url = line.split()[2].rstrip(";")
                break
        else:
            sys.exit("the server did not start")
        self.client = httpx.AsyncClient(base_url=self.url, timeout=120)

    async def workers(self) -> list[dict[str, Any]]:
        return (await self.client.get("/v1/workers")).raise_for_status().json()["data"]

    async def ask(self, body: dict[str, Any], give_up: bool = False) -> str | None:
        """The answer; None if it was given up."""
        body = {"model": "tiny-llada", **body}
        if not body["stream"]:
            response = (await self.client.post("/v1/completions", json=body)).raise_for_status()
            return response.json()["choices"][0]["text"]
        text = ""
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                text += chunk["choices"][0]["text"] if chunk["choices"] else ""
                if give_up:
                    return None
        return text

    async def figures(self) -> dict[str, float]:
        text = (await self.client.get("/metrics")).raise_for_status().text
        pairs = [line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, value in pairs}


class Soak:
    """What happens, and what was seen of it."""

    def __init__(self, server: Server, expected: list[str], seed: int, kill_s: float) -> None:
        self.server, self.expected = server, expected
        self.rng = random.Random(seed)
        self.kill_s = kill_s
        self.ends_s = 0.0
        self.latencies_s: list[float] = []
        self.wrong: list[str] = []
        self.counts = dict.fromkeys(("answers", "given_up", "kills", "role_changes", "joined", "drained"), 0)
        self.samples: list[dict[str, float]] = []

    async def client(self) -> None:
        while time.monotonic() < self.ends_s:
            index = self.rng.randrange(len(REQUESTS))
            give_up = self.rng.random() < 0.1 and REQUESTS[index]["stream"]
            began_s = time.monotonic()
            try:
                text = await self.server.ask(REQUESTS[index], give_up)
            except Exception as error:  # counted, and shown at the end
                self.wrong.append(f"request {index}: {type(error).__name__}: {error}")
                continue
            if text is None:
                self.counts["given_up"] += 1
            elif text != self.expected[index]:
                self.wrong.append(f"request {index}: {text!r}, not {self.expected[index]!r}")
            else:
                self.counts["answers"] += 1
                self.latencies_s.append(time.monotonic() - began_s)

    async def trouble(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(0.5, 1.5) * self.kill_s)
            if time.monotonic() > self.ends_s - 15:
                return
            running = [w for w in await self.server.workers() if w["state"] == "running"]
            if running:
                os.kill(self.rng.choice(running)["pid"], signal.SIGKILL)
                self.counts["kills"] += 1

    async def operators(self) -> None:
        """A worker more and then one less, and a role to and fro, for as long as there is time."""
        client = self.server.client
        while True:
            await asyncio.sleep(4 * self.kill_s)
            if time.monotonic() > self.ends_s - 30:
                return
            role = self.rng.choice(["prefill", "colocated"])
            (await client.post("/v1/workers", json={"role": role}, timeout=120)).raise_for_status()
            self.counts["joined"] += 1
            names = [w["name"] for w in await self.server.workers() if w["role"] == role]
            (await client.delete(f"/v1/workers/{names[0]}", timeout=120)).raise_for_status()
            self.counts["drained"] += 1
            names = [w["name"] for w in await self.server.workers() if w["role"] == "colocated"]
            for role in ("prefill", "colocated"):
                answer = await client.patch(f"/v1/workers/{names[0]}", json={"role": role}, timeout=120)
                answer.raise_for_status()
                self.counts["role_changes"] += 1

    async def watch(self, every_s: float = 5.0) -> None:
        began_s = time.monotonic()
        while time.monotonic() < self.ends_s:
            self.samples.append({"time_s": time.monotonic() - began_s, **await self.sample()})
            await asyncio.sleep(every_s)

    async def sample(self) -> dict[str, float]:
        folder = Path(f"/proc/{self.server.process.pid}")
        memory = [_rss_mib(pid) for w in await self.server.workers() if (pid := w["pid"])]
        pools = list(Path("/dev/shm").glob("genserve-*"))
        return {
            "server_mib": _rss_mib(self.server.process.pid),
            "server_fds": len(list((folder / "fd").iterdir())),
            "server_threads": len(list((folder / "task").iterdir())),
            "largest_worker_mib": max(memory, default=0.0),
            "num_pools": len(pools),
            "answers": self.counts["answers"],
        }


def _rss_mib(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except FileNotFoundError:  # it has just died
        return 0.0


async def run(arguments: argparse.Namespace) -> int:
    server = Server()
    try:
        expected = [str(await server.ask(body)) for body in REQUESTS]
        soak = Soak(server, expected, arguments.seed, arguments.kill_s)
        soak.ends_s = time.monotonic() + 60 * arguments.minutes
        async with asyncio.TaskGroup() as tasks:
            for _ in range(arguments.clients):
                tasks.create_task(soak.client())
            for task in (soak.trouble(), soak.operators(), soak.watch()):
                tasks.create_task(task)
        await asyncio.sleep(5)
        figures = await server.figures()
        soak.samples.append({"time_s": 60 * arguments.minutes + 5, **await soak.sample()})
    finally:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=60)
    return report(arguments, soak, figures)


def report(arguments: argparse.Namespace, soak: Soak, figures: dict[str, float]) -> int:
    held = {}
    for name in ("sequences", "used_pages", "staged_pages", "kept_pages", "outstanding_tokens", "fetching"):
        found = [value for key, value in figures.items() if f"_{name}" in key and "total" not in key]
        held[name] = sum(found)
    restarts = sum([value for key, value in figures.items() if "restarts" in key and "created" not in key])
    moved = sum([value for key, value in figures.items() if "fetched" in key and "created" not in key])
    latencies = sorted(soak.latencies_s)
    what = {
        "minutes": arguments.minutes,
        **soak.counts,
        "wrong": len(soak.wrong),
        "restarts": restarts,
        "fetched": moved,
        "median_s": statistics.median(latencies),
        "p99_s": latencies[int(0.99 * len(latencies))],
        "pools_left": len(list(Path("/dev/shm").glob("genserve-*"))),
    }
    rows = [{"what": name, "value": value} for name, value in what.items()]
    rows += [{"what": f"held at the end: {name}", "value": value} for name, value in held.items()]
    third = len(soak.samples) // 3
    grown = []
    for name in soak.samples[0]:
        if name in ("time_s", "answers"):
            continue
        series = [sample[name] for sample in soak.samples]
        first, last = statistics.median(series[third : 2 * third]), statistics.median(series[2 * third :])
        grown.append({"sampled": name, "middle third": first, "last third": last, "most": max(series)})
    sections = {"Soak": rows, "Over time (medians)": grown}
    save("dllm_soak", sections, {"Over time (medians)": ("sampled", "last third", "")}, arguments.out)
    (arguments.out / "samples.json").write_text(json.dumps(soak.samples))
    for title, found in sections.items():
        print(f"\n## {title}\n\n{table(found)}")
    for wrong in soak.wrong[:20]:
        print("wrong:", wrong)
    return 1 if soak.wrong or any(held.values()) or what["pools_left"] else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kill-s", type=float, default=20.0, help="seconds between two kills, about")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/soak"))
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
