"""genserve: diffusion language models, text-to-image workflows and autoregressive models on one core.

Importing this package costs milliseconds: torch, transformers, Ray and FastAPI are imported
where they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from genserve.core.types import SamplingParams
    from genserve.llm import LLM, AsyncLLM

_EXPORTS = {
    "LLM": "genserve.llm",
    "AsyncLLM": "genserve.llm",
    "SamplingParams": "genserve.core.types",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        import importlib

        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'genserve' has no attribute {name!r}")
