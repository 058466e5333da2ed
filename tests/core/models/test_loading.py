"""Finding and loading models: every supported family, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from genserve.core.errors import ConfigError, ModelNotFound
from genserve.core.models.loading import load_model, wrap_model
from genserve.core.models.source import ModelSource, resolve
from genserve.core.models.tiny import (
    TINY_ARCHITECTURES,
    make_tiny_folder,
    make_tiny_model,
    make_tiny_tokenizer,
)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("arch", TINY_ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_loads_from_a_folder(tmp_path: Path, arch: str, dtype: str) -> None:
    folder = make_tiny_folder(tmp_path / "tiny", arch)
    loaded = load_model(str(folder), dtype=dtype)
    assert loaded.name == "tiny" and str(loaded.dtype) == f"torch.{dtype}"
    assert {str(p.dtype) for p in loaded.model.parameters()} == {f"torch.{dtype}"}
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.eos_token_ids == (2,) and loaded.max_context_tokens == 512
    assert loaded.tokenizer is not None
    assert loaded.vocab_size == 320 and loaded.num_valid_tokens == len(loaded.tokenizer) < 320
    expected_kv = {"gemma": 1, "opt": 4, "gpt2": 4}.get(arch, 2)
    expected_dim = 12 if arch in ("qwen2", "opt", "gpt2") else 16
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim) == (3, expected_kv, expected_dim)
    if dtype == "float32":
        ids = torch.tensor([[5, 6, 7, 8]])
        torch.testing.assert_close(loaded.model(ids).logits, make_tiny_model(arch)(ids).logits)


def test_layer_specs_tell_windows_and_softcaps() -> None:
    windows = {
        arch: [spec.sliding_window for spec in wrap_model(make_tiny_model(arch)).layer_specs]
        for arch in ("llama", "mistral", "gemma2", "gemma3")
    }
    assert windows == {
        "llama": [None, None, None],
        "mistral": [24, 24, 24],
        "gemma2": [24, None, 24],
        "gemma3": [24, None, 24],
    }
    assert {spec.softcap for spec in wrap_model(make_tiny_model("gemma2")).layer_specs} == {20.0}
    assert {spec.softcap for spec in wrap_model(make_tiny_model("gemma3")).layer_specs} == {None}
    assert {spec.scaling for spec in wrap_model(make_tiny_model("opt")).layer_specs} == {1.0}
    wide = wrap_model(make_tiny_model("gemma2", query_pre_attn_scalar=64))
    assert {spec.scaling for spec in wide.layer_specs} == {0.125}


@pytest.mark.parametrize("arch", ["llama", "gemma2", "mixtral"])
def test_probing_leaves_the_model_as_it_was(arch: str) -> None:
    model = make_tiny_model(arch)
    ids = torch.tensor([[5, 6, 7, 8]])
    before, attention = model(ids).logits, model.config._attn_implementation
    wrap_model(model)
    assert model.config._attn_implementation == attention
    assert torch.equal(model(ids).logits, before)


def test_sliding_window_counts_the_query_itself() -> None:
    """A change one token outside the window of a one-layer model leaves the last logits alone; inside, not."""
    model = make_tiny_model("mistral", num_hidden_layers=1)
    (spec,) = wrap_model(model).layer_specs
    ids = torch.arange(10, 60).unsqueeze(0)
    outside, inside = ids.clone(), ids.clone()
    outside[0, 49 - spec.sliding_window] = 5
    inside[0, 50 - spec.sliding_window] = 5
    last = model(ids).logits[0, -1]
    torch.testing.assert_close(model(outside).logits[0, -1], last)
    assert (model(inside).logits[0, -1] - last).abs().max() > 1e-4


def test_auto_dtype_is_float32_on_a_cpu_whatever_the_checkpoint(tmp_path: Path) -> None:
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        folder = make_tiny_folder(tmp_path / str(stored), "llama")
        make_tiny_model("llama").to(stored).save_pretrained(folder)
        assert load_model(str(folder)).dtype == torch.float32


def test_attention_implementation_is_set_as_asked(tmp_path: Path) -> None:
    loaded = load_model(str(make_tiny_folder(tmp_path)), attn_implementation="eager")
    assert loaded.model.config._attn_implementation == "eager"


def test_eos_ids_are_those_of_generation_config_and_tokenizer() -> None:
    model = make_tiny_model("llama")
    model.generation_config.eos_token_id = [7, 0]
    assert wrap_model(model).eos_token_ids == (0, 7)
    assert wrap_model(model, make_tiny_tokenizer()).eos_token_ids == (0, 2, 7)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    assert wrap_model(model).eos_token_ids == ()


def test_resolve_knows_each_kind_of_source(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path / "a-model")
    assert resolve("smollm2") == ModelSource("builtin", "smollm2", "smollm2")
    assert resolve(str(folder)) == ModelSource("folder", str(folder), "a-model")
    gguf = tmp_path / "b" / "x.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"GGUF")
    assert resolve(str(gguf)) == ModelSource("gguf", str(gguf), "x")
    assert resolve(str(gguf.parent)) == ModelSource("gguf", str(gguf), "x")


def test_resolve_says_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFound,
        match=r"no-such/model.*built-in model \(tiny-llada, tiny-llama, tiny-sd3, smollm2\).*folder or file.*hub id",
    ):
        resolve("no-such/model")
    with pytest.raises(ModelNotFound, match="folder or file") as missing:
        resolve("./missing/folder/x")
    assert "hub id" not in str(missing.value)
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(str(tmp_path))
    text = tmp_path / "notes.txt"
    text.write_text("x")
    with pytest.raises(ConfigError, match=r"not a \.gguf"):
        resolve(str(text))


def test_hub_id_in_the_local_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    commit = "0" * 40
    repo = tmp_path / "models--org--tiny"
    make_tiny_folder(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve("org/tiny") == ModelSource("hub", "org/tiny", "org/tiny")


def _folder_of_config(path: Path, **config: object) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "mamba"}, "recurrent state"),
        ({"model_type": "jamba"}, "recurrent state"),
        ({"model_type": "qwen3_next"}, "recurrent state|linear_attention"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross-attention"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "no-such-type"}, "no-such-type"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_models_that_cannot_be_served_are_refused_before_loading(tmp_path: Path, config, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_model(_folder_of_config(tmp_path / "m", **config))


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
        (
            "gpt_oss",
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
            | {"head_dim": 8, "vocab_size": 64, "num_local_experts": 2, "intermediate_size": 32},
        ),
    ],
)
def test_models_with_an_attention_of_their_own_are_refused_by_the_probe(
    model_type: str, options: dict
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, pad_token_id=0, **options))
    with pytest.raises(ConfigError, match=r"not served|context length"):
        wrap_model(model, name=model_type)


def test_broken_folders_give_a_config_error(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot load m"):
        load_model(str(folder))
    weights.unlink()
    with pytest.raises(ConfigError, match="cannot load m"):
        load_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load m"):
        load_model(str(folder))
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a gguf file")
    with pytest.raises(ConfigError, match="cannot load bad"):
        load_model(str(bad))
    with pytest.raises(ConfigError, match="dtype"):
        load_model(str(folder), dtype="int3")  # type: ignore[arg-type]


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    make_tiny_model("llama").save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match="cannot load bare"):
        load_model(str(tmp_path / "bare"))
