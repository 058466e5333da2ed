"""Readers of published traces: Azure LLM inference, Mooncake, ServeGen, and plain length tables.

Owns the file formats only; it must not know what is done with the requests. Files may be gzipped.
A row that cannot be used is an error that names file, line and column; none is dropped.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO

import numpy as np

from genserve.core.errors import ConfigError
from genserve.core.workload.arrivals import GammaGaps, Gaps, Segment, Superposition, VaryingRate, WeibullGaps
from genserve.core.workload.lengths import Empirical, Independent, LengthPairs, ObservedPairs
from genserve.core.workload.spec import RequestSpec
from genserve.core.workload.workload import Workload

TraceFormat = Literal["azure", "mooncake", "servegen-arrivals", "lengths"]

_COLUMNS: dict[TraceFormat, tuple[str, ...]] = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "servegen-arrivals": ("client_id", "window_start_s", "rate_per_s", "dist", "p1"),
    "lengths": ("num_prefill_tokens", "num_decode_tokens"),
}
_SERVEGEN_WINDOW_S = 600.0
_SERVEGEN_GAPS: dict[str, Any] = {"Gamma": lambda shape: GammaGaps(shape**-0.5), "Weibull": WeibullGaps}


def trace_format(path: str | Path) -> TraceFormat:
    """Which of the formats a file has, by its first line."""
    path = Path(path)
    with _open(path) as file:
        first = file.readline().strip()
    if first.startswith("{"):
        return "mooncake"
    header = {column.strip() for column in first.split(",")}
    for name, columns in _COLUMNS.items():
        if header.issuperset(columns):
            return name
    known = "; ".join(",".join(columns) for columns in _COLUMNS.values())
    raise ConfigError(
        f"{path}, line 1: not a known trace. Known are JSON lines (Mooncake), or columns {known}"
    )


def read_azure(path: str | Path) -> Workload:
    """Azure LLM inference trace: `TIMESTAMP,ContextTokens,GeneratedTokens`."""
    path = Path(path)
    requests: list[RequestSpec] = []
    start: datetime | None = None
    previous_s = 0.0
    for line, row in _rows(path, _COLUMNS["azure"]):
        try:
            time = datetime.fromisoformat(row["TIMESTAMP"])
            start = start or time
            arrival_s = (time - start).total_seconds()
        except (ValueError, TypeError):
            _fail(path, line, "TIMESTAMP", f"expected a date and time, got {row['TIMESTAMP']!r}")
        if arrival_s < previous_s:
            _fail(path, line, "TIMESTAMP", "is earlier than the row before")
        previous_s = arrival_s
        requests.append(
            RequestSpec(
                arrival_s,
                _count(path, line, "ContextTokens", row["ContextTokens"]),
                _count(path, line, "GeneratedTokens", row["GeneratedTokens"]),
                seed=len(requests),
            )
        )
    return Workload.from_requests(path.name, requests)


def read_mooncake(path: str | Path, *, seed: int = 0, spread_bins: bool = True) -> Workload:
    """Mooncake trace, JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`.

    Each hash id stands for a block of 512 prompt tokens from the front. The conversation trace's
    timestamps fall on a grid of about 3 s; `spread_bins` spreads the requests of each instant
    evenly at random (by `seed`) up to the next instant, at most a typical gap away.
    """
    path = Path(path)
    requests: list[RequestSpec] = []
    previous_ms = -math.inf
    with _open(path) as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            row = _json_object(path, line, text)
            timestamp_ms = _number(path, line, "timestamp", row.get("timestamp"))
            if timestamp_ms < previous_ms:
                _fail(path, line, "timestamp", "is earlier than the row before")
            previous_ms = timestamp_ms
            num_prompt = _count(path, line, "input_length", row.get("input_length"))
            requests.append(
                RequestSpec(
                    timestamp_ms / 1000,
                    num_prompt,
                    _count(path, line, "output_length", row.get("output_length")),
                    prefix_ids=_hash_ids(path, line, row.get("hash_ids"), num_prompt),
                    seed=len(requests),
                )
            )
    if spread_bins:
        requests = _spread(requests, np.random.default_rng(seed))
    return Workload.from_requests(path.name, requests)


def read_lengths(path: str | Path) -> ObservedPairs:
    """A length table: `num_prefill_tokens,num_decode_tokens` and any other columns."""
    path = Path(path)
    prompt, output = _COLUMNS["lengths"]
    pairs = [
        (_count(path, line, prompt, row[prompt]), _count(path, line, output, row[output]))
        for line, row in _rows(path, _COLUMNS["lengths"])
    ]
    if not pairs:
        raise ConfigError(f"{path}: has no rows")
    return ObservedPairs(tuple(pairs))


@dataclass(frozen=True, slots=True)
class ServeGenClients:
    """ServeGen's clients: arrivals and lengths in the same order, for `Workload.generate`."""

    client_ids: tuple[int, ...]
    arrivals: Superposition
    lengths: tuple[LengthPairs, ...]


def read_servegen(
    arrivals_path: str | Path,
    lengths_path: str | Path,
    *,
    start_s: float = 0.0,
    duration_s: float = 3600.0,
    prompt_field: str = "input_tokens",
) -> ServeGenClients:
    """The clients active in `start_s` <= t < `start_s + duration_s`, on a clock that starts there.

    Arrivals are per client and 600 s window: the fitted shape (`p1`), at the window's `rate_per_s`
    (the fitted scale does not reproduce that rate). Lengths are those of the window that holds
    `start_s`, else the nearest the client has, else all clients' together.
    """
    path = Path(arrivals_path)
    windows: defaultdict[int, list[tuple[float, float, Gaps]]] = defaultdict(list)
    for line, row in _rows(path, _COLUMNS["servegen-arrivals"]):
        window_s = _number(path, line, "window_start_s", row["window_start_s"])
        client = int(_number(path, line, "client_id", row["client_id"]))
        rate = _number(path, line, "rate_per_s", row["rate_per_s"])
        if row["dist"] not in _SERVEGEN_GAPS:
            _fail(path, line, "dist", f"expected Gamma or Weibull, got {row['dist']!r}")
        shape = _number(path, line, "p1", row["p1"])
        if rate <= 0 or shape <= 0:
            _fail(path, line, "rate_per_s" if rate <= 0 else "p1", "must be above 0")
        if start_s <= window_s < start_s + duration_s:
            windows[client].append((window_s - start_s, rate, _SERVEGEN_GAPS[row["dist"]](shape)))
    if not windows:
        raise ConfigError(f"{path}: no client is active between {start_s} s and {start_s + duration_s} s")
    client_ids = tuple(sorted(windows))
    lengths = _servegen_lengths(Path(lengths_path), client_ids, start_s, prompt_field)
    clients = tuple(VaryingRate(_segments(sorted(windows[c], key=lambda w: w[0])), False) for c in client_ids)
    return ServeGenClients(client_ids, Superposition(clients), lengths)


def _segments(windows: list[tuple[float, float, Gaps]]) -> tuple[Segment, ...]:
    segments: list[Segment] = []
    time_s = 0.0
    for start_s, rate, gaps in windows:
        if start_s > time_s:
            segments.append(Segment(start_s - time_s, 0.0))
        segments.append(Segment(_SERVEGEN_WINDOW_S, rate, gaps))
        time_s = start_s + _SERVEGEN_WINDOW_S
    return tuple(segments)


def _servegen_lengths(
    path: Path, client_ids: tuple[int, ...], start_s: float, prompt_field: str
) -> tuple[LengthPairs, ...]:
    # pdfs[field][client][window start]; client -1 is all of them together.
    pdfs: dict[str, dict[int, dict[float, dict[int, float]]]]
    pdfs = {prompt_field: defaultdict(dict), "output_tokens": defaultdict(dict)}
    found: set[str] = set()
    for client, window_s, name, tokens, weight in _length_weights(path):
        found.add(name)
        if name in pdfs:
            for owner in {client, -1}:
                pdf = pdfs[name][owner].setdefault(window_s, {})
                pdf[max(1, tokens)] = pdf.get(max(1, tokens), 0.0) + weight
    for name, by_client in pdfs.items():
        if not by_client:
            raise ConfigError(f"{path}: has no lengths of field {name!r}, only of {', '.join(sorted(found))}")

    def pick(name: str, client: int) -> Empirical:
        by_window = pdfs[name].get(client) or pdfs[name][-1]
        before = [window_s for window_s in by_window if window_s <= start_s]
        return Empirical.from_pdf(by_window[max(before) if before else min(by_window)])

    return tuple(Independent(pick(prompt_field, c), pick("output_tokens", c)) for c in client_ids)


def _length_weights(path: Path) -> Iterator[tuple[int, float, str, int, float]]:
    """`(client, window start, field, tokens, weight)` of a per-client JSON-lines or a pooled CSV file."""
    with _open(path) as file:
        is_json = file.readline().startswith("{")
    if not is_json:
        for line, row in _rows(path, ("field", "tokens", "prob")):
            tokens = int(_number(path, line, "tokens", row["tokens"]))
            yield -1, 0.0, row["field"], tokens, _number(path, line, "prob", row["prob"])
        return
    with _open(path) as file:
        for line, text in enumerate(file, 1):
            row = _json_object(path, line, text)
            client = int(_number(path, line, "client_id", row.get("client_id")))
            window_s = _number(path, line, "window_start_s", row.get("window_start_s"))
            pdf = row.get("pdf")
            if not isinstance(pdf, Mapping):
                _fail(path, line, "pdf", f"expected an object, got {pdf!r}")
            for tokens, weight in pdf.items():
                if (value := _number(path, line, "pdf", weight)) > 0:
                    yield client, window_s, str(row.get("field")), int(float(tokens)), value


def _spread(requests: list[RequestSpec], rng: np.random.Generator) -> list[RequestSpec]:
    groups = [list(group) for _, group in groupby(requests, key=lambda request: request.arrival_s)]
    starts_s = [group[0].arrival_s for group in groups]
    gaps_s = np.diff(starts_s)
    typical_s = float(np.median(gaps_s)) if len(gaps_s) else 0.0
    spread: list[RequestSpec] = []
    for group, start_s, gap_s in zip(groups, starts_s, [*gaps_s.tolist(), typical_s], strict=True):
        offsets_s = np.sort(rng.random(len(group))) * min(gap_s, typical_s)
        for request, offset_s in zip(group, offsets_s.tolist(), strict=True):
            spread.append(
                RequestSpec(
                    start_s + offset_s,
                    request.num_prompt_tokens,
                    request.num_output_tokens,
                    prefix_ids=request.prefix_ids,
                    seed=request.seed,
                )
            )
    return spread


def _hash_ids(path: Path, line: int, value: Any, num_prompt_tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        _fail(path, line, "hash_ids", "expected a list of integers >= 0")
    if len(value) > -(-num_prompt_tokens // 512):
        _fail(
            path,
            line,
            "hash_ids",
            f"{len(value)} blocks of 512 tokens exceed input_length {num_prompt_tokens}",
        )
    return tuple(value)


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            yield file
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    with _open(path) as file:
        reader = csv.reader(file)
        header = [column.strip() for column in next(reader, [])]
        for column in columns:
            if column not in header:
                _fail(path, 1, column, "is missing from the header")
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                column = header[len(row)] if len(row) < len(header) else header[-1]
                _fail(path, reader.line_num, column, f"expected {len(header)} cells, got {len(row)}")
            yield reader.line_num, dict(zip(header, row, strict=True))


def _json_object(path: Path, line: int, text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {line}, column {error.colno}: not JSON: {error.msg}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{path}, line {line}: expected an object, got {text.strip()[:40]!r}")
    return row


def _number(path: Path, line: int, column: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number >= 0):
        _fail(path, line, column, f"expected a number >= 0, got {value!r}")
    return number


def _count(path: Path, line: int, column: str, value: Any) -> int:
    number = _number(path, line, column, value)
    if number < 1 or number != int(number):
        _fail(path, line, column, f"expected a whole number >= 1, got {value!r}")
    return int(number)


def _fail(path: Path, line: int, column: str, problem: str) -> NoReturn:
    raise ConfigError(f"{path}, line {line}, column {column}: {problem}")
