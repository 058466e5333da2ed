"""Prometheus instruments of the HTTP front: what clients see, by model.

Recorded once a request, never once a token. Knows nothing of engines.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class HttpMetrics:
    """The instruments, registered in `registry` (a new one if None)."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"genserve_http_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"genserve_http_{name}", text, ["model"], buckets=buckets, registry=self.registry
            )

        self.requests = counter("requests", "Requests by model and status.", "model", "status")
        self.disconnects = counter("disconnects", "Requests whose client went before the end.", "model")
        self.stream_errors = counter("stream_errors", "Streams ended by an error.", "model", "code")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.", "model")
        self.generation_tokens = counter("generation_tokens", "Output tokens, aborted ones too.", "model")
        self.images = counter("images", "Images made.", "model")
        self.inflight = Gauge(
            "genserve_http_inflight_requests", "Requests in flight.", ["model"], registry=self.registry
        )
        self.ttft_s = histogram("time_to_first_token_seconds", "From request to first output.", _SECONDS)
        self.tpot_s = histogram(
            "time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_SECONDS
        )
        self.latency_s = histogram("request_seconds", "From request to last output.", _SECONDS)

    def observe_completion(
        self,
        model: str,
        *,
        start_s: float,
        first_s: float | None,
        end_s: float,
        prompt_tokens: int,
        output_tokens: int,
        num_sequences: int,
    ) -> None:
        """Record a completion that ended by itself; times are on one clock."""
        self.latency_s.labels(model).observe(end_s - start_s)
        self.prompt_tokens.labels(model).inc(prompt_tokens)
        if first_s is None:
            return
        self.ttft_s.labels(model).observe(first_s - start_s)
        tokens_after_first = output_tokens / num_sequences - 1
        if tokens_after_first > 0:
            self.tpot_s.labels(model).observe((end_s - first_s) / tokens_after_first)

    def observe_images(self, model: str, num_images: int) -> None:
        """Record a request that made images."""
        self.images.labels(model).inc(num_images)

    def exposition(self) -> bytes:
        """All of the registry in Prometheus' text format."""
        return generate_latest(self.registry)


class CountRequests:
    """ASGI middleware: counts every response by status and `scope["genserve.model"]` ("" if none)."""

    def __init__(self, app: object, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # type: ignore[operator]
            return
        status = "499"

        async def counting_send(message) -> None:  # type: ignore[no-untyped-def]
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counting_send)  # type: ignore[operator]
        finally:
            self._metrics.requests.labels(scope.get("genserve.model", ""), status).inc()
