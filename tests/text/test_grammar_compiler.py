"""Tests of the grammar compiler: its costs, refusals and cache."""

from __future__ import annotations

import json
import random
import threading
from array import array

import pytest
from llguidance import LLParserLimits

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import SOURCE_CHARACTERS_MAX, SchemaKind, StructuredOutput
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, byte_tokenizer
from trioserve.text import grammar_compiler
from trioserve.text.grammar_bounds import COMPILE_STACK_BYTES
from trioserve.text.grammar_compiler import GRAMMAR_BYTES, GrammarCompiler
from trioserve.text.guide_factory import GuideFactory


def new_compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), vocab_size=BYTE_VOCAB_SIZE, end_token_ids=(END_TOKEN_ID,))


COMPILER = new_compiler()


def accepts(structured: StructuredOutput, text: str) -> bool:
    matcher = COMPILER.compile(structured).new_matcher()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def in_thread_with_large_stack(function):
    """Run a function in a thread with the stack of TextThreads.run_compile."""
    results = []

    def work():
        try:
            results.append(function())
        except InvalidRequest as error:
            results.append(error)

    usual = threading.stack_size(COMPILE_STACK_BYTES)
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
    return results[0]


def lark_chain(line: str, last: str) -> StructuredOutput:
    """Make a grammar of the maximum length, whose rules form a chain."""
    lines, size = ["start: r0"], 0
    while size < SOURCE_CHARACTERS_MAX[SchemaKind.GRAMMAR] - 100:
        index = len(lines) - 1
        lines.append(line.format(index, index + 1))
        size += len(lines[-1]) + 1
    return StructuredOutput.grammar("\n".join([*lines, last.format(len(lines) - 1)]))


def ref_chain(link: dict) -> StructuredOutput:
    definitions = {f"d{index}": json.loads(json.dumps(link).replace("NEXT", f"d{index + 1}")) for index in range(3000)}
    return StructuredOutput.json({"$ref": "#/$defs/d0", "$defs": {**definitions, "d3000": {"type": "integer"}}})


DEEP = {
    "rules": lambda: lark_chain("r{}: r{}", 'r{}: "a"'),
    "rules and text": lambda: lark_chain('r{}: "b" r{}', 'r{}: "a"'),
    "references": lambda: ref_chain({"$ref": "#/$defs/NEXT"}),
    "references in lists": lambda: ref_chain({"type": "array", "items": {"$ref": "#/$defs/NEXT"}}),
    "references in allOf": lambda: ref_chain({"allOf": [{"$ref": "#/$defs/NEXT"}]}),
    "groups": lambda: StructuredOutput.regex("(" * 8000 + "a" + ")" * 8000),
    "parentheses": lambda: StructuredOutput.grammar("start: " + "(" * 30000 + '"a"' + ")" * 30000),
}


@pytest.mark.slow
@pytest.mark.parametrize("structured", DEEP.values(), ids=DEEP.keys())
def test_grammars_of_maximum_depth_do_not_crash_the_process(structured):
    compiled = in_thread_with_large_stack(lambda: COMPILER.compile(structured()))
    if not isinstance(compiled, InvalidRequest):
        matcher = compiled.new_matcher()  # Masks of the grammar are filled in a thread with a normal stack.
        matcher.consume_tokens(matcher.compute_ff_tokens()[:100])
        matcher.compute_bitmask()


HUGE = {
    "a repetition of repetitions": StructuredOutput.regex("((a{0,1000}){0,1000}){0,1000}"),
    "nested quantifiers": StructuredOutput.regex("(a+)+(b+)+(a|b|ab)*c" * 20),
    "many properties": StructuredOutput.json({"properties": {f"p{index}": {"type": "string"} for index in range(200)}}),
    "an enum of many": StructuredOutput.choice([f"choice {index}" for index in range(1000)]),
    "long lists of long texts": StructuredOutput.json(
        {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**6}}
    ),
    "a fine grid": StructuredOutput.json({"type": "number", "multipleOf": 1e-7, "minimum": 0.1, "maximum": 1e15}),
    "unicode classes": StructuredOutput.regex(r"[\p{L}\p{N}]{1,200}@[\p{L}\p{N}]{1,200}" * 5),
}


