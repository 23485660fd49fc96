"""Tests that hostile schemas and grammars are refused with a clear message, or compiled in bounded time.

Masks and forced tokens of a compiled grammar take bounded time, too. The limits in seconds are those of a slow machine.
A grammar beyond the bounds would take minutes.
"""

from __future__ import annotations

import json
import random
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.structured_output import SchemaKind, StructuredOutput
from trioserve.text.grammar_bounds import COMPILE_STACK_BYTES, REPEATS_MAX, check_lark, check_pattern, check_schema
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.tokenizer import Tokenizer

COMPILE_SECONDS_MAX = 10.0
MASK_SECONDS_MAX = 1.0  # Limit for one mask on a busy machine. An idle machine needs 10 to 30 ms.
TOKENS = 60


def nested(depth: int) -> str:
    return '{"type": "array", "items": ' * depth + '{"type": "null"}' + "}" * depth


def doubling(members: Callable[[int], dict[str, Any]], depth: int) -> dict[str, Any]:
    definitions = {f"d{level}": members(level + 1) for level in range(depth)}
    return {"$defs": {**definitions, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def to(level: int) -> dict[str, str]:
    return {"$ref": f"#/$defs/d{level}"}


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(count)}}


ENDLESS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/a"}},
    "required": ["a"],
    "additionalProperties": False,
}
LATE = {
    "$defs": {"a": ENDLESS},
    "type": "object",
    "properties": {"x": {"enum": ["1", "2"]}, "b": {"$ref": "#/$defs/a"}},
    "required": ["x", "b"],
    "additionalProperties": False,
}

ANYTHING = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}, "$ref": "#/$defs/a"}
CONSTANTS = {
    "type": "object",
    "properties": {"x": {"enum": ["1", "2"]}, **{f"k{index}": {"const": index} for index in range(900)}},
    "required": ["x", *(f"k{index}" for index in range(900))],
}
ALTERNATIVES = {
    "anyOf": [
        {"type": "object", "properties": {f"k{index}": {"type": "integer"}}, "required": [f"k{index}"]}
        for index in range(600)
    ]
}


def lines(line: Callable[[int], str], count: int, last: str) -> str:
    return "\n".join((*map(line, range(count)), last))


