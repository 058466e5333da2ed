"""What happened to each request and when, and the standard instruments that follow from it.

Owns the life of a request as seen from outside (arrival, first token, finish); it must not know why.
Live and simulated loops and the load generator produce the same `Timeline`, so one summary and one
set of plots serve all. Memory is bounded by `max_timelines`, and what runs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from genserve.core.metrics.recorder import TOKEN_BUCKETS, Counter, Recorder


@dataclass(frozen=True, slots=True)
class Timeline:
    """One request that has ended. Times are seconds on the run's clock.

    first_token_s  None if it ended without a token.
    token_times_s  when tokens came, empty unless kept; several that came at once are one entry.
    outcome        a finish reason ("stop", "length"), "abort", or the kind of an error.
    ok             whether it ended as its client wanted.
    """

    request_id: str
    arrival_s: float
    first_token_s: float | None
    finish_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    outcome: str = "stop"
    ok: bool = True
    kind: str = ""
    token_times_s: tuple[float, ...] = ()

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        if self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.finish_s - self.first_token_s) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From arrival to finish."""
        return self.finish_s - self.arrival_s


class _Open:
    __slots__ = (
        "arrival_s",
        "first_token_s",
        "kind",
        "last_token_s",
        "num_cached",
        "num_output",
        "num_preemptions",
        "num_prompt",
        "times_s",
    )

    def __init__(self, arrival_s: float, num_prompt: int, kind: str) -> None:
        self.arrival_s, self.num_prompt, self.kind = arrival_s, num_prompt, kind
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.num_output = self.num_cached = self.num_preemptions = 0
        self.times_s: list[float] = []


class RequestLog:
    """Follows requests and feeds a recorder; keeps the last `max_timelines` that ended.

    With a recorder that is off and `max_timelines` 0, every call returns at once. Facts about a
    request that never arrived, or has ended, are ignored: an abort may cross a finish.
    """

    def __init__(self, recorder: Recorder, *, max_timelines: int = 0, keep_token_times: bool = False) -> None:
        self._on = recorder.enabled or max_timelines > 0
        self._recorder = recorder
        self._keep_token_times = keep_token_times
        self._open: dict[str, _Open] = {}
        self._ended: deque[Timeline] = deque(maxlen=max_timelines)
        self._outcomes: dict[str, Counter] = {}
        counter, histogram = recorder.counter, recorder.histogram
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that arrived")
        self._output_tokens = counter("output_tokens", "Output tokens produced")
        self._cached_tokens = counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache")
        self._preemptions = counter("preemptions", "Times a running request gave its KV pages up")
        self._ttft = histogram("ttft_s", "Time from arrival to the first token")
        self._tpot = histogram("tpot_s", "Mean time per output token after the first, by request")
        self._inter_token = histogram("inter_token_s", "Time between tokens of one request")
        self._e2e = histogram("e2e_s", "Time from arrival to the end")
        self._prompt_lengths = histogram("request_prompt_tokens", "Prompt tokens, by request", TOKEN_BUCKETS)
        self._output_lengths = histogram("request_output_tokens", "Output tokens, by request", TOKEN_BUCKETS)
        self._in_flight = recorder.gauge("requests_in_flight", "Requests that arrived and have not ended")

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """The ended requests kept, in order of ending."""
        return tuple(self._ended)

    def arrived(self, request_id: str, now_s: float, num_prompt_tokens: int, kind: str = "") -> None:
        """A request came in."""
        if not self._on:
            return
        self._open[request_id] = _Open(now_s, num_prompt_tokens, kind)
        self._prompt_tokens.add(num_prompt_tokens)
        self._prompt_lengths.observe(num_prompt_tokens)
        self._in_flight.set(len(self._open))

    def cached(self, request_id: str, num_tokens: int) -> None:
        """`num_tokens` of its prompt were found in the prefix cache."""
        if (request := self._open.get(request_id)) is not None:
            request.num_cached += num_tokens
            self._cached_tokens.add(num_tokens)

    def preempted(self, request_id: str) -> None:
        """It gave up its KV pages and will be recomputed."""
        if (request := self._open.get(request_id)) is not None:
            request.num_preemptions += 1
            self._preemptions.add()

    def tokens(self, request_id: str, now_s: float, num_tokens: int = 1) -> None:
        """`num_tokens` of output came, all at `now_s`."""
        if num_tokens <= 0 or (request := self._open.get(request_id)) is None:
            return
        if request.first_token_s is None:
            request.first_token_s = now_s
            self._ttft.observe(now_s - request.arrival_s)
        else:
            self._inter_token.observe(now_s - request.last_token_s)
        request.last_token_s = now_s
        request.num_output += num_tokens
        self._output_tokens.add(num_tokens)
        if self._keep_token_times:
            request.times_s.append(now_s)

    def finished(self, request_id: str, now_s: float, outcome: str, *, ok: bool = True) -> None:
        """It ended; `outcome` is a finish reason or the kind of an error."""
        if (request := self._open.pop(request_id, None)) is None:
            return
        timeline = Timeline(
            request_id,
            request.arrival_s,
            request.first_token_s,
            now_s,
            request.num_prompt,
            request.num_output,
            request.num_cached,
            request.num_preemptions,
            outcome,
            ok,
            request.kind,
            tuple(request.times_s),
        )
        self._ended.append(timeline)
        if (counter := self._outcomes.get(outcome)) is None:
            counter = self._recorder.counter("requests", "Requests that ended", outcome=outcome)
            self._outcomes[outcome] = counter
        counter.add()
        self._e2e.observe(timeline.e2e_s)
        self._output_lengths.observe(timeline.num_output_tokens)
        if (tpot_s := timeline.tpot_s) is not None:
            self._tpot.observe(tpot_s)
        self._in_flight.set(len(self._open))
