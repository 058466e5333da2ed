"""A server for an autoregressive model, put together from the library's parts.

    python examples/serve_ar.py [MODEL] [PORT]

`genserve serve` does the same with options; change this where those do not reach.
"""

from __future__ import annotations

import sys

from genserve.ar.config import ArConfig
from genserve.ar.serve import start_served
from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway
from genserve.core.server.run import bind, run, serve


async def main(model: str = "smollm2", port: str = "8000") -> None:
    sock = bind("127.0.0.1", int(port))
    served = await start_served(ArConfig(model=model, kv_pool="512MiB", max_running=32))
    gateway = Gateway([served])
    await serve(
        create_app(gateway),
        gateway,
        sock,
        on_started=lambda: print(f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True),
        on_stopped=served.completer.engine.aclose,
    )


if __name__ == "__main__":
    run(lambda: main(*sys.argv[1:]))
