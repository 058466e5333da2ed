"""Configuration of the diffusion front end."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ByteSize, Field, model_validator

from genserve.core.config import Bytes, Config

Positive = Annotated[int, Field(ge=1)]


def _overflow_tokens(value: Any) -> Any:
    tokens = int(value) if isinstance(value, str) and value.isdecimal() else value
    if tokens == "never" or (isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 1):
        return tokens
    raise ValueError('a number of tokens from 1 on, or "never"')


class DllmConfig(Config):
    """One diffusion language model, its workers, and what requests get that do not say."""

    @property
    def hands_over(self) -> bool:
        """Whether workers are ready to hand KV over, be it after a change of roles."""
        return bool(self.num_prefill_workers or self.transfer_pool)

    @model_validator(mode="after")
    def _check_workers(self) -> Self:
        if self.num_prefill_workers >= self.num_workers and self.num_prefill_workers > 0:
            raise ValueError(
                f"num_prefill_workers: {self.num_prefill_workers} of {self.num_workers} workers leave none to "
                "decode"
            )
        if (self.num_prefill_workers or self.transfer_pool) and self.routing != "least_outstanding":
            raise ValueError(f"routing: prefill workers need least_outstanding, not {self.routing}")
        return self

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
    num_prefill_workers: Annotated[int, Field(ge=0)] = 0
    """Of the workers, those that run prefills only and hand the KV over to the others."""
    overflow_tokens: Annotated[int | Literal["never"], BeforeValidator(_overflow_tokens)] = 8192
    """With prefill workers: once each has so many prefill tokens outstanding, the others prefill too, up to
    as many each. never: they only decode."""
    prefill_tokens: Positive = 4096
    """Tokens in a step of a prefill worker, unless one prefill alone has more."""
    transfer_pool: Bytes | None = None
    """Bytes that a worker sets aside for KV that others fetch; by default as many as `kv_pool` where there
    are prefill workers. With it, prefill workers can be added while serving."""
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
    ray_address: str | None = None
    """Of the Ray cluster to run on; by default that of RAY_ADDRESS, else one that ends with the server."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Whether Ray puts the workers close together or on different nodes; the strict ones insist."""
    placement_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """How long to wait until the Ray cluster has room for the workers."""
    worker_cpus: Annotated[float, Field(gt=0)] = 0.1
    """CPUs that Ray reserves for each worker; threads are counted by num_threads alone."""
    worker_gpus: Annotated[float, Field(gt=0)] | None = None
    """GPUs that Ray reserves for each worker; by default one, or a share where there are fewer."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 10.0
    """A worker's actor that is silent for so much longer than it should be is killed and replaced."""
    step_deadline_s: Annotated[float, Field(ge=0)] = 120.0
    """So is one whose step takes longer than this; 0 for no limit."""
