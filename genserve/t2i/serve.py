"""Composition root of workflow serving: a coordinator, its executors, and the workflows that are registered.

With executor "thread" everything is in this process, each executor's nodes on a thread; with "ray" each executor is
an actor (`serve_ray`).
"""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import TYPE_CHECKING, Any

from genserve import __version__
from genserve.t2i.config import T2iConfig
from genserve.t2i.coordinator import HOME, Coordinator, ExecutorSpec

if TYPE_CHECKING:
    from genserve.core.dispatch import LogEntry
    from genserve.core.runtime.loop import Executor
    from genserve.t2i.client import LocalWorkflows


def device_of(config: T2iConfig) -> str:
    if config.device != "auto":
        return config.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def threads_each(config: T2iConfig) -> int:
    """CPU threads of one executor: what there is, divided."""
    return max(1, (config.num_threads or os.cpu_count() or 1) // config.num_executors)


async def start(config: T2iConfig, log: list[LogEntry] | None = None) -> LocalWorkflows:
    """Start the executors where `config.executor` says. `register` gives them something to do."""
    if config.executor == "ray":
        from genserve.t2i.serve_ray import start_remote

        return await start_remote(config, log)
    # The imports take seconds.
    await asyncio.get_running_loop().run_in_executor(None, importlib.import_module, "genserve.t2i.worker")
    return start_local(config, log)


def start_local(config: T2iConfig, log: list[LogEntry] | None = None) -> LocalWorkflows:
    """The same at once, with executors on threads of this process. Inside a running event loop."""
    import torch

    from genserve.core.runtime.executors import ThreadExecutor
    from genserve.t2i.client import LocalWorkflows
    from genserve.t2i.space import Space
    from genserve.t2i.worker import T2iWorker

    torch.set_num_threads(threads_each(config))
    space, device = Space(), device_of(config)
    specs = [
        ExecutorSpec(f"executor-{index}", HOME, config.weights_budget)
        for index in range(config.num_executors)
    ]
    executors: dict[str, Executor] = {}
    for spec in specs:
        worker = T2iWorker(space, device, host_bytes=config.host_budget)
        for lane in (spec.name, f"{spec.name}/io"):
            executors[lane] = ThreadExecutor(worker, lane)
    return LocalWorkflows(
        Coordinator(specs),
        executors,
        space,
        max_queued_requests=config.max_queued_requests,
        max_images=config.max_images,
        facts=facts(device),
        log=log,
    )


def facts(device: str) -> dict[str, Any]:
    """What else an image depends on, for receipts."""
    import torch

    return {"genserve": __version__, "torch": torch.__version__, "device": device}
