"""Configuration of the autoregressive front end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field, model_validator

from genserve.core.config import Config

Positive = Annotated[int, Field(ge=1)]


class ArConfig(Config):
    """One autoregressive model and the engine that runs it.

    model      a built-in name, a Hugging Face folder or hub id, or a GGUF file.
    name       what clients call it; by default the built-in's or folder's own name.
    dtype      auto: float32 on a CPU, else the checkpoint's own (bfloat16 for float16).
    device     auto: the GPU if torch sees one.
    kv_pool    bytes of the KV pool, allocated once ("512MiB", "4GB").
    max_context_tokens  at most the model's own, which is the default.
    max_running  sequences in a step, at most.
    budget_tokens  tokens in a step, at most: larger serves prompts faster, smaller keeps streams even.
    max_queued_requests  sequences in flight (running and waiting); beyond it the answer is 429.
    num_threads  CPU threads of this engine; by default all cores.
    executor   thread: in the server's process. ray: in an actor of its own.
    """

    model: str
    name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kv_pool: ByteSize = ByteSize(1 << 30)
    max_context_tokens: Positive | None = None
    max_running: Positive = 64
    budget_tokens: Positive = 512
    max_queued_requests: Positive = 256
    prefix_cache: bool = True
    num_threads: Positive | None = None
    executor: Literal["thread", "ray"] = "thread"

    @model_validator(mode="after")
    def _budget_covers_decodes(self) -> ArConfig:
        if self.budget_tokens < self.max_running:
            raise ValueError(
                f"budget_tokens ({self.budget_tokens}) must be at least max_running ({self.max_running}): "
                "a step computes one token of each running sequence"
            )
        return self
