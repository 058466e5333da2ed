"""The server process: uvicorn, and what its signals mean.

SIGTERM or the first SIGINT: new requests get 503, those in flight go on up to a timeout, then the
process ends with status 0. A second SIGINT ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from genserve.core.errors import ConfigError
from genserve.core.server.gateway import Gateway

if TYPE_CHECKING:
    from fastapi import FastAPI

_log = logging.getLogger("genserve.server")
EXIT_INTERRUPTED = 130
_ABORT_GRACE_S = 2  # for streams that were just aborted to say so


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one (ask `getsockname`). `ConfigError` if it is taken.

    Clients that connect before `serve` wait until it answers.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        what = error.strerror or str(error)
        raise ConfigError(f"host, port: cannot listen on {host}:{port}: {what}") from error
    sock.setblocking(False)
    return sock


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are ours: uvicorn would stop listening before the drain


def _config(app: FastAPI, gateway: Gateway, log_level: str, write_timeout_s: float) -> uvicorn.Config:
    http: Any = "h11"
    if importlib.util.find_spec("httptools") is not None:
        from genserve.core.server.http_connection import connection_type

        http = connection_type(write_timeout_s)
    return uvicorn.Config(
        app,
        http=http,
        h11_max_incomplete_event_size=64 << 10,
        # Room for as many idle connections, and for those that only ask how the server is.
        limit_concurrency=2 * gateway.max_inflight_requests + 64,
        log_level=log_level,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_ABORT_GRACE_S,
        timeout_keep_alive=30,
    )


async def serve(
    app: FastAPI,
    gateway: Gateway,
    sock: socket.socket,
    *,
    drain_timeout_s: float = 30.0,
    write_timeout_s: float = 60.0,
    on_started: Callable[[], None] = lambda: None,
    on_draining: Callable[[int], None] = lambda num_inflight: None,
    on_stopped: Callable[[], Awaitable[None]] | None = None,
    handle_signals: bool = True,
    stop: asyncio.Event | None = None,
    log_level: str = "warning",
) -> None:
    """Serve on `sock` until SIGTERM, SIGINT or `stop`, drain, and return once all is closed.

    A client that takes nothing of its answer for `write_timeout_s` is dropped.
    `on_draining` is told how many requests are in flight when the drain begins. `on_stopped` frees the
    engines; it runs last, also after an error. With `handle_signals` this must be
    the main thread's loop.
    """
    server = _Server(_config(app, gateway, log_level, write_timeout_s))
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    if handle_signals:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGINT, _on_interrupt, stop)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if not serving.done():
            on_started()
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            num_inflight = gateway.num_inflight_requests
            on_draining(num_inflight)
            _log.info("draining %d requests, for %g s at most", num_inflight, drain_timeout_s)
            if not await gateway.drain(drain_timeout_s):
                _log.warning("drain timed out; the remaining requests were aborted")
            server.should_exit = True
        await serving
    finally:
        stopping.cancel()
        if handle_signals:
            loop.remove_signal_handler(signal.SIGTERM)
            loop.remove_signal_handler(signal.SIGINT)
        if on_stopped is not None:
            await on_stopped()


def _on_interrupt(stop: asyncio.Event) -> None:
    if stop.is_set():
        os._exit(EXIT_INTERRUPTED)
    stop.set()


def run(main: Callable[[], Any]) -> Any:
    """Run the coroutine function `main` on uvloop where it is installed, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main())
    return uvloop.run(main())
