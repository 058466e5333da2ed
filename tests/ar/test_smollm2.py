"""The embedded model on the engine: greedy answers are those of `transformers`, token for token."""

from __future__ import annotations

import pytest
import torch

from genserve.ar.config import ArConfig
from genserve.ar.serve import assemble
from genserve.core.models.attention.backend import PAGED, register
from genserve.core.models.loading import load_model
from genserve.core.types import SamplingParams
from tests.ar.driver import Driver, submit

pytestmark = pytest.mark.smollm2

QUESTIONS = [
    "What is the capital of France?",
    "Hi!",
    "Write one sentence about the sea, in the voice of an old sailor who has not been home for many years.",
    "List three colours.",
]
NUM_NEW = 12


@torch.no_grad()
def expected(prompts):
    model = load_model("smollm2", dtype="float32").model
    answers = []
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = out.sequences[0, len(ids) :].tolist()
        logprobs = torch.cat(out.logits).log_softmax(-1)
        answers.append((tokens, logprobs[range(len(tokens)), tokens].tolist()))
    return answers


def test_greedy_answers_to_a_ragged_batch_equal_transformers():
    register()
    loaded = load_model("smollm2", dtype="float32", attn_implementation=PAGED)
    prompts = [
        loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    answers = expected(prompts)
    # Chunks of at most 32 tokens; the shared system prompt comes out of the cache for the later ones.
    config = ArConfig(model="smollm2", kv_pool="64MiB", max_running=4, budget_tokens=32, num_threads=1)
    driver = Driver(assemble(config, loaded))
    sampling = SamplingParams(temperature=0, max_tokens=NUM_NEW, logprobs=0)
    driver.run(*[submit(f"q{i}", ids, sampling) for i, ids in enumerate(prompts)])
    for i, (tokens, logprobs) in enumerate(answers):
        assert driver.tokens(f"q{i}") == tokens
        got = [entry.logprob for output in driver.outputs[f"q{i}"] for entry in output.logprobs]
        assert got == pytest.approx(logprobs, abs=1e-3)
    assert "Paris" in loaded.tokenizer.decode(answers[0][0])
    assert driver.engine.num_cached_tokens > 0


def test_every_layer_runs_on_the_kernels():
    from genserve.core.models.kernels.fuse import optimize_for_cpu
    from genserve.core.models.kernels.threads import ThreadTeam

    model = load_model("smollm2", dtype="float32").model
    counts = optimize_for_cpu(model, ThreadTeam())
    assert counts == {"norms": 2 * 30 + 1, "mlps": 30, "experts": 0, "routers": 0, "linears": 4 * 30 + 1}
