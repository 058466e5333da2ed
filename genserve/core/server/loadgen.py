"""A load generator for any OpenAI-compatible server: open loop (rate or trace) and closed loop.

Owns sending, timing and counting; it must not know which server answers. Times are taken where bytes
arrive. In an open loop latency counts from the moment a request was *due*, so a client or server
that falls behind cannot hide it (`send_lag_s` tells the client's part). Token counts come from the
server's `usage`. Every request that was sent ends as one timeline, good or with the kind of its error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from genserve.core.errors import ConfigError, ExecutionFailed
from genserve.core.metrics.summary import SLO, Distribution, Summary, summarize
from genserve.core.metrics.timelines import Timeline
from genserve.core.server.http_client import BadResponse, Disconnected, HttpClient
from genserve.core.workload.spec import RequestSpec, synthesize_prompt, synthesize_text
from genserve.core.workload.workload import Workload

_MAX_ERROR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Target:
    """The server under load, and how to ask.

    base_url    with or without `/v1`.
    vocab_size  for completions: send prompts as token ids below it; None sends text of about as many tokens.
    ignore_eos  ask for exactly the wanted number of tokens (an extension that vLLM, too, understands).
    extra_body  further fields of every request.
    """

    base_url: str
    model: str
    endpoint: Literal["chat", "completions"] = "chat"
    api_key: str | None = field(default=None, repr=False)
    vocab_size: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    request_timeout_s: float = 600.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.endpoint not in ("chat", "completions"):
            raise ConfigError(f"endpoint: must be chat or completions, got {self.endpoint!r}")
        if self.endpoint == "chat" and self.vocab_size is not None:
            raise ConfigError("vocab_size: chat prompts are text; use endpoint completions for token ids")
        if not self.request_timeout_s > 0:
            raise ConfigError(f"request_timeout_s: must be above 0, got {self.request_timeout_s}")

    def client(self) -> HttpClient:
        """An HTTP client for this server's `/v1`."""
        root = self.base_url.rstrip("/")
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return HttpClient(root if root.endswith("/v1") else f"{root}/v1", headers)

    @property
    def path(self) -> str:
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def body(self, spec: RequestSpec) -> bytes:
        """The request for `spec`, as JSON."""
        fields: dict[str, Any] = {"model": self.model}
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": synthesize_text(spec)}]
        elif self.vocab_size is None:
            fields["prompt"] = synthesize_text(spec)
        else:
            fields["prompt"] = synthesize_prompt(spec, self.vocab_size)
        fields |= {"max_tokens": spec.num_output_tokens, "temperature": self.temperature}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps({**fields, **self.extra_body}, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is. `num_output_tokens` counts streamed events until usage is known."""

    num_total: int
    num_sent: int
    num_done: int
    num_failed: int
    num_output_tokens: int
    elapsed_s: float


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """One run: a timeline for each request sent (times from the run's start), and how it went.

    error_examples     one message per kind of error.
    num_without_usage  requests whose tokens had to be counted by events, for want of `usage`.
    send_lag_s         how late the client itself was, open loop only.
    """

    timelines: tuple[Timeline, ...]
    num_planned: int
    duration_s: float
    offered_rate_per_s: float | None
    concurrency: int | None
    hit_time_limit: bool
    send_lag_s: Distribution
    error_examples: dict[str, str]
    num_without_usage: int
    client_cpu_s: float

    @property
    def num_errors(self) -> dict[str, int]:
        """How many requests failed, by kind."""
        kinds: dict[str, int] = {}
        for timeline in self.timelines:
            if not timeline.ok:
                kinds[timeline.outcome] = kinds.get(timeline.outcome, 0) + 1
        return kinds

    def summary(self, slo: SLO | None = None) -> Summary:
        """Latency, throughput and goodput of the run."""
        return summarize(self.timelines, duration_s=self.duration_s, slo=slo)


async def run_load(
    target: Target,
    workload: Workload,
    *,
    concurrency: int | None = None,
    time_limit_s: float | None = None,
    on_progress: OnProgress | None = None,
) -> LoadResult:
    """Send a workload and measure.

    Without `concurrency` requests go out at their arrival times (open loop); with it, arrival times
    are ignored and so many are kept in flight (closed loop). After `time_limit_s` what is in flight
    is cut off and counted as `time_limit`. Cancelling cuts everything off and leaves nothing behind.
    """
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"concurrency: must be at least 1, got {concurrency}")
    if time_limit_s is not None and not time_limit_s > 0:
        raise ConfigError(f"time_limit_s: must be above 0, got {time_limit_s}")
    return await _Run(target, workload, concurrency, on_progress).run(time_limit_s)


async def served_models(target: Target) -> list[str]:
    """The ids that `/v1/models` lists. Raises ExecutionFailed if the server cannot be asked."""
    pieces: list[bytes] = []
    try:
        async with target.client() as client, asyncio.timeout(target.request_timeout_s):
            status = await client.request("GET", "/models", b"", lambda _, piece: pieces.append(piece))
        if status != 200:
            raise ExecutionFailed(f"{target.base_url}: /v1/models answered with status {status}")
        return [model["id"] for model in json.loads(b"".join(pieces))["data"]]
    except (OSError, TimeoutError) as error:
        raise ExecutionFailed(f"{target.base_url}: cannot be reached: {error or 'timed out'}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ExecutionFailed(f"{target.base_url}: /v1/models is not a list of models") from error


class _Run:
    def __init__(
        self, target: Target, workload: Workload, concurrency: int | None, on_progress: OnProgress | None
    ) -> None:
        self._target, self._workload, self._concurrency = target, workload, concurrency
        self._on_progress = on_progress
        self._timelines: list[Timeline] = []
        self._lags_s: list[float] = []
        self._error_examples: dict[str, str] = {}
        self._num_sent = self._num_failed = self._num_tokens = self._num_without_usage = 0
        self._start_s = 0.0

    async def run(self, time_limit_s: float | None) -> LoadResult:
        hit_time_limit = False
        cpu_start_s = time.process_time()
        async with self._target.client() as client:
            self._start_s = time.perf_counter()
            try:
                async with asyncio.timeout(time_limit_s), asyncio.TaskGroup() as group:
                    if self._concurrency is None:
                        await self._send_when_due(client, group)
                    else:
                        pending = iter(self._workload.requests)
                        for _ in range(self._concurrency):
                            group.create_task(self._send_one_by_one(client, pending))
            except TimeoutError:
                hit_time_limit = True
            duration_s = self._now()
        rate = self._workload.rate_per_s if self._concurrency is None else None
        return LoadResult(
            tuple(self._timelines),
            len(self._workload.requests),
            duration_s,
            rate,
            self._concurrency,
            hit_time_limit,
            Distribution.of(self._lags_s),
            self._error_examples,
            self._num_without_usage,
            time.process_time() - cpu_start_s,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._start_s

    async def _send_when_due(self, client: HttpClient, group: asyncio.TaskGroup) -> None:
        for spec in self._workload.requests:
            body = self._target.body(spec)  # before the wait: a long prompt takes milliseconds to make
            await asyncio.sleep(max(0.0, spec.arrival_s - self._now()))
            self._lags_s.append(self._now() - spec.arrival_s)
            group.create_task(self._send(client, spec, body, spec.arrival_s))

    async def _send_one_by_one(self, client: HttpClient, pending: Iterator[RequestSpec]) -> None:
        for spec in pending:
            body = self._target.body(spec)
            await self._send(client, spec, body, self._now())

    async def _send(self, client: HttpClient, spec: RequestSpec, body: bytes, arrival_s: float) -> None:
        stream = _Stream(self._now)
        index = self._num_sent
        self._num_sent += 1
        self._report()
        error: tuple[str, str] | None
        try:
            async with asyncio.timeout(self._target.request_timeout_s):
                status = await client.request("POST", self._target.path, body, stream.feed)
            error = stream.error_at_end(status)
        except asyncio.CancelledError:
            self._record(index, spec, stream, arrival_s, ("time_limit", "cut off"))
            raise
        except TimeoutError:
            error = ("timeout", f"no end after {self._target.request_timeout_s:g} s")
        except Disconnected as problem:
            error = ("disconnected", str(problem))
        except BadResponse as problem:
            error = ("bad_response", str(problem))
        except OSError as problem:
            error = ("connect", str(problem))
        self._record(index, spec, stream, arrival_s, error)

    def _record(
        self, index: int, spec: RequestSpec, stream: _Stream, arrival_s: float, error: tuple[str, str] | None
    ) -> None:
        num_events = len(stream.token_times_s)
        num_output = stream.usage.get("completion_tokens", num_events)
        if error is not None:
            self._num_failed += 1
            self._error_examples.setdefault(*error)
        elif "completion_tokens" not in stream.usage:
            self._num_without_usage += 1
        self._num_tokens += num_output
        self._timelines.append(
            Timeline(
                request_id=str(index),
                arrival_s=arrival_s,
                first_token_s=stream.token_times_s[0] if num_events else None,
                finish_s=self._now() if error or stream.last_s is None else stream.last_s,
                num_prompt_tokens=stream.usage.get("prompt_tokens", spec.num_prompt_tokens),
                num_output_tokens=num_output,
                num_cached_tokens=stream.usage.get("cached_tokens", 0),
                outcome=error[0] if error else stream.finish_reason or "stop",
                ok=error is None,
                kind=spec.kind,
                token_times_s=tuple(stream.token_times_s),
            )
        )
        self._report()

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(
                Progress(
                    len(self._workload.requests),
                    self._num_sent,
                    len(self._timelines),
                    self._num_failed,
                    self._num_tokens,
                    self._now(),
                )
            )


class _Stream:
    """Reads one streamed response: server-sent events of chat or text completion chunks."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._rest = b""
        self._body_start = b""
        self._error: tuple[str, str] | None = None
        self._done = False
        self.token_times_s: list[float] = []
        self.last_s: float | None = None
        self.finish_reason: str | None = None
        self.usage: dict[str, int] = {}

    def feed(self, status: int, piece: bytes) -> None:
        """A piece of the body has arrived."""
        if len(self._body_start) < _MAX_ERROR_BYTES:
            self._body_start += piece[:_MAX_ERROR_BYTES]
        if status != 200:
            return
        now_s = self._now()
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def error_at_end(self, status: int) -> tuple[str, str] | None:
        """`(kind, message)` of what was wrong with the complete response."""
        if status != 200:
            text = self._body_start.decode("utf-8", "replace").strip()
            return f"http_{status}", f"status {status}: {text[:500]}"
        if self._error is not None:
            return self._error
        if self.finish_reason is None and not self._done:
            start = self._body_start[:200].decode("utf-8", "replace")
            if b"data:" not in self._body_start:
                return "bad_response", f"not an event stream: {start}"
            return "truncated", "the stream ended without a finish reason"
        return None

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
            if event.get("error") is not None:
                self._error = ("server_error", str(event["error"])[:500])
                return
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or choice
                if delta.get("content") or delta.get("reasoning_content") or delta.get("text"):
                    self.token_times_s.append(now_s)
                    self.last_s = now_s
                if choice.get("finish_reason") is not None:
                    self.finish_reason = str(choice["finish_reason"])
                    self.last_s = now_s
            if (usage := event.get("usage")) is not None:
                self.usage = {name: int(usage[name]) for name in ("prompt_tokens", "completion_tokens")}
                details = usage.get("prompt_tokens_details") or {}
                self.usage["cached_tokens"] = int(details.get("cached_tokens") or 0)
        except (ValueError, TypeError, AttributeError, KeyError) as problem:
            self._error = ("bad_response", f"{problem!r} in event {data[:200].decode('utf-8', 'replace')}")
