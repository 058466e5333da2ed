"""Log-probabilities of the prompt: those of a plain forward pass, told once, whatever the chunks."""

import pytest
import torch

from genserve.core.models.tiny import make_tiny_model
from genserve.core.types import SamplingParams
from tests.ar.driver import Driver, submit, tiny_parts
from tests.ar.test_equals_transformers import page_size_bytes, prompts


@torch.no_grad()
def expected(model, prompt):
    logprobs = model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]


@pytest.mark.parametrize("max_tokens", [0, 1, 20])
@pytest.mark.parametrize(
    "settings", [{}, {"budget_tokens": 16}, {"kv_pool": 8 * page_size_bytes("llama", torch.float32)}], ids=str
)
def test_prompt_logprobs(settings, max_tokens):
    driver = Driver(tiny_parts("llama", model=make_tiny_model("llama", 1), **settings))
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, prompt_logprobs=2, logprobs=0, ignore_eos=True
    )
    driver.run(*[submit(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts())])
    if "kv_pool" in settings and max_tokens == 20:
        assert driver.engine.num_preemptions > 0
    model = make_tiny_model("llama", 1)
    for index, prompt in enumerate(prompts()):
        outputs = driver.outputs[f"r{index}"]
        told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        assert len(told) == 1
        assert told[0][0] is None
        assert [entry.token_id for entry in told[0][1:]] == prompt[1:]
        assert all(len(entry.top) == 2 for entry in told[0][1:])
        got = [entry.logprob for entry in told[0][1:]]
        assert got == pytest.approx(expected(model, prompt), abs=1e-4)
        assert len(driver.tokens(f"r{index}")) == max_tokens
