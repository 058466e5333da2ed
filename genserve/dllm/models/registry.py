"""Loads a diffusion language model by what its `config.json` calls itself.

To add one, write its file (a `build` like the others') and name it here.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from genserve.core.errors import ConfigError
from genserve.core.models.kernels.threads import ThreadTeam
from genserve.core.models.loading import Dtype, quiet_transformers
from genserve.core.models.source import ModelSource, resolve
from genserve.dllm.models.build import Built
from genserve.dllm.models.checkpoint import Checkpoint
from genserve.dllm.models.interface import NO_MASK, LoadedDiffusionModel
from genserve.dllm.models.parts import Parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Architecture names and model types of configs, and the module here that builds them.
ARCHITECTURES = {
    "LLaDAModelLM": "llada",
    "DreamModel": "dream",
    "LLaDA2MoeModelLM": "llada2",
    "SDARForCausalLM": "sdar",
    "DiffusionGemmaForBlockDiffusion": "diffusion_gemma",
}
MODEL_TYPES = {
    "llada": "llada",
    "Dream": "dream",
    "llada2_moe": "llada2",
    "sdar": "sdar",
    "diffusion_gemma": "diffusion_gemma",
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}
_MASK_TOKENS = ("<|mdm_mask|>", "<|mask|>", "<|MASK|>", "[MASK]", "<mask>")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt", "*.model"]


def load_diffusion_model(
    source: ModelSource | str,
    *,
    dtype: Dtype = "auto",
    device: str = "cpu",
    mask_token_id: int | None = None,
    team: ThreadTeam | None = None,
) -> LoadedDiffusionModel:
    """Load a checkpoint folder (or hub id) and its tokenizer, running no code of its own.

    `dtype` "auto" is float32 on a CPU, where bfloat16 weights stay bfloat16 in memory, and the
    checkpoint's own elsewhere (bfloat16 for float16). In float32 on a CPU all is ready to run on
    `team`'s threads; nothing is left to optimise. `mask_token_id` is for checkpoints that do not say.
    Errors are `ConfigError` (cannot be loaded or served, with the reason) or `ModelNotFound`.
    """
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"dtype: {dtype!r} is not one of auto, float32, bfloat16")
    if isinstance(source, str):
        source = resolve(source)
    checkpoint = Checkpoint(_folder(source), source.name)
    build = import_module(f"genserve.dllm.models.{_module_of(checkpoint)}").build
    target = torch.device(device)
    torch_dtype = _DTYPES[dtype] if dtype != "auto" else _own_dtype(checkpoint, target)
    with torch.no_grad():
        built: Built = build(checkpoint, Parts(torch_dtype, target, team or ThreadTeam()))
    checkpoint.refuse_leftovers()
    tokenizer = _load_tokenizer(checkpoint)
    num_valid = built.num_ids
    if tokenizer is not None:
        num_valid = min(num_valid, 1 + max(tokenizer.get_vocab().values()))
    has_mask = built.family != "canvas"
    mask = _mask_token_id(checkpoint, tokenizer, mask_token_id, built.vocab_size) if has_mask else NO_MASK
    return LoadedDiffusionModel(
        model=built.model,
        family=built.family,
        name=source.name,
        shift=built.shift,
        mask_token_id=mask,
        eos_token_ids=_eos_token_ids(checkpoint, tokenizer),
        max_context_tokens=built.max_context_tokens,
        vocab_size=built.vocab_size,
        num_valid_tokens=num_valid,
        default_block_length=built.default_block_length,
        dtype=torch_dtype,
        device=target,
        tokenizer=tokenizer,
        canvas=built.canvas,
    )


def load_diffusion_tokenizer(source: ModelSource | str) -> PreTrainedTokenizerBase | None:
    """Only the tokenizer of a checkpoint, for a front end whose workers are in other processes."""
    if isinstance(source, str):
        source = resolve(source)
    return _load_tokenizer(Checkpoint(_folder(source), source.name))


def _folder(source: ModelSource) -> Path:
    if source.kind == "folder":
        return Path(source.location)
    if source.kind != "hub":
        raise ConfigError(
            f"{source.name}: diffusion models are loaded from folders with config.json and safetensors, "
            f"not from a {source.kind} model"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source.location, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's client raises anything here; the cause is kept
        raise ConfigError(f"cannot fetch {source.name}: {type(error).__name__}: {error}") from error


def _module_of(checkpoint: Checkpoint) -> str:
    names = checkpoint.get("architectures", [])
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    kind = checkpoint.get("model_type")
    if not names and kind in MODEL_TYPES:
        return MODEL_TYPES[kind]
    raise checkpoint.error(
        f"{' or '.join(map(str, names)) or kind or 'a config without architectures'} is no diffusion language "
        f"model that is served; there are: {', '.join(ARCHITECTURES)}"
    )


def _own_dtype(checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return _DTYPES.get(checkpoint.get("dtype", checkpoint.get("torch_dtype")), torch.bfloat16)


def _load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase | None:
    """The folder's tokenizer; None if there are no files of one."""
    folder = checkpoint.folder
    if not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2TokenizerFast

    # Some folders name a class that only their own code has; its files are an ordinary BPE.
    kinds: list[Any] = [AutoTokenizer]
    if (folder / "tokenizer.json").is_file():
        kinds.append(PreTrainedTokenizerFast)
    elif (folder / "merges.txt").is_file():
        kinds.append(Qwen2TokenizerFast)
    reasons = []
    with quiet_transformers():
        for kind in kinds:
            try:
                return kind.from_pretrained(folder, trust_remote_code=False)
            except Exception as error:  # transformers raises anything here; all causes are told
                reasons.append(f"{kind.__name__}: {type(error).__name__}: {error}")
    raise checkpoint.error(f"cannot load the tokenizer: {'; '.join(reasons)}")


def _mask_token_id(
    checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None, given: int | None, vocab_size: int
) -> int:
    found: Any = given
    if found is None:
        found = checkpoint.get("mask_token_id", checkpoint.generation.get("mask_token_id"))
    if found is None and tokenizer is not None:
        found = tokenizer.mask_token_id
        if found is None:
            vocabulary = tokenizer.get_vocab()
            found = next((vocabulary[token] for token in _MASK_TOKENS if token in vocabulary), None)
    if found is None:
        raise checkpoint.error(
            "neither config.json (mask_token_id) nor the tokenizer (mask_token) says which token is the mask; "
            "give mask_token_id"
        )
    if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found < vocab_size:
        raise checkpoint.error(f"mask_token_id must be a token id below {vocab_size}, not {found!r}")
    return found


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """End-of-sequence ids of the generation config (else of the config), and the tokenizer's own."""
    found: Any = checkpoint.generation.get("eos_token_id")
    if found is None:
        found = checkpoint.get("eos_token_id")
    ids = [] if found is None else list(found) if isinstance(found, list) else [found]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))
