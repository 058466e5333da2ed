"""Configuration of the workflow front end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, field_validator

from genserve.core.config import Bytes, Config
from genserve.core.errors import ConfigError
from genserve.t2i.passes import with_default

Positive = Annotated[int, Field(ge=1)]


class T2iConfig(Config):
    """Executors, their memory, and what requests may ask for."""

    num_executors: Positive = 1
    """Each runs one node at a time, with models of its own."""
    executor: Literal["thread", "ray"] = "thread"
    """thread: in this process. ray: each in an actor of its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU if torch sees one."""
    weights_budget: Bytes | None = None
    """Bytes of weights on each executor; the least recently used models go first. By default no limit."""
    host_budget: Bytes = ByteSize(0)
    """Bytes of models that each executor keeps in host memory once they left its GPU."""
    tensor_pool: Bytes = ByteSize(256 << 20)
    """Bytes of shared memory of each process with executor "ray", for tensors that others fetch."""
    max_queued_requests: Positive = 256
    """Requests in flight (running and waiting), at most; beyond it the answer is 429."""
    max_images: Positive = 16
    """Images of one request, at most."""
    loras: Mapping[str, str] = {}
    """Adapters that requests may name: name to folder, file or hub id."""
    passes: Mapping[str, Mapping[str, Any]] = {}
    """Passes of the compiler beyond those that every workflow gets, with their options, such as
    {"step_cache": {"threshold": 0.1}}, for the model's own workflows and those that a session registers: cfg_split
    (guidance on two executors), step_cache and approximate_cache (both approximate)."""
    num_threads: Positive | None = None
    """CPU threads, divided among the executors; by default all cores."""
    ray_address: str | None = None
    """Of the Ray cluster to run on; by default that of RAY_ADDRESS, else one that ends with the server."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Whether Ray puts the executors close together or on different nodes; the strict ones insist."""
    placement_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """How long to wait until the Ray cluster has room for the executors."""
    executor_cpus: Annotated[float, Field(gt=0)] = 0.1
    """CPUs that Ray reserves for each executor; threads are counted by num_threads alone."""
    executor_gpus: Annotated[float, Field(gt=0)] | None = None
    """GPUs that Ray reserves for each executor; by default one, or a share where there are fewer."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 10.0
    """An executor's actor that is silent for so much longer than it should be is killed and replaced."""
    step_deadline_s: Annotated[float, Field(ge=0)] = 600.0
    """So is one of which a node takes longer than this, loading included; 0 for no limit."""

    @field_validator("passes")
    @classmethod
    def _known(cls, passes: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
        try:
            with_default(passes)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return passes
