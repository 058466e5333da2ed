"""Composition root of diffusion serving: a dispatcher, its engines, their workers, one model for all of them.

With executor "thread" everything is on this event loop but the workers' steps; they share the weights,
each has a KV pool of its own. With "ray" each engine lives in an actor with its device and its weights
(`serve_ray`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from genserve.core.errors import ConfigError, InvalidRequest
from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.core.metrics.recorder import Recorder
from genserve.core.types import EngineInfo
from genserve.dllm.config import DllmConfig
from genserve.dllm.dispatcher import Dispatcher
from genserve.dllm.engine import Engine
from genserve.dllm.limits import EngineLimits
from genserve.dllm.options import (
    CACHES,
    UNSUPPORTED,
    UNSUPPORTED_BY_CANVAS,
    DiffusionCheck,
    DiffusionOptions,
    ServedFacts,
    check_params,
)
from genserve.dllm.pool import engine_roles
from genserve.dllm.request import DiffusionParams, Unmasking

if TYPE_CHECKING:
    from genserve.core.runtime.executors import Worker
    from genserve.core.runtime.local_engine import LocalEngine
    from genserve.core.runtime.loop import Executor
    from genserve.core.server.gateway import ServedModel
    from genserve.core.tensors.store import TensorStore
    from genserve.dllm.models.interface import LoadedDiffusionModel

DISPATCHER = "dispatcher"

Progress = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Described:
    """What clients and the dispatcher must know of a loaded model: small, and the same in every process."""

    info: EngineInfo
    limits: EngineLimits
    facts: ServedFacts


@dataclass(frozen=True, slots=True)
class DllmParts:
    """What `assemble` made: the engines and their workers by name, and the store that the workers share."""

    described: Described
    dispatcher: Dispatcher
    engines: Mapping[str, Engine]
    workers: Mapping[str, Worker]
    store: TensorStore | None
    recorder: Recorder
    tokenizer: Any


def load(config: DllmConfig, on_progress: Progress | None = None) -> LoadedDiffusionModel:
    """Load the model, its threads shared out among the workers of this process. Blocks; raises `ConfigError`."""
    from genserve.core.models.source import resolve

    source = resolve(config.model)  # before the imports that take seconds
    import torch

    from genserve.core.models.fetch import FetchProgress
    from genserve.core.models.kernels.threads import ThreadTeam
    from genserve.dllm.models.registry import load_diffusion_model

    if on_progress is not None:
        on_progress(FetchProgress(source.name, "load"))
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = threads_each(config)
    torch.set_num_threads(threads)
    return load_diffusion_model(
        source,
        dtype=config.dtype,
        device=device,
        mask_token_id=config.mask_token_id,
        team=ThreadTeam(threads),
    )


def threads_each(config: DllmConfig) -> int:
    """CPU threads of one worker: what there is, divided."""
    return max(1, (config.num_threads or os.cpu_count() or 1) // config.num_workers)


def describe(config: DllmConfig, loaded: LoadedDiffusionModel) -> Described:
    """Limits and defaults of a served model; `ConfigError` for a configuration that it cannot have."""
    from genserve.core.models.attention.pool import context_limit, pool_pages

    context = context_limit(loaded.name, loaded.max_context_tokens, config.max_context_tokens)
    # Guidance takes a second canvas.
    num_canvases = (2 if loaded.family == "bidirectional" else 1) * config.max_running
    num_pages = pool_pages(
        config.kv_pool, loaded.model.layer_specs, loaded.dtype, loaded.device, num_canvases, context
    )
    if loaded.canvas is not None:
        canvas = loaded.default_block_length
        for name, num_tokens in (("max_context_tokens", context), ("kv_pool", num_pages * PAGE_TOKENS)):
            if num_tokens <= canvas:
                raise ConfigError(
                    f"{name}: {num_tokens} tokens do not hold a canvas of {canvas} and a prompt"
                )
    num_staging_pages = 0
    if config.num_prefill_workers or config.transfer_pool:
        num_staging_pages = pool_pages(
            config.transfer_pool or config.kv_pool,
            loaded.model.layer_specs,
            loaded.dtype,
            loaded.device,
            num_canvases,
            context,
            field="transfer_pool",
        )
        if loaded.canvas is not None:
            raise ConfigError(
                f"num_prefill_workers, transfer_pool: {loaded.name} renoises whole canvases, which no other "
                "worker can go on with"
            )
    limits = EngineLimits(
        num_pages=num_pages,
        num_staging_pages=num_staging_pages,
        prefill_tokens=config.prefill_tokens,
        max_context_tokens=context,
        max_running=config.max_running,
        budget_tokens=config.budget_tokens,
        policy=config.budget_policy,
        prefix_cache=config.prefix_cache,
        shifted=bool(loaded.shift),
        fill_token_id=loaded.eos_token_ids[0] if loaded.eos_token_ids else 0,
        eos_token_ids=loaded.eos_token_ids,
    )
    info = EngineInfo(
        model=config.name or loaded.name,
        family="dllm",
        vocab_size=loaded.num_valid_tokens,
        max_context_tokens=context,
        kv_pool_tokens=num_pages * PAGE_TOKENS,
        max_queued_requests=config.max_queued_requests,
        eos_token_ids=loaded.eos_token_ids,
        default_max_tokens=config.default_max_tokens,
        default_temperature=1.0 if loaded.family == "canvas" else 0.0,
        unsupported=UNSUPPORTED_BY_CANVAS if loaded.family == "canvas" else UNSUPPORTED,
    )
    facts = ServedFacts(loaded.family, loaded.shift, loaded.mask_token_id, _defaults(config, loaded))
    try:
        check_params(facts.defaults, facts, info)
    except InvalidRequest as error:
        raise ConfigError(f"{loaded.name}: {error}") from error
    return Described(info, limits, facts)


def _defaults(config: DllmConfig, loaded: LoadedDiffusionModel) -> DiffusionParams:
    # Block-causal models are published with a strict comparison.
    rule = Unmasking(strict=loaded.family == "block_causal")
    if loaded.canvas is not None:
        entropy, confidence = loaded.canvas.entropy_bound, loaded.canvas.confidence
        rule = Unmasking("entropy_bound", entropy_bound=entropy, threshold=confidence)
    if config.threshold is not None:
        rule = replace(rule, threshold=config.threshold)
    return DiffusionParams(
        cache=config.cache or CACHES[loaded.family][0],
        unmasking=rule,
        block_length=config.block_length or loaded.default_block_length,
        # The references of block-causal models denoise the rest of a block as if no stop token were there.
        early_stop=loaded.family != "block_causal",
    )


def make_worker(
    config: DllmConfig,
    loaded: LoadedDiffusionModel,
    limits: EngineLimits,
    store: TensorStore | None = None,
) -> Worker:
    """A worker with a KV pool of its own over a loaded model, warmed up. It hands KV over through `store`."""
    from genserve.core.models.attention.pool import make_backend
    from genserve.core.models.attention.transfer import KvTransfer
    from genserve.core.models.kernels.threads import ThreadTeam
    from genserve.dllm.canvas_worker import CanvasWorker
    from genserve.dllm.worker import DllmWorker

    team = ThreadTeam(threads_each(config))
    specs = loaded.model.layer_specs
    backend = make_backend(specs, limits.num_pages, loaded.dtype, loaded.device, team)
    max_pages = -(-limits.max_context_tokens // PAGE_TOKENS)
    worker: CanvasWorker | DllmWorker
    if loaded.family == "canvas":
        worker = CanvasWorker(loaded, backend, limits.max_running, max_pages)
    else:
        # A copy that takes too long must fail by itself before the whole worker counts as hanging.
        timeout_s = min(30.0, (config.step_deadline_s or 60.0) / 2)
        transfer = None if store is None else KvTransfer(store, backend, len(specs), timeout_s=timeout_s)
        worker = DllmWorker(loaded, backend, limits.max_running, max_pages, transfer=transfer)
    worker.warm_up()
    return worker


def open_store(
    loaded: LoadedDiffusionModel, limits: EngineLimits, num_workers: int, **listen: Any
) -> TensorStore | None:
    """The store of a process with `num_workers` workers, or None if nothing is ever handed over.

    Engines count what they stage in pages; a quarter more is there for what falls between tensors of
    unequal sizes.
    """
    if not limits.num_staging_pages:
        return None
    from genserve.core.models.attention.pool import page_bytes
    from genserve.core.tensors.store import TensorStore

    staged_bytes = limits.num_staging_pages * page_bytes(
        loaded.model.layer_specs, loaded.dtype, loaded.device
    )
    return TensorStore.open(pool_bytes=int(1.25 * num_workers * staged_bytes) + (1 << 20), **listen)


def lanes(engine: Engine, worker: Worker) -> dict[str, Executor]:
    """A thread for the worker's steps and one for copies from and for other workers."""
    from genserve.core.runtime.executors import ThreadExecutor

    return {lane: ThreadExecutor(worker, lane) for lane in (engine.lane, engine.exchange.lane)}


