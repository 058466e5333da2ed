"""Workflows from a plain script: start, register, run, without asyncio.

    with Session(num_executors=2) as session:
        session.register(workflow)
        image = session.run("name", prompt="a red fox", seed=1).outputs[0]["image"]

Owns a thread with an event loop, on which the runtime lives; what it offers is `WorkflowClient`, synchronously.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from genserve.core.config import load
from genserve.core.errors import ExecutionFailed
from genserve.t2i.client import LocalWorkflows, UpdateStream
from genserve.t2i.config import T2iConfig
from genserve.t2i.graph import Graph
from genserve.t2i.registration import registered
from genserve.t2i.request import InvokeRequest, LoraUse, Result, Update, WorkflowInfo
from genserve.t2i.serve import start
from genserve.t2i.workflow import Workflow

T = TypeVar("T")
OnUpdate = Callable[[Update], None]


class Session:
    """A runtime of this process's own. `config`: fields of `T2iConfig`; `ConfigError` for what can't be."""

    def __init__(self, config: T2iConfig | None = None, **fields: Any) -> None:
        self._config = config or load(T2iConfig, **fields)
        self._ids = itertools.count()
        self._aio = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._aio.run_forever, name="genserve-session", daemon=True)
        self._thread.start()
        try:
            self._client: LocalWorkflows = self._call(start(self._config))
        except BaseException:
            self._stop()
            raise

    def register(self, workflow: Workflow | Graph, **options: Any) -> WorkflowInfo:
        """Compile a workflow and serve it under its name. `options`: see `registration.registered`.

        Raises `CompileError` for what is wrong with it, `ConfigError` for a model that can't fit.
        """
        options = {"passes": self._config.passes, **options}
        served, codes = registered(
            workflow, budget_bytes=self._config.weights_budget, loras=self._config.loras, **options
        )

        async def serve() -> None:
            self._client.serve(served, codes)

        self._call(serve())
        return served.info

    def run(
        self,
        workflow: str,
        *,
        num_images: int = 1,
        loras: Sequence[LoraUse | str] = (),
        on_update: OnUpdate | None = None,
        request: Mapping[str, Any] | None = None,
        **inputs: Any,
    ) -> Result:
        """Run a registered workflow and wait for its result. Ctrl-C cancels it.

        `on_update` is called with each update, on this thread's behalf but on the session's own thread. `request`:
        further fields of `InvokeRequest`. Raises what `WorkflowClient.invoke` does.
        """
        return self.submit(
            workflow, num_images=num_images, loras=loras, on_update=on_update, request=request, **inputs
        ).result()

    def submit(
        self,
        workflow: str,
        *,
        num_images: int = 1,
        loras: Sequence[LoraUse | str] = (),
        on_update: OnUpdate | None = None,
        request: Mapping[str, Any] | None = None,
        **inputs: Any,
    ) -> Running:
        """The same without waiting."""
        self._check_open()
        uses = tuple(LoraUse(lora) if isinstance(lora, str) else lora for lora in loras)
        asked = InvokeRequest(
            f"session-{next(self._ids)}", workflow, inputs, num_images, uses, **dict(request or {})
        )

        async def begun() -> UpdateStream:
            return self._client.invoke(asked)

        updates = self._call(begun())  # before anybody can cancel it
        return Running(
            asyncio.run_coroutine_threadsafe(self._run(updates, on_update), self._aio),
            lambda: self._aio.call_soon_threadsafe(self._client.cancel, asked.request_id),
        )

    async def _run(self, updates: UpdateStream, on_update: OnUpdate | None) -> Result:
        try:
            async for update in updates:
                if on_update is not None:
                    on_update(update)
                if isinstance(update, Result):
                    return update
        finally:
            await updates.aclose()
        raise ExecutionFailed("the request ended without a result")

    def stats(self) -> dict[str, float]:
        return self._call(self._client.stats())

    def close(self) -> None:
        """End what runs, and free everything. Afterwards, nothing."""
        if self._thread.is_alive():
            try:
                self._call(self._client.aclose())
            finally:
                self._stop()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._aio.is_closed():
            raise ExecutionFailed("the session is closed")

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._aio.is_closed():
            work.close()
        self._check_open()
        return asyncio.run_coroutine_threadsafe(work, self._aio).result()

    def _stop(self) -> None:
        self._aio.call_soon_threadsafe(self._aio.stop)
        self._thread.join()
        self._aio.close()


class Running:
    """A request under way."""

    def __init__(self, future: Future[Result], cancel: Callable[[], Any]) -> None:
        self._future, self._cancel = future, cancel

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for it. An interrupt (Ctrl-C) cancels it and goes on as `KeyboardInterrupt`."""
        try:
            return self._future.result(timeout_s)
        except KeyboardInterrupt:
            self._cancel()
            raise

    def cancel(self) -> None:
        """Within a step it ends with `Cancelled`."""
        self._cancel()

    def done(self) -> bool:
        return self._future.done()
