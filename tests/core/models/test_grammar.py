"""Grammar constraints: what is generated fits and ends; what cannot be enforced is refused first."""

from __future__ import annotations

import json
import re

import pytest
import torch

from genserve.core.errors import ConfigError, ExecutionFailed, InvalidRequest
from genserve.core.models.grammar import GrammarCompiler, validate_grammar
from genserve.core.models.sampling import SamplerState, sample
from genserve.core.models.tiny import make_tiny_tokenizer
from genserve.core.types import Grammar, SamplingParams

VOCAB = 320
EOS = 2
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["a", "b"], "type": "string"},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["name", "age", "kind", "tags"],
    }
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, (EOS,))


def generate(compiler: GrammarCompiler, grammar: Grammar, seed: int, limit: int = 400, bias=()) -> list[int]:
    """Random logits, so whatever the grammar allows may come."""
    params = SamplingParams(temperature=1.5, seed=seed, grammar=grammar, logit_bias=bias)
    state = SamplerState(params, [5, 6], matcher=compiler.matcher(grammar))
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    while len(output) < limit:
        (token,) = sample(torch.randn(1, VOCAB, generator=generator), [state])
        assert token.error is None
        output.append(token.token_id)
        if token.token_id == EOS:
            return output
        state.append(token.token_id)
    return output


@pytest.mark.parametrize("seed", range(8))
def test_json_schema_output_parses_and_fits(compiler: GrammarCompiler, tokenizer, seed: int) -> None:
    output = generate(compiler, Grammar("json_schema", PERSON), seed)
    assert output[-1] == EOS
    value = json.loads(tokenizer.decode(output[:-1]))
    assert set(value) == {"name", "age", "kind", "tags"}
    assert isinstance(value["age"], int) and 0 <= value["age"] <= 150
    # Random bytes may spell a lone surrogate: one character to the grammar, three to a strict decoder.
    assert value["kind"] in ("a", "b") and len(value["name"].replace("\ufffd" * 3, "?")) <= 8
    assert all(isinstance(tag, bool) for tag in value["tags"]) and len(value["tags"]) <= 3


@pytest.mark.parametrize(
    "regex", [r"\d{3}-\d{4}", r"(yes|no|perhaps)( indeed){0,2}", r"[A-Z][a-z]{2,10}\.", "é+日{2}"]
)
@pytest.mark.parametrize("seed", range(4))
def test_regex_output_matches_as_a_whole(compiler: GrammarCompiler, tokenizer, regex: str, seed: int) -> None:
    # The bias towards the end keeps unbounded repetitions short.
    output = generate(compiler, Grammar("regex", regex), seed, bias=((EOS, 3.0),))
    assert output[-1] == EOS
    assert re.fullmatch(regex, tokenizer.decode(output[:-1]))


def test_json_object_is_an_object(compiler: GrammarCompiler, tokenizer) -> None:
    closing = tokenizer.convert_tokens_to_ids("}"), tokenizer.convert_tokens_to_ids('"')
    bias = ((closing[0], 6.0), (closing[1], 5.0), (EOS, 20.0))
    for seed in range(6):
        output = generate(compiler, Grammar("json_object"), seed, bias=bias)
        assert output[-1] == EOS
        assert isinstance(json.loads(tokenizer.decode(output[:-1])), dict)


def test_special_tokens_are_never_text(compiler: GrammarCompiler, tokenizer) -> None:
    grammar = Grammar("regex", r"[<>|a-z_]{4,60}")
    for seed in range(3):
        output = generate(compiler, grammar, seed, bias=((0, 50.0), (1, 50.0)))
        assert not {0, 1} & set(output)


def test_after_completion_only_the_end_is_left(compiler: GrammarCompiler, tokenizer) -> None:
    matcher = compiler.matcher(Grammar("regex", "ab"), tokenizer.encode("ab"))
    for _ in range(3):
        row = torch.zeros(VOCAB)
        matcher.mask(row)
        assert row.isfinite().nonzero().flatten().tolist() == [EOS]
        matcher.accept(EOS)
    with pytest.raises(ExecutionFailed):
        matcher.accept(50)


def test_padding_ids_are_masked(compiler: GrammarCompiler, tokenizer) -> None:
    row = torch.zeros(VOCAB)
    compiler.matcher(Grammar("regex", ".*")).mask(row)
    assert not row[len(tokenizer) :].isfinite().any()


