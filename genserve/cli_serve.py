"""`genserve serve`: options and messages; building and running is `genserve.server`."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from genserve import cli_options as opt
from genserve.core.errors import ConfigError

if TYPE_CHECKING:
    from genserve.server import Served
    from genserve.server_config import ModelEntry, ServerConfig


def serve(
    family: Annotated[
        str | None,
        typer.Argument(help="ar, dllm or t2i: of models that do not say; alone, its default model."),
    ] = None,
    models: opt.Models = None,
    config: opt.ConfigFile = None,
    overrides: opt.Overrides = None,
    host: Annotated[str | None, typer.Option(help="Where to listen [default: 127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free port [default: 8000].")] = None,
    api_keys: opt.ApiKeys = None,
    executor: opt.Executor = None,
    kv_pool: opt.KvPool = None,
    dtype: opt.Dtype = None,
    num_threads: opt.NumThreads = None,
    max_running: opt.MaxRunning = None,
    budget_tokens: opt.BudgetTokens = None,
    drain_timeout_s: Annotated[
        float | None, typer.Option(help="Seconds for requests in flight after SIGTERM [default: 30].")
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option(help="What the log on stderr tells [default: warning]."),
    ] = None,
) -> None:
    """Serve models behind an OpenAI-compatible API. SIGTERM or Ctrl-C ends it.

    Without --model or --config a small model that is part of the package is served: of AR, or of FAMILY.
    Options for models are set on each of them.
    """
    import logging
    import os

    from genserve.server_config import server_config

    if not api_keys and "GENSERVE_API_KEY" in os.environ:
        raise ConfigError("api_keys: GENSERVE_API_KEY is set, but empty; unset it to serve without a key")

    settings = server_config(
        config,
        family=family,
        models=models or (),
        model_options=opt.given(
            executor=executor,
            kv_pool=kv_pool,
            dtype=dtype,
            num_threads=num_threads,
            max_running=max_running,
            budget_tokens=budget_tokens,
        ),
        overrides=overrides or (),
        host=host,
        port=port,
        api_keys=api_keys or None,
        drain_timeout_s=drain_timeout_s,
        log_level=log_level,
    )
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from genserve.core.server.run import run
    from genserve.server import run_server

    try:
        run(lambda: run_server(settings, _Messages(settings)))
    except ConfigError as error:
        if getattr(error.__cause__, "errno", None) == errno.EADDRINUSE:
            raise ConfigError(f"{error}; give another --port, or --port 0 for a free one") from error
        raise


class _Messages:
    """`ServerEvents` on the terminal: what a person wants on stdout, progress on stderr."""

    def __init__(self, settings: ServerConfig) -> None:
        from rich.console import Console

        from genserve.cli_progress import LoadProgress

        self._console = Console(highlight=False, soft_wrap=True)
        self._has_keys = bool(settings.api_keys)
        self._progress = LoadProgress()
        self._start_s = 0.0
        self._num_workers = 1

    def starting(self, model: ModelEntry) -> None:
        self._start_s = time.monotonic()
        self._num_workers = getattr(model, "num_workers", 1)
        self._progress.start()
        self._progress.begin(model.name or model.model)

    def loading(self, progress: Any) -> None:
        self._progress.on_progress(progress)

    def started(self, model: Served) -> None:
        self._progress.stop()
        took_s = time.monotonic() - self._start_s
        if not hasattr(model, "info"):
            infos = model.client.workflows()
            loras = {lora: None for info in infos.values() for lora in info.loras}
            self._console.print(
                f"[bold]{model.name}[/] ({model.family}): workflows {', '.join(infos)}; "
                f"adapters {', '.join(loras) or 'none'}; started in {took_s:.1f} s"
            )
            return
        info = model.info
        each = f" for each of {self._num_workers} workers" if self._num_workers > 1 else ""
        self._console.print(
            f"[bold]{model.name}[/] ({info.family}): {info.max_context_tokens:,} tokens of context, "
            f"{info.kv_pool_tokens:,} tokens of KV{each}, started in {took_s:.1f} s"
        )

    def ready(self, url: str, models: list[Served]) -> None:
        name = models[0].name
        key = "..." if self._has_keys else "none"
        header = ' -H "Authorization: Bearer $GENSERVE_API_KEY"' if self._has_keys else ""
        if not hasattr(models[0], "info"):
            body = f'{{"model": "{name}", "prompt": "a small red circle on the left, blue background"}}'
            self._console.print(f"Ready at [bold]{url}[/]; try:")
            self._console.print(
                f"  curl {url}/v1/images/generations{header} -H 'Content-Type: application/json' -d '{body}'\n"
                f'  OpenAI(base_url="{url}/v1", api_key="{key}").images.generate(...)  # of the openai package',
                markup=False,
            )
            self._console.print("Ctrl-C or SIGTERM stops it: requests in flight are finished first.")
            return
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
        self._console.print(f"Ready at [bold]{url}[/]; try:")
        self._console.print(
            f"  curl {url}/v1/chat/completions{header} -H 'Content-Type: application/json' -d '{body}'\n"
            f'  OpenAI(base_url="{url}/v1", api_key="{key}")  # of the openai package\n'
            f"  genserve chat --base-url {url}",
            markup=False,
        )
        self._console.print("Ctrl-C or SIGTERM stops it: requests in flight are finished first.")

    def draining(self, num_inflight: int) -> None:
        what = (
            f"finishing {num_inflight} request{'s' if num_inflight > 1 else ''} (Ctrl-C ends at once)"
            if num_inflight
            else "nothing in flight"
        )
        self._console.print(f"Stopping: {what}")

    def stopped(self) -> None:
        self._console.print("Stopped.")
