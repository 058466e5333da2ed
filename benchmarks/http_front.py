"""What the HTTP front costs: CPU of the server process per streamed token and per request.

The engine emits scripted tokens at once, so that everything measured is tokens to text, protocol and
sockets. The clients run in this process, the server in another.

    python benchmarks/http_front.py [--streams 64] [--tokens 1000] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from report import save, table


def serve(parent: Connection) -> None:
    """The server process: answers "cpu" and "rss" on `parent` until told to stop."""
    from genserve.core.runtime.completion import Completer
    from genserve.core.server.app import create_app
    from genserve.core.server.gateway import Gateway, ServedModel
    from genserve.core.server.run import bind, run
    from genserve.core.server.run import serve as serve_http
    from genserve.core.testing import Script, ScriptedEngine, byte_level_tokenizer
    from genserve.core.text.tokenizer import Tokenizer
    from genserve.core.types import EngineInfo

    tokenizer = Tokenizer(byte_level_tokenizer())
    chunks = [[i] for i in tokenizer.encode("Hello world 你好 the quick brown fox " * 2000)]

    async def main() -> None:
        info = EngineInfo("m", "ar", tokenizer.vocab_size, 1 << 20, 1 << 30, 1024, (2,))
        engine = ScriptedEngine(lambda request: Script(chunks), info)
        gateway = Gateway([ServedModel("m", 0, Completer(engine, tokenizer), tokenizer, info)])
        sock = bind("127.0.0.1", 0)
        stop = asyncio.Event()

        def answer() -> None:
            if parent.recv() == "stop":
                stop.set()
                return
            used = resource.getrusage(resource.RUSAGE_SELF)
            with open("/proc/self/statm") as statm:
                rss_bytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            engine.submitted.clear()
            parent.send((used.ru_utime + used.ru_stime, rss_bytes))

        asyncio.get_running_loop().add_reader(parent.fileno(), answer)
        await serve_http(
            create_app(gateway),
            gateway,
            sock,
            on_started=lambda: parent.send(sock.getsockname()[1]),
            handle_signals=False,
            stop=stop,
        )

    run(main)


async def one_request(port: int, path: str, body: dict[str, Any]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    answer = await reader.read(-1)
    if not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        raise RuntimeError(f"a stream did not end: {answer[-200:]!r}")
    writer.close()


async def load(port: int, streams: int, path: str, body: dict[str, Any]) -> None:
    await asyncio.gather(*(one_request(port, path, body) for _ in range(streams)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("out/http"))
    args = parser.parse_args()

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    process.start()
    port = here.recv()

    def server_usage() -> tuple[float, int]:
        here.send("usage")
        return here.recv()

    chat = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    plain = {"model": "m", "stream": True, "prompt": "hi"}
    cases = {
        "chat": ("/v1/chat/completions", chat),
        "chat, 4 stop strings": (
            "/v1/chat/completions",
            {**chat, "stop": ["\n\nUser:", "###", "END", "</s>"]},
        ),
        "chat, 5 logprobs": ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 5}),
        "completions": ("/v1/completions", plain),
    }
    asyncio.run(load(port, 8, *[cases["chat"][0], {**chat, "max_tokens": 50}]))
    rows: dict[str, float] = {}
    for name, (path, body) in cases.items():
        before, begun = server_usage()[0], time.perf_counter()
        asyncio.run(load(port, args.streams, path, {**body, "max_tokens": args.tokens}))
        num_tokens = args.streams * args.tokens
        rows[f"{name}: server CPU us/token"] = (server_usage()[0] - before) / num_tokens * 1e6
        rows[f"{name}: wall us/token, clients included"] = (time.perf_counter() - begun) / num_tokens * 1e6
    before, rss_before = server_usage()
    for _ in range(args.requests // 100):
        asyncio.run(load(port, 100, "/v1/chat/completions", {**chat, "max_tokens": 1}))
        server_usage()  # also makes the scripted engine forget what it recorded
    after, rss_after = server_usage()
    rows["one-token request, new connection: server CPU us"] = (after - before) / args.requests * 1e6
    rows[f"memory growth over {args.requests} requests, KiB"] = (rss_after - rss_before) / 1024
    here.send("stop")
    process.join()
    results = [{"what": name, "value": float(value)} for name, value in rows.items()]
    print(table(results))
    costs = [row for row in results if "server CPU" in row["what"]]
    sections = {"HTTP front": results, "server CPU": costs}
    save("http_front", sections, {"server CPU": ("what", "value", "µs")}, args.out)


if __name__ == "__main__":
    main()
