"""Tests of schemas with cases, conditions and lists: the grammar allows exactly the values that the schema accepts."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, byte_tokenizer
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.schema_keywords import KeptSchema

COMPILER = GrammarCompiler(byte_tokenizer(), vocab_size=BYTE_VOCAB_SIZE, end_token_ids=(END_TOKEN_ID,))
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def is_written(schema: dict[str, Any], value: Any, *, strict: bool = True) -> bool:
    matcher = COMPILER.compile(StructuredOutput.json(schema, strict=strict)).new_matcher()
    text = list(json.dumps(value).encode())
    return matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()


KEPT: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "oneOf of types": ({"oneOf": [TEXT, INTEGER]}, ["a", 3, None, 1.5]),
    "oneOf of constants": (
        {
            "oneOf": [
                an_object(k={"const": "x"}) | {"required": ["k"]},
                an_object(k={"const": "y"}) | {"required": ["k"]},
            ]
        },
        [{"k": "x"}, {"k": "y"}, {"k": "z"}, {}],
    ),
    "oneOf of lengths": (
        {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 4}]},
        ["", "abc", "abcd", 1],
    ),
    "oneOf that overlaps": (
        {"oneOf": [{"type": "integer", "maximum": 6}, {"type": "integer", "minimum": 4}], "type": "integer"},
        [3, 4, 5, 6, 7],
    ),
    "a least count of listed names": (
        an_object(a=INTEGER, b=INTEGER, c=INTEGER) | {"minProperties": 2},
        [{}, {"a": 1}, {"a": 1, "b": 2}, {"b": 1, "c": 2}, {"a": 1, "c": 2}, {"a": 1, "b": 2, "c": 3}],
    ),
    "a least count beside a required name": (
        an_object(a=INTEGER, b=INTEGER, c=INTEGER) | {"minProperties": 2, "maxProperties": 3, "required": ["b"]},
        [{}, {"b": 1}, {"a": 1, "b": 2}, {"b": 1, "c": 2}, {"a": 1, "c": 2}],
    ),
    "a count of all names of a pattern": (
        {
            "type": "object",
            "patternProperties": {"^[ab]$": INTEGER},
            "additionalProperties": False,
            "minProperties": 2,
            "maxProperties": 2,
        },
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}],
    ),
    "a count of listed names that are required": (
        an_object(a=INTEGER, b=INTEGER) | {"minProperties": 2, "required": ["a", "b"]},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
    ),
    "oneOf of required": (
        an_object(a=INTEGER, b=INTEGER) | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{}, {"a": 1}, {"b": 2}, {"a": 1, "b": 2}],
    ),
    "if a constant": (
        an_object(k={"enum": ["x", "y"]}, b=INTEGER)
        | {"if": {"properties": {"k": {"const": "x"}}, "required": ["k"]}, "then": {"required": ["b"]}},
        [{}, {"k": "x"}, {"k": "y"}, {"k": "x", "b": 1}, {"k": "y", "b": 1}],
    ),
    "if, then and else": (
        an_object(k=TEXT, a=INTEGER, b=INTEGER)
        | {
            "if": {"properties": {"k": {"const": "ab"}}},
            "then": {"required": ["a"]},
            "else": {"required": ["b"]},
        },
        [{}, {"a": 1}, {"k": "ab"}, {"k": "ab", "a": 1}, {"k": "a"}, {"k": "a", "b": 1}, {"k": "abc", "b": 2}],
    ),
    "if a type": ({"type": ["string", "null"], "if": TEXT, "then": {"minLength": 2}}, ["", "a", "ab", None]),
    "dependentRequired": (
        an_object(a=INTEGER, b=INTEGER) | {"dependentRequired": {"a": ["b"]}},
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
    ),
    "dependencies": (
        an_object(a=INTEGER, b=INTEGER) | {"dependencies": {"a": ["b"], "b": {"properties": {"b": {"minimum": 5}}}}},
        [{}, {"a": 1}, {"b": 1}, {"b": 5}, {"a": 1, "b": 5}, {"a": 1, "b": 1}],
    ),
    "dependentSchemas": (
        an_object(a=INTEGER, b=INTEGER) | {"dependentSchemas": {"a": {"required": ["b"]}}},
        [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
    ),
    "contains": (
        {"type": "array", "items": INTEGER, "contains": {"const": 7}, "maxItems": 3},
        [[], [7], [1], [1, 7], [1, 2, 7], [1, 2, 3]],
    ),
    "uniqueItems of an enum": (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 1},
        [[], ["a"], ["b", "a"], ["a", "b"], ["a", "a"]],
    ),
    "no uniqueItems": ({"type": "array", "items": INTEGER, "uniqueItems": False}, [[1, 1]]),
    "propertyNames with a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": INTEGER},
        [{}, {"x": 1}, {"xy": 2}, {"a": 1}],
    ),
    "propertyNames of an enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
        [{}, {"a": 1}, {"a": 1, "b": 2}, {"c": 1}],
    ),
    "names that a pattern lists": (
        {"type": "object", "patternProperties": {"^[ab]$": {"enum": [1, 2]}}, "additionalProperties": False},
        [{}, {"a": 1}, {"a": 1, "b": 2}, {"c": 1}, {"a": 3}],
    ),
    "not a type": ({"not": {"type": ["string", "null"]}}, ["a", None, 1, True]),
    "not a constant": ({"type": "string", "not": {"enum": ["a", "abc"]}}, ["", "a", "ab", "abc", "abcd", "b"]),
    "not a number": ({"type": "integer", "not": {"const": 5}}, [4, 5, 6]),
    "not a range": ({"type": "integer", "not": {"minimum": 3}}, [2, 3, 4]),
    "not required": (
        an_object(a=INTEGER, b=INTEGER) | {"not": {"required": ["a", "b"]}},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
    ),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, [0, 3, 4, -6]),
    "enum with other keywords": (
        {"enum": ["a", "abc", 1, 2.5, None], "type": ["string", "integer"], "not": {"const": 1}, "minLength": 2},
        ["a", "abc", 1, 2.5, None],
    ),
}


@pytest.mark.parametrize(("schema", "values"), KEPT.values(), ids=KEPT.keys())
def test_a_grammar_allows_exactly_the_values_that_the_schema_accepts(schema: dict[str, Any], values: list[Any]) -> None:
    wanted = jsonschema.Draft202012Validator(schema)
    if "dependencies" in schema:
        wanted = jsonschema.Draft7Validator(schema)
    assert [is_written(schema, value) for value in values] == [wanted.is_valid(value) for value in values]


UNKEPT: dict[str, tuple[dict[str, Any], str]] = {
    "uniqueItems": (an_object(a={"type": "array", "items": INTEGER, "uniqueItems": True}), "properties.a.uniqueItems"),
    "contains": ({"type": "array", "contains": INTEGER}, "contains"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)b"}, "pattern"),
    "format": ({"type": "array", "items": {"type": "string", "format": "brandnew"}}, "items.format"),
    "oneOf": ({"oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}]}, "oneOf"),
    "not": ({"not": {"type": "string", "pattern": "a"}}, "not"),
    "if": ({"if": {"pattern": "a"}, "then": {"minLength": 3}}, "if"),
    "unevaluatedProperties": ({"allOf": [{"type": "object"}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    "$dynamicRef": ({"$dynamicRef": "#a"}, "$dynamicRef"),
    "cases": (
        an_object(**dict.fromkeys("abcdefgh", INTEGER)) | {"dependentRequired": {name: ["a"] for name in "bcdefgh"}},
        "dependentRequired.h.dependentRequired",
    ),
}


@pytest.mark.parametrize(("schema", "path"), UNKEPT.values(), ids=UNKEPT.keys())
def test_a_keyword_that_cannot_be_enforced_is_refused_if_strict_and_else_reported(
    schema: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        COMPILER.compile(StructuredOutput.json(schema, param="p"))
    assert caught.value.param == "p"
    assert f"at {path}," in str(caught.value)
    structured = StructuredOutput.json(schema, param="p", strict=False)
    guides = GuideFactory(COMPILER).prepare(SamplingParams(structured=structured))
    assert guides.ignored_keywords == (f"p.{path}",)


def test_number_of_cases_of_a_schema_is_bounded() -> None:
    node: dict[str, Any] = INTEGER
    for _ in range(12):
        node = {"if": an_object(a=node), "then": an_object(a=node), "else": an_object(b=node)}
    with pytest.raises(InvalidRequest):
        KeptSchema(node, param="p")


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    name: str


class Letter(enum.Enum):
    A = "a"
    B = "b"


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
TYPES: dict[str, Any] = {
    "discriminated union": Pet,
    "union": Cat | Dog,
    "set of int": set[int],
    "path": pathlib.Path,
    "secret": pydantic.SecretStr,
    "bytes": bytes,
    "Decimal": decimal.Decimal,
    "Decimal with digits": pydantic.condecimal(max_digits=5, decimal_places=2),
    "HttpUrl": pydantic.HttpUrl,
    "AnyUrl": pydantic.AnyUrl,
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "UUID": uuid.UUID,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Network": ipaddress.IPv6Network,
    "FilePath": pydantic.FilePath,
    "Json": pydantic.Json,
    "Base64Bytes": pydantic.Base64Bytes,
    "dict": dict[str, int],
    "dict of int": dict[int, str],
    "tuple": tuple[int, str],
    "optional": int | None,
    "literal": Literal["a", 1, None],
    "enum": Letter,
    "conlist": pydantic.conlist(int, min_length=1, max_length=2),
    "constr": pydantic.constr(pattern=r"^\w+$", max_length=5),
    "constr without spaces": pydantic.constr(pattern=r"^\S+$"),
    "any": Any,
    "PositiveInt": pydantic.PositiveInt,
    "float": float,
    "ByteSize": pydantic.ByteSize,
    "list of unions": list[Pet],
    "dict with a pattern": dict[Annotated[str, pydantic.Field(pattern="^x")], int],
    "frozenset of an enum": frozenset[Letter],
    "dict of an enum": dict[Letter, int],
}
IGNORED = {"set of int": ("properties.x.uniqueItems",)}


@pytest.mark.parametrize("name", TYPES)
def test_schemas_of_pydantic_are_accepted(name: str) -> None:
    schema = pydantic.create_model("M", x=(TYPES[name], ...)).model_json_schema()
    assert COMPILER.compile(StructuredOutput.json(schema, strict=False)).ignored == IGNORED.get(name, ())
    if name not in IGNORED:
        COMPILER.compile(StructuredOutput.json(schema))


def test_a_schema_that_requires_more_keys_than_it_allows_is_refused():
    with pytest.raises(InvalidRequest):
        COMPILER.compile(StructuredOutput.json(an_object(a=INTEGER, b=INTEGER) | {"minProperties": 3}))