@pytest.mark.parametrize("structured", HUGE.values(), ids=HUGE.keys())
def test_grammars_of_unbounded_cost_are_compiled_or_refused_in_bounded_time(structured):
    compiled = in_thread_with_large_stack(lambda: COMPILER.compile(structured))
    if isinstance(compiled, InvalidRequest):
        assert compiled.param == "structured"


@pytest.mark.parametrize("kind", [kind for kind in SchemaKind if kind is not SchemaKind.JSON_OBJECT])
def test_grammar_source_that_is_too_long_or_empty_is_refused(kind):
    source_max = SOURCE_CHARACTERS_MAX[kind]
    assert StructuredOutput(kind=kind, source="x" * source_max)
    with pytest.raises(InvalidRequest, match=f"at most {source_max} are allowed"):
        StructuredOutput(kind=kind, source="x" * (source_max + 1))
    with pytest.raises(InvalidRequest, match="is empty"):
        StructuredOutput(kind=kind)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StructuredOutput.choice([]),
        lambda: StructuredOutput.choice("yes"),
        lambda: StructuredOutput.choice(["yes", ""]),
        lambda: StructuredOutput.choice(["yes", 1]),
        lambda: StructuredOutput.regex(b"a"),
        lambda: StructuredOutput.json({"a": object()}),
        lambda: StructuredOutput.grammar(None),
    ],
)
def test_grammar_source_of_the_wrong_type_is_refused(make):
    with pytest.raises(InvalidRequest) as raised:
        make()
    assert raised.value.param == "structured"


IMPOSSIBLE = {"$ref": "#/$defs/itself", "$defs": {"itself": {"$ref": "#/$defs/itself"}}}
POSSIBLE = {"type": "object", "properties": {"a": {"type": "boolean"}}}


def tags_of(*schemas: dict) -> StructuredOutput:
    structures = [{"begin": f"<f{index}>", "schema": one, "end": "</f>"} for index, one in enumerate(schemas)]
    return StructuredOutput.structural_tag({"structures": structures, "triggers": ["<f"]})


def calls_of(*schemas: dict) -> StructuredOutput:
    choices = " | ".join(f'"{index}" %json {json.dumps(one)}' for index, one in enumerate(schemas))
    return StructuredOutput(kind=SchemaKind.TOOL_CALLS, source=f"start: {choices}", param="tools")


@pytest.mark.parametrize("make_structured", [tags_of, calls_of])
def test_an_unsatisfiable_schema_among_several_is_refused_when_compiled(make_structured):
    with pytest.raises(InvalidRequest, match=r"nothing can satisfy the schema .*#/\$defs/itself") as raised:
        COMPILER.compile(make_structured(POSSIBLE, IMPOSSIBLE))
    assert raised.value.param == make_structured(POSSIBLE).param
    assert COMPILER.compile(make_structured(POSSIBLE, POSSIBLE))


def test_a_pydantic_class_is_accepted_as_a_schema():
    class Person:
        @classmethod
        def model_json_schema(cls):
            return {"type": "object", "properties": {"name": {"const": "Ann"}}, "required": ["name"]}

    assert accepts(StructuredOutput.json(Person), '{"name": "Ann"}')


def test_keys_follow_the_schemas_order_and_white_space_follows_its_options():
    properties = {"b": {"type": "null"}, "a": {"type": "null"}}
    schema = {"type": "object", "properties": properties, "required": ["b", "a"]}
    assert accepts(StructuredOutput.json(schema), '{"b": null, "a": null}')
    assert not accepts(StructuredOutput.json(schema), '{"a": null, "b": null}')
    assert not accepts(StructuredOutput.json(schema), '{"b":null,"a":null}')
    flexible = {**schema, "x-guidance": {"whitespace_flexible": True, "key_separator": ":", "item_separator": ","}}
    assert accepts(StructuredOutput.json(flexible), '{\n "b":null,\n "a":null}')


