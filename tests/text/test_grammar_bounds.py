"""Tests that bounds of schemas and grammars are checked in linear time, for any spelling of references."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.structured_output import SchemaKind, StructuredOutput
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, byte_tokenizer
from trioserve.text.grammar_bounds import JOINED_PATTERNS_MAX, SCHEMAS_MAX, check_lark, check_schema
from trioserve.text.grammar_compiler import COMPILE_SECONDS_MAX, GrammarCompiler

SHORT, GROWTH = 150, 4
GROWTH_MAX = 9.0  # Linear growth would be 4, and quadratic growth 16.


def many_spellings(count: int) -> dict[str, Any]:
    rule = {"allOf": [{} for _ in range(8 * count)]}
    spellings = [f"#/$defs/{'%78' if index % 2 else 'x'}" for index in range(count)]
    return {"$defs": {"x": rule}, "allOf": [{"$ref": spelling} for spelling in spellings]}


def anchors_that_are_none(count: int) -> dict[str, Any]:
    rule = {"allOf": [{} for _ in range(8 * count)]}
    return {"$defs": {"x": rule}, "allOf": [{"$ref": f"#{index:x}/$defs/x"} for index in range(count)]}


def many_users_of_one_rule(count: int) -> dict[str, Any]:
    users = {f"u{index}": {"allOf": [{"$ref": "#/$defs/x"}]} for index in range(count)}
    return {"$defs": {"x": {"allOf": [{} for _ in range(8 * count)]}, **users}}


def nested(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(20 * count):
        schema = {"allOf": [schema]}
    return schema


def doubling(count: int) -> dict[str, Any]:
    level = {f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{index + 1}"}] * 2} for index in range(8 * count)}
    return {"$defs": {**level, f"d{8 * count}": {}}, "allOf": [{"$ref": "#/$defs/d0"}]}


def relative_to_a_long_name(count: int) -> dict[str, Any]:
    return {"$id": "http://example.com/" + "a" * 400, "allOf": [{"$ref": f"?{index}"} for index in range(8 * count)]}


@pytest.mark.parametrize(
    "make",
    [
        many_spellings,
        anchors_that_are_none,
        many_users_of_one_rule,
        nested,
        doubling,
        relative_to_a_long_name,
    ],
)
def test_time_to_check_a_schema_is_linear_in_its_length(make: Callable[[int], dict[str, Any]]) -> None:
    def seconds(schema: dict[str, Any]) -> float:
        began_at = time.process_time()
        check_schema(schema, param="schema")
        return time.process_time() - began_at

    short, long = make(SHORT), make(SHORT * GROWTH)
    assert min(seconds(long) / seconds(short) for _ in range(3)) < GROWTH_MAX


PATTERNS = {"allOf": [{"pattern": f"a{index}"} for index in range(JOINED_PATTERNS_MAX)]}


@pytest.mark.parametrize(
    ("reference", "rules"),
    [
        ("#/$defs/x", {"x": PATTERNS}),
        ("#/%24defs/%78", {"x": PATTERNS}),
        ("#/$defs/a~1b~0", {"a/b~": PATTERNS}),
        ("#/$defs/x/0", {"x": [PATTERNS]}),
        ("#/$defs/x/00", {"x": [PATTERNS]}),
        ("#anchor", {"x": {"$anchor": "anchor", **PATTERNS}}),
        ("http://example.com/x", {"x": {"$id": "http://example.com/x", **PATTERNS}}),
        ("x", {"y": {"$id": "x", **PATTERNS}}),
        ("json-schema:///#/$defs/x", {"x": PATTERNS}),
        ("#/$defs/x/const", {"x": {"const": PATTERNS}}),
        ("#/$defs/x/allOf/0", {"x": {"allOf": [PATTERNS]}}),
    ],
)
def test_joined_patterns_are_counted_for_every_spelling_of_a_reference(reference: str, rules: dict[str, Any]) -> None:
    check_schema({"$defs": rules, "$ref": reference}, param="schema")
    for joined in ({"$ref": reference, "pattern": "b"}, {"allOf": [{"$ref": reference}, {"pattern": "b"}]}):
        with pytest.raises(InvalidRequest, match="joins more than 32 patterns"):
            check_schema({"$defs": rules, **joined}, param="schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/examples/0", "examples": [{"pattern": "a{99999}"}]},
        {"$ref": "#/const", "const": {"pattern": "a{99999}"}},
        {"type": "object", "properties": {"const": {"pattern": "a{99999}"}}},
        {"$defs": {"enum": {"pattern": "a{99999}"}}, "$ref": "#/$defs/enum"},
    ],
)
def test_a_value_is_checked_as_a_schema_if_a_reference_leads_to_it(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="repeated 99999 times"):
        check_schema(schema, param="schema")


def test_a_value_without_references_to_it_is_not_checked_as_a_schema() -> None:
    check_schema({"const": {"pattern": "a{99999}"}, "examples": [{"allOf": [{"pattern": "a"}] * 99}]}, param="schema")


def test_number_of_schemas_in_a_grammar_is_bounded() -> None:
    check_lark("start: " + "%json {} " * SCHEMAS_MAX, param="grammar")
    with pytest.raises(InvalidRequest, match=f"more than {SCHEMAS_MAX} schemas"):
        check_lark("start: " + "%json {} " * (SCHEMAS_MAX + 1), param="grammar")


def test_a_long_text_after_a_pattern_with_a_quote_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="9000 characters"):
        check_lark('start: /"/ "' + "a" * 9000 + '"', param="grammar")


# --- many schemas in one request ------------------------------------------------------------------------------------

TAG = {
    "structures": [{"begin": f"<t{index}>", "schema": {"enum": [index, "x"]}, "end": "</t>"} for index in range(20)],
    "triggers": ["<t"],
}


def new_compiler(cpu_seconds: Callable[[], float] = lambda: 0.0) -> GrammarCompiler:
    return GrammarCompiler(
        byte_tokenizer(), vocab_size=BYTE_VOCAB_SIZE, end_token_ids=(END_TOKEN_ID,), cpu_seconds=cpu_seconds
    )


def tag() -> StructuredOutput:
    return StructuredOutput(kind=SchemaKind.STRUCTURAL_TAG, source=json.dumps(TAG))


def test_all_schemas_of_a_request_share_one_limit_of_compilation_time() -> None:
    clock = iter(range(100))
    compiler = new_compiler(lambda: float(next(clock)))
    with pytest.raises(
        InvalidRequest, match=f"has 20 schemas, and compiling 3 of them took more than .*{3} s"
    ) as caught:
        compiler.compile(tag())
    assert caught.value.param is not None
    assert COMPILE_SECONDS_MAX == 3
    assert compiler.compiles_total == 0


def test_a_cancelled_compilation_ends_between_two_schemas() -> None:
    class Unwanted(Exception):
        pass

    checks: list[None] = []

    def check() -> None:
        checks.append(None)
        if len(checks) == 5:
            raise Unwanted

    compiler = new_compiler()
    with pytest.raises(Unwanted):
        compiler.compile(tag(), check=check)
    assert len(checks) == 5
    compiler.compile(tag())