def assemble(config: DllmConfig, loaded: LoadedDiffusionModel) -> DllmParts:
    """A dispatcher and `num_workers` engines and workers in this process around one loaded model."""
    described = describe(config, loaded)
    limits = described.limits
    engines = {
        name: Engine(name, limits, DISPATCHER)
        for name in engine_roles(config.num_workers, config.num_prefill_workers)
    }
    store = open_store(loaded, limits, config.num_workers)
    workers = {name: make_worker(config, loaded, limits, store) for name in engines}
    recorder = Recorder()
    dispatcher = make_dispatcher(config, described, recorder)
    return DllmParts(described, dispatcher, engines, workers, store, recorder, loaded.tokenizer)


def make_dispatcher(config: DllmConfig, described: Described, recorder: Recorder) -> Dispatcher:
    return Dispatcher(
        engine_roles(config.num_workers, config.num_prefill_workers),
        described.limits,
        config.routing,
        recorder=recorder,
        overload_tokens=None if config.overflow_tokens == "never" else config.overflow_tokens,
    )


def figures(dispatcher: Dispatcher, engines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of dispatcher and engines, with averages since the start.

    A step is one packed forward pass, a pass one request's part of it.
    """
    stats = dispatcher.stats(engines)

    def per(total: str, count: str) -> float:
        return stats.get(total, 0.0) / max(stats.get(count, 0.0), 1.0)

    return {
        **stats,
        "tokens_per_forward": per("num_commits", "num_steps"),
        "tokens_per_pass": per("num_commits", "num_passes"),
        "passes_per_block": per("num_passes", "num_blocks"),
        "prefill_tokens_per_step": per("num_prefill_tokens", "num_steps"),
        "decode_tokens_per_step": per("num_decode_tokens", "num_steps"),
    }


async def start_local(parts: DllmParts) -> LocalEngine:
    """Run dispatcher and engines on this event loop, each worker on a thread."""
    from genserve.core.runtime.local_engine import LocalEngine

    executors: dict[str, Executor] = {}
    for name, worker in parts.workers.items():
        executors.update(lanes(parts.engines[name], worker))
    return LocalEngine(
        parts.described.info,
        parts.dispatcher,
        executors,
        entry=DISPATCHER,
        others=parts.engines,
        figures=partial(figures, parts.dispatcher),
        closed=None if parts.store is None else parts.store.close,
    )


def _check_tokenizer(config: DllmConfig, hf_tokenizer: Any) -> None:
    if hf_tokenizer is None:
        raise ConfigError(f"{config.model}: a model without a tokenizer cannot be served as text")


async def start_served(config: DllmConfig, on_progress: Progress | None = None) -> ServedModel:
    """Start the workers where `config.executor` says and present the model to a server or to the library."""
    from genserve.core.runtime.completion import Completer
    from genserve.core.server.gateway import ServedModel
    from genserve.core.text.tokenizer import Tokenizer

    aio = asyncio.get_running_loop()
    if config.executor == "ray":
        from genserve.core.models.source import resolve

        source = resolve(config.model)  # before the imports that take seconds
        from genserve.core.models.fetch import FetchProgress
        from genserve.dllm.models.registry import load_diffusion_tokenizer

        if on_progress is not None:
            on_progress(FetchProgress(source.name, "load"))
        hf_tokenizer: Any = await aio.run_in_executor(None, load_diffusion_tokenizer, source)
        _check_tokenizer(config, hf_tokenizer)
        recorder = Recorder()
        from genserve.dllm.serve_ray import start_remote

        engine, described = await start_remote(config, recorder)
    else:
        loaded = await aio.run_in_executor(None, load, config, on_progress)
        hf_tokenizer = loaded.tokenizer
        _check_tokenizer(config, hf_tokenizer)
        parts = await aio.run_in_executor(None, assemble, config, loaded)
        engine, described, recorder = await start_local(parts), parts.described, parts.recorder
    tokenizer = Tokenizer(hf_tokenizer)
    completer = Completer(engine, tokenizer, check=DiffusionCheck(described.facts, tokenizer), clock=aio.time)
    info = described.info
    created = int(time.time())
    return ServedModel(
        info.model, created, completer, tokenizer, info, DiffusionOptions, recorder, engine.membership
    )
