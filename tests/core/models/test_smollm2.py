"""The embedded model, as fetched: it answers, and it stops."""

from __future__ import annotations

import pytest
import torch

from genserve.core.models.grammar import GrammarCompiler
from genserve.core.models.loading import LoadedModel, load_model
from genserve.core.models.registry import list_models
from genserve.core.models.sampling import SamplerState, sample
from genserve.core.types import Grammar, SamplingParams

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2", dtype="bfloat16")


def chat_ids(loaded: LoadedModel, text: str) -> list[int]:
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return loaded.tokenizer.encode(prompt)


def test_facts(smollm2: LoadedModel) -> None:
    assert smollm2.dtype == torch.bfloat16
    assert (smollm2.num_layers, smollm2.num_kv_heads, smollm2.head_dim) == (30, 3, 64)
    assert smollm2.max_context_tokens == 8192
    assert smollm2.vocab_size == smollm2.num_valid_tokens == 49152
    assert smollm2.eos_token_ids == (smollm2.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert {model.name: model.cached for model in list_models()}["smollm2"]


def test_tokenizer_round_trips_and_splits_digits(smollm2: LoadedModel) -> None:
    for text in ("In 2024, 12345+67=?", "hello  world\n\n\tdef f(x):\n    return x", "héllo 日本語 🎉"):
        assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text
    assert len(smollm2.tokenizer.encode("12345")) == 5


def test_it_answers_and_stops_at_the_end_of_its_turn(smollm2: LoadedModel) -> None:
    prompt = chat_ids(smollm2, "What is the capital of France?")
    ids = smollm2.model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[
        0, len(prompt) :
    ].tolist()
    assert ids[-1] in smollm2.eos_token_ids
    assert "Paris" in smollm2.tokenizer.decode(ids)


def test_constrained_answer(smollm2: LoadedModel) -> None:
    grammar = Grammar("regex", r"The capital of France is (Paris|London|Rome)\.")
    matcher = GrammarCompiler(smollm2.tokenizer, smollm2.vocab_size, smollm2.eos_token_ids).matcher(grammar)
    state = SamplerState(SamplingParams(temperature=0, grammar=grammar), matcher=matcher)
    ids = chat_ids(smollm2, "What is the capital of France?")
    start = len(ids)
    while ids[-1] not in smollm2.eos_token_ids or len(ids) == start:
        logits = smollm2.model(torch.tensor([ids]), logits_to_keep=1).logits[:, -1].float()
        (token,) = sample(logits, [state])
        state.append(token.token_id)
        ids.append(token.token_id)
    assert smollm2.tokenizer.decode(ids[start:-1]) == "The capital of France is Paris."
