"""Tiny models: reproducible, decisive and varied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genserve.core.errors import ConfigError
from genserve.core.models.tiny import (
    TINY_ARCHITECTURES,
    make_tiny_folder,
    make_tiny_model,
    make_tiny_tokenizer,
)


@pytest.mark.parametrize("arch", TINY_ARCHITECTURES)
def test_greedy_output_varies_and_has_margins(arch: str) -> None:
    model = make_tiny_model(arch)
    prompt = torch.randint(3, 320, (1, 20), generator=torch.Generator().manual_seed(1))
    ids = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=2)
    output = ids[0, 20:].tolist()
    assert len(output) == 40 and len(set(output)) >= 8
    logits = model(ids).logits[0, 19:-1].float()
    top = logits.topk(2).values
    margins = top[:, 0] - top[:, 1]
    assert margins.median() > 0.1 and margins.min() > 1e-3
    # The output must depend on the whole prompt, or a wrong cache would go unnoticed.
    other = prompt.clone()
    other[0, 1 if arch not in ("mistral",) else 15] = 5
    assert (model(prompt).logits[0, -1] - model(other).logits[0, -1]).abs().max() > 1e-2


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_seed_decides_the_weights(arch: str) -> None:
    first, same, other = (dict(make_tiny_model(arch, seed).named_parameters()) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_unknown_architecture_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="llama"):
        make_tiny_model("transformer-xxl")


def test_tokenizer_round_trips_any_text_and_is_reproducible() -> None:
    tokenizer = make_tiny_tokenizer()
    assert make_tiny_tokenizer().get_vocab() == tokenizer.get_vocab()
    for text in ["the river", "Zürich 日本語 🎉\n\t  x", "the<|im_end|>"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the the the")) < len("the the the")


def test_folder_loads_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_tiny_folder(tmp_path / "tiny", "qwen3", seed=5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size > len(tokenizer)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == 2
    ids = torch.tensor([tokenizer.encode(text)])
    rebuilt = make_tiny_model("qwen3", 5, vocab_size=model.config.vocab_size)
    torch.testing.assert_close(model(ids).logits, rebuilt(ids).logits)
