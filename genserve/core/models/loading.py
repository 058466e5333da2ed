"""Finds and loads a causal language model, and says what serving it needs to know.

Owns the way from a name (built-in, folder, GGUF file, hub id) to a torch model in eval mode, and
`probe`, which learns by one tiny forward pass what each layer hands to the attention interface:
the engine serves what was seen there, and everything else is refused with a reason. Knows nothing
of pages, batches or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from genserve.core.errors import ConfigError, GenserveError
from genserve.core.models.layers import LayerSpec, probe
from genserve.core.models.source import ModelSource, resolve

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from genserve.core.models.fetch import FetchProgress

Dtype = Literal["auto", "float32", "bfloat16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Kinds of layers whose state is not keys and values of every earlier token.
_UNSERVED_LAYER_TYPES = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "chunked_attention"}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve (eval mode, no gradients) and the facts an engine needs.

    `tokenizer` is None only for models built in memory. `vocab_size` is the width of the logits;
    ids from `num_valid_tokens` on are padding and must never be chosen.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: PretrainedConfig
    name: str
    eos_token_ids: tuple[int, ...]
    max_context_tokens: int
    vocab_size: int
    num_valid_tokens: int
    layer_specs: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_layers(self) -> int:
        return len(self.layer_specs)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of every layer; `ConfigError` if layers differ (use `layer_specs`)."""
        return self._common("num_kv_heads")

    @property
    def head_dim(self) -> int:
        """Head size of every layer; `ConfigError` if layers differ (use `layer_specs`)."""
        return self._common("head_dim")

    def _common(self, field: str) -> int:
        values = {getattr(spec, field) for spec in self.layer_specs}
        if len(values) != 1:
            raise ConfigError(f"{self.name}: layers differ in {field}: {sorted(values)}")
        return values.pop()


def load_model(
    source: ModelSource | str,
    *,
    dtype: Dtype = "auto",
    device: str = "cpu",
    attn_implementation: str | None = None,
    on_progress: Callable[[FetchProgress], None] | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer; a built-in is fetched first if need be.

    `dtype` "auto" is fp32 on a CPU (where bf16 checkpoints lose nothing by it, and the kernels read
    their weights as bf16 all the same); elsewhere the checkpoint's own, with bf16 for fp16. `attn_implementation` None is transformers' choice for the
    model. Errors are `ConfigError` (cannot be loaded or served, with
    the reason) or `ModelNotFound`.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ConfigError(f"dtype: {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    target = torch.device(device)
    if dtype == "auto" and target.type == "cpu":
        dtype = "float32"
    if isinstance(source, str):
        source = resolve(source)
    location = source.location
    if source.kind == "builtin":
        from genserve.core.models.fetch import fetch

        location = str(fetch(source.name, on_progress))
    if on_progress is not None:
        from transformers import AutoModelForCausalLM  # noqa: F401  (seconds that are not the weights')

        from genserve.core.models.fetch import FetchProgress

        on_progress(FetchProgress(source.name, "load"))
    try:
        model: Any  # transformers wraps `to` in a way that type checkers misread
        if source.kind == "gguf":
            model, tokenizer = load_gguf(Path(location), "bfloat16" if dtype == "auto" else dtype)
        else:
            model, tokenizer = _load_folder(location, dtype, source.name)
        model.to(target)
        if attn_implementation is not None:
            model.set_attn_implementation(attn_implementation)
    except GenserveError:
        raise
    except Exception as error:  # transformers raises anything here; the cause is kept
        raise ConfigError(f"cannot load {source.name}: {type(error).__name__}: {error}") from error
    return wrap_model(model, tokenizer, source.name)


def load_tokenizer(
    source: ModelSource | str, on_progress: Callable[[FetchProgress], None] | None = None
) -> PreTrainedTokenizerBase:
    """Only the tokenizer of a model, for a front end whose engine is in another process."""
    from transformers import AutoTokenizer

    if isinstance(source, str):
        source = resolve(source)
    location = source.location
    if source.kind == "builtin":
        from genserve.core.models.fetch import fetch

        location = str(fetch(source.name, on_progress))
    try:
        with quiet_transformers():
            if source.kind == "gguf":
                path = Path(location)
                return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
            return AutoTokenizer.from_pretrained(location)
    except Exception as error:  # transformers raises anything here; the cause is kept
        raise ConfigError(
            f"cannot load the tokenizer of {source.name}: {type(error).__name__}: {error}"
        ) from error


def wrap_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "model"
) -> LoadedModel:
    """What an engine must know of a model in memory; sets it to eval mode without gradients. Probes it."""
    model.eval().requires_grad_(False)
    config = model.config.get_text_config()
    check_servable(model.config, name)
    max_context_tokens = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_context_tokens, int):
        raise ConfigError(
            f"{name}: the config has no max_position_embeddings, so its context length is unknown"
        )
    layer_specs = probe(model, name)
    head = model.get_output_embeddings()
    vocab_size = config.vocab_size if head is None else head.weight.shape[0]
    num_valid = vocab_size
    if tokenizer is not None:
        num_valid = min(vocab_size, 1 + max(tokenizer.get_vocab().values()))
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        name=name,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_context_tokens=max_context_tokens,
        vocab_size=vocab_size,
        num_valid_tokens=num_valid,
        layer_specs=layer_specs,
        dtype=model.dtype,
        device=model.device,
    )


def check_servable(config: PretrainedConfig, name: str) -> None:
    """`ConfigError` if the config alone shows that the model is no decoder with a KV cache."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{name}: {kind} is an encoder-decoder model; only decoder-only models are served")
    if getattr(text, "add_cross_attention", False):
        raise ConfigError(f"{name}: {kind} uses cross-attention, which is not served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{name}: transformers has no causal language model of type {kind!r}")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        raise ConfigError(
            f"{name}: {kind} keeps a recurrent state (Mamba, RWKV or a hybrid), which is not served"
        )
    unserved = _UNSERVED_LAYER_TYPES.intersection(getattr(text, "layer_types", None) or ())
    if unserved:
        raise ConfigError(
            f"{name}: {kind} has layers of kind {', '.join(sorted(unserved))}, which are not served"
        )


def _load_folder(location: str, dtype: Dtype, name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with quiet_transformers():
        config = AutoConfig.from_pretrained(location)
        check_servable(config, name)
        tokenizer = AutoTokenizer.from_pretrained(location)
        model: Any = AutoModelForCausalLM.from_pretrained(location, dtype=_DTYPES.get(dtype, "auto"))
    if dtype == "auto" and model.dtype not in _DTYPES.values():
        model.to(torch.bfloat16)
    return model, tokenizer


def load_gguf(
    path: Path, dtype: Literal["float32", "bfloat16"]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A GGUF file as a dense transformers model and its tokenizer. Slow: tens of CPU seconds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet_transformers():
        folder, file = str(path.parent), path.name
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=_DTYPES[dtype], quantization_config=GgufConfig(dequantize=True)
        )
    # The weights are dense now, but transformers still takes the model for quantized and would
    # refuse to save or convert it.
    model.hf_quantizer = None
    model.quantization_method = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config (else of the config), and the tokenizer's own."""
    generation = getattr(model, "generation_config", None)
    found: Any = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "eos_token_id", None)
    ids = [] if found is None else list(found) if isinstance(found, (list, tuple)) else [found]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or advice of transformers on stderr while loading; errors still raise."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    verbosity, bars, gguf_bar = logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf.tqdm = partial(gguf_bar, disable=True)  # it does not ask the switch above
    try:
        yield
    finally:
        gguf.tqdm = gguf_bar
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
