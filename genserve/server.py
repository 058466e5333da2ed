"""Composition root of a server: from a `ServerConfig` to models of any family behind one HTTP front.

Here alone the families meet. Nothing decides anything: parts are built, wired, and closed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol

from genserve.core.errors import ConfigError
from genserve.core.server.app import create_app
from genserve.core.server.gateway import Gateway, ServedModel, ServedWorkflows
from genserve.core.server.jobs import JobLimits
from genserve.core.server.run import EXIT_INTERRUPTED, bind, serve
from genserve.families import start_configured
from genserve.server_config import ModelEntry, ServerConfig

Served = ServedModel | ServedWorkflows


class ServerEvents(Protocol):
    """What somebody who watches a server is told, in this order. All on the server's event loop
    but `loading`, which comes from the thread that loads."""

    def starting(self, model: ModelEntry) -> None: ...

    def loading(self, progress: Any) -> None:
        """A `FetchProgress`, while a built-in model is fetched."""
        ...

    def started(self, model: Served) -> None: ...

    def ready(self, url: str, models: list[Served]) -> None: ...

    def draining(self, num_inflight: int) -> None: ...

    def stopped(self) -> None: ...


@contextlib.asynccontextmanager
async def started_models(config: ServerConfig, events: ServerEvents) -> AsyncIterator[list[Served]]:
    """The config's models, started one after the other; all are freed at the end, also after an error."""
    async with contextlib.AsyncExitStack() as stack:
        models: list[Served] = []
        await asyncio.to_thread(_check_names, config)
        with _exit_on_signal():
            for entry in config.models:
                events.starting(entry)
                model = await _start(entry, events.loading)
                stack.push_async_callback(_closer(model))
                events.started(model)
                models.append(model)
        yield models


def _check_names(config: ServerConfig) -> None:
    """`ConfigError` if two models would have one name, before the first of them is loaded."""
    from genserve.core.models.loading import resolve
    from genserve.t2i.catalogue import display_name

    if len(config.models) < 2:
        return
    sources: dict[str, str] = {}
    for entry in config.models:
        name = display_name(entry) if entry.family == "t2i" else entry.name or resolve(entry.model).name
        if name in sources:
            raise ConfigError(
                f"models: {sources[name]} and {entry.model} are both called {name!r}; give one another name"
            )
        sources[name] = entry.model


def _closer(model: Served) -> Callable[[], Awaitable[None]]:
    if isinstance(model, ServedWorkflows):
        return model.client.aclose
    return model.completer.engine.aclose


async def _start(entry: ModelEntry, on_progress: Callable[[Any], None]) -> Served:
    return await start_configured(entry.family, entry, on_progress)


async def run_server(config: ServerConfig, events: ServerEvents) -> None:
    """Listen, load, serve until a signal ends it, drain, free. Run it in the main thread.

    A signal while models are still loading ends the process at once.
    """
    sock = bind(config.host, config.port)
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    with contextlib.closing(sock):
        async with started_models(config, events) as models:
            gateway = Gateway(
                models,
                max_inflight_requests=config.max_inflight_requests,
                max_inflight_sequences=config.max_inflight_sequences,
            )
            app = create_app(
                gateway,
                api_keys=[key.get_secret_value() for key in config.api_keys],
                max_body_bytes=config.max_body,
                max_image_body_bytes=config.max_image_body,
                job_limits=JobLimits(config.max_jobs, config.max_job_bytes, config.job_age_s),
                body_timeout_s=config.body_timeout_s,
            )
            await serve(
                app,
                gateway,
                sock,
                drain_timeout_s=config.drain_timeout_s,
                write_timeout_s=config.write_timeout_s,
                on_started=lambda: events.ready(f"http://{shown}:{port}", models),
                on_draining=events.draining,
                log_level=config.log_level,
            )
    events.stopped()


@contextlib.contextmanager
def _exit_on_signal() -> Iterator[None]:
    """Until models are loaded nobody is served, and a thread that loads cannot be interrupted."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, os._exit, EXIT_INTERRUPTED)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
