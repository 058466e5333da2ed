"""A sampled result depends on the request alone: not on company, chunks, cache, preemption or place."""

from __future__ import annotations

import asyncio
import random

import pytest

from genserve.ar.config import ArConfig
from genserve.ar.serve import start_engine
from genserve.core.runtime.choice import CompletionRequest, derived_seed
from genserve.core.runtime.completion import Completer
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import Grammar, SamplingParams
from tests.ar.driver import Driver, submit, tiny_parts

PAGE_BYTES = 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, k and v, heads, head size, fp32
NUM_NEW = 40
OPTIONS = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 7},
    "min_p": {"min_p": 0.05, "temperature": 1.4},
    "repetition": {"repetition_penalty": 1.7},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "bias": {"logit_bias": tuple((token_id, 3.0) for token_id in range(10, 60))},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
    "all at once": {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": ((40, -100.0), (41, 2.0)),
        "logprobs": 3,
    },
}


def requests():
    source = random.Random(3)
    for index, (name, options) in enumerate(OPTIONS.items()):
        prompt = [source.randrange(3, 300) for _ in range(5 + 6 * index)]
        sampling = {"seed": 100 + index, "max_tokens": NUM_NEW, "ignore_eos": True, **options}
        yield submit(name, prompt, SamplingParams(**sampling))


def companions(seed, count):
    source = random.Random(seed)
    for index in range(count):
        prompt = [source.randrange(3, 300) for _ in range(source.randrange(1, 60))]
        sampling = SamplingParams(
            temperature=source.choice([0, 1.0]),
            seed=source.randrange(1 << 60),
            max_tokens=source.randrange(1, 50),
        )
        yield submit(f"companion {index}", prompt, sampling)


def result(driver, name):
    return driver.tokens(name), [entry for output in driver.outputs[name] for entry in output.logprobs]


@pytest.fixture(scope="module")
def alone():
    """Each request by itself, in an engine that has seen nothing."""
    results = {}
    for request in requests():
        driver = Driver(tiny_parts())
        driver.run(request)
        results[request.request_id] = result(driver, request.request_id)
        assert len(results[request.request_id][0]) == NUM_NEW
    assert len({tuple(tokens) for tokens, _ in results.values()}) == len(results)
    return results


