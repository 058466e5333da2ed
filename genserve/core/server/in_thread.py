"""A server in a thread of this process, for tests, notebooks and benchmarks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from genserve.core.server.gateway import Gateway
from genserve.core.server.run import bind, run, serve

if TYPE_CHECKING:
    from fastapi import FastAPI

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Parts:
    """What the server thread runs; `aclose` frees the engines at the end."""

    app: FastAPI
    gateway: Gateway
    aclose: Callable[[], Awaitable[None]]


class ServerInThread:
    """Context manager: `build` is awaited on the server's own loop; the server listens on loopback."""

    def __init__(
        self,
        build: Callable[[], Awaitable[Parts]],
        *,
        drain_timeout_s: float = 10.0,
        write_timeout_s: float = 60.0,
        port: int = 0,
    ) -> None:
        self._build = build
        self._drain_timeout_s = drain_timeout_s
        self._write_timeout_s = write_timeout_s
        self._socket = bind("127.0.0.1", port)
        self.port: int = self._socket.getsockname()[1]
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="genserve-server", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float = 30.0) -> _T:
        """Run `coroutine` on the server's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def begin_stop(self) -> None:
        """As SIGTERM would: drain, then end."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def join(self, timeout_s: float = 30.0) -> None:
        """Wait for the end; raises what the server raised."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError("the server did not stop in time")
        if self._error is not None:
            raise self._error

    def __enter__(self) -> ServerInThread:
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread.is_alive():
            self.begin_stop()
        self.join()

    def _main(self) -> None:
        try:
            run(self._serve)
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        parts = await self._build()
        await serve(
            parts.app,
            parts.gateway,
            self._socket,
            drain_timeout_s=self._drain_timeout_s,
            write_timeout_s=self._write_timeout_s,
            on_started=self._started.set,
            on_stopped=parts.aclose,
            handle_signals=False,
            stop=self._stop,
        )
