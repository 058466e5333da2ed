"""Named workloads, fitted to published statistics, and the opening of a workload by name or path.

Owns the fitted constants. They are figures of public traces, so nothing here needs the traces.
Prompt and output lengths are independent (in the Azure traces their correlation is -0.11 and 0.00).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from genserve.core.errors import ConfigError
from genserve.core.workload.arrivals import Arrivals, OnOff, first_arrivals, gamma, poisson
from genserve.core.workload.lengths import Independent, LengthPairs, Quantiles
from genserve.core.workload.spec import RequestSpec
from genserve.core.workload.traces import (
    read_azure,
    read_lengths,
    read_mooncake,
    read_servegen,
    trace_format,
)
from genserve.core.workload.workload import Workload

_PROBABILITIES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)


def _quantiles(*tokens: float) -> Quantiles:
    return Quantiles(tuple(zip(_PROBABILITIES, tokens, strict=True)))


# Azure LLM inference traces of November 2023, conversation and code.
_CHAT = Independent(
    _quantiles(2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 6179, 14050),
    _quantiles(7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 954, 1000),
)
_CODE = Independent(
    _quantiles(3, 17, 75, 147, 578, 1469, 2744, 5187, 7303, 7436, 7437, 7437),
    _quantiles(6, 6, 6, 7, 9, 13, 24, 55, 90, 251, 825, 1899),
)
# Equal on and off periods of mean m give CV^2 = 1 + rate_on * m / 2; this is the code trace's 13.2.
_CODE_ARRIVALS = OnOff(on_rate_per_s=5.14, mean_on_s=67.4, mean_off_s=67.4)

# Sangam, Table 1: medians, 99th percentiles and standard deviations. The points between are chosen
# so that the standard deviation comes out; a lognormal with these medians and tails misses it.
_SANGAM_SHAREGPT = Independent(
    Quantiles(((0, 16), (0.5, 795), (0.75, 1460), (0.99, 2007), (1, 2048))),
    Quantiles(((0, 8), (0.5, 266), (0.9, 535), (0.99, 874), (1, 1024))),
)
_SANGAM_ARXIV = Independent(
    Quantiles(((0, 256), (0.1, 1500), (0.5, 2827), (0.75, 3370), (0.99, 3923), (1, 4000))),
    Quantiles(((0, 32), (0.1, 90), (0.5, 162), (0.9, 260), (0.99, 360), (1, 384))),
)

# Mooncake's conversation trace; every prompt there shares its first block.
_MOONCAKE = Independent(
    _quantiles(891, 894, 901, 964, 2306, 6909, 15367, 27367, 39550, 85400, 121300, 126195),
    _quantiles(1, 3, 10, 24, 156, 350, 472, 597, 698, 1118, 2000, 2000),
)
_MOONCAKE_FOLLOW_UP = 0.68
_MOONCAKE_OPEN_SESSIONS = 512
_BLOCK_TOKENS = 512


def _plain(arrivals: Arrivals, lengths: LengthPairs, name: str) -> Callable[[int, int], Workload]:
    return lambda num, seed: Workload.generate(arrivals, lengths, seed=seed, num_requests=num, name=name)


def _mooncake_like(num_requests: int, seed: int) -> Workload:
    """Sessions: a request either goes on from an earlier, shorter prompt or starts anew."""
    arrival_rng, length_rng, session_rng = np.random.default_rng(seed).spawn(3)
    prompts, outputs = _MOONCAKE.sample_pairs(num_requests, length_rng)
    times_s = first_arrivals(poisson(3.4), num_requests, arrival_rng)
    sessions: list[tuple[int, ...]] = []
    requests: list[RequestSpec] = []
    next_id = 1
    for index, (time_s, num_prompt, num_output) in enumerate(
        zip(times_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    ):
        num_blocks = -(-num_prompt // _BLOCK_TOKENS)
        shared: tuple[int, ...] = (0,)
        go_on, where = session_rng.random(2).tolist()
        candidates = [ids for ids in sessions if 1 < len(ids) < num_blocks]
        if candidates and go_on < _MOONCAKE_FOLLOW_UP:
            # Of the prompts that this one could extend, one of the longer: conversations grow.
            candidates.sort(key=len)
            shared = candidates[int(len(candidates) * where**0.5)]
            sessions.remove(shared)
        num_new = num_blocks - len(shared)
        ids = shared + tuple(range(next_id, next_id + num_new))
        next_id += num_new
        sessions = [*sessions, ids][-_MOONCAKE_OPEN_SESSIONS:]
        requests.append(RequestSpec(time_s, num_prompt, num_output, ids, seed=(seed << 32) + index))
    return Workload.from_requests("mooncake-like", requests)


_PRESETS: dict[str, tuple[str, Callable[[int, int], Workload]]] = {
    "chat": (
        "Azure conversation trace, 2023: 5.53/s, prompts of 1,155 tokens, outputs of 211",
        _plain(gamma(5.53, 1.09), _CHAT, "chat"),
    ),
    "code": (
        "Azure code trace, 2023: 2.57/s in long bursts, prompts of 2,048 tokens, outputs of 28",
        _plain(_CODE_ARRIVALS, _CODE, "code"),
    ),
    "sangam-sharegpt": (
        "Sangam's ShareGPT: prompt median 795, output median 266",
        _plain(poisson(1.0), _SANGAM_SHAREGPT, "sangam-sharegpt"),
    ),
    "sangam-arxiv": (
        "Sangam's arXiv summarisation: prompt median 2,827, output median 162",
        _plain(poisson(1.0), _SANGAM_ARXIV, "sangam-arxiv"),
    ),
    "mooncake-like": (
        "Mooncake's conversations: 3.4/s, long prompts that share prefixes",
        _mooncake_like,
    ),
    "tiny": (
        "short prompts and outputs, for a laptop",
        _plain(
            poisson(2.0),
            Independent(Quantiles(((0, 8), (0.5, 40), (1, 160))), Quantiles(((0, 8), (0.5, 24), (1, 64)))),
            "tiny",
        ),
    ),
}


def preset_names() -> dict[str, str]:
    """Name and one line of description of every preset."""
    return {name: description for name, (description, _) in _PRESETS.items()}


def preset(name: str, num_requests: int, seed: int = 0) -> Workload:
    """A named workload at its own rate; `at_rate` gives it another."""
    if name not in _PRESETS:
        raise ConfigError(f"workload: no preset {name!r}; there are {', '.join(_PRESETS)}")
    if num_requests < 1:
        raise ConfigError(f"num_requests: must be at least 1, got {num_requests}")
    return _PRESETS[name][1](num_requests, seed)


def open_workload(source: str | Path, num_requests: int | None = None, seed: int = 0) -> Workload:
    """A preset by name, or a trace by path, of at most `num_requests` requests (presets: 1,000 unless told).

    A length table gets Poisson arrivals of 1/s. A ServeGen arrivals file needs its lengths file
    beside it (`..._arrivals.csv` and `..._lengths.jsonl`, or a pooled `..._lengths.csv`).
    """
    if str(source) in _PRESETS:
        return preset(str(source), 1000 if num_requests is None else num_requests, seed)
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"workload: {str(source)!r} is neither a file nor one of {', '.join(_PRESETS)}")
    kind = trace_format(path)
    if kind == "lengths":
        pairs = read_lengths(path)
        num = len(pairs.pairs) if num_requests is None else num_requests
        return Workload.generate(poisson(1.0), pairs, seed=seed, num_requests=num, name=path.name)
    if kind == "servegen-arrivals":
        clients = read_servegen(path, _servegen_lengths_path(path))
        bound = {"duration_s": 3600.0} if num_requests is None else {"num_requests": num_requests}
        workload = Workload.generate(clients.arrivals, clients.lengths, seed=seed, name=path.name, **bound)
        named = [replace(r, kind=f"client-{clients.client_ids[int(r.kind[7:])]}") for r in workload.requests]
        return replace(workload, requests=tuple(named))
    workload = read_azure(path) if kind == "azure" else read_mooncake(path, seed=seed)
    return workload if num_requests is None else workload.first(num_requests)


def _servegen_lengths_path(arrivals_path: Path) -> Path:
    stem = arrivals_path.name.split("_arrivals")[0]
    found = sorted(arrivals_path.parent.glob(f"{stem}_*lengths.*"))
    if not found:
        raise ConfigError(f"{arrivals_path}: no lengths file named {stem}_lengths.* beside it")
    return found[0]
