"""What a checkpoint folder says of itself, and complaints that name what is wrong with it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from genserve.core.errors import ConfigError
from genserve.dllm.models.registry import load_diffusion_model
from genserve.dllm.models.tiny import TINY_DIFFUSION_MODELS, write_tiny
from tests.dllm.models.passes import Passes


def run_alone(loaded, ids):
    return Passes(loaded).run([ids], [(0, 0, len(ids))], [len(ids)])


def edit(folder, drop=(), **changes):
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    for key in drop:
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_facts_of_each_architecture(tmp_path):
    facts = {}
    for arch in TINY_DIFFUSION_MODELS:
        loaded = load_diffusion_model(str(write_tiny(arch, tmp_path / arch)))
        facts[arch] = (loaded.family, loaded.shift, loaded.default_block_length)
        assert (loaded.mask_token_id, loaded.eos_token_ids) == (300, (2,))
        assert (loaded.vocab_size, loaded.num_valid_tokens, loaded.max_context_tokens) == (320, 301, 512)
        assert len(loaded.model.layer_specs) == 2
        assert loaded.tokenizer.decode(loaded.tokenizer("the river").input_ids) == "the river"
    assert facts == {
        "llada": ("bidirectional", 0, 32),
        "dream": ("bidirectional", 1, 32),
        "llada2": ("block_causal", 0, 32),
        "sdar": ("block_causal", 0, 8),
    }


@pytest.mark.parametrize(
    ("arch", "changes", "message"),
    [
        ("llada", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*LLaDAModelLM, DreamModel"),
        ("llada", {"alibi": True}, "alibi True"),
        ("llada", {"layer_norm_type": "low_precision"}, "layer_norm_type 'low_precision'.*'rms'"),
        ("llada", {"activation_type": "gelu"}, "activation_type 'gelu'"),
        ("llada", {"block_type": "sequential"}, "block_type 'sequential'"),
        ("llada", {"n_kv_heads": 3}, "4 attention heads do not share 3"),
        ("llada", {"n_layers": "two"}, "n_layers must be a whole number"),
        ("llada", {"mlp_hidden_size": 80}, r"blocks\.0\.ff_proj\.weight.*\[96, 48\].*\[80, 48\]"),
        ("llada", {"n_layers": 1}, r"no place for.*blocks\.1"),
        ("llada", {"n_layers": 3}, r"no tensor 'model\.transformer\.blocks\.2"),
        ("llada", {"mask_token_id": 320}, "mask_token_id must be a token id below 320"),
        ("dream", {"rope_scaling": {"type": "yarn"}}, "rope_scaling of type 'yarn'"),
        ("dream", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("sdar", {"use_sliding_window": True}, "use_sliding_window True"),
        ("llada2", {"score_function": "softmax"}, "score_function 'softmax'"),
        ("llada2", {"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
    ],
)
def test_what_is_not_served_is_refused_by_name(arch, changes, message, tmp_path):
    edit(write_tiny(arch, tmp_path), **changes)
    with pytest.raises(ConfigError, match=message):
        load_diffusion_model(str(tmp_path))


def test_config_keys_that_change_the_layout(tmp_path):
    """Grouped heads, a tied embedding, biases: each loads, and each is really used."""
    for arch, overrides in [
        ("llada", {"n_kv_heads": 2, "weight_tying": True, "include_qkv_bias": True, "embedding_size": 384}),
        ("sdar", {"tie_word_embeddings": True, "attention_bias": True}),
    ]:
        folder = write_tiny(arch, tmp_path / arch, **overrides)
        loaded = load_diffusion_model(str(folder))
        assert loaded.model.layer_specs[0].num_kv_heads == 2
        assert loaded.vocab_size == overrides.get("embedding_size", 320)
        embedding = next(
            w for n, w in load_file(folder / "model.safetensors").items() if "wte" in n or "embed" in n
        )
        x = torch.randn(3, 48)
        torch.testing.assert_close(loaded.model.logits(x), x @ embedding.T, atol=1e-4, rtol=1e-4)


def test_shards_are_one_checkpoint(tmp_path):
    folder = write_tiny("dream", tmp_path)
    whole = load_diffusion_model(str(folder))
    tensors = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: w for n, w in tensors.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").unlink()
    ids = torch.arange(20)
    results = [run_alone(loaded, ids) for loaded in (whole, load_diffusion_model(str(folder)))]
    assert torch.equal(*results)


def test_llada2_keys_left_out_mean_what_its_configuration_class_says(tmp_path):
    defaults = {
        "n_group": 8,
        "num_experts": 16,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    }
    write_tiny("llada2", tmp_path, **defaults)
    whole = load_diffusion_model(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    for key in (*defaults, "use_qk_norm", "use_qkv_bias", "score_function"):
        if key != "num_experts":
            del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.arange(20)
    results = [run_alone(loaded, ids) for loaded in (whole, load_diffusion_model(str(tmp_path)))]
    assert torch.equal(*results)


def test_a_missing_mask_token_says_how_to_give_it(tmp_path):
    write_tiny("llada2", tmp_path)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    with pytest.raises(ConfigError, match="give mask_token_id"):
        load_diffusion_model(str(tmp_path))
    loaded = load_diffusion_model(str(tmp_path), mask_token_id=7)
    assert (loaded.mask_token_id, loaded.tokenizer, loaded.num_valid_tokens) == (7, None, 320)


def test_a_tokenizer_class_of_the_folder_s_own_code_is_read_as_the_bpe_it_is(tmp_path):
    write_tiny("dream", tmp_path)
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (tmp_path / "tokenizer.json").unlink()
    named = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "eos_token": "<|im_end|>",
        "mask_token": "<|mask|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "tokenization_dream.py").write_text("raise RuntimeError('code of a checkpoint was run')\n")
    tokenizer = load_diffusion_model(str(tmp_path)).tokenizer
    assert tokenizer.decode(tokenizer("the old bridge").input_ids) == "the old bridge"


def test_broken_files_are_named(tmp_path):
    write_tiny("llada", tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_diffusion_model(str(tmp_path))
    index = {"weight_map": {"model.transformer.wte.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names model-00002-of-00002\.safetensors, which is not there"):
        load_diffusion_model(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").unlink()
    weights.unlink()
    with pytest.raises(ConfigError, match="no weights"):
        load_diffusion_model(str(tmp_path))
    weights.write_bytes(whole)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"model.extra": torch.ones(1)}))
    with pytest.raises(ConfigError, match=r"no place for: 'model\.extra'"):
        load_diffusion_model(str(tmp_path))


def test_the_router_gives_ties_to_the_lowest_id():
    from genserve.core.models.kernels.threads import ThreadTeam
    from genserve.dllm.models.parts import Parts

    parts = Parts(torch.float32, torch.device("cpu"), ThreadTeam())
    router = parts.group_router(torch.zeros(8, 16), torch.zeros(8), 3, 4, 2, 2.0)
    x = torch.randn(2, 16)
    chosen, weights = router(x)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 2 / 3))
    torch_chosen, torch_weights = router._choose(torch.zeros(2, 8))
    assert torch.equal(torch_chosen, chosen)
    torch.testing.assert_close(torch_weights, weights)