def test_rebuilt_matcher_goes_on_where_the_old_one_was(compiler: GrammarCompiler) -> None:
    grammar = Grammar("json_schema", PERSON)
    output = generate(compiler, grammar, 3)
    kept = compiler.matcher(grammar)
    for at, token_id in enumerate(output):
        rebuilt = compiler.matcher(grammar, output[:at])
        rows = torch.zeros(2, VOCAB)
        kept.mask(rows[0])
        rebuilt.mask(rows[1])
        assert torch.equal(rows[0], rows[1])
        kept.accept(token_id)


def test_each_sequence_has_its_own_state_in_a_batch(compiler: GrammarCompiler, tokenizer) -> None:
    grammars = [Grammar("regex", "abc"), None, Grammar("regex", "x{40}")]
    states = [
        SamplerState(
            SamplingParams(temperature=0, grammar=grammar),
            matcher=compiler.matcher(grammar) if grammar else None,
        )
        for grammar in grammars
    ]
    logits = torch.zeros(3, VOCAB)
    logits[:, 200] = 1.0
    texts = ["", "", ""]
    for _ in range(2):
        for row, token in enumerate(sample(logits, states)):
            states[row].append(token.token_id)
            texts[row] += tokenizer.decode([token.token_id])
    assert "abc".startswith(texts[0]) and texts[0]
    assert texts[1] == tokenizer.decode([200, 200])
    assert set(texts[2]) == {"x"}


def test_a_token_outside_the_grammar_is_an_error(compiler: GrammarCompiler, tokenizer) -> None:
    with pytest.raises(ExecutionFailed, match="does not fit"):
        compiler.matcher(Grammar("regex", "ab"), tokenizer.encode("zz"))


def test_compiled_grammars_are_cached_and_bounded(compiler: GrammarCompiler) -> None:
    for index in range(200):
        compiler.matcher(Grammar("regex", f"a{{{index}}}"))
    assert len(compiler._cache) == 64
    compiled = compiler._cache[Grammar("regex", "a{199}")]
    compiler.matcher(Grammar("regex", "a{199}"))
    assert compiler._cache[Grammar("regex", "a{199}")] is compiled


REFUSED_SCHEMAS = {
    "[1": "JSON",
    "5": "object",
    '{"type": "foo"}': "unknown type",
    '{"type": "object", "properties": 5}': "properties",
    '{"type": "integer", "minimum": 5, "maximum": 3}': "minimum 5 is over maximum 3",
    '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}': "uniqueItems",
    '{"not": {"type": "string"}}': "not",
    '{"if": {"type": "integer"}, "then": {"minimum": 5}}': "if, then",
    '{"allOf": [{"type": "integer"}, {"minimum": 5}]}': "allOf",
    '{"type": "number", "multipleOf": 0.5}': "multipleOf",
    '{"minimum": 5}': "minimum",
    '{"type": "string", "pattern": "x+", "maxLength": 3}': "pattern",
    '{"type": "string", "pattern": "("}': "parenthesis",
    '{"type": "string", "pattern": "^a\\"b$"}': "quotation",
    '{"type": "object", "patternProperties": {"\\\\\\\\": {}}}': "backslashes",
    '{"anyOf": [{"type": "object"}], "required": ["a"]}': "required beside anyOf",
    '{"type": "object", "required": ["a"]}': "required names",
    '{"enum": [1, "a"], "type": "string"}': "enum is not of the given type",
    '{"enum": [true], "type": "integer"}': "enum is not of the given type",
    '{"$ref": "http://example.org/x"}': r"\$ref",
    '{"$ref": "#/$defs/nope"}': r"\$defs",
    '{"type": "object", "properties": {"a": {"contains": {}}}}': "#/properties/a: contains",
    '{"type": "object", "dependentRequired": {"a": ["b"]}}': "dependentRequired",
    '{"enum": []}': "enum",
    '{"anyOf": []}': "anyOf",
    '{"type": "string", "description": "' + "x" * 70_000 + '"}': "bytes at most",
    '{"items":' * 5000 + "{}" + "}" * 5000: "levels at most",
    '{"type": "array", "items": ' * 60 + "{}" + "}" * 60: "levels at most",
    json.dumps({"type": "string", "pattern": "(" * 32600 + "a" + ")" * 32600}): "#: pattern: a regex may",
    json.dumps({"type": "string", "pattern": "(" * 65 + "a" + ")" * 65}): "nest 64 groups",
    json.dumps({"patternProperties": {"(?:" * 65 + "a" + ")" * 65: {}}}): "nest 64 groups",
    json.dumps(
        {"properties": {"a": {"type": "string", "pattern": "[]" + "(" * 65 + "a" + ")" * 65}}}
    ): "nest 64 groups",
    '{"type": "integer", "multipleOf": 5000}': r"#: multipleOf must be an integer in \[1, 1024\]",
    '{"type": "integer", "multipleOf": 0}': "multipleOf must be",
    '{"type": "integer", "multipleOf": 7, "minimum": 3}': "multipleOf together with minimum",
    '{"type": "string", "format": "nonsense"}': '#: format "nonsense" is not supported',
    '{"type": "string", "format": 3}': "format 3 is not supported",
    '{"type": "string", "format": ["date"]}': "format .* is not supported",
    '{"type": "number", "format": "date"}': "format is not supported for type number",
    '{"type": "string", "format": "email", "pattern": "a"}': "pattern together with format",
    '{"items": {"type": "array", "minItems": -5}}': "#/items: minItems must be an integer in",
    '{"type": "array", "maxItems": 2.5}': "maxItems must be an integer",
    '{"type": "array", "minItems": true}': "minItems must be an integer",
    '{"type": "string", "maxLength": -1}': "maxLength must be an integer",
    '{"type": "string", "minLength": 5, "maxLength": 3}': "minLength 5 is over maxLength 3",
    '{"type": "object", "minProperties": 5, "maxProperties": 3}': "minProperties 5 is over maxProperties 3",
    '{"type": "number", "minimum": 5, "exclusiveMaximum": 3}': "minimum 5 is over exclusiveMaximum 3",
    '{"type": "number", "minimum": NaN}': "minimum must be a finite number",
    '{"type": "number", "maximum": "3"}': "maximum must be a finite number",
    json.dumps({"enum": ["x" * 28] * 600}): "16384 characters in enum",
    json.dumps({"properties": {f"{i:020}": {} for i in range(900)}}): "16384 characters in enum",
    json.dumps(
        {"prefixItems": [{"type": "integer", "multipleOf": 1000}] * 2}
    ): "1024 as the sum of multipleOf",
    json.dumps({"prefixItems": [{"type": "string", "pattern": "a?" * 30}] * 9}): "repetitions",
}


