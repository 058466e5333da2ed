"""Composition root of diffusion serving over Ray: a dispatcher here, each engine in an actor with its worker.

Beside `serve`, which says what an engine and a worker are made of; here is only where they run, how they
are placed and watched, and what operators may change while they serve.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from genserve.core.errors import ConfigError
from genserve.core.metrics.recorder import Recorder
from genserve.core.runtime.health import HealthLimits
from genserve.core.runtime.local_engine import LocalEngine
from genserve.core.runtime.membership import Membership, Wording
from genserve.dllm.config import DllmConfig
from genserve.dllm.engine import Engine
from genserve.dllm.messages import (
    ChangeRole,
    Drain,
    Drained,
    EngineBack,
    EngineJoined,
    EngineLost,
    Role,
    RoleChanged,
)
from genserve.dllm.pool import engine_roles
from genserve.dllm.serve import (
    DISPATCHER,
    Described,
    describe,
    figures,
    lanes,
    load,
    make_dispatcher,
    make_worker,
    open_store,
)

if TYPE_CHECKING:
    from genserve.core.runtime.ray_controller import RemoteController, RemoteParts
    from genserve.core.runtime.ray_placement import Placing


async def build_remote(config: DllmConfig, name: str, token: str | None) -> RemoteParts:
    """What an actor runs: one engine and its worker, with weights and a tensor store of their own.

    With a `token` other machines reach the store too.
    """
    from genserve.core.runtime.ray_actor import node_ip
    from genserve.core.runtime.ray_controller import RemoteParts

    loaded = load(config)
    described = describe(config, loaded)
    engine = Engine(name, described.limits, DISPATCHER)
    listen: dict[str, Any] = {} if token is None else {"listen": (node_ip(), 0), "token": token}
    store = open_store(loaded, described.limits, 1, **listen)
    worker = make_worker(config, loaded, described.limits, store)

    async def close() -> None:
        if store is not None:
            await asyncio.get_running_loop().run_in_executor(None, store.close)

    return RemoteParts(engine, lanes(engine, worker), described, close)


async def start_remote(config: DllmConfig, recorder: Recorder) -> tuple[LocalEngine, Described]:
    """A dispatcher on this event loop, over engines in Ray actors that come and go with its membership."""
    from genserve.core.runtime.ray_actor import ensure_ray, num_nodes
    from genserve.core.runtime.ray_controller import RemoteSpec, start_remotes

    ensure_ray(config.ray_address)
    placing = _placing(config)
    hands_over = config.hands_over
    # Also on one machine if others may join later: a worker that is added there must reach the rest.
    may_grow = num_nodes() > 1 or config.ray_address is not None
    token = secrets.token_hex(32) if hands_over and may_grow else None

    async def start(members: Sequence[tuple[str, str]]) -> Sequence[RemoteController]:
        specs = [
            RemoteSpec(name, (config, name, token), partial(EngineLost, name), partial(EngineBack, name))
            for name, _ in members
        ]
        return await start_remotes(
            specs,
            build_remote,
            placing,
            reply_to=(DISPATCHER,),
            limits=HealthLimits(
                heartbeat_s=config.heartbeat_s,
                step_deadline_s=config.step_deadline_s or None,
            ),
            swept=_remove_leftovers if hands_over else None,
        )

    membership = Membership(
        start,
        Wording(
            lambda name, role: EngineJoined(name, _role(role)),
            Drain,
            lambda name, role: ChangeRole(name, _role(role)),
            _answered,
        ),
        roles=("colocated", "prefill") if hands_over else ("colocated",),
        missing=lambda roles: None if "colocated" in roles else "no worker would be left to decode",
    )
    remotes = await membership.start(
        list(engine_roles(config.num_workers, config.num_prefill_workers).values())
    )
    described: Described = remotes[0].described
    try:
        dispatcher = make_dispatcher(config, described, recorder)
        engine = LocalEngine(
            described.info,
            dispatcher,
            {},
            entry=DISPATCHER,
            membership=membership,
            figures=partial(figures, dispatcher),
        )
    except BaseException:
        await asyncio.gather(*(remote.aclose() for remote in remotes))
        raise
    return engine, described


def _role(role: str) -> Role:
    return cast(Role, role)  # the membership has checked it


def _answered(body: Any) -> tuple[str, str | None]:
    if isinstance(body, Drained):
        return body.engine, None
    if isinstance(body, RoleChanged):
        return body.engine, body.role
    raise TypeError(f"the membership got a message it does not know: {type(body).__name__}")


def _remove_leftovers() -> None:
    from genserve.core.tensors.store import remove_leftovers

    remove_leftovers(None)


def _placing(config: DllmConfig) -> Placing:
    """What each worker reserves: a GPU of its own, or its share if there are fewer than workers; else CPU."""
    from genserve.core.runtime.ray_placement import Placing, num_gpus

    bundle = {"CPU": config.worker_cpus}
    gpus = num_gpus()
    if config.device == "cuda" and not gpus:
        raise ConfigError("device: the Ray cluster has no GPU")
    if config.device != "cpu" and gpus:
        bundle["GPU"] = config.worker_gpus or min(1.0, gpus / config.num_workers)
    return Placing(bundle, config.placement, config.placement_timeout_s)