def test_the_least_recently_used_grammars_are_evicted(monkeypatch):
    compiler = new_compiler()
    sources = [StructuredOutput.regex(f"{index}") for index in range(4)]
    monkeypatch.setattr(grammar_compiler, "CACHE_BYTES_MAX", 3 * GRAMMAR_BYTES + 1000)
    for structured in sources[:3]:
        compiler.compile(structured)
    assert compiler.find(sources[0]) is not None
    compiler.compile(sources[3])
    assert [compiler.find(structured) is not None for structured in sources] == [True, False, True, True]


def test_equal_grammar_sources_in_different_fields_share_a_compiled_grammar():
    compiler = new_compiler()
    first = compiler.compile(StructuredOutput.regex("a", param="guided_regex"))
    assert compiler.compile(StructuredOutput.regex("a", param="structured", free_until="x")) is first
    assert compiler.compiles_total == 1


def test_a_model_without_an_end_token_supports_no_grammars():
    compiler = GrammarCompiler(byte_tokenizer(), vocab_size=BYTE_VOCAB_SIZE, end_token_ids=())
    compiler.end_token_ids = ()
    with pytest.raises(InvalidRequest, match="no end token"):
        compiler.compile(StructuredOutput.regex("a"))


# Each token of this grammar adds states to the lexer.
GROWING = StructuredOutput.regex("(a|b)*a(a|b){13}[a-z ]{1,3000}")


def grown(structured, tokens_max: int) -> int:
    """Return how many tokens the matcher accepts before its lexer has too many states."""
    matcher = structured.new_matcher()
    for count, token in enumerate(random.Random(1).choices(b"ab", k=tokens_max)):
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_token(token):
            return count
    return tokens_max


def test_a_grammar_that_failed_is_compiled_again_for_the_next_request(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "LIMITS", LLParserLimits(max_lexer_states=1500, verbose_errors=False))
    compiler = new_compiler()
    factory = GuideFactory(compiler)
    sampling = SamplingParams(structured=GROWING)
    first = compiler.compile(GROWING)
    assert 20 < grown(first, 3000) < 3000
    assert grown(first, 3000) < 20, "matchers of one grammar share its lexer"
    guide = factory.find(sampling).new_guide(frozenset((END_TOKEN_ID,)), ())
    row = array("I", (0,)) * 9
    for token in b"abab" * 10:
        guide.fill_masks(row.buffer_info()[0], 9, ())
        if not guide.accept(token):
            break
    assert "too many states" in guide.fault
    assert compiler.find(GROWING) is None
    second = compiler.compile(GROWING)
    assert second is not first
    assert grown(second, 20) == 20


def test_sequences_of_a_grammar_with_too_many_lexer_states_continue(monkeypatch):
    monkeypatch.setattr(grammar_compiler, "GRAMMAR_SEQUENCES_MAX", 3)
    compiler = new_compiler()
    structured = StructuredOutput.regex("a+")
    first = compiler.compile(structured)
    matchers = [first.new_matcher() for _ in range(3)]
    assert compiler.find(structured) is None
    assert compiler.compile(structured) is not first
    assert all(matcher.consume_token(ord("a")) for matcher in matchers)


def test_estimated_memory_of_a_grammar_grows_with_filled_masks(monkeypatch):
    compiler = new_compiler()
    monkeypatch.setattr(grammar_compiler, "CACHE_BYTES_MAX", 20 * GRAMMAR_BYTES)
    used, other = compiler.compile(StructuredOutput.regex("a")), StructuredOutput.regex("b")
    used.mask_count = 10**6
    assert used.byte_count_max == GRAMMAR_BYTES + 150 + grammar_compiler.LEXER_BYTES_MAX
    compiler.compile(other)
    assert compiler.find(StructuredOutput.regex("a")) is None
    assert compiler.find(other) is not None
