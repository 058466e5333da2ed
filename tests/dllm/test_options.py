"""Every option of a diffusion request is honoured or refused by its name, before any work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genserve.core.errors import InvalidRequest
from genserve.core.runtime.choice import CompletionRequest
from genserve.core.runtime.completion import Completer
from genserve.core.testing import Script, ScriptedEngine, byte_level_tokenizer
from genserve.core.text.tokenizer import Tokenizer
from genserve.core.types import EngineInfo, Grammar, SamplingParams
from genserve.dllm.options import UNSUPPORTED, DiffusionCheck, DiffusionOptions, ServedFacts
from genserve.dllm.request import DiffusionParams, Unmasking

TOKENIZER = Tokenizer(byte_level_tokenizer())
MASK = 7
PROMPT = tuple(range(20, 30))
INFO = EngineInfo(
    model="tiny",
    family="dllm",
    vocab_size=TOKENIZER.vocab_size,
    max_context_tokens=128,
    kv_pool_tokens=96,
    max_queued_requests=8,
    default_max_tokens=32,
    default_temperature=0.0,
    unsupported=UNSUPPORTED,
)


def completer(family="bidirectional", shift=0, **info) -> Completer:
    cache = {"bidirectional": "dual", "block_causal": "block", "canvas": "canvas"}[family]
    rule = Unmasking("entropy_bound") if family == "canvas" else Unmasking()
    facts = ServedFacts(family, shift, MASK, DiffusionParams(cache=cache, unmasking=rule, block_length=16))
    engine = ScriptedEngine(lambda request: Script([]), replace(INFO, **info))
    return Completer(engine, TOKENIZER, check=DiffusionCheck(facts, TOKENIZER))


def prepared(options=None, family="bidirectional", shift=0, prompt=PROMPT, **fields) -> CompletionRequest:
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingParams.__slots__}
    request = CompletionRequest("r", prompt, SamplingParams(**sampling), options=options, **fields)
    return completer(family, shift).prepare(request)


def params(options=None, **more) -> DiffusionParams:
    return prepared(options, **more).options


def test_defaults_are_those_of_the_served_model():
    assert params() == DiffusionParams(cache="dual", block_length=16)
    assert params(family="block_causal").cache == "block"
    assert params(include_unmasking=True).include_unmasking
    assert prepared().sampling.max_tokens == 32


@pytest.mark.parametrize(
    ("options", "unmasking"),
    [
        ({"threshold": 0.5}, Unmasking(threshold=0.5)),
        ({"factor": 2.0}, Unmasking("factor", factor=2.0)),
        ({"entropy_bound": 0.3}, Unmasking("entropy_bound", entropy_bound=0.3)),
        ({"steps": 8}, Unmasking("quota", steps=8)),
        ({"steps": 8, "schedule": "linear"}, Unmasking("quota", steps=8, schedule="linear")),
        ({"steps": 8, "threshold": 0.5}, Unmasking(threshold=0.5, steps=8)),
        ({"unmasking": "margin"}, Unmasking("margin")),
        ({"unmasking": "random", "steps": 4}, Unmasking("random", steps=4)),
        (
            {"unmasking": {"kind": "random", "independent": True}},
            Unmasking("random", independent=True, schedule="linear"),
        ),
        ({"unmasking": {"threshold": 0.25}}, Unmasking(threshold=0.25)),
        (
            {"unmasking": {"kind": "factor", "factor_rule": "fast_dllm"}},
            Unmasking("factor", factor_rule="fast_dllm"),
        ),
    ],
)
def test_the_rule_is_named_or_follows_from_its_parameter(options, unmasking):
    assert params(options).unmasking == unmasking


def test_ready_params_and_options_are_the_same():
    ready = DiffusionParams(cache="prefix", block_length=8)
    assert params({"cache": "prefix", "block_length": 8}) == params(ready) == ready
    assert params(DiffusionOptions(cache="prefix", block_length=8)) == ready


def test_pinned_and_suffix_become_token_ids():
    text = TOKENIZER.encode("fox jumps")
    found = params({"pinned": [{"position": 3, "text": "fox jumps"}, {"position": 0, "token_ids": [5]}]})
    assert found.pinned == (*((3 + i, token_id) for i, token_id in enumerate(text)), (0, 5))
    assert params({"suffix": "fox jumps"}).suffix_token_ids == tuple(text)
    assert params({"suffix": [5, 6]}).suffix_token_ids == (5, 6)


def test_guidance_takes_the_cache_it_needs():
    assert params({"cfg_scale": 1.5}).cache == "none"


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"cache": "lru"}, "cache", "no 'lru' for a bidirectional model; there is: dkv, dual, none, prefix"),
        ({"cache": "block"}, "cache", "for a bidirectional model"),
        ({"unmasking": "guess"}, "unmasking", "there are: threshold, factor, quota, random, sequential"),
        ({"unmasking": "quota", "threshold": 0.5}, "threshold", "is not read by unmasking 'quota'"),
        ({"unmasking": {"kind": "quota", "factor": 1.0}}, "unmasking.factor", "is not read by unmasking 'quota'"),
        ({"unmasking": {"threshold": 0.5}, "threshold": 0.6}, "threshold", "contradicts unmasking.threshold"),
        ({"threshold": 0.0}, "threshold", "must be in (0, 1]"),
        ({"threshold": 1.5}, "threshold", "must be in (0, 1]"),
        ({"threshold": float("nan")}, "threshold", "finite"),
        ({"factor": 0.0}, "factor", "must be in (0"),
        ({"steps": 0}, "steps", "must be in [1"),
        ({"block_length": 0}, "block_length", "must be in [1, 128], not 0"),
        ({"block_length": 129}, "block_length", "must be in [1, 128], not 129"),
        ({"block_length": "8"}, "block_length", "integer"),
        ({"cache": "dkv", "refresh_interval": 0}, "refresh_interval", "must be in [1"),
        ({"max_block_steps": 0}, "max_block_steps", "must be in [1"),
        ({"editing_threshold": 0.5}, "editing_threshold", "is for block-causal models"),
        ({"cfg_scale": -1.0}, "cfg_scale", "must be in [0"),
        ({"cfg_scale": 1.0, "cache": "dual"}, "cfg_scale", "needs a bidirectional model and cache 'none'"),
        ({"first_position": "left_neighbour"}, "first_position", "shifted logits"),
        ({"pinned": [{"position": 32, "token_ids": [5]}]}, "pinned", "outside of the answer of 32 tokens"),
        ({"pinned": [{"position": -1, "token_ids": [5]}]}, "pinned", "must be in [0"),
        ({"pinned": [{"position": 0, "token_ids": [MASK]}]}, "pinned", "is the mask"),
        ({"pinned": [{"position": 0, "token_ids": [9999]}]}, "pinned", "must be in [0, "),
        ({"pinned": [{"position": 0}]}, "pinned[0]", "either text or token_ids"),
        ({"pinned": [{"position": 0, "token_ids": []}]}, "pinned[0]", "pins no token"),
        (
            {"pinned": [{"position": 0, "token_ids": [5, 6]}, {"position": 1, "token_ids": [5]}]},
            "pinned",
            "position 1 is pinned twice",
        ),
        ({"suffix": [9999]}, "suffix", "must be in [0, "),
        ({"suffix": 3}, "suffix", "string or a list of token ids"),
        ({"suffix": "\ud800"}, "suffix", ""),
        ({"unmasking": {"kind": "quota", "schedule": "linear", "eps": 1.0}}, "eps", "must be below 1, not 1.0"),
        ({"unmasking": {"kind": "quota", "eps": 0.5}}, "unmasking.eps", "is read by schedule 'linear' alone"),
        (
            {"unmasking": {"kind": "random", "independent": True, "schedule": "even"}},
            "unmasking.schedule",
            "independent draws have the schedule 'linear'",
        ),
        ({"unmasking": {"kind": "random", "independent": True, "steps": 1025}}, "steps", "[1, 1024], not 1025"),
        ({"unmasking": {"steps_bound": "least"}}, "unmasking.steps_bound", "needs steps"),
        ({"refresh_interval": 4}, "refresh_interval", "is for cache 'dkv', not for 'dual'"),
        ({"chache": "dual"}, "chache", "no such option; there is: cache, unmasking"),
        ({"unmasking": {"kid": "quota"}}, "unmasking.kid", "no such option"),
        (3, "options", "must be a mapping, not int"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_name(options, field, message):
    with pytest.raises(InvalidRequest) as refused:
        prepared(options)
    assert refused.value.field == field and message in refused.value.message


@pytest.mark.parametrize(
    ("family", "options", "field"),
    [
        ("block_causal", {"cache": "dual"}, "cache"),
        ("block_causal", {"cache": "dkv"}, "cache"),
        ("block_causal", {"suffix": "fox"}, "suffix"),
        ("block_causal", {"cfg_scale": 1.0}, "cfg_scale"),
        ("canvas", {"cache": "none"}, "cache"),
        ("canvas", {"editing_threshold": 0.9}, "editing_threshold"),
        ("canvas", {"block_length": 8}, "block_length"),
        ("canvas", {"unmasking": "quota"}, "unmasking"),
        ("canvas", {"factor": 1.0}, "factor"),
        ("canvas", {"steps": 4096}, "steps"),
        ("canvas", {"pinned": [{"position": 0, "token_ids": [5]}]}, "pinned"),
    ],
)
def test_what_the_family_lacks_is_refused_by_name(family, options, field):
    with pytest.raises(InvalidRequest) as refused:
        prepared(options, family=family)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": ((5, 1.0),)},
        {"prompt_logprobs": 0},
        {"echo": True},
    ],
)
def test_sampling_that_needs_an_order_is_refused(fields):
    with pytest.raises(InvalidRequest) as refused:
        prepared(**fields)
    assert refused.value.field == next(iter(fields))


def test_a_grammar_is_refused_before_its_library_is_imported():
    with pytest.raises(InvalidRequest, match="regex: constrained output is not supported"):
        completer().check_grammar(Grammar("regex", "a+"))
    with pytest.raises(InvalidRequest, match="json_object: constrained"):
        prepared(grammar=Grammar("json_object"))


@pytest.mark.parametrize(
    ("options", "max_tokens", "message"),
    [
        (None, 87, "10 prompt tokens + 87 output tokens are more than the KV pool of 96 tokens"),
        (None, 119, "more than the model's context of 128"),
        ({"suffix": [5] * 50}, 37, "10 prompt tokens + 50 suffix tokens + 37 output tokens are more than the KV"),
        ({"cfg_scale": 1.0}, 39, "more than half the KV pool (cfg_scale keeps two canvases) of 48 tokens"),
        ({"suffix": [5] * 86}, None, "leave no room in the KV pool of 96"),
    ],
)  # fmt: skip
def test_the_whole_canvas_counts_against_context_and_pool(options, max_tokens, message):
    with pytest.raises(InvalidRequest) as refused:
        prepared(options, max_tokens=max_tokens)
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("options", "room"), [(None, 32), ({"suffix": [5] * 70}, 16), ({"cfg_scale": 1.0}, 32)]
)
def test_the_default_length_is_cut_to_the_room(options, room):
    assert prepared(options).sampling.max_tokens == room


def test_canvases_are_whole():
    found = prepared({"steps": 8, "entropy_bound": 0.5}, family="canvas", max_tokens=70)
    assert found.sampling.max_tokens == 70 and found.options.unmasking.steps == 8
    with pytest.raises(InvalidRequest, match="81 output tokens in whole canvases of 16 are more than the KV"):
        prepared(family="canvas", max_tokens=81)
    engine_info = {"default_max_tokens": None}
    request = CompletionRequest("r", PROMPT)
    assert completer("canvas", **engine_info).prepare(request).sampling.max_tokens == 80


def test_suffix_is_not_for_chat():
    with pytest.raises(InvalidRequest, match="suffix: is for completions"):
        prepared({"suffix": "fox"}, continues_prompt=False)


def test_an_engine_without_options_refuses_them():
    engine = ScriptedEngine(lambda request: Script([]), replace(INFO, family="ar", unsupported=()))
    for fields in ({"options": {"cache": "dual"}}, {"include_unmasking": True}):
        with pytest.raises(InvalidRequest, match=f"{next(iter(fields))}: is not supported"):
            Completer(engine, TOKENIZER).prepare(CompletionRequest("r", PROMPT, **fields))


leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(-2, 40), st.integers(), st.floats()),
    *(st.sampled_from(["quota", "threshold", "dual", "none", "linear", "x", "\ud800"]), st.just(10**30)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["kind", "steps", "threshold", "position", "text", "token_ids"]), inner
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=120, deadline=None)
@given(
    options=st.dictionaries(st.sampled_from([*DiffusionOptions.model_fields, "x"]), values, max_size=3),
    family=st.sampled_from(["bidirectional", "block_causal", "canvas"]),
)
def test_any_values_are_served_or_refused_by_the_name_of_a_field(options, family):
    refused = None
    try:
        found = prepared(options, family=family)
    except InvalidRequest as error:
        refused = error
    if refused is None:
        assert isinstance(found.options, DiffusionParams) and "x" not in options
        return
    named = refused.field.split(".")[0].split("[")[0]
    assert named in {*options, "prompt"} or (named in ("threshold", "steps") and "unmasking" in options)
    assert refused.message and len(str(refused)) < 500
