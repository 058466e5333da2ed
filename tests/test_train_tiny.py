"""The example that trains the tiny models: it resumes exactly, learns from what it should, and its results load."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import genserve

ROOT = Path(__file__).parent.parent
BUILTIN = Path(genserve.__file__).parent / "builtin"
FOLDERS = ("tiny-llada", "tiny-llama")


@pytest.fixture(scope="module", autouse=True)
def examples_importable():
    sys.path.insert(0, str(ROOT / "examples"))
    yield
    sys.path.remove(str(ROOT / "examples"))


def smoke(out: Path, stop_after: int | None = None) -> None:
    import train_tiny_dllm as script

    script.main(
        which=script.Which.both,
        out=out,
        steps=4,
        threads=torch.get_num_threads(),
        seed=3,
        items=1,
        smoke=True,
        stop_after=stop_after,
    )


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path):
    smoke(tmp_path / "whole")
    smoke(tmp_path / "halves", stop_after=2)  # within the causal model
    smoke(tmp_path / "halves", stop_after=4)  # within the other one
    smoke(tmp_path / "halves")
    for name in FOLDERS:
        whole = load_file(tmp_path / "whole" / name / "model.safetensors")
        halves = load_file(tmp_path / "halves" / name / "model.safetensors")
        assert whole.keys() == halves.keys()
        assert all(torch.equal(whole[key], halves[key]) for key in whole)
        assert json.loads((tmp_path / "halves" / name / "scores.json").read_text())["steps"] == 4


def test_other_settings_do_not_resume(tmp_path):
    smoke(tmp_path, stop_after=1)
    import train_tiny_dllm as script

    with pytest.raises(SystemExit, match="other settings"):
        script.main(
            which=script.Which.dllm,
            out=tmp_path,
            steps=5,
            threads=1,
            seed=3,
            items=1,
            smoke=True,
            stop_after=None,
        )


def test_training_never_meets_a_held_out_item():
    import tiny_corpus

    held_out = tiny_corpus.held_out(400, seed=0)
    assert len({(item.task, item.question) for item in held_out}) == 400
    assert held_out == tiny_corpus.held_out(400, seed=0)
    made = {"spelling", "sort_numbers", "sort_words", "story"}
    unseen_answers = {item.answer for item in held_out if item.task in made}
    unseen_questions = {item.question.lower() for item in held_out}
    rng = random.Random(5)
    for _ in range(20_000):
        item = tiny_corpus.training_item(rng)
        assert item.answer not in unseen_answers
        assert item.question.lower() not in unseen_questions


def test_masked_batches_hide_only_answers_and_judge_only_masked_positions():
    import tiny_corpus
    from tiny_batches import Encoder, masked_batch
    from tiny_folders import make_tokenizer

    encoder = Encoder(make_tokenizer(tiny_corpus.tokenizer_texts(num=1000), 288))
    for step in range(8):
        batch = masked_batch(encoder, seed=0, step=step, num_rows=8)
        masked = batch.ids == encoder.mask
        assert masked.any()
        assert bool((batch.weights[~masked] == 0).all())
        assert not (batch.targets == encoder.mask).any()
        kept = ~masked & (torch.arange(batch.ids.shape[1]) < batch.lengths[:, None])
        in_canvas = kept & (batch.targets != encoder.eos)
        assert torch.equal(batch.ids[in_canvas], batch.targets[in_canvas])


@pytest.fixture(scope="module")
def tokenizers():
    from transformers import AutoTokenizer

    return {name: AutoTokenizer.from_pretrained(BUILTIN / name) for name in FOLDERS}


@pytest.mark.parametrize("name", FOLDERS)
def test_builtin_tokenizer_writes_chats_as_training_did(name, tokenizers):
    from tiny_batches import Encoder

    tokenizer = tokenizers[name]
    turns = (
        ("system", "Be brief."),
        ("user", "Hi!"),
        ("assistant", "Hello, naïve 世界!"),
        ("user", "Spell tree."),
    )
    messages = [{"role": role, "content": text} for role, text in turns]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == Encoder(tokenizer).chat_prompt(*turns)
    assert tokenizer.decode(tokenizer.encode("Hello, naïve 世界!")) == "Hello, naïve 世界!"
    assert tokenizer.mask_token_id not in ids
    assert tokenizer.eos_token_id == tokenizer.pad_token_id
    config = json.loads((BUILTIN / name / "config.json").read_text())
    assert len(tokenizer) <= config["vocab_size"]


@pytest.mark.parametrize("name", FOLDERS)
def test_builtin_folder_has_its_card_and_licence(name):
    card = (BUILTIN / name / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "toy" in card


def test_builtin_models_are_small():
    files = [path for path in BUILTIN.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert max(path.stat().st_size for path in files) < 10_000_000


def test_builtin_llama_answers_through_transformers(tokenizers):
    from transformers import AutoModelForCausalLM

    tokenizer = tokenizers["tiny-llama"]
    model = AutoModelForCausalLM.from_pretrained(BUILTIN / "tiny-llama", dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris, a city in Europe."


def test_builtin_llada_unmasks_to_right_answers(tokenizers):
    from tiny_batches import Encoder
    from tiny_folders import load_llada
    from tiny_net import decode_by_unmasking

    tokenizer, net = tokenizers["tiny-llada"], load_llada(BUILTIN / "tiny-llada")
    encoder = Encoder(tokenizer)
    held_out = json.loads((BUILTIN / "tiny-llada" / "held_out.json").read_text())
    assert len(held_out) == 120
    right = tokens = forwards = 0
    for item in held_out[:36]:
        prompt = encoder.chat_prompt(("user", item["question"]))
        done = decode_by_unmasking(net, prompt, 96, encoder.mask, encoder.eos, dual_cache=True)
        right += tokenizer.decode(done.ids) == item["answer"]
        tokens, forwards = tokens + len(done.ids), forwards + done.num_forwards
    assert right >= 0.85 * 36
    assert tokens >= 4 * forwards