SETTINGS = {
    "together": {},
    "small chunks": {"budget_tokens": 16},
    "one at a time": {"max_running": 1, "budget_tokens": 5},
    "no cache": {"prefix_cache": False},
    "few pages": {"kv_pool": 9 * PAGE_BYTES},
    "few pages, no cache, small chunks": {
        "kv_pool": 9 * PAGE_BYTES,
        "prefix_cache": False,
        "budget_tokens": 17,
    },
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("settings", SETTINGS)
def test_company_chunks_cache_and_preemption_change_nothing(alone, settings, seed):
    driver = Driver(tiny_parts(**SETTINGS[settings]))
    everything = [*requests(), *companions(seed, 8)]
    random.Random(seed).shuffle(everything)
    driver.submit(*everything[:6])
    for late in everything[6:]:
        driver.step()
        driver.submit(late)
    driver.run()
    assert {name: result(driver, name) for name in alone} == alone
    if "few pages" in settings:
        assert driver.engine.num_preemptions > 3
    driver.run(*(request for request in requests()))  # now with whatever the cache holds
    twice = {name: (tokens * 2, logprobs * 2) for name, (tokens, logprobs) in alone.items()}
    assert {name: result(driver, name) for name in alone} == twice


def test_a_grammar_survives_preemption():
    grammar = Grammar("regex", "[a-z]{30}")
    sampling = [
        SamplingParams(seed=seed, max_tokens=60, grammar=grammar, frequency_penalty=0.5) for seed in range(6)
    ]
    results = []
    for settings in ({}, {"kv_pool": 5 * PAGE_BYTES}):
        driver = Driver(parts_with_tokenizer(**settings))
        driver.run(*[submit(f"g{i}", [20 + i] * 9, each) for i, each in enumerate(sampling)])
        results.append([driver.tokens(f"g{i}") for i in range(6)])
        assert (driver.engine.num_preemptions > 0) == bool(settings)
    assert results[0] == results[1]
    assert len(set(map(tuple, results[0]))) == 6


def parts_with_tokenizer(**config):
    from genserve.ar.serve import assemble
    from genserve.core.models.attention.backend import PAGED, register
    from genserve.core.models.loading import wrap_model
    from genserve.core.models.tiny import make_tiny_model, make_tiny_tokenizer

    register()
    model = make_tiny_model("llama")
    model.set_attn_implementation(PAGED)
    config = {"kv_pool": "2MiB", "num_threads": 1, "max_running": 16, "budget_tokens": 64, **config}
    loaded = wrap_model(model, make_tiny_tokenizer(), name="tiny")
    return assemble(ArConfig(model="tiny", **config), loaded)


@pytest.mark.parametrize("budget_tokens", [64, 16])
def test_a_grammar_that_cannot_be_built_fails_its_request_alone(budget_tokens):
    """Also when its prompt takes several chunks, so that nothing is sampled where it was admitted."""
    driver = Driver(tiny_parts(budget_tokens=budget_tokens))  # no tokenizer, so no grammar
    sampling = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    broken = SamplingParams(temperature=0, max_tokens=5, grammar=Grammar("regex", "a"))
    prompt = list(range(10, 60))
    driver.run(
        submit("good", [5, 6], sampling), submit("broken", prompt, broken), submit("too", prompt, sampling)
    )
    assert driver.outputs["broken"][-1].finish_reason == "error"
    assert "grammar" in driver.outputs["broken"][-1].error and driver.tokens("broken") == []
    assert len(driver.tokens("good")) == len(driver.tokens("too")) == 5


def test_a_request_that_the_sampler_cannot_take_fails_alone():
    driver = Driver(tiny_parts())
    no_seed = SamplingParams(temperature=1.0, max_tokens=5)
    fine = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    driver.run(submit("fine", [5, 6], fine), submit("no seed", [7, 8], no_seed))
    assert "seed" in driver.outputs["no seed"][-1].error
    assert len(driver.tokens("fine")) == 5


def completions(folder, requests_, **config):
    """Tokens by choice of each request, all at once, through the real loop."""

    async def main():
        options = {"num_threads": 1, "kv_pool": "2MiB", "max_running": 16, "budget_tokens": 64, **config}
        engine, hf_tokenizer = await start_engine(ArConfig(model=folder, **options))
        completer = Completer(engine, Tokenizer(hf_tokenizer))

        async def collect(request):
            tokens = {}
            async with completer.complete(request) as completion:
                async for delta in completion:
                    tokens.setdefault(delta.index, []).extend(delta.token_ids)
            return [tokens[index] for index in sorted(tokens)]

        try:
            async with asyncio.timeout(60):
                results = await asyncio.gather(*map(collect, requests_))
                stats = await engine.stats()
        finally:
            await engine.aclose()
        assert stats["num_sequences"] == stats["num_used_pages"] == stats["num_streams"] == 0
        return results

    return asyncio.run(main())


def choice_requests():
    for index, options in enumerate(OPTIONS.values()):
        sampling = SamplingParams(**{"seed": index, "max_tokens": 20, "ignore_eos": True, **options})
        yield CompletionRequest(f"c{index}", tuple(range(10, 30 + index)), sampling, n=3)


def test_choices_differ_and_equal_their_own_seeds_alone(tiny_folder):
    together = completions(tiny_folder, list(choice_requests()))
    single = [
        CompletionRequest(
            f"{request.request_id}/{i}",
            request.prompt_token_ids,
            SamplingParams(
                **{
                    **{name: getattr(request.sampling, name) for name in SamplingParams.__slots__},
                    "seed": derived_seed(request.sampling.seed, i),
                }
            ),
        )
        for request in choice_requests()
        for i in range(3)
    ]
    alone = completions(tiny_folder, single, max_running=2, prefix_cache=False)
    assert [tokens for choices in together for tokens in choices] == [tokens for (tokens,) in alone]
    for request, choices in zip(choice_requests(), together, strict=True):
        assert len(set(map(tuple, choices))) == (3 if request.sampling.temperature else 1)


@pytest.mark.ray
@pytest.mark.slow
def test_a_ray_actor_gives_the_same_tokens(tiny_folder, ray_session):
    here = completions(tiny_folder, list(choice_requests()))
    assert completions(tiny_folder, list(choice_requests()), executor="ray") == here
