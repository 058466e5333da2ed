"""DiffusionGemma, through its classes in `transformers`: an encoder of text and a decoder of a canvas.

Both have the same layers with the same weights but for one scalar a layer, so that one packed pass
runs causal rows of some requests and canvas rows of others. Encoder rows leave KV behind; canvas rows
write theirs over their own positions, to be written again by encoder rows once the canvas is final.
Served are text and the model's own samplers; images are not.
"""

from __future__ import annotations

from typing import Any

import torch

from genserve.core.errors import ConfigError
from genserve.core.models.attention.backend import PAGED, PagedContext, register
from genserve.core.models.kernels.fuse import optimize_for_cpu
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.layers import LayerSpec, probe
from genserve.core.models.loading import quiet_transformers
from genserve.dllm.models.build import Built
from genserve.dllm.models.checkpoint import Checkpoint
from genserve.dllm.models.interface import CanvasDefaults
from genserve.dllm.models.parts import Parts


class DiffusionGemma(torch.nn.Module):
    """The decoder of a `DiffusionGemmaForBlockDiffusion`, taken over; its layers also encode. A `CanvasModel`."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__()
        encoder, decoder = model.model.encoder.language_model, model.model.decoder
        text = model.config.text_config
        self.layer_specs: tuple[LayerSpec, ...] = probe(encoder, name)
        self.hidden_size: int = text.hidden_size
        self._layer_types: list[str] = text.layer_types
        self._softcap: float = model.final_logit_softcapping
        register()
        model.set_attn_implementation(PAGED)
        self.decoder: Any = decoder
        self.head = model.lm_head
        embedding_VH = decoder.embed_tokens.weight
        num_ids, width = embedding_VH.shape
        self.mix = torch.nn.Linear(num_ids, width, bias=False, device="meta")
        self.mix.weight = torch.nn.Parameter(embedding_VH.detach().t(), requires_grad=False)
        # The one weight that is not shared is pulled out of the layers, and applied row by row.
        self._scales = [
            (encode.layer_scalar.clone(), decode.layer_scalar.clone())
            for encode, decode in zip(encoder.layers, decoder.layers, strict=True)
        ]
        for layer in decoder.layers:
            layer.layer_scalar.fill_(1)
        self._name_the_weights_of_norms()

    def _name_the_weights_of_norms(self) -> None:
        """Norms without a weight get one of ones, by which the kernels know them."""
        widths = {"v_norm": "head_dim", "norm": "hidden_size"}
        for parent in self.decoder.modules():
            for name, child in parent.named_children():
                if getattr(child, "with_scale", True):
                    continue
                width = getattr(parent, widths[name]) if name in widths else self.hidden_size
                child.with_scale = True
                child.weight = torch.nn.Parameter(
                    torch.ones(width, device=self.mix.weight.device, dtype=self.mix.weight.dtype),
                    requires_grad=False,
                )

    def hidden(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        canvas_rows_N: torch.Tensor,
        soft_NH: torch.Tensor,
        paged: PagedContext,
    ) -> torch.Tensor:
        """Final-normed hidden states [N, H] of the canvas rows; see `CanvasModel`."""
        decoder = self.decoder
        x = decoder.embed_tokens(ids_T)
        x[canvas_rows_N] = decoder.self_conditioning(x[canvas_rows_N], soft_NH)
        x, positions = x[None], positions_T[None]
        is_canvas_T = torch.zeros(len(ids_T), dtype=torch.bool, device=ids_T.device)
        is_canvas_T[canvas_rows_N] = True
        rotations = {kind: decoder.rotary_emb(x, positions, kind) for kind in decoder.unique_layer_types}
        layers = zip(decoder.layers, self._layer_types, self._scales, strict=True)
        for layer, kind, (encode, decode) in layers:
            x = layer(
                x,
                position_embeddings=rotations[kind],
                attention_mask=None,
                position_ids=positions,
                cache=None,
                paged=paged,
            )
            x = x * torch.where(is_canvas_T, decode, encode)[None, :, None]
        return decoder.norm(x[0, canvas_rows_N])

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Float32 logits [N, V], softly capped."""
        return torch.tanh(self.head(hidden_NH).float() / self._softcap) * self._softcap

    def soften(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The mean of the scaled embeddings under the predictions [N, H]."""
        embed = self.decoder.embed_tokens
        dtype = embed.weight.dtype
        probs_NV = logits_NV.to(dtype).softmax(-1, dtype=torch.float32).to(dtype)
        return self.mix(probs_NV) * embed.embed_scale.to(dtype)


def build(checkpoint: Checkpoint, parts: Parts) -> Built:
    """Have the model's own class load the folder, then take the model over."""
    from transformers import DiffusionGemmaForBlockDiffusion

    model_class: Any = DiffusionGemmaForBlockDiffusion
    try:
        with quiet_transformers():
            model, report = model_class.from_pretrained(
                checkpoint.folder,
                dtype=parts.dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are reported
                local_files_only=True,
            )
        model.to(parts.device)
    except Exception as error:  # transformers raises anything here; the cause is kept
        raise checkpoint.error(f"{type(error).__name__}: {error}") from error
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise checkpoint.error(
            f"tensor {name!r} has shape {list(stored)}; the config asks for {list(wanted)}"
        )
    for complaint, names in (("has no", "missing_keys"), ("has no place for", "unexpected_keys")):
        if report[names]:
            first, *others = sorted(report[names])
            more = f", nor {len(others)} more" if others else ""
            raise checkpoint.error(f"{complaint} tensor {first!r}{more}")
    checkpoint.ignore_all()
    return take_over(model, checkpoint.name, parts.team)


def take_over(model: Any, name: str, team: ThreadTeam) -> Built:
    """What the registry needs of a `DiffusionGemmaForBlockDiffusion`, which can generate no longer.

    In float32 on the CPU its layers become kernels, run by `team`. `ConfigError` if it cannot be served.
    """
    model.eval().requires_grad_(False)
    config, text = model.config, model.config.text_config
    if text.use_bidirectional_attention == "all":
        raise ConfigError(f"{name}: use_bidirectional_attention 'all' is not served: prompts must be causal")
    if "sliding_attention" in text.layer_types and text.sliding_window < 2:
        raise ConfigError(f"{name}: sliding_window must be at least 2, not {text.sliding_window}")
    served = DiffusionGemma(model, name)
    if model.dtype is torch.float32 and model.device.type == "cpu":
        optimize_for_cpu(served, team)
    return Built(
        model=served,
        family="canvas",
        max_context_tokens=text.max_position_embeddings,
        vocab_size=text.vocab_size,
        num_ids=text.vocab_size,
        default_block_length=config.canvas_length,
        canvas=_defaults(model.generation_config),
    )


def _defaults(generation: Any) -> CanvasDefaults:
    """Of the generation config, and where it does not say, of the model's own `generate`."""
    sampler = generation.sampler_config
    given = {
        "num_steps": generation.max_denoising_steps,
        "entropy_bound": None if sampler is None else sampler.entropy_bound,
        "hottest": generation.t_max,
        "coldest": generation.t_min,
        "num_stable": generation.stability_threshold,
        "confidence": generation.confidence_threshold,
    }
    return CanvasDefaults(**{name: value for name, value in given.items() if value is not None})