@pytest.mark.parametrize("schema", REFUSED_SCHEMAS, ids=lambda s: s[:50])
def test_schemas_that_would_not_be_enforced_are_refused(compiler: GrammarCompiler, schema: str) -> None:
    grammar = Grammar("json_schema", schema)
    with pytest.raises(InvalidRequest, match=REFUSED_SCHEMAS[schema]) as refused:
        validate_grammar(grammar, "response_format")
    assert refused.value.field == "response_format"
    with pytest.raises(InvalidRequest):
        compiler.matcher(grammar)


@pytest.mark.parametrize(
    "regex",
    [
        "(",
        "a**",
        "[a",
        r"(a)\1",
        r"\bfoo",
        "a(?=b)",
        "a{5,2}",
        "(" * 5000 + ")" * 5000,
        "a" * 9000,
        "a?" * 4000,
        "(" * 65 + "a" + ")" * 65,
    ],
)
def test_bad_regexes_are_refused_without_the_librarys_file_names(regex: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate_grammar(Grammar("regex", regex))
    assert ".cc" not in str(refused.value) and refused.value.field == "grammar"


@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        "{}",
        '{"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}',
        '{"type": ["integer", "null"], "minimum": 3}',
        '{"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "T", "default": null}',
        '{"properties": {"not": {"type": "string"}, "if": {}}}',
        '{"type": "object", "additionalProperties": {"type": "integer"}}',
        '{"type": "array", "prefixItems": [{"const": 1}], "items": false}',
        '{"type": "string", "format": "date-time"}',
        '{"type": "integer", "multipleOf": 1024}',
        json.dumps({"type": "string", "pattern": r"\(" * 200}),
        json.dumps({"type": "string", "pattern": "[()]" * 200}),
        '{"type": "array", "items": ' * 40 + "{}" + "}" * 40,
    ],
    ids=lambda s: s[:50],
)
def test_ordinary_schemas_pass(schema: str) -> None:
    validate_grammar(Grammar("json_schema", schema))


def test_pydantic_schemas_pass() -> None:
    from typing import Literal

    from pydantic import BaseModel, Field

    class Inner(BaseModel):
        score: float = Field(ge=0, le=1)
        label: Literal["x", "y"] | None = None

    class Outer(BaseModel):
        """A doc string becomes a description."""

        items: list[Inner] = Field(min_length=1, max_length=4)
        parent: Outer | None = None
        extra: dict[str, int] = {}

    Outer.model_rebuild(_types_namespace={"Outer": Outer, "Inner": Inner})
    validate_grammar(Grammar("json_schema", json.dumps(Outer.model_json_schema())))


def test_a_model_without_an_end_cannot_be_constrained(tokenizer) -> None:
    with pytest.raises(ConfigError, match="end-of-sequence"):
        GrammarCompiler(tokenizer, VOCAB, ())
