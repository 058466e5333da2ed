"""Composition root of workflow serving over Ray: the coordinator here, each executor in an actor with its store.

Beside `serve`; here is only where executors run, how they are placed and watched, and that another one takes the
place of one that is lost.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

from genserve.core.errors import ConfigError
from genserve.core.runtime.health import HealthLimits
from genserve.t2i.config import T2iConfig
from genserve.t2i.coordinator import Coordinator, ExecutorSpec
from genserve.t2i.messages import ExecutorBack, ExecutorGone, ExecutorLost

if TYPE_CHECKING:
    from genserve.core.dispatch import LogEntry
    from genserve.core.runtime.loop import Executor
    from genserve.core.runtime.ray_placement import Placing
    from genserve.t2i.client import LocalWorkflows
    from genserve.t2i.worker import T2iWorker

HOME_LANE = "home"


def build_worker(
    pool_bytes: int, device: str, num_threads: int, wait_s: float, host_bytes: int, token: str | None
) -> T2iWorker:
    """What an actor holds. With a `token` other machines reach its store too."""
    import torch

    from genserve.core.runtime.ray_actor import node_ip
    from genserve.core.tensors.store import TensorStore
    from genserve.t2i.space import Space
    from genserve.t2i.worker import T2iWorker

    torch.set_num_threads(num_threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    listen: dict[str, Any] = {} if token is None else {"listen": (node_ip(), 0), "token": token}
    return T2iWorker(Space(TensorStore.open(pool_bytes=pool_bytes, **listen)), device, wait_s, host_bytes)


async def start_remote(config: T2iConfig, log: list[LogEntry] | None = None) -> LocalWorkflows:
    """A coordinator on this event loop over executors in Ray actors."""
    from genserve.core.runtime.executors import ThreadExecutor
    from genserve.core.runtime.ray_actor import ensure_ray, node_ip, num_nodes
    from genserve.core.runtime.ray_executor import LastingExecutor
    from genserve.core.runtime.ray_placement import reserve
    from genserve.core.tensors.store import TensorStore, remove_leftovers
    from genserve.t2i.client import LocalWorkflows
    from genserve.t2i.serve import device_of, facts, threads_each
    from genserve.t2i.space import Space
    from genserve.t2i.worker import Keeper

    ensure_ray(config.ray_address)
    several = num_nodes() > 1 or config.ray_address is not None
    token = secrets.token_hex(32) if several else None
    reservation = await reserve(config.num_executors, _placing(config))
    limits = HealthLimits(heartbeat_s=config.heartbeat_s, step_deadline_s=config.step_deadline_s or None)
    wait_s = (config.step_deadline_s or 600.0) / 2
    listen: dict[str, Any] = {} if token is None else {"listen": (node_ip(), 0), "token": token}
    space = Space(TensorStore.open(pool_bytes=config.tensor_pool, **listen))
    names = [f"executor-{index}" for index in range(config.num_executors)]
    client: LocalWorkflows | None = None

    def tell(body: Any) -> None:
        if client is not None:
            client.post(body)

    def lost(name: str, reason: str) -> None:
        tell(ExecutorLost(name, reason))

    def back(name: str) -> None:
        tell(ExecutorBack(name))

    def gone(name: str) -> None:
        tell(ExecutorGone(name))

    starting = [
        asyncio.ensure_future(
            LastingExecutor.start(
                build_worker,
                config.tensor_pool,
                config.device,
                threads_each(config),
                wait_s,
                int(config.host_budget),
                token,
                control_lane=f"{name}/io",
                options=reservation.options(index),
                limits=limits,
                on_lost=partial(lost, name),
                on_back=partial(back, name),
                on_gone=partial(gone, name),
                swept=partial(remove_leftovers, None),
            )
        )
        for index, name in enumerate(names)
    ]
    try:
        lasting = list(await asyncio.gather(*starting))
    except BaseException:
        for task in starting:
            task.cancel()
        ended = await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(found.aclose() for found in ended if isinstance(found, LastingExecutor)))
        reservation.release_all()
        space.close()
        raise
    executors: dict[str, Executor] = {HOME_LANE: ThreadExecutor(Keeper(space), HOME_LANE)}
    for name, executor in zip(names, lasting, strict=True):
        executors[name] = executors[f"{name}/io"] = executor

    async def closed() -> None:
        reservation.release_all()
        await asyncio.to_thread(remove_leftovers, None)

    client = LocalWorkflows(
        Coordinator([ExecutorSpec(name, name, config.weights_budget) for name in names], home_lane=HOME_LANE),
        executors,
        space,
        max_queued_requests=config.max_queued_requests,
        max_images=config.max_images,
        facts=facts(device_of(config)),
        log=log,
        closed=closed,
    )
    return client


def _placing(config: T2iConfig) -> Placing:
    """What each executor reserves: a GPU of its own, or its share if there are fewer than executors; else CPU."""
    from genserve.core.runtime.ray_placement import Placing, num_gpus

    bundle = {"CPU": config.executor_cpus}
    gpus = num_gpus()
    if config.device == "cuda" and not gpus:
        raise ConfigError("device: the Ray cluster has no GPU")
    if config.device != "cpu" and gpus:
        bundle["GPU"] = config.executor_gpus or min(1.0, gpus / config.num_executors)
    return Placing(bundle, config.placement, config.placement_timeout_s)
