"""Tensors from one process to another: the tensor store beside a bare mapped pool, gloo and Ray, in one run.

    python benchmarks/data_engine.py [--rounds 5] [--no-ray] [--out DIR]

trip     put a tensor, send word, the other process reads one byte of each page, and answers. `view` reads where
         the tensor lies, `copied out` copies it first. The bare pool is a file mapped by both, one slot that
         is overwritten every time, and a pipe: what the store can't be faster than. The store adds references,
         holders, generations, and checks; its slot is released after each trip, outside the clock.
copy     the one copy that a put is, beside `memmove` from the same source into a mapped file.
slots    allocation and release in a ledger with 10,000 live tensors; then how full a pool gets at random sizes
         before an allocation finds no hole.

Ray gets the tensor as the argument of an actor call: plain, as a numpy array, and with
RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1 (a session of its own). Ways are interleaved within each round; figures are
over all rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from report import save, table

from genserve.core.errors import StoreFull
from genserve.core.tensors.slots import Slots
from genserve.core.tensors.store import TensorStore

KIB, MIB = 1 << 10, 1 << 20
# Bytes to trips in a round: ours, and Ray's.
SIZES = {KIB: (300, 40), 64 * KIB: (300, 40), MIB: (80, 25), 20 * MIB: (12, 6), 64 * MIB: (5, 3)}
POOL_BYTES = 256 * MIB
TOKEN = "benchmark"
BARE, BARE_COPY = "mapped pool and pipe, view", "mapped pool and pipe, copied out"


def label(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def touch(tensor: torch.Tensor) -> int:
    return int(tensor[::4096].sum())


def map_file(path: str) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=64 * MIB, dtype=torch.uint8)


def join_gloo(path: str, rank: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)


def other_process(pipe: Any, bare_path: str, gloo_path: str) -> None:
    """Answers `(way, bytes, trips)`, then as many messages as trips."""
    torch.set_num_threads(1)
    bare = map_file(bare_path)
    store = TensorStore.open(pool_bytes=MIB, token=TOKEN)
    join_gloo(gloo_path, 1)
    out = torch.zeros(64 * MIB, dtype=torch.uint8)
    import torch.distributed as dist

    def bare_copied(num_bytes: int) -> torch.Tensor:
        return out[:num_bytes].copy_(bare[:num_bytes])

    reads: dict[str, Callable[[Any], torch.Tensor]] = {
        BARE: lambda num_bytes: bare[:num_bytes],
        BARE_COPY: bare_copied,
        "store, view": store.view,
        "store, copied out": lambda ref: store.get(ref, out[: ref.nbytes]).wait(),
        "store over TCP": lambda ref: store.get(ref, out[: ref.nbytes]).wait(),
    }
    while (ask := pipe.recv()) is not None:
        way, num_bytes, trips = ask
        pipe.send("ready")
        for _ in range(trips):
            if way == "gloo send and receive":
                dist.recv(out[:num_bytes], 0)
                pipe.send(touch(out[:num_bytes]))
            else:
                pipe.send(touch(reads[way](pipe.recv())))
    store.close()


class Pair:
    """This process and the other one."""

    def __init__(self, folder: Path) -> None:
        bare_path, gloo_path = str(folder / "bare"), str(folder / "gloo")
        with open(bare_path, "wb") as bare_file:
            os.posix_fallocate(bare_file.fileno(), 0, 64 * MIB)
        self.bare = map_file(bare_path)
        self.store = TensorStore.open(pool_bytes=POOL_BYTES, listen=("127.0.0.1", 0), token=TOKEN)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._other = context.Process(target=other_process, args=(theirs, bare_path, gloo_path), daemon=True)
        self._other.start()
        join_gloo(gloo_path, 0)
        self.ways: dict[str, Callable[[torch.Tensor], Callable[[], None]]] = {
            BARE: self._through_bare,
            BARE_COPY: self._through_bare,
            "store, view": self._through_store,
            "store, copied out": self._through_store,
            "store over TCP": partial(self._through_store, far=True),
            "gloo send and receive": self._through_gloo,
        }

    def trips(self, way: str, source: torch.Tensor, trips: int) -> list[float]:
        """Seconds of each."""
        self._pipe.send((way, source.nbytes, trips))
        self._pipe.recv()
        want, spent = touch(source), []
        for _ in range(trips):
            start = time.perf_counter()
            after = self.ways[way](source)
            got = self._pipe.recv()
            spent.append(time.perf_counter() - start)
            after()
            if got != want:
                raise RuntimeError(f"{way}: {got} arrived, not {want}")
        return spent

    def close(self) -> None:
        self._pipe.send(None)
        self._other.join(10)
        self.store.close()

    def _through_bare(self, source: torch.Tensor) -> Callable[[], None]:
        self.bare[: source.nbytes].copy_(source)
        self._pipe.send(source.nbytes)
        return lambda: None

    def _through_store(self, source: torch.Tensor, far: bool = False) -> Callable[[], None]:
        ref = self.store.put(source, ("other",))
        seen = dataclasses.replace(ref, owner=ref.owner._replace(machine="elsewhere")) if far else ref
        self._pipe.send(seen)
        return lambda: self.store.release(ref, "other")

    def _through_gloo(self, source: torch.Tensor) -> Callable[[], None]:
        import torch.distributed as dist

        dist.send(source, 1)
        return lambda: None


def ray_session(pipe: Any, zero_copy: bool) -> None:
    """A Ray session in a process of its own: `(numpy?, bytes, trips)` to the seconds of each."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    if zero_copy:
        os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
    import ray

    ray.init(
        address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30
    )

    @ray.remote(num_cpus=0)
    class Reader:
        def touch(self, array: Any) -> int:
            return int(array[::4096].sum())

    reader = Reader.remote()
    sources: dict[int, torch.Tensor] = {}
    ray.get(reader.touch.remote(torch.zeros(8, dtype=torch.uint8)))
    pipe.send("ready")
    while (ask := pipe.recv()) is not None:
        as_numpy, num_bytes, trips = ask
        source = sources.setdefault(num_bytes, torch.ones(num_bytes, dtype=torch.uint8))
        spent = []
        for _ in range(trips):
            start = time.perf_counter()
            ray.get(reader.touch.remote(source.numpy() if as_numpy else source))
            spent.append(time.perf_counter() - start)
        pipe.send(spent)
    ray.shutdown()


