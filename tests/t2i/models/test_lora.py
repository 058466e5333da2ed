"""Adapters: read from every format, put on exactly as the stock pipelines fuse them, and taken off without a trace."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from genserve.core.errors import ConfigError
from genserve.t2i.models.lora import LoadLora, LoRA, Patcher
from genserve.t2i.models.lora_file import Adapter, read_adapter
from tests.t2i.conftest import TinyFolders

SHIPPED = "pytorch_lora_weights.safetensors"


def modules_of(pipeline: Any) -> dict[str, Any]:
    return {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


def load(tiny: TinyFolders, family: str) -> dict[str, Any]:
    import diffusers

    return modules_of(diffusers.DiffusionPipeline.from_pretrained(tiny(family)))


def weights_of(components: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{path}": parameter.detach().clone()
        for name, part in components.items()
        for path, parameter in part.named_parameters()
    }


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def fused_by_diffusers(
    tiny: TinyFolders, family: str, adapters: list[tuple[str, float]]
) -> dict[str, torch.Tensor]:
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(tiny(family))
    names = [f"a{index}" for index in range(len(adapters))]
    for name, (folder, _) in zip(names, adapters, strict=True):
        pipeline.load_lora_weights(folder, adapter_name=name)
    pipeline.set_adapters(names, [scale for _, scale in adapters])
    pipeline.fuse_lora(components=list(pipeline._lora_loadable_modules), adapter_names=names)
    state = {
        f"{name}.{path}": parameter
        for name, part in modules_of(pipeline).items()
        for path, parameter in part.named_parameters()
    }
    return {name.replace(".base_layer.", "."): value for name, value in state.items() if ".lora_" not in name}


@pytest.mark.parametrize("family", ["sd15", "sdxl", "sd3", "flux"])
def test_patched_weights_are_bit_for_bit_what_diffusers_fuses(tiny: TinyFolders, family: str) -> None:
    both = family in ("sd15", "sdxl")
    one = tiny.lora(family, seed=1, rank=4, alpha=3, text_encoders=both)
    other = tiny.lora(family, seed=2, rank=8, text_encoders=both)
    components = load(tiny, family)
    before = weights_of(components)
    patcher = Patcher()

    patcher.apply(components, [(read_adapter(one, identity="one"), 0.8)])
    expected = fused_by_diffusers(tiny, family, [(one, 0.8)])
    assert equal(weights_of(components), expected)
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], expected[name])}
    assert len(changed) == {"sd15": 2, "sdxl": 3}.get(family, 1)

    patcher.apply(components, [(read_adapter(one), 0.5), (read_adapter(other), -1.25)])
    assert equal(weights_of(components), fused_by_diffusers(tiny, family, [(one, 0.5), (other, -1.25)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_base_a_base_b_both_base_is_bit_equal(tiny: TinyFolders, dtype: torch.dtype) -> None:
    components = {name: part.to(dtype) for name, part in load(tiny, "sd15").items()}
    a, b = (read_adapter(tiny.lora("sd15", seed=seed, text_encoders=True)) for seed in (1, 2))
    base = weights_of(components)
    patcher = Patcher()
    seen: dict[str, dict[str, torch.Tensor]] = {}
    for name, wanted in {
        "a": [(a, 1.0)],
        "none": [],
        "b": [(b, 1.0)],
        "a again": [(a, 1.0)],
        "both": [(a, 1.0), (b, 0.5)],
        "end": [],
    }.items():
        patcher.apply(components, wanted)
        seen[name] = weights_of(components)
    assert equal(seen["none"], base)
    assert equal(seen["end"], base)
    assert equal(seen["a"], seen["a again"])
    assert not equal(seen["a"], seen["b"])
    assert not equal(seen["a"], seen["both"])
    target = "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    parts = dict(zip(a.names, a.weights, strict=True))
    exact = base[f"{target}.weight"].float() + parts[f"{target}.up"] @ parts[f"{target}.down"]
    assert torch.equal(seen["a"][f"{target}.weight"], exact.to(dtype))


def test_the_key_says_what_is_on(tiny: TinyFolders) -> None:
    components = load(tiny, "sd3")
    adapter = read_adapter(tiny.lora("sd3"), identity="style")
    patcher = Patcher()
    assert patcher.key == ()
    patcher.apply(components, [(adapter, 0.5)])
    assert patcher.key == (("style", 0.5),)
    patcher.apply(components, [(adapter, 0.0)])
    assert patcher.key == ()
    patcher.restore(components)
    assert patcher.key == ()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def test_200_swaps_leave_memory_flat_and_weights_bit_equal(tiny: TinyFolders) -> None:
    components = load(tiny, "sd15")
    adapters = [read_adapter(tiny.lora("sd15", seed=seed, text_encoders=True)) for seed in range(1, 4)]
    base = weights_of(components)
    addresses = {name: p.data_ptr() for name, p in components["unet"].named_parameters()}
    patcher = Patcher()

    def swap(count: int) -> None:
        for index in range(count):
            wanted = [(adapters[index % 3], 1.0), (adapters[(index + 1) % 3], 0.1 * (index % 7))]
            patcher.apply(components, wanted[: index % 3])
        patcher.apply(components, [(adapters[0], 1.0)])

    swap(20)
    first, num_bytes, tensors, resident = (
        weights_of(components),
        patcher.num_bytes,
        num_tensors(),
        resident_bytes(),
    )
    swap(200)
    assert patcher.num_bytes == num_bytes
    assert num_tensors() <= tensors
    assert resident_bytes() - resident < 2**25  # a copy of the weights in each swap would be four times that
    assert equal(weights_of(components), first)
    patcher.restore(components)
    assert equal(weights_of(components), base)
    assert {name: p.data_ptr() for name, p in components["unet"].named_parameters()} == addresses


def test_only_targeted_weights_are_backed_up(tiny: TinyFolders) -> None:
    components = load(tiny, "sd3")
    adapter = read_adapter(tiny.lora("sd3"))
    targets = {name.rpartition(".")[0] for name in adapter.names}
    patcher = Patcher(backup_device="cpu")
    patcher.apply(components, [(adapter, 1.0)])
    state = weights_of(components)
    assert patcher.num_bytes == sum(4 * state[f"{target}.weight"].numel() for target in targets)


def test_an_adapter_of_another_model_is_refused_before_anything_changes(tiny: TinyFolders) -> None:
    components = load(tiny, "sd15")
    good = read_adapter(tiny.lora("sd15", seed=1), identity="good")
    patcher = Patcher()
    patcher.apply(components, [(good, 1.0)])
    before = weights_of(components)

    target = good.names[0].rpartition(".")[0]
    lost = tuple(name.replace(target, "unet.down_blocks.7.conv") for name in good.names)
    with pytest.raises(
        ConfigError, match=r"adapter bad is for another model: unet.down_blocks.7.conv \(no such module\)"
    ):
        patcher.apply(components, [(good, 0.5), (Adapter("bad", lost, good.weights), 1.0)])

    with pytest.raises(ConfigError, match=r"of another kind or shape.* and \d+ more"):
        patcher.apply(components, [(read_adapter(tiny.lora("sdxl")), 1.0)])
    norm = tuple(name.replace(target, "unet.conv_norm_out") for name in good.names)
    with pytest.raises(ConfigError, match=r"unet.conv_norm_out \(of another kind or shape\)"):
        patcher.apply(components, [(Adapter("norm", norm, good.weights), 1.0)])
    assert patcher.key == (("good", 1.0),)
    assert equal(weights_of(components), before)


def test_weights_for_parts_that_are_not_here_do_not_matter(tiny: TinyFolders) -> None:
    components = load(tiny, "sd15")
    adapter = read_adapter(tiny.lora("sd15", text_encoders=True))
    encoder = {"text_encoder": components["text_encoder"], "tokenizer": object()}
    unet = weights_of({"unet": components["unet"]})
    patcher = Patcher()
    patcher.apply(encoder, [(adapter, 1.0)])
    assert patcher.num_bytes > 0
    assert equal(weights_of({"unet": components["unet"]}), unet)


def test_the_node_gives_named_tensors_that_alias_nothing(tiny: TinyFolders) -> None:
    folder = tiny.lora("sd3", rank=4, alpha=2)
    node = LoadLora(model_path=folder)
    assert [port.name for port in node.output_ports] == ["weights", "names"]
    outputs = node.execute(node.load(folder, "cpu"))
    again = node.execute({})
    assert len(outputs["weights"]) == len(outputs["names"]) > 0
    assert json.loads(json.dumps(outputs["names"])) == outputs["names"]
    named = dict(zip(outputs["names"], outputs["weights"], strict=True))
    target = "transformer.transformer_blocks.0.attn.to_q"
    file = load_file(f"{folder}/{SHIPPED}")
    assert torch.equal(named[f"{target}.down"], file[f"{target}.lora_A.weight"])
    assert torch.equal(named[f"{target}.up"], file[f"{target}.lora_B.weight"])
    assert float(named[f"{target}.alpha"]) == 2
    named[f"{target}.down"].zero_()
    assert again["weights"][outputs["names"].index(f"{target}.down")].any()
    assert LoRA(model_path=folder).scale == 1.0


def spell_as_kohya(state: Mapping[str, torch.Tensor], alpha: float) -> Iterator[tuple[str, torch.Tensor]]:
    prefixes = {"unet": "lora_unet_", "text_encoder": "lora_te_text_model_"}
    for key, tensor in state.items():
        module, _, rest = key.partition(".lora_")
        component, _, path = module.partition(".")
        name = prefixes[component] + path.replace(".", "_")
        yield f"{name}.lora_{ {'A.weight': 'down', 'B.weight': 'up'}[rest] }.weight", tensor
        yield f"{name}.alpha", torch.tensor(alpha)


def spell_as_attention_processors(
    state: Mapping[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    for key, tensor in state.items():
        module, _, rest = key.partition(".lora_")
        part = {"A.weight": "down", "B.weight": "up"}[rest]
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            if module.endswith(name) and module.startswith("unet."):
                stem = module.removesuffix(f".{name}")
                yield f"{stem}.processor.{name.removesuffix('.0')}_lora.{part}.weight", tensor


def test_files_of_other_trainers_say_the_same(tiny: TinyFolders, tmp_path: Path) -> None:
    folder = tiny.lora("sd15", seed=1, rank=4, alpha=3, text_encoders=True)
    expected = read_adapter(folder)
    state = load_file(f"{folder}/{SHIPPED}")
    save_file(dict(spell_as_kohya(state, 3.0)), tmp_path / "kohya.safetensors")
    kohya = read_adapter(str(tmp_path / "kohya.safetensors"))
    components = load(tiny, "sd15")
    patcher = Patcher()
    patcher.apply(components, [(expected, 1.0)])
    ours = weights_of(components)
    patcher.restore(components)
    assert not equal(weights_of(components), ours)
    patcher.apply(components, [(kohya, 1.0)])
    assert equal(weights_of(components), ours)

    save_file(dict(spell_as_attention_processors(state)), tmp_path / "old.safetensors")
    old = read_adapter(str(tmp_path / "old.safetensors"))
    assert 0 < len(old.names) < len(expected.names)
    assert set(old.names) <= set(expected.names)
    assert all(float(w) == 4 for n, w in zip(old.names, old.weights, strict=True) if n.endswith("alpha"))


def test_alpha_comes_from_the_configuration_of_the_file(tiny: TinyFolders, tmp_path: Path) -> None:
    folder = tiny.lora("sd3", rank=4)
    state = load_file(f"{folder}/{SHIPPED}")
    config = {
        "transformer.lora_alpha": 8,
        "transformer.alpha_pattern": {"transformer_blocks.0.attn.to_q": 2},
        "transformer.use_rslora": True,
    }
    save_file(state, tmp_path / SHIPPED, {"lora_adapter_metadata": json.dumps(config)})
    adapter = read_adapter(str(tmp_path))
    named = dict(zip(adapter.names, adapter.weights, strict=True))
    assert float(named["transformer.transformer_blocks.0.attn.to_q.alpha"]) == 2 * 2
    assert float(named["transformer.transformer_blocks.1.attn.to_q.alpha"]) == 8 * 2

    save_file(state, tmp_path / SHIPPED)
    assert float(read_adapter(str(tmp_path)).weights[2]) == 4


def test_what_is_no_plain_adapter_is_refused(tiny: TinyFolders, tmp_path: Path) -> None:
    state = load_file(f"{tiny.lora('sd3')}/{SHIPPED}")
    key = next(iter(state))

    def refused(message: str, changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, tmp_path / SHIPPED)
        with pytest.raises(ConfigError, match=message):
            read_adapter(str(tmp_path))

    refused("DoRA", {**state, key.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(1)})
    refused("only one of its two matrices", {key: state[key]})
    refused("of no known format: down.lora_A.weight", {**state, "down.lora_A.weight": torch.ones(1)})
    refused("is no weight of a low-rank adapter", {**state, "transformer.norm.weight": torch.ones(1)})
    (tmp_path / SHIPPED).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="is no safetensors file"):
        read_adapter(str(tmp_path))
    (tmp_path / SHIPPED).unlink()
    with pytest.raises(ConfigError, match="no adapter there"):
        read_adapter(str(tmp_path))
