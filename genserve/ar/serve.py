"""Composition root of AR serving: wires model, KV pool, worker, engine and loop together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from genserve.ar.config import ArConfig
from genserve.ar.engine import DEVICE_LANE, Engine, EngineLimits
from genserve.core.errors import ConfigError
from genserve.core.kv.blocks import PAGE_TOKENS
from genserve.core.runtime.client import EngineClient
from genserve.core.types import EngineInfo, SamplingParams, Submit

if TYPE_CHECKING:
    from genserve.ar.worker import ArWorker
    from genserve.core.models.loading import LoadedModel
    from genserve.core.server.gateway import ServedModel

Progress = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What `build_parts` made; `tokenizer` is the Hugging Face one.

    `prepare` compiles a request's grammar, off the steps (see `LocalEngine`).
    """

    info: EngineInfo
    controller: Engine
    worker: ArWorker
    tokenizer: Any
    prepare: Callable[[Submit], None] | None = None


def build_parts(config: ArConfig, on_progress: Progress | None = None) -> EngineParts:
    """Load the model (fetching it if need be) and make its engine. Blocks; raises `ConfigError`."""
    from genserve.core.models.source import resolve

    source = resolve(config.model)  # before the imports that take seconds
    import torch

    from genserve.core.models.attention.backend import PAGED, register
    from genserve.core.models.loading import load_model

    register()
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_model(
        source, dtype=config.dtype, device=device, attn_implementation=PAGED, on_progress=on_progress
    )
    parts = assemble(config, loaded)
    parts.worker.warm_up()
    return parts


def assemble(config: ArConfig, loaded: LoadedModel) -> EngineParts:
    """An engine around a loaded model, whose linear layers it may repack in place."""
    import torch

    from genserve.ar.worker import ArWorker
    from genserve.core.models.attention.pool import context_limit, make_backend, pool_pages
    from genserve.core.models.grammar import GrammarCompiler, GrammarMatcher
    from genserve.core.models.kernels.fuse import optimize_for_cpu
    from genserve.core.models.kernels.threads import ThreadTeam

    specs, dtype, device = loaded.layer_specs, loaded.dtype, loaded.device
    context = context_limit(loaded.name, loaded.max_context_tokens, config.max_context_tokens)
    num_pages = pool_pages(config.kv_pool, specs, dtype, device, config.max_running, context)
    num_threads = config.num_threads or os.cpu_count() or 1
    team = ThreadTeam(num_threads)
    if device.type == "cpu":
        torch.set_num_threads(num_threads)
        if dtype is torch.float32:
            optimize_for_cpu(loaded.model, team)
    backend = make_backend(specs, num_pages, dtype, device, team)

    @cache
    def grammars() -> GrammarCompiler:  # reads the whole vocabulary: only once somebody asks
        if loaded.tokenizer is None:
            raise ConfigError("constrained output needs a tokenizer")
        return GrammarCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)

    def make_matcher(sampling: SamplingParams) -> GrammarMatcher | None:
        return grammars().matcher(sampling.grammar) if sampling.grammar is not None else None

    def prepare(request: Submit) -> None:
        if request.sampling.grammar is not None:
            grammars().compile(request.sampling.grammar)

    limits = EngineLimits(
        num_pages=num_pages,
        max_context_tokens=context,
        max_running=config.max_running,
        budget_tokens=config.budget_tokens,
        prefix_cache=config.prefix_cache,
        eos_token_ids=loaded.eos_token_ids,
    )
    worker = ArWorker(
        loaded.model,
        backend,
        num_slots=config.max_running,
        max_pages=-(-context // PAGE_TOKENS),
        num_valid_tokens=loaded.num_valid_tokens if loaded.num_valid_tokens < loaded.vocab_size else None,
        make_matcher=make_matcher,
        device=loaded.device,
    )
    info = EngineInfo(
        model=config.name or loaded.name,
        family="ar",
        vocab_size=loaded.num_valid_tokens,
        max_context_tokens=context,
        kv_pool_tokens=num_pages * PAGE_TOKENS,
        max_queued_requests=config.max_queued_requests,
        eos_token_ids=loaded.eos_token_ids,
    )
    return EngineParts(info, Engine(limits), worker, loaded.tokenizer, prepare)


async def start_local(parts: EngineParts) -> EngineClient:
    """Run an engine on this event loop, its worker on a thread."""
    from genserve.core.runtime.executors import ThreadExecutor
    from genserve.core.runtime.local_engine import LocalEngine

    return LocalEngine(
        parts.info,
        parts.controller,
        {DEVICE_LANE: ThreadExecutor(parts.worker, parts.info.model)},
        prepare=parts.prepare,
    )


async def build_and_start(config: ArConfig) -> EngineClient:
    """What a Ray actor runs: everything in its own process."""
    return await start_local(build_parts(config))


async def start_engine(config: ArConfig, on_progress: Progress | None = None) -> tuple[EngineClient, Any]:
    """Start the engine where `config.executor` says; returns it with the Hugging Face tokenizer."""
    import asyncio

    aio = asyncio.get_running_loop()
    if config.executor == "ray":
        from genserve.core.models.source import resolve

        resolve(config.model)  # before the imports that take seconds
        from genserve.core.models.fetch import FetchProgress
        from genserve.core.models.loading import load_tokenizer
        from genserve.core.runtime.ray_executor import RayEngine

        tokenizer = await aio.run_in_executor(None, load_tokenizer, config.model, on_progress)
        if on_progress is not None:
            on_progress(FetchProgress(config.model, "load"))
        return await RayEngine.start(build_and_start, config), tokenizer
    parts = await aio.run_in_executor(None, build_parts, config, on_progress)
    return await start_local(parts), parts.tokenizer


async def start_served(config: ArConfig, on_progress: Progress | None = None) -> ServedModel:
    """Start an engine and present it to a server."""
    import asyncio

    from genserve.core.runtime.completion import Completer
    from genserve.core.server.gateway import ServedModel
    from genserve.core.text.tokenizer import Tokenizer

    engine, hf_tokenizer = await start_engine(config, on_progress)
    if hf_tokenizer is None:
        raise ConfigError(f"{config.model}: a model without a tokenizer cannot be served as text")
    tokenizer = Tokenizer(hf_tokenizer)
    completer = Completer(engine, tokenizer, clock=asyncio.get_running_loop().time)
    return ServedModel(engine.info.model, int(time.time()), completer, tokenizer, engine.info)
