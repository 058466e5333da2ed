"""Which JSON schemas a grammar can enforce exactly. Plain Python: no grammar library.

The grammar library leaves out what it does not know, with no more than a warning, and dies on deep
nesting. Here everything outside what it was seen to enforce is refused, by name and place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from genserve.core.models.patterns import MAX_REGEX_CHARS, check_regex, num_regex_repeats

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 48
# These bound compiling to about 0.3 s over a vocabulary of 49,152 tokens.
MAX_LITERAL_CHARS = 16 * 1024
MAX_MULTIPLE_OF = 1024
MAX_SCHEMA_REPEATS = 256
MAX_COUNT = (1 << 31) - 1

_ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "$schema",
        "$id",
        "$comment",
        "$defs",
        "definitions",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
    ]
)
_COMBINATORS = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_NUMERIC = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset(
        [
            "properties",
            "required",
            "additionalProperties",
            "unevaluatedProperties",
            "patternProperties",
            "minProperties",
            "maxProperties",
        ]
    ),
    "array": frozenset(["items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"]),
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": _NUMERIC | {"multipleOf"},
    "number": _NUMERIC,
    "boolean": frozenset(),
    "null": frozenset(),
}
_FORMATS = frozenset(
    [
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "uri-template", "uuid", "json-pointer", "relative-json-pointer"),
    ]
)
_COUNTS = tuple((f"min{what}", f"max{what}") for what in ("Items", "Length", "Properties"))
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def check_schema(text: str) -> None:
    """`ValueError` saying what and where, unless every constraint of the schema would be enforced.

    Deviation from JSON Schema: `oneOf` accepts what `anyOf` would where branches overlap, and an object
    with `properties` takes no others unless `additionalProperties` says so.
    """
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema may have {MAX_SCHEMA_BYTES} bytes at most")
    _check_depth(text)
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    _check(schema, "#")
    _check_size(schema)


def _check_depth(text: str) -> None:
    """Counts brackets outside strings, before any recursive parser sees the text."""
    depth = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
            if depth > MAX_SCHEMA_DEPTH:
                raise ValueError(f"a schema may nest {MAX_SCHEMA_DEPTH} levels at most")
        elif char in "}]":
            depth -= 1


def _check(schema: Any, place: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{place}: expected a schema (an object or a boolean)")
    keywords = set(schema) - _ANNOTATIONS
    combinators = [keyword for keyword in _COMBINATORS if keyword in schema]
    if combinators:
        _check_combinator(schema, combinators[0], keywords, place)
    else:
        _check_typed(schema, keywords, place)
    for sub_place, sub_schema in _subschemas(schema, place):
        _check(sub_schema, sub_place)


def _check_combinator(schema: dict[str, Any], keyword: str, keywords: set[str], place: str) -> None:
    beside = keywords - {keyword} - ({"type"} if keyword in ("enum", "const") else set())
    if beside:
        raise ValueError(f"{place}: {', '.join(sorted(beside))} beside {keyword} is not supported")
    value = schema[keyword]
    if keyword == "$ref" and not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
        raise ValueError(f"{place}: $ref must point into the schema itself (# or #/...)")
    if keyword in ("anyOf", "oneOf", "allOf") and not (isinstance(value, list) and value):
        raise ValueError(f"{place}: {keyword} must be a non-empty list of schemas")
    if keyword == "allOf" and len(value) > 1:
        raise ValueError(f"{place}: allOf of several schemas is not supported")
    if keyword in ("enum", "const") and "type" in schema:
        allowed = [kind for name in _types(schema, place) for kind in _PYTHON_TYPES[name]]
        for item in value if keyword == "enum" and isinstance(value, list) else [value]:
            if type(item) not in allowed:
                raise ValueError(f"{place}: {json.dumps(item)[:80]} in {keyword} is not of the given type")


def _check_typed(schema: dict[str, Any], keywords: set[str], place: str) -> None:
    types = _types(schema, place)
    known = frozenset({"type"}).union(*(_BY_TYPE[name] for name in types))
    unknown = keywords - known
    if unknown:
        raise ValueError(
            f"{place}: {', '.join(sorted(unknown))} is not supported for type {' or '.join(types)}"
        )
    if ("pattern" in schema or "format" in schema) and ("minLength" in schema or "maxLength" in schema):
        raise ValueError(f"{place}: pattern or format together with minLength or maxLength is not supported")
    for pattern in [schema.get("pattern", ""), *_mapping(schema, "patternProperties", place)]:
        # Patterns are put between the quotes of a JSON string as they are.
        if not isinstance(pattern, str) or '"' in pattern or "\\\\" in pattern:
            raise ValueError(
                f"{place}: a pattern must be a string without quotation marks and backslashes to match"
            )
        try:
            check_regex(pattern)
        except ValueError as error:
            raise ValueError(f"{place}: pattern: {error}") from error
    if "pattern" in schema and "format" in schema:
        raise ValueError(f"{place}: pattern together with format is not supported")
    _check_values(schema, place)
    required = schema.get("required", [])
    properties = _mapping(schema, "properties", place)
    if not isinstance(required, list):
        raise ValueError(f"{place}: required must be a list")
    missing = [name for name in required if name not in properties]
    if missing:
        raise ValueError(
            f"{place}: required names {json.dumps(missing[0])[:80]}, which properties does not define"
        )


def _check_values(schema: dict[str, Any], place: str) -> None:
    if schema.get("format", "date") not in tuple(_FORMATS):
        raise ValueError(
            f"{place}: format {_shown(schema['format'])} is not supported; these are: "
            + ", ".join(sorted(_FORMATS))
        )
    for low, high in _COUNTS:
        for keyword in (low, high):
            if keyword in schema and not (type(schema[keyword]) is int and 0 <= schema[keyword] <= MAX_COUNT):
                raise ValueError(f"{place}: {keyword} must be an integer in [0, {MAX_COUNT}]")
        if low in schema and high in schema and schema[low] > schema[high]:
            raise ValueError(f"{place}: {low} {schema[low]} is over {high} {schema[high]}")
    for keyword in (*_LOWER, *_UPPER):
        bound = schema.get(keyword, 0)
        if type(bound) not in (int, float) or not math.isfinite(bound) or abs(bound) >= 1 << 63:
            raise ValueError(f"{place}: {keyword} must be a finite number within 64 bits")
    for low in _LOWER:
        for high in _UPPER:
            if low in schema and high in schema and schema[low] > schema[high]:
                raise ValueError(f"{place}: {low} {schema[low]} is over {high} {schema[high]}")
    if "multipleOf" in schema:
        step = schema["multipleOf"]
        if type(step) is not int or not 1 <= step <= MAX_MULTIPLE_OF:
            raise ValueError(f"{place}: multipleOf must be an integer in [1, {MAX_MULTIPLE_OF}]")
        bounds = [keyword for keyword in (*_LOWER, *_UPPER) if keyword in schema]
        if bounds:
            raise ValueError(f"{place}: multipleOf together with {bounds[0]} is not supported")


def _check_size(schema: dict[str, Any]) -> None:
    """Bounds what compiling takes, over the whole schema."""
    num_literal = num_pattern = sum_multiple = num_repeats = 0
    left: list[Any] = [schema]
    while left:
        at = left.pop()
        if isinstance(at, bool):
            continue
        values = at["enum"] if isinstance(at.get("enum"), list) else []
        values = values + ([at["const"]] if "const" in at else [])
        num_literal += sum(len(json.dumps(value, ensure_ascii=False)) for value in values)
        num_literal += sum(len(name) for name in at.get("properties", {}))
        patterns = [at["pattern"]] if "pattern" in at else []
        patterns.extend(at.get("patternProperties", {}))
        num_pattern += sum(map(len, patterns))
        num_repeats += sum(map(num_regex_repeats, patterns))
        sum_multiple += at.get("multipleOf", 0)
        left.extend(sub for _, sub in _subschemas(at, "#"))
    for what, size, limit in (
        ("characters in enum, const and names of properties", num_literal, MAX_LITERAL_CHARS),
        ("characters in patterns", num_pattern, MAX_REGEX_CHARS),
        ("repetitions (?, *, +, {}) in patterns", num_repeats, MAX_SCHEMA_REPEATS),
        ("as the sum of multipleOf", sum_multiple, MAX_MULTIPLE_OF),
    ):
        if size > limit:
            raise ValueError(f"a schema may have {limit} {what} at most, not {size}")


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]


def _types(schema: dict[str, Any], place: str) -> list[str]:
    """The types a schema names; without `type` those its keywords imply, or all if it has none."""
    named = schema.get("type")
    if named is None:
        if _BY_TYPE["object"] & set(schema):
            return ["object"]
        if _BY_TYPE["array"] & set(schema):
            return ["array"]
        return ["boolean", "null"]
    types = named if isinstance(named, list) else [named]
    for name in types:
        if not isinstance(name, str) or name not in _BY_TYPE:
            raise ValueError(f"{place}: unknown type {json.dumps(name)[:80]}")
    return types


def _mapping(schema: dict[str, Any], keyword: str, place: str) -> dict[str, Any]:
    entries = schema.get(keyword, {})
    if not isinstance(entries, dict):
        raise ValueError(f"{place}: {keyword} must be an object")
    return entries


def _subschemas(schema: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        for name, value in _mapping(schema, keyword, place).items():
            yield f"{place}/{keyword}/{name}", value
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for index, value in enumerate(schema.get(keyword, [])):
            yield f"{place}/{keyword}/{index}", value
    for keyword in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"):
        if keyword in schema:
            yield f"{place}/{keyword}", schema[keyword]
