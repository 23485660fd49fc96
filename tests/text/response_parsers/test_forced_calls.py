"""Tests that grammars of forced calls compile, allow texts that the parser reads, and exclude wrong arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping

import llguidance
import llguidance.numpy
import msgspec
import pytest

from trioserve.text.response_parsers.call_format import JsonOf
from trioserve.text.response_parsers.families import TOOL_FAMILIES
from trioserve.text.response_parts import WholeCall
from trioserve.text.restraints import calls_or_json, forced_calls, strict_calls

FAMILIES = sorted(TOOL_FAMILIES)
PARIS = WholeCall("get_weather", '{"city": "Paris", "days": 3}')
NOON = WholeCall("get_time", "{}")


@pytest.fixture(scope="module")
def byte_vocabulary() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


@pytest.fixture(scope="module")
def takes(byte_vocabulary):
    """Return a function that returns True if a grammar allows a whole text."""

    def takes_text(grammar: str, text: str) -> bool:
        problem = llguidance.LLMatcher.validate_grammar(grammar, byte_vocabulary)
        assert not problem, (problem, grammar)
        matcher = llguidance.LLMatcher(byte_vocabulary, grammar)
        tokens = byte_vocabulary.tokenize_str(text)
        return (
            matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    return takes_text


def written(family: str, *calls: WholeCall, special: Mapping[str, int] | None = None) -> str:
    return TOOL_FAMILIES[family].format_for(special or {}).written(calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_parser_reads_calls_that_its_family_writes(read, family):
    for calls in ((PARIS,), (NOON,), (PARIS, NOON, PARIS)):
        found = read(written(family, *calls), family)
        assert found.calls == [(call.name, json.loads(call.arguments)) for call in calls]
        assert found.content == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_parser_shows_an_incomplete_call_neither_as_complete_nor_as_content(read, family):
    calls = (PARIS, NOON, PARIS)
    expected = [(call.name, json.loads(call.arguments)) for call in calls]
    text = written(family, *calls)
    for end in range(len(text)):
        found = read(text[:end], family)
        assert found.calls == expected[: len(found.calls)], text[:end]
        assert not (found.begun and found.content), (text[:end], found)
        trigger = TOOL_FAMILIES[family].format_for({}).trigger
        assert not trigger or trigger not in found.content, (text[:end], found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_call_names_an_offered_tool_and_follows_its_schema(tools, takes, family):
    structured = forced_calls(family, tools, may_repeat=False, special_token_ids={})
    assert takes(structured.source, written(family, PARIS))
    assert takes(structured.source, written(family, NOON))
    assert takes(structured.source, written(family, WholeCall("get_weather", '{"city": "a\\n\\"b\\" é"}')))
    assert not takes(structured.source, "Let me see.")
    assert not takes(structured.source, written(family, WholeCall("get_whether", '{"city": "Paris"}')))
    assert not takes(structured.source, written(family, WholeCall("get_weather", '{"days": 3}')))
    assert not takes(structured.source, written(family, WholeCall("get_weather", '{"city": "Paris", "days": "three"}')))
    assert not takes(structured.source, written(family, PARIS, PARIS))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_of_a_named_tool_cannot_name_another_tool(tools, takes, family):
    structured = forced_calls(family, tools[1:2], may_repeat=False, special_token_ids={})
    assert takes(structured.source, written(family, NOON))
    assert not takes(structured.source, written(family, PARIS))


@pytest.mark.parametrize("family", FAMILIES)
def test_grammar_allows_several_tool_calls_if_the_family_supports_them(tools, takes, family):
    structured = forced_calls(family, tools, may_repeat=True, special_token_ids={})
    several = TOOL_FAMILIES[family].format_for({}).separator is not None
    assert takes(structured.source, written(family, PARIS))
    assert takes(structured.source, written(family, PARIS, NOON, PARIS)) == several


def ends_reachable(vocabulary: llguidance.LLTokenizer, grammar: str, calls: str, closing: str) -> dict[str, bool]:
    """For each text that may follow complete calls, return whether the response may end after this text.

    The search tries every byte that the grammar allows. It stops at `closing` and at the beginning of another call.
    """
    ends = {}
    paths = [""]
    while paths:
        path = paths.pop()
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        assert matcher.consume_tokens(vocabulary.tokenize_str(calls + path))
        closed = matcher.deep_copy()
        ends[path] = closed.consume_tokens(vocabulary.tokenize_str(closing)) and closed.is_accepting()
        mask = llguidance.numpy.allocate_token_bitmask(1, vocabulary.vocab_size)
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = [chr(byte) for byte in range(256) if mask[0, byte // 32] >> (byte % 32) & 1]
        paths += [path + character for character in allowed if character in " \n\t,;"]
        assert len(ends) < 20, "the texts between two calls are bounded"
    return ends


@pytest.mark.parametrize("family", FAMILIES)
def test_a_response_may_end_after_a_complete_call_and_after_any_separator(tools, byte_vocabulary, read, family):
    call_format = TOOL_FAMILIES[family].format_for({})
    for may_repeat, calls in ((False, (PARIS,)), (True, (PARIS,)), (True, (PARIS, NOON))):
        if len(calls) > 1 and call_format.separator is None:
            continue
        grammars = [forced_calls(family, tools, may_repeat=may_repeat, special_token_ids={})]
        schema = {"type": "object", "required": ["answer"], "properties": {"answer": {"type": "string"}}}
        grammars.append(calls_or_json(family, tools, JsonOf(schema), may_repeat=may_repeat, special_token_ids={}))
        for grammar in grammars:
            text = written(family, *calls).removesuffix(call_format.closing)
            ends = ends_reachable(byte_vocabulary, grammar.source, text, call_format.closing)
            assert all(ends.values()), ends
            separator = call_format.separator or ""
            assert not may_repeat or separator.strip(" \n\t,;") or separator in ends
            for between in ends:
                found = read(text + between + call_format.closing, family)
                assert [name for name, _ in found.calls] == [call.name for call in calls]
                assert found.content == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_separator_is_optional_after_the_last_forced_call(tools, takes, family):
    call_format = TOOL_FAMILIES[family].format_for({})
    structured = forced_calls(family, tools, may_repeat=True, special_token_ids={})
    text = written(family, PARIS).removesuffix(call_format.closing)
    assert takes(structured.source, text + (call_format.separator or "") + call_format.closing)


@pytest.mark.parametrize(
    ("inside", "free_until", "good", "bad"),
    [
        (True, "</think>", ["{}", "\n\n{}"], ["<think>a</think>{}"]),
        (None, "", ["{}", "<think>\na\n</think>\n\n{}", "<think></think>{}"], ["a</think>{}", "<think>{}"]),
        (False, "", ["{}"], ["\n{}", "<think>a</think>{}"]),
    ],
)
def test_a_forced_call_may_follow_reasoning(tools, takes, inside, free_until, good, bad):
    structured = forced_calls(
        "hermes", tools, may_repeat=False, special_token_ids={}, reasoning_family="qwen3", begins_inside=inside
    )
    assert structured.free_until == free_until
    call = written("hermes", PARIS)
    assert all(takes(structured.source, text.replace("{}", call)) for text in good)
    assert not any(takes(structured.source, text.replace("{}", call)) for text in bad)


def test_grammar_begins_after_reasoning_with_which_the_response_begins(tools):
    structured = forced_calls("hermes", tools, may_repeat=False, special_token_ids={}, reasoning_family="deepseek_r1")
    assert structured.free_until == "</think>"


@pytest.mark.parametrize("family", [family for family in FAMILIES if TOOL_FAMILIES[family].call_format.trigger])
def test_optional_calls_of_strict_tools_follow_their_schemas(tools, takes, family):
    strict = [msgspec.structs.replace(tool, strict=True) for tool in tools]
    structured = strict_calls(family, strict, may_repeat=True, special_token_ids={})
    assert structured is not None
    assert takes(structured.source, "Just text, with <tags> and {braces}.\n")
    assert takes(structured.source, written(family, PARIS))
    assert takes(structured.source, "I look.\n" + written(family, PARIS))
    assert not takes(structured.source, "I look.\n" + written(family, WholeCall("get_weather", '{"days": 3}')))
    assert not takes(structured.source, written(family, WholeCall("get_whether", '{"city": "Paris"}')))


def test_optional_calls_have_no_grammar_if_no_tool_is_strict(tools):
    assert strict_calls("hermes", tools, may_repeat=True, special_token_ids={}) is None


def test_grammar_replaces_the_spelling_of_special_tokens_by_the_tokens(tools):
    structured = forced_calls(
        "hermes", tools, may_repeat=False, special_token_ids={"<tool_call>": 7, "</tool_call>": 9}
    )
    assert '<[7]> "\\n{' in structured.source
    assert '"}\\n" <[9]>' in structured.source
    assert "<tool_call>" not in structured.source


def test_grammar_for_older_mistral_vocabularies_forces_an_array_of_calls(tools, takes):
    structured = forced_calls("mistral", tools, may_repeat=True, special_token_ids={})
    assert takes(structured.source, '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]')
    structured = forced_calls("mistral", tools, may_repeat=True, special_token_ids={"[TOOL_CALLS]": 5, "[ARGS]": 6})
    assert '<[5]> "get_time" <[6]>' in structured.source


def test_equal_requests_get_equal_tool_call_grammars(tools):
    first = forced_calls("hermes", tools, may_repeat=True, special_token_ids={"<tool_call>": 7})
    assert first == forced_calls("hermes", list(tools), may_repeat=True, special_token_ids={"<tool_call>": 7})


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"type": "object", "properties": {}, "additionalProperties": False}],
)
def test_grammar_can_force_calls_of_tools_without_parameters(takes, tools, parameters):
    tool = msgspec.structs.replace(tools[1], parameters=parameters)
    for family in FAMILIES:
        structured = forced_calls(family, [tool], may_repeat=False, special_token_ids={})
        assert takes(structured.source, written(family, NOON))