class RayDrivers:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = {}, []
        for zero_copy in (False, True):
            self._pipes[zero_copy], theirs = context.Pipe()
            process = context.Process(target=ray_session, args=(theirs, zero_copy))
            process.start()
            self._processes.append(process)
            self._pipes[zero_copy].recv()

    def trips(self, way: str, num_bytes: int, trips: int) -> list[float]:
        pipe = self._pipes["zero-copy" in way]
        pipe.send(("numpy" in way, num_bytes, trips))
        return pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(30)


RAY_WAYS = ("Ray, torch tensor", "Ray, torch tensor, zero-copy option", "Ray, numpy array")


def trips(pair: Pair, rays: RayDrivers | None, rounds: int) -> dict[str, list[dict]]:
    sections = {}
    for num_bytes, (ours, rays_own) in SIZES.items():
        source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        spent: dict[str, list[float]] = defaultdict(list)
        for turn in range(rounds + 1):
            ways: list[tuple[str, Callable[[], list[float]]]] = [
                (way, partial(pair.trips, way, source, ours)) for way in pair.ways
            ]
            if rays is not None:
                ways += [(way, partial(rays.trips, way, num_bytes, rays_own)) for way in RAY_WAYS]
            for way, measured in ways:
                seconds = measured()
                if turn:  # the first round touches every page for the first time
                    spent[way] += seconds
        bare = statistics.median(spent[BARE])
        bare_copy = statistics.median(spent[BARE_COPY])
        sections[f"trip, {label(num_bytes)}"] = [
            {
                "way": way,
                "p50 ms": 1e3 * statistics.median(seconds),
                "p99 ms": 1e3 * sorted(seconds)[int(0.99 * len(seconds))],
                "GB/s": num_bytes / statistics.median(seconds) / 1e9,
                "x mapped pool": statistics.median(seconds) / (bare_copy if "copied out" in way else bare),
                "trips": len(seconds),
            }
            for way, seconds in spent.items()
        ]
    return sections