PATTERNS = {"allOf": [{"type": "string", "pattern": f".*{index}.*"} for index in range(500)]}
REFUSED_SCHEMAS: dict[str, Any] = {
    "depth": nested(6000),
    "depth of a constant": '{"const": ' + "[" * 5000 + "]" * 5000 + "}",
    "refers to itself": {"$ref": "#"},
    "refers in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "circle of allOf": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "a remote reference": {"$ref": "http://127.0.0.1/x"},
    "a file": {"$ref": "file:///etc/passwd"},
    "an object without an end": {"$defs": {"a": ENDLESS}, "$ref": "#/$defs/a"},
    "a list without an end": {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
    "hundreds of patterns joined": {"allOf": [{"type": "string", "pattern": f".*{index}.*"} for index in range(500)]},
    "hundreds of patterns joined by references": {
        "$defs": {
            f"d{index}": {"type": "string", "pattern": f".*{index}.*", "allOf": [to(index + 1)]} for index in range(200)
        }
        | {"d200": {"type": "string"}},
        "$ref": "#/$defs/d0",
        "allOf": [to(0)],
    },
    "thousands of optional properties": optional(4000),
    "a long constant": {"const": "x" * 200_000},
    "a large constant": {"const": {f"k{index}": [index] * 5 for index in range(4000)}},
    "a long enum member": {"enum": ["a", "x" * 100_000]},
    "a long property": {"type": "object", "properties": {"x" * 100_000: {}}, "required": ["x" * 100_000]},
    "a long pattern": {"type": "string", "pattern": "x" * 200_000},
    "a pattern of many": {"type": "string", "pattern": "a{1000000000}"},
    "a pattern of many in many": {"type": "string", "pattern": "((a{1000}b){1000}c)"},
    "half a character": r'{"const": "\ud800"}',
    "half a character in a pattern": r'{"type": "string", "pattern": "\ud83d"}',
    "no JSON number": '{"type": "array", "minItems": 1e400}',
    "a negative size": {"type": "array", "maxItems": -1},
    "nothing satisfies it": {"type": "string", "minLength": 5, "maxLength": 3},
}
REFUSED = {
    **{name: (SchemaKind.JSON_SCHEMA, schema) for name, schema in REFUSED_SCHEMAS.items()},
    "a regex of many": (SchemaKind.REGEX, "a{1000000000}"),
    "a regex of many in many": (SchemaKind.REGEX, "(a{3000}){3000}"),
    "a regex in parentheses": (SchemaKind.REGEX, "(" * 8000 + "a" + ")" * 8000),
    "a long regex": (SchemaKind.REGEX, "x" * 16_000),
    "a regex that looks ahead": (SchemaKind.REGEX, "(?=a)b"),
    "a regex that looks back": (SchemaKind.REGEX, r"(a)\1"),
    "a regex of nothing": (SchemaKind.REGEX, r"[^\s\S]"),
    "a long choice": (SchemaKind.CHOICE, json.dumps(["x" * 200_000])),
    "a rule that is itself": (SchemaKind.GRAMMAR, 'start: start "a" | start'),
    "a grammar that never ends": (SchemaKind.GRAMMAR, 'start: "a" start'),
    "rules that double": (
        SchemaKind.GRAMMAR,
        "start: r0\n" + lines(lambda i: f"r{i}: r{i + 1} r{i + 1}", 60, 'r60: "a"'),
    ),
    "terminals that double": (
        SchemaKind.GRAMMAR,
        "start: T0\n" + lines(lambda i: f"T{i}: T{i + 1} T{i + 1}", 40, 'T40: "a"'),
    ),
    "a grammar in parentheses": (SchemaKind.GRAMMAR, "start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "a grammar of many": (SchemaKind.GRAMMAR, 'start: "a"{1,1000000000}'),
    "a long text in a grammar": (SchemaKind.GRAMMAR, 'start: "' + "x" * 60_000 + '"'),
    "terminals that exclude each other": (
        SchemaKind.GRAMMAR,
        "start: T\nT: " + " & ".join(f"/.*{index}.*/" for index in range(40)),
    ),
    "a schema in a grammar": (SchemaKind.GRAMMAR, f"start: %json {json.dumps(PATTERNS)}"),
    "a deep schema in a grammar": (SchemaKind.GRAMMAR, "start: %json " + '{"items": ' * 5000 + "{}" + "}" * 5000),
    "a schema of a tool": (SchemaKind.TOOL_CALLS, f'start: "a" %json {json.dumps(PATTERNS)}'),
    "a schema of a tag": (
        SchemaKind.STRUCTURAL_TAG,
        {"structures": [{"begin": "<a>", "schema": PATTERNS, "end": "</a>"}], "triggers": ["<a>"]},
    ),
    "a token that is not there": (SchemaKind.GRAMMAR, "start: <[999999999]>"),
    "a grammar that is not there": (SchemaKind.GRAMMAR, "start: @nowhere"),
}
BOUNDED = {
    "a deep list": (SchemaKind.JSON_SCHEMA, nested(60)),
    "anything, again and again": (SchemaKind.JSON_SCHEMA, ANYTHING),
    "allOf that doubles": (SchemaKind.JSON_SCHEMA, doubling(lambda level: {"allOf": [to(level)] * 2}, 25)),
    "properties that double": (
        SchemaKind.JSON_SCHEMA,
        doubling(lambda level: {"type": "object", "properties": {"a": to(level), "b": to(level)}}, 60),
    ),
    "an enum of thousands": (SchemaKind.JSON_SCHEMA, {"enum": [f"value-{index}-{'x' * 20}" for index in range(7000)]}),
    "hundreds of alternatives": (SchemaKind.JSON_SCHEMA, ALTERNATIVES),
    "as many optional properties as may be": (SchemaKind.JSON_SCHEMA, {**optional(480), "additionalProperties": False}),
    "a long string": (SchemaKind.JSON_SCHEMA, {"type": "string", "minLength": 1_000_000}),
    "no end, later": (SchemaKind.JSON_SCHEMA, LATE),
    "hundreds of constants": (SchemaKind.JSON_SCHEMA, CONSTANTS),
    "choices by the thousand": (SchemaKind.CHOICE, json.dumps([f"value-{index}" for index in range(10_000)])),
    "catastrophic for others": (SchemaKind.REGEX, "(a+)+b|((((a*)*)*)*)*c"),
    "an automaton of 2 ** 200 states": (SchemaKind.REGEX, "(a|b)*a(a|b){200}"),
    "any text, again and again": (SchemaKind.REGEX, "(.*a){100}"),
    "letters": (SchemaKind.REGEX, r"\p{L}{1,3000}"),
    "an ambiguous grammar": (SchemaKind.GRAMMAR, 'start: e\ne: e "+" e | e "*" e | /[0-9]/ | e e'),
    "a chain of rules": (SchemaKind.GRAMMAR, "start: r0\n" + lines(lambda i: f"r{i}: r{i + 1}", 3000, 'r3000: "a"')),
    "any text up to a mark": (SchemaKind.GRAMMAR, 'start: t*\nt[lazy]: /.*?/ "x"'),
}


@pytest.fixture(scope="module")
def compiler(smollm2: Tokenizer) -> GrammarCompiler:
    compiler = GrammarCompiler(smollm2, vocab_size=49_152, end_token_ids=(2,))
    assert compiler.load() is None
    return compiler


def in_thread_with_large_stack(work: Callable[[], None]) -> None:
    """Run a function in a thread with the stack of a compilation."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(COMPILE_STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]


def structured_of(kind: SchemaKind, source: Any) -> StructuredOutput:
    return StructuredOutput(kind=kind, source=source if isinstance(source, str) else json.dumps(source))


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_grammar_is_refused_with_a_sentence(compiler: GrammarCompiler, name: str) -> None:
    def refuse() -> None:
        with pytest.raises(InvalidRequest) as caught:
            compiler.compile(structured_of(*REFUSED[name]))
        assert caught.value.param is not None
        assert caught.value.param.startswith("structured")
        assert 10 < len(str(caught.value)) < 600

    began_at = time.process_time()
    in_thread_with_large_stack(refuse)
    assert time.process_time() - began_at < COMPILE_SECONDS_MAX


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_a_hostile_grammar_takes_bounded_time(compiler: GrammarCompiler, name: str) -> None:
    """Generate a random response of tokens that the grammar allows.

    The grammar may fail, but only in bounded time.
    """

    def walk() -> None:
        began_at = time.process_time()
        matcher = compiler.compile(structured_of(*BOUNDED[name])).new_matcher()
        assert time.process_time() - began_at < COMPILE_SECONDS_MAX
        words = array("I", bytes(4 * 1536))
        rng = random.Random(name)
        for _ in range(TOKENS):
            began_at = time.process_time()
            matcher.unsafe_compute_mask_ptr(words.buffer_info()[0], 4 * 1536)
            allowed = [
                32 * place + bit for place, word in enumerate(words) if word for bit in range(32) if word >> bit & 1
            ]
            assert time.process_time() - began_at < MASK_SECONDS_MAX
            if matcher.is_error() or not allowed:
                return
            began_at = time.process_time()
            matcher.consume_token(rng.choice(allowed))
            for token_id in matcher.compute_ff_tokens()[:256]:
                matcher.consume_token(token_id)
            assert time.process_time() - began_at < MASK_SECONDS_MAX
            if matcher.is_stopped():
                return

    in_thread_with_large_stack(walk)


@pytest.mark.parametrize(
    "pattern, repeats",
    [
        ("a{10000}", True),
        ("a{10001}", False),
        ("(a{100}b){100}", True),
        ("(a{100}b){101}", False),
        ("(a{2,}){0,10001}", False),
        (r"\d{4}-\d{2}-\d{2}T\d{2}", True),
        (r"\{20000}", True),
        ("[{20000}]", True),
        (r"[\]{20000}]", True),
        ("a{99999999999}", False),
        ("(?:x|y{200}){2}{30}", False),
        (")){3}", True),
    ],
)
def test_repetitions_in_patterns_are_counted(pattern: str, repeats: bool) -> None:
    if repeats:
        check_pattern(pattern, param="structured")
    else:
        with pytest.raises(InvalidRequest, match=f"at most {REPEATS_MAX} are allowed"):
            check_pattern(pattern, param="structured")


@pytest.mark.parametrize(
    "grammar", ['start: "a"~1..20000', 'start: "a"{20000}', 'start: "a"{1, 20000}', "start: /a{20000}/"]
)
def test_repetitions_in_grammars_are_counted(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="repeated 20000 times"):
        check_lark(grammar, param="structured")


def test_texts_of_a_schema_within_a_grammar_are_not_texts_of_the_grammar() -> None:
    schema = json.dumps({"type": "string", "description": "x" * 20_000 + " {20000}"})
    check_lark(f'start: "a" %json {schema} "b"', param="structured")
    long = "b" * 9000
    with pytest.raises(InvalidRequest, match="a text of the grammar has 9000"):
        check_lark(f'start: "a" %json {schema} "{long}"', param="structured")


def test_properties_within_default_and_examples_are_not_counted() -> None:
    check_schema({"type": "string", "default": optional(4000), "examples": [optional(4000)]}, param="structured")


def test_required_properties_do_not_count_as_optional() -> None:
    schema = optional(4000)
    check_schema({**schema, "required": list(schema["properties"])}, param="structured")
    with pytest.raises(InvalidRequest, match="481 properties that are not required"):
        check_schema({**optional(500), "required": [f"p{index}" for index in range(19)]}, param="structured")
