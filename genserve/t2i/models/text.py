"""Prompts to token ids, and what of a prompt an encoder cannot read.

Owns tokenizers and the text encoders' common parts; must not know any family. Prompt embeddings travel as one value
of two tensors, the sequence (1 x tokens x width) and the pooled vector (1 x width), so that a workflow hands one
thing from the encoder to the denoiser. What was not read is an output named `warnings`, a list of sentences, which
a call doesn't return: whoever runs the node collects it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from genserve.t2i.model import Model
from genserve.t2i.ports import JSON, tensors

if TYPE_CHECKING:
    import torch

EMBEDS = tensors(2)


class Tokenizer:
    """A tokenizer that several threads may use: those of transformers change their padding in each call."""

    def __init__(self, tokenizer: Any, encoder: str) -> None:
        self.max_length: int = tokenizer.model_max_length
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._lock = threading.Lock()

    def __call__(self, prompt: str, max_length: int | None = None) -> tuple[torch.Tensor, list[str]]:
        """Ids padded to `max_length` (1 x max_length), and a warning that says what was dropped, if anything was."""
        limit = max_length or self.max_length
        with self._lock:
            ids = self._tokenizer(
                [prompt], padding="max_length", max_length=limit, truncation=True, return_tensors="pt"
            ).input_ids
            whole = self._tokenizer([prompt], padding=False, truncation=False, verbose=False).input_ids[0]
            if len(whole) <= limit:
                return ids, []
            # The end mark is kept: the last position before it is where the text stops.
            dropped = self._tokenizer.decode(whole[limit - 1 : -1])
        return ids, [
            f"{self._encoder} reads {limit} tokens; of the prompt it did not read: {dropped.strip()!r}"
        ]


def load_encoder(model_path: str, name: str, dtype: torch.dtype, device: str) -> tuple[Any, Tokenizer] | None:
    """A text encoder and its tokenizer, such as `text_encoder_2`; None where the checkpoint was saved without it."""
    import transformers

    from genserve.t2i.models.checkpoint import read_config

    cls, tokenizer_cls = (
        read_config(model_path, "model_index.json").get(part) or [None, None]
        for part in (name, name.replace("text_encoder", "tokenizer"))
    )
    if cls[1] is None:
        return None
    encoder = getattr(transformers, cls[1]).from_pretrained(model_path, subfolder=name, dtype=dtype)
    tokenizer = getattr(transformers, tokenizer_cls[1]).from_pretrained(
        model_path, subfolder=name.replace("text_encoder", "tokenizer")
    )
    return encoder.to(device).eval(), Tokenizer(tokenizer, name)


def load_encoders(model_path: str, names: Sequence[str], dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Those of the text encoders that there are, and their tokenizers, by the names of their folders."""
    parts: dict[str, Any] = {}
    for name in names:
        loaded = load_encoder(model_path, name, dtype, device)
        if loaded is not None:
            parts[name], parts[name.replace("text_encoder", "tokenizer")] = loaded
    return parts


class TextEncoder(Model):
    """What the families' text encoders have in common: one value for the workflow, warnings for the runtime."""

    content: ClassVar[tuple[str, ...]] = ("tokenizer", "tokenizer_2", "tokenizer_3")

    def add_outputs(self) -> None:
        self.add_output("prompt_embeds", EMBEDS)
        self.add_output("warnings", JSON)


def embeds(sequence: torch.Tensor, pooled: torch.Tensor, warnings: Sequence[str]) -> dict[str, Any]:
    """The outputs of a text encoder's node, each warning once."""
    return {"prompt_embeds": [sequence, pooled], "warnings": list(dict.fromkeys(warnings))}
