"""Configuration of the diffusion front end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from genserve.core.config import Bytes, Config

Positive = Annotated[int, Field(ge=1)]


class DllmConfig(Config):
    """One diffusion language model, its workers, and what requests get that do not say."""

    model: str
    """A built-in name, or a Hugging Face folder or hub id."""
    name: str | None = None
    """What clients call it; by default the built-in's or folder's own name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, else the checkpoint's own (bfloat16 for float16)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if torch sees one."""
    kv_pool: Bytes = ByteSize(1 << 30)
    """Bytes of each worker's KV pool, allocated once; "512MiB" and "4GB" are read too."""
    max_context_tokens: Positive | None = None
    """Of prompt, answer and suffix together; at most the model's own, which is the default."""
    max_running: Positive = 64
    """Requests in a step of one worker, at most."""
    budget_tokens: Positive = 1024
    """Tokens in a step in the long run: larger admits prompts faster, smaller keeps steps even."""
    budget_policy: Literal["signed", "paper"] = "signed"
    """signed: a balance that may be in debt. paper: Sangam's rule as published."""
    num_workers: Positive = 1
    """Workers under one dispatcher, each with a KV pool of its own."""
    routing: Literal["least_outstanding", "round_robin", "sticky"] = "least_outstanding"
    """Which worker takes a block: the one with the fewest prefill tokens outstanding, each in turn, or
    the one that had the request's block before."""
    max_queued_requests: Positive = 256
    """Requests in flight (running and waiting), at most; beyond it the answer is 429."""
    prefix_cache: bool = True
    """Whether requests share the KV of common prefixes (block-causal models)."""
    default_max_tokens: Positive = 128
    """Length of an answer whose request names none."""
    cache: Literal["none", "prefix", "dual", "dkv", "block", "canvas"] | None = None
    """KV cache of requests that name none: dual, of block-causal models block."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Confidence from which requests that name no rule commit a token: 0.9."""
    block_length: Positive | None = None
    """Positions denoised together, of requests that do not say; by default the model's own."""
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    """For checkpoints that do not name it."""
    num_threads: Positive | None = None
    """CPU threads, divided among the workers; by default all cores."""
    executor: Literal["thread", "ray"] = "thread"
    """thread: in the server's process. ray: each worker in an actor of its own."""
