"""The network of the tiny models and its plain decoding.

Parameters carry the published LLaDA tensor names; the same network with a causal mask is a Llama. Knows nothing
of files, of the corpus or of how the weights came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a network; all are multiples of 16 so that every kernel can be used."""

    d_model: int = 160
    num_layers: int = 5
    head_dim: int = 32
    d_ff: int = 432
    vocab_size: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def num_heads(self) -> int:
        return self.d_model // self.head_dim


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each after an RMSNorm and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, ff = shape.d_model, shape.d_ff
        self.head_dim = shape.head_dim
        self.attn_norm = nn.RMSNorm(d, eps=shape.norm_eps)
        self.q_proj, self.k_proj, self.v_proj, self.attn_out = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.ff_norm = nn.RMSNorm(d, eps=shape.norm_eps)
        self.ff_proj, self.up_proj = nn.Linear(d, ff, bias=False), nn.Linear(d, ff, bias=False)
        self.ff_out = nn.Linear(ff, d, bias=False)

    def forward(
        self, x: Tensor, rope: KV, bias: Tensor | None, kept: KV | None, start: int
    ) -> tuple[Tensor, KV]:
        num_rows, num_tokens, d = x.shape
        h = self.attn_norm(x)
        q, k, v = (
            proj(h).view(num_rows, num_tokens, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, rope), _rotate(k, rope)
        if kept is not None:
            end = start + num_tokens
            k, v = (
                torch.cat((old[:, :, :start], new, old[:, :, end:]), dim=2)
                for old, new in zip(kept, (k, v), strict=True)
            )
        # Plain softmax: the fused bf16 attention of the CPU is slow backwards.
        scores = (q @ k.transpose(-1, -2)).float() * self.head_dim**-0.5
        if bias is not None:
            scores = scores + bias
        mixed = scores.softmax(-1).to(v.dtype) @ v
        x = x + self.attn_out(mixed.transpose(1, 2).reshape(num_rows, num_tokens, d))
        h = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(h)) * self.up_proj(h)), (k, v)


def _rotate(x: Tensor, rope: KV) -> Tensor:
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class TinyNet(nn.Module):
    """Token ids in, hidden rows or logits out; without `bias` every position sees every other one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.ModuleDict()
        self.model["transformer"] = nn.ModuleDict(
            {
                "wte": nn.Embedding(shape.vocab_size, shape.d_model),
                "blocks": nn.ModuleList(Block(shape) for _ in range(shape.num_layers)),
                "ln_f": nn.RMSNorm(shape.d_model, eps=shape.norm_eps),
                "ff_out": nn.Linear(shape.d_model, shape.vocab_size, bias=False),
            }
        )
        for name, weight in self.named_parameters():
            if name.endswith(("attn_out.weight", "ff_out.weight")) and "blocks" in name:
                nn.init.zeros_(weight)  # every block begins as the identity
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=0.5 if "wte" in name else weight.shape[1] ** -0.5)

    @property
    def parts(self) -> Any:
        """The submodules, by their published names."""
        return self.model["transformer"]

    def hidden(
        self, ids: Tensor, bias: Tensor | None = None, kept: Sequence[KV] | None = None, start: int = 0
    ) -> tuple[Tensor, list[KV]]:
        """Final hidden rows [rows, tokens, d_model] and each layer's K and V of the whole sequence.

        `kept` is the K and V of an earlier pass over the whole sequence; then `ids` are its positions from
        `start` on, and only theirs are renewed.
        """
        rope = _rope(self.shape, start, ids.shape[1])
        x, caches = self.parts["wte"](ids), []
        for index, block in enumerate(self.parts["blocks"]):
            x, cache = block(x, rope, bias, kept[index] if kept is not None else None, start)
            caches.append(cache)
        return self.parts["ln_f"](x), caches

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] of hidden rows."""
        return self.parts["ff_out"](hidden)


def _rope(shape: Shape, start: int, num_tokens: int) -> KV:
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(start, start + num_tokens, dtype=torch.float32)[:, None] * shape.rope_theta**-steps
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


@dataclass(frozen=True, slots=True)
class Decoded:
    """An answer cut before its end-of-sequence token, and the forward passes it took."""

    ids: list[int]
    num_forwards: int


@torch.inference_mode()
def decode_by_unmasking(
    net: TinyNet,
    prompt: Sequence[int],
    num_answer_tokens: int,
    mask_id: int,
    eos_id: int,
    *,
    dual_cache: bool,
    threshold: float = 0.9,
    block_length: int = 32,
) -> Decoded:
    """Block by block from the left, all positions at or above `threshold` at once and at least one a pass."""
    canvas = torch.tensor([[*prompt, *[mask_id] * num_answer_tokens]])
    start, length, num_forwards = len(prompt), canvas.shape[1], 0
    while start < length:
        end = min(start + block_length, length)
        kept = None
        while bool((block := canvas[0, start:end]).eq(mask_id).any()):
            num_forwards += 1
            if kept is None:
                hidden, caches = net.hidden(canvas)
                hidden = hidden[:, start:end]
                kept = caches if dual_cache else None
            else:
                hidden, _ = net.hidden(canvas[:, start:end], kept=kept, start=start)
            logits = net.head(hidden)[0].float()
            logits[:, mask_id] = -torch.inf
            confidence, token = logits.softmax(-1).max(-1)
            confidence = torch.where(block == mask_id, confidence, -1.0)
            chosen = confidence >= threshold
            chosen[confidence.argmax()] = True
            canvas[0, start:end] = torch.where(chosen, token, block)
        if bool((canvas[0, start:end] == eos_id).any()):
            break
        start = end
    answer = canvas[0, len(prompt) :].tolist()
    return Decoded(answer[: answer.index(eos_id)] if eos_id in answer else answer, num_forwards)
