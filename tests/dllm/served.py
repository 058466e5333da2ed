"""A server over a tiny random diffusion model, and official clients for it."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai

from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway
from genserve.core.server.in_thread import Parts, ServerInThread
from genserve.families import start_model


class Served:
    """`models` are (folder, options) pairs, started one after the other; a context manager."""

    def __init__(self, *models: tuple[str, dict[str, Any]]) -> None:
        self._models = models
        self._server = ServerInThread(self._build)

    async def _build(self) -> Parts:
        options = {"num_threads": 1, "kv_pool": "4MiB", "max_queued_requests": 64}
        self.served = [await start_model(folder, {**options, **own}) for folder, own in self._models]
        self.gateway = Gateway(self.served)

        async def close() -> None:
            for model in self.served:
                await model.completer.engine.aclose()

        return Parts(create_app(self.gateway), self.gateway, close)

    def __enter__(self) -> Served:
        self._server.__enter__()
        self.url = self._server.url
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=60)
        self.names = [model.name for model in self.served]
        self.tokenizer = self.served[0].tokenizer
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self._server.__exit__(*exc)

    def stats(self, number: int = 0) -> dict[str, float]:
        return self.call(self.served[number].completer.engine.stats())

    def call(self, what: Any) -> Any:
        """Run a coroutine on the server's loop."""
        return self._server.call(what)

    def complete(self, prompt: Any = "One page of the book", model: str | None = None, **fields: Any) -> Any:
        """`/v1/completions`; fields that the client does not know go into the body all the same."""
        known = {"max_tokens", "n", "seed", "stop", "logprobs", "temperature", "top_p", "stream"}
        known |= {"stream_options", "suffix", "echo", "presence_penalty", "frequency_penalty", "logit_bias"}
        extra = {key: fields.pop(key) for key in list(fields) if key not in known}
        return self.client.completions.create(
            model=model or self.names[0], prompt=prompt, extra_body=extra or None, **fields
        )

    def chat(self, content: str = "Where is the river?", **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model=self.names[0], messages=messages, **fields)

    def metrics(self) -> dict[str, float]:
        lines = [
            line.rsplit(" ", 1)
            for line in httpx.get(self.url + "/metrics").text.splitlines()
            if line[0] != "#"
        ]
        return {name: float(value) for name, value in lines}

    def settled(self, timeout_s: float = 10.0) -> bool:
        """Whether nobody holds anything before the timeout: requests, slots, pages, streams."""
        names = ("num_sequences", "num_waiting", "num_running", "num_used_pages", "num_leases", "num_held")
        names += ("num_staged_pages", "num_kept_pages", "num_fetching", "num_outstanding_tokens")
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            stats = self.stats()
            if "num_pages" in stats:
                assert stats["num_used_pages"] + stats["num_free_pages"] == stats["num_pages"]
            if not any(stats.get(name, 0) for name in (*names, "num_streams")):
                return self.gateway.num_inflight_requests == 0
            time.sleep(0.01)
        return False
