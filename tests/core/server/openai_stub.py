"""A small real server that speaks OpenAI's streaming format with known delays and chosen faults."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

TTFT_S, TPOT_S = 0.08, 0.02


class Stub:
    """The model name of a request chooses what happens to it."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.clients: set[tuple[str, int]] = set()
        self.model_ids = ["ok"]
        self.num_streaming = 0
        self.most_streaming = 0
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/v1/completions")(self.completions)
        self.app.get("/v1/models")(self.models)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name} for name in self.model_ids]}

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, lambda text: {"delta": {"content": text} if text else {}})

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, lambda text: {"text": text or ""})

    async def _answer(self, request: Request, choice: Any) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.clients.add(tuple(request.scope["client"]))
        model = body["model"]
        if model.startswith("http_"):
            return JSONResponse({"error": {"message": f"no {model}"}}, status_code=int(model[5:]))
        if model == "plain":
            return PlainTextResponse("hello")
        if model == "alternating" and len(self.bodies) % 2:
            return JSONResponse({"error": {"message": "odd"}}, status_code=429)
        return StreamingResponse(self._stream(model, body, choice), media_type="text/event-stream")

    async def _stream(self, model: str, body: dict[str, Any], choice: Any) -> AsyncIterator[str]:
        self.num_streaming += 1
        self.most_streaming = max(self.most_streaming, self.num_streaming)
        try:
            num = body["max_tokens"]
            if model != "fast":
                await asyncio.sleep(3600 if model == "hangs" else TTFT_S)
            for index in range(num):
                if index and model != "fast":
                    await asyncio.sleep(TPOT_S)
                if index == 2 and model == "cut":
                    raise RuntimeError("cut")
                if index == 2 and model == "error_event":
                    yield self._event({"error": {"message": "engine lost"}})
                    return
                if index == 2 and model == "bad_json":
                    yield "data: {oops\n\n"
                yield self._event({"choices": [{"index": 0, "finish_reason": None, **choice(f" t{index}")}]})
            if model == "no_finish":
                return
            yield self._event({"choices": [{"index": 0, "finish_reason": "length", **choice(None)}]})
            if model != "no_usage":
                usage = {"prompt_tokens": 77, "completion_tokens": num, "total_tokens": 77 + num}
                usage["prompt_tokens_details"] = {"cached_tokens": 32}
                yield self._event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        finally:
            self.num_streaming -= 1

    @staticmethod
    def _event(event: dict[str, Any]) -> str:
        return f"data: {json.dumps(event)}\n\n"


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """The stub on a free port of this machine, in a thread of its own; gives its base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(stub.app, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
        assert not thread.is_alive()
