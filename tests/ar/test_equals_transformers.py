"""Greedy tokens and logits equal `transformers`, for every architecture, however the work is cut."""

import pytest
import torch

from genserve.core.models.kernels import threads
from genserve.core.models.tiny import make_tiny_model
from genserve.core.types import SamplingParams
from tests.ar.driver import Driver, submit, tiny_parts

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "opt", "gpt2", "mixtral"]
LENGTHS = [1, 3, 16, 17, 40, 33, 64, 5]
NUM_NEW = 24

# Chunk sizes (through the token budget), pages, and batch sizes that force every path.
SETTINGS = {
    "roomy": {},
    "small chunks": {"budget_tokens": 16},
    "one at a time": {"max_running": 1, "budget_tokens": 7},
    "few pages": {"num_pages": 7},
    "no prefix cache": {"prefix_cache": False, "budget_tokens": 21},
}


def prompts(vocab_size=300):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


@torch.no_grad()
def greedy(model, prompt, num_new):
    """Plain forwards of the whole text: tokens, and the logits each was taken from."""
    ids, logits = list(prompt), []
    for _ in range(num_new):
        last = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        logits.append(last)
        ids.append(int(last.argmax()))
    return ids[len(prompt) :], torch.stack(logits)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request):
    model = make_tiny_model(request.param, 1)
    expected = [greedy(model, prompt, NUM_NEW) for prompt in prompts()]
    return request.param, expected


def run(arch, settings, dtype=torch.float32):
    settings = dict(settings)
    num_pages = settings.pop("num_pages", None)
    model = make_tiny_model(arch, 1).to(dtype)
    if num_pages is not None:
        settings["kv_pool"] = num_pages * page_size_bytes(arch, dtype)
    driver = Driver(tiny_parts(arch, model=model, **settings))
    if num_pages is not None:
        assert driver.engine.pages.num_pages == num_pages
    sampling = SamplingParams(temperature=0, max_tokens=NUM_NEW, logprobs=0, ignore_eos=True)
    driver.run(*[submit(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts())])
    return driver


def page_size_bytes(arch, dtype):
    from genserve.core.models.attention.cpu import CpuAttention
    from genserve.core.models.loading import wrap_model

    return CpuAttention.page_bytes(wrap_model(make_tiny_model(arch, 1).to(dtype)).layer_specs, dtype)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_greedy_tokens_and_logprobs(case, settings):
    arch, expected = case
    driver = run(arch, settings)
    for index, (tokens, logits) in enumerate(expected):
        assert driver.tokens(f"r{index}") == tokens
        logprobs = torch.tensor(
            [entry.logprob for output in driver.outputs[f"r{index}"] for entry in output.logprobs]
        )
        reference = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, reference, atol=1e-4, rtol=1e-4)
    if settings.get("num_pages"):
        assert driver.engine.num_preemptions > 0
    if settings.get("budget_tokens", 64) < 20:
        assert any(not row.sample for step in driver.steps for row in step.rows)


def test_prefix_cache_hit_partial_hit_and_eviction_equal_cold():
    model = make_tiny_model("llama", 1)
    base = prompts()[6]
    texts = {"cold": base, "hit": base, "partial": [*base[:40], 9, 9, 9], "longer": [*base, 7, 8]}
    driver = Driver(tiny_parts("llama", model=make_tiny_model("llama", 1)))
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for name, prompt in texts.items():
        driver.run(submit(name, prompt, sampling))
        assert driver.tokens(name) == greedy(model, prompt, 8)[0]
    cached = {name: driver.outputs[name][0].num_cached_tokens for name in texts}
    assert cached == {"cold": 0, "hit": 48, "partial": 32, "longer": 64}
    small = Driver(
        tiny_parts(
            "llama", model=make_tiny_model("llama", 1), kv_pool=6 * page_size_bytes("llama", torch.float32)
        )
    )
    for turn in range(3):
        for index, prompt in enumerate(prompts()):
            small.run(submit(f"{turn}/{index}", prompt, sampling))
            assert small.tokens(f"{turn}/{index}") == greedy(model, prompt, 8)[0]
    assert small.engine.pages.num_evictions > 0


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "mixtral"])
def test_bf16_agrees_with_transformers_until_rounding_decides(arch):
    driver = run(arch, {}, torch.bfloat16)
    model = make_tiny_model(arch, 1).to(torch.bfloat16)
    for index, prompt in enumerate(prompts()):
        tokens = driver.tokens(f"r{index}")
        expected, logits = greedy(model, prompt, NUM_NEW)
        for position, (got, wanted) in enumerate(zip(tokens, expected, strict=True)):
            if got != wanted:
                gap = logits[position, wanted] - logits[position, got]
                assert gap <= 0.05 * logits[position].abs().max()
                break


def test_bf16_mixtral_agrees_on_most_first_tokens():
    """Rounding may send a token to another expert, so that nothing stronger holds."""
    driver = run("mixtral", {}, torch.bfloat16)
    model = make_tiny_model("mixtral", 1).to(torch.bfloat16)
    firsts = [greedy(model, prompt, 1)[0][0] for prompt in prompts()]
    same = sum(driver.tokens(f"r{i}")[0] == first for i, first in enumerate(firsts))
    assert same >= len(firsts) - 2


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_do_not_depend_on_chunks_company_cache_threads_or_preemption_bit_for_bit(arch, monkeypatch):
    """On fp32 CPU the log-probabilities are the same floats, not just close ones."""

    def logprobs(settings):
        driver = run(arch, settings)
        return [output.logprobs for i in range(len(LENGTHS)) for output in driver.outputs[f"r{i}"]]

    seen = [logprobs(settings) for settings in SETTINGS.values()]
    # Tiny layers are not worth a second thread: make them, and see that they were shared.
    monkeypatch.setattr(threads, "_MIN_WORK_PER_THREAD", 1)
    shared = []
    whole = threads.ThreadTeam.run
    monkeypatch.setattr(
        threads.ThreadTeam,
        "run",
        lambda team, part, cuts: (shared.append(len(cuts) > 2), whole(team, part, cuts))[1],
    )
    seen.append(logprobs({"num_threads": 2}))
    assert any(shared)
    assert all(other == seen[0] for other in seen[1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("arch", ["llama", "gemma2", "opt"])
def test_a_gpu_gives_the_tokens_of_transformers(arch):
    model = make_tiny_model(arch, 1).to("cuda")
    driver = Driver(tiny_parts(arch, model=model))
    sampling = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    driver.run(*[submit(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts())])
    reference = make_tiny_model(arch, 1)
    for index, prompt in enumerate(prompts()):
        assert driver.tokens(f"r{index}") == greedy(reference, prompt, NUM_NEW)[0]
