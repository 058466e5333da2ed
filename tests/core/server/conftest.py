"""A server on loopback over a real engine (a tiny random model) or a scripted one, and clients for it.

What can be shown on the real engine is (`real_engine`); the scripted one is for what a real one does
not do on demand: fixed texts, stalls, failures.
"""

from __future__ import annotations

import inspect
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from genserve.ar.config import ArConfig
from genserve.ar.serve import start_engine
from genserve.core.runtime.client import EngineClient
from genserve.core.runtime.completion import Completer
from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway, ServedModel
from genserve.core.server.in_thread import Parts, ServerInThread
from genserve.core.testing import Script, ScriptedEngine, byte_level_tokenizer
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import EngineInfo, Submit

CONTEXT_TOKENS = 256
TOKENIZER = Tokenizer(byte_level_tokenizer())
API_KEY = "key-for-tests"


def babble(request: Submit) -> Script:
    """Text that depends on prompt and seed alone: words, emoji and stray bytes."""
    random_seed = 0 if request.sampling.temperature == 0 else request.sampling.seed
    source = random.Random(f"{request.prompt_token_ids}/{random_seed}")
    words = ["Hello", " world", " 你好", "👋🏽", " ça va", " the quick", "\n", " fox", " Größe", " STOP"]
    text = "".join(source.choice(words) for _ in range(CONTEXT_TOKENS))
    return Script([[i] for i in TOKENIZER.encode(text)], step_delay_s=0.001)


def engine_info(**changes) -> EngineInfo:
    values = {
        "model": "tiny",
        "family": "ar",
        "vocab_size": TOKENIZER.vocab_size,
        "max_context_tokens": CONTEXT_TOKENS,
        "kv_pool_tokens": 4096,
        "max_queued_requests": 64,
        "eos_token_ids": (2,),
    }
    return EngineInfo(**{**values, **changes})


@dataclass
class EngineUnderTest:
    """An engine, its tokenizer, and what else it holds open for its clients."""

    engine: EngineClient
    tokenizer: Tokenizer
    check: Any = None
    options_model: Any = None


def make_engine(script=babble, **info) -> EngineUnderTest:
    """A scripted engine. Called on the server's loop."""
    return EngineUnderTest(ScriptedEngine(script, engine_info(**info)), TOKENIZER)


def real_engine(folder: str, **config) -> Callable[[], Awaitable[EngineUnderTest]]:
    """A maker of the AR engine with the model in `folder`, to be awaited on the server's loop."""

    async def make() -> EngineUnderTest:
        options = {"name": "tiny", "max_context_tokens": CONTEXT_TOKENS, "num_threads": 1, "kv_pool": "4MiB"}
        options |= {"max_running": 16, "budget_tokens": 64, "max_queued_requests": 64, **config}
        engine, hf_tokenizer = await start_engine(ArConfig(model=folder, **options))
        return EngineUnderTest(engine, Tokenizer(hf_tokenizer))

    return make


class Served:
    """A running server, its engine, and an official client."""

    def __init__(self, server: ServerInThread, made: dict) -> None:
        self.server = server
        self._made = made
        self.client = openai.OpenAI(
            base_url=server.url + "/v1", api_key=API_KEY, max_retries=0, timeout=20, http_client=None
        )

    @property
    def under_test(self) -> EngineUnderTest:
        return self._made["engine"]

    @property
    def engine(self):
        return self.under_test.engine

    @property
    def gateway(self) -> Gateway:
        return self._made["gateway"]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.under_test.tokenizer

    def stats(self) -> dict[str, float]:
        return self.server.call(self.engine.stats())

    def held(self) -> dict[str, float]:
        """What the engine holds for somebody: all zeros when nothing leaks."""
        stats = self.stats()
        if "num_free_pages" in stats:
            assert stats["num_used_pages"] + stats["num_free_pages"] == stats["num_pages"]
        names = ("num_live", "num_sequences", "num_running", "num_waiting", "num_used_pages", "num_leases")
        return {name: stats[name] for name in (*names, "num_streams") if name in stats}

    def num_live(self) -> int:
        """Sequences that the engine knows of."""
        stats = self.stats()
        return int(stats["num_sequences" if "num_sequences" in stats else "num_live"])

    def settled(self, timeout_s: float = 5.0) -> bool:
        """Whether nothing is in flight, in the gateway and in the engine, before the timeout."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.gateway.num_inflight_requests == 0 and not any(self.held().values()):
                return True
            time.sleep(0.005)
        return False

    def wait_live(self, count: int, timeout_s: float = 5.0) -> None:
        end = time.monotonic() + timeout_s
        while self.num_live() < count:
            assert time.monotonic() < end, "the sequences never reached the engine"
            time.sleep(0.002)

    def open_post(self, path: str, body: dict | bytes, headers: str = "") -> socket.socket:
        """A raw connection on which `body` has been sent."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.server.port), timeout=10)
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {API_KEY}\r\n"
            f"connection: close\r\n{headers}"
        )
        if "chunked" not in headers:
            head += f"content-length: {len(data)}\r\n"
        sock.sendall(head.encode() + b"\r\n" + data)
        return sock

    def post(self, path: str, body: dict | bytes, headers: str = "") -> tuple[int, dict]:
        """Status and JSON body of a raw request."""
        with self.open_post(path, body, headers) as sock:
            return read_response(sock)


def read_response(sock: socket.socket) -> tuple[int, dict]:
    data = b""
    while True:
        try:
            part = sock.recv(65536)
        except ConnectionResetError:
            break
        if not part:
            break
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.fixture(scope="package")
def serve_engine():
    """`serve_engine(make, **create_app arguments)`: start a server over `make()`; stopped at the end."""
    running = []

    def start(
        make=make_engine, gateway_options=None, drain_timeout_s=10.0, write_timeout_s=60.0, **app_options
    ) -> Served:
        made: dict = {}

        async def build() -> Parts:
            engine = make()
            if inspect.isawaitable(engine):
                engine = await engine
            made["engine"] = engine
            client = engine.engine
            completer = Completer(client, engine.tokenizer, check=engine.check)
            model = ServedModel(
                "tiny", 1_700_000_000, completer, engine.tokenizer, client.info, engine.options_model
            )
            gateway = made["gateway"] = Gateway([model], **(gateway_options or {}))
            return Parts(create_app(gateway, **app_options), gateway, client.aclose)

        server = ServerInThread(build, drain_timeout_s=drain_timeout_s, write_timeout_s=write_timeout_s)
        server.__enter__()
        running.append(server)
        return Served(server, made)

    yield start
    for server in running:
        server.__exit__()


@pytest.fixture(scope="package", params=["thread", pytest.param("ray", marks=pytest.mark.ray)])
def served(request, serve_engine, tiny_folder) -> Served:
    """A server over the real engine: in its own process, and in a Ray actor."""
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    return serve_engine(real_engine(tiny_folder, executor=request.param))