def copies(pair: Pair, rounds: int) -> list[dict]:
    rows = []
    for num_bytes, (ours, _) in SIZES.items():
        source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        spent: dict[str, list[float]] = defaultdict(list)

        for turn in range(3 * rounds + 1):
            for _ in range(max(ours // 3, 3)):
                start = time.perf_counter()
                ctypes.memmove(pair.bare.data_ptr(), source.data_ptr(), source.nbytes)
                middle = time.perf_counter()
                ref = pair.store.put(source, ("other",))
                end = time.perf_counter()
                pair.store.release(ref, "other")
                if turn:
                    spent["memcpy"].append(middle - start)
                    spent["put"].append(end - middle)
        memcpy_s, put_s = statistics.median(spent["memcpy"]), statistics.median(spent["put"])
        rows.append(
            {
                "size": label(num_bytes),
                "memcpy µs": 1e6 * memcpy_s,
                "put µs": 1e6 * put_s,
                "memcpy GB/s": num_bytes / memcpy_s / 1e9,
                "put GB/s": num_bytes / put_s / 1e9,
                "of memcpy": memcpy_s / put_s,
            }
        )
    return rows


def slots(rounds: int) -> list[dict]:
    """Each of 10,000 live tensors is replaced by another, one after the other."""
    chance = random.Random(0)
    num_bytes = 8 << 30
    ledger = Slots(num_bytes, [0] * (num_bytes // 256))
    sizes = [int(2 ** chance.uniform(8, 20)) for _ in range(10_000)]
    live = [ledger.allocate(size, ("a", "b")) for size in sizes]
    for slot in live:
        ledger.seal(slot)
    allocations, releases = [], []
    for _ in range(rounds):
        order = list(range(10_000))
        chance.shuffle(order)
        # In batches, so that the clock is asked rarely; each frees a hundred and takes a hundred others.
        for first in range(0, 10_000, 100):
            batch = order[first : first + 100]
            start = time.perf_counter()
            for index in batch:
                slot = live[index]
                ledger.release(slot.offset, slot.generation, "a")
                ledger.release(slot.offset, slot.generation, "b")
            middle = time.perf_counter()
            for index in batch:
                live[index] = ledger.allocate(sizes[index - 1], ("a", "b"))
                ledger.seal(live[index])
            end = time.perf_counter()
            releases.append((middle - start) / 100)
            allocations.append((end - middle) / 100)
    return [
        {
            "10,000 live tensors": name,
            "µs, median": 1e6 * statistics.median(times),
            "µs, p99": 1e6 * sorted(times)[int(0.99 * len(times))],
        }
        for name, times in (
            ("allocate and seal, two holders", allocations),
            ("release by both holders", releases),
        )
    ]


def fragmentation() -> list[dict]:
    rows = []
    for full in (0.8, 0.85, 0.9, 0.95):
        chance = random.Random(1)
        ledger = Slots(256 * MIB, [0] * MIB)
        live: list[Any] = []
        pool, failures = 256 * MIB, 0
        for _ in range(100_000):
            size = int(2 ** chance.uniform(8, 20))
            while ledger.stats()["used_bytes"] + size > full * pool:
                index = chance.randrange(len(live))
                live[index], live[-1] = live[-1], live[index]
                slot = live.pop()
                ledger.release(slot.offset, slot.generation, "a")
            try:
                slot = ledger.allocate(size, ("a",))
            except StoreFull:
                failures += 1
                continue
            ledger.seal(slot)
            live.append(slot)
        stats = ledger.stats()
        rows.append(
            {
                "pool full to": f"{full:.0%}",
                "refused of 100,000": failures,
                "largest free piece, KiB": stats["largest_free_bytes"] / KIB,
            }
        )
        for slot in live:
            ledger.release(slot.offset, slot.generation, "a")
        if ledger.stats()["largest_free_bytes"] != pool:
            raise RuntimeError("not all of the pool came back")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/data_engine"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sections = {"slots": slots(args.rounds), "fragmentation": fragmentation()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rays = None if args.no_ray else RayDrivers()
        pair = Pair(Path(folder))
        try:
            sections["copy"] = copies(pair, args.rounds)
            sections |= trips(pair, rays, args.rounds)
        finally:
            pair.close()
            if rays is not None:
                rays.close()
    for title, rows in sections.items():
        print(f"\n## {title}\n{table(rows)}")
    bars = {title: ("way", "p50 ms", "ms") for title in sections if title.startswith("trip")}
    save("data_engine", sections, bars, args.out)


if __name__ == "__main__":
    main()
