"""Configuration of the autoregressive front end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field, model_validator

from genserve.core.config import Bytes, Config

Positive = Annotated[int, Field(ge=1)]


class ArConfig(Config):
    """One autoregressive model and the engine that runs it."""

    model: str
    """A built-in name, a Hugging Face folder or hub id, or a GGUF file."""
    name: str | None = None
    """What clients call it; by default the built-in's or folder's own name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on a CPU, else the checkpoint's own (bfloat16 for float16)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if torch sees one."""
    kv_pool: Bytes = ByteSize(1 << 30)
    """Bytes of the KV pool, allocated once; "512MiB" and "4GB" are read too."""
    max_context_tokens: Positive | None = None
    """Of prompt and output together; at most the model's own, which is the default."""
    max_running: Positive = 64
    """Sequences in a step, at most."""
    budget_tokens: Positive = 512
    """Tokens in a step, at most: larger serves prompts faster, smaller keeps streams even."""
    max_queued_requests: Positive = 256
    """Sequences in flight (running and waiting), at most; beyond it the answer is 429."""
    prefix_cache: bool = True
    """Whether requests share the KV of common prefixes."""
    num_threads: Positive | None = None
    """CPU threads of this engine; by default all cores."""
    executor: Literal["thread", "ray"] = "thread"
    """thread: in the server's process. ray: in an actor of its own."""

    @model_validator(mode="after")
    def _budget_covers_decodes(self) -> ArConfig:
        if self.budget_tokens < self.max_running:
            raise ValueError(
                f"budget_tokens ({self.budget_tokens}) must be at least max_running ({self.max_running}): "
                "a step computes one token of each running sequence"
            )
        return self
