"""Calls as JSON objects, between tags, behind markers, bare and fenced; and what only looks like one."""

from __future__ import annotations

import json

import pytest

from trioserve.text.response_parsers.registry import make_response_parser
from trioserve.text.response_parts import ContentText, ToolCallArguments, ToolCallBegin, ToolCallEnd

WEATHER_CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
PARIS = ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{WEATHER_CALL}\n</tool_call>", "", [PARIS]),
        (f"<tool_call>{WEATHER_CALL}</tool_call>", "", [PARIS]),
        (f"I look.\n<tool_call>\n{WEATHER_CALL}\n</tool_call>", "I look.", [PARIS]),
        (f"<tool_call>\n{WEATHER_CALL}\n</tool_call>\nDone.", "\nDone.", [PARIS]),
        (f"a\n<tool_call>{WEATHER_CALL}</tool_call>\nb\n<tool_call>{WEATHER_CALL}</tool_call>\n", "a\nb", [PARIS] * 2),
        (f"<tool_call>\n{WEATHER_CALL}\n</tool_call>\n" * 3, "", [PARIS] * 3),
        (f"<tool_call>\n{WEATHER_CALL}", "", [PARIS]),  # the closing tag is missing
        (f"<tool_call>\n{WEATHER_CALL}\n</tool_c", "", [PARIS]),
        (f"<tool_call>[{WEATHER_CALL}, {WEATHER_CALL}]</tool_call>", "", [PARIS] * 2),
        (f"<tool_call>{WEATHER_CALL}\n{WEATHER_CALL}</tool_call>", "", [PARIS] * 2),
        (f"<tool_call>{WEATHER_CALL} and then</tool_call>", " and then</tool_call>", [PARIS]),
        ('<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}</tool_call>', "", [PARIS]),
        ('<tool_call>{"name": "get_weather", "parameters": {"city": "Paris"}}</tool_call>', "", [PARIS]),
        (r'<tool_call>{"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}</tool_call>', "", [PARIS]),
        (
            f'<tool_call>{{"type": "function", "function": {WEATHER_CALL}, "index": 0}}</tool_call>',
            "",
            [PARIS],
        ),
        ('<tool_call>{"name": "get_time"}</tool_call>', "", [("get_time", {})]),
        ('<tool_call>{"name": "get_time", "arguments": null}</tool_call>', "", [("get_time", {})]),
        ('<tool_call>{"name": "get_time", "arguments": ""}</tool_call>', "", [("get_time", {})]),
        ('<tool_call>{"name": "not_offered", "arguments": {}}</tool_call>', "", [("not_offered", {})]),
        ('<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "", [("f", {"a": "x\ny"})]),
        ('<tool_call>{"name": "get_time", "arguments": []}</tool_call>', "", [("get_time", {})]),
        (f"<tool_call>\n{WEATHER_CALL}}}\n</tool_call>", "", [PARIS]),
        (f"<tool_call>\n{WEATHER_CALL}}} and", "} and", [PARIS]),
        (f"<tools>\n{WEATHER_CALL}\n</tools>", "", [PARIS]),
        (f"<tool_call><tool_call>{WEATHER_CALL}</tool_call>", "<tool_call>", [PARIS]),
    ],
)
def test_hermes_calls(read, text, content, calls):
    found = read(text, "hermes")
    assert (found.content, found.calls) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "Use <tool_call> tags, please.",
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "name": "g"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tools>\n" + '{"name": "not_offered", "arguments": {}}' + "\n</tools>",
        '{"name": "not_offered", "arguments": {}}',
        '{"name": "get_weather"}',
        '{"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {}}}',
        '{"name": "get_weather", "description": "Tells the weather", "parameters": {}}',
        '{"city": "Paris"}',
        "{}\n[]\n[1, 2]\n```json\n{}\n```\n``` \n",
        "```python\nprint({})\n```",
        f"in the line {WEATHER_CALL}",
        "  indented\n\n  and spaced  \n",
        "<tool_cal",
        "a < b and b << c <",
        "[see below]\n{braces}",
        "",
    ],
)
def test_what_only_looks_like_a_call_is_content_unchanged(read, text):
    for family in ("hermes", "llama3_json", "mistral"):
        found = read(text, family)
        assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (WEATHER_CALL, "", [PARIS]),
        (f"  {WEATHER_CALL}\n", None, [PARIS]),
        (f"[{WEATHER_CALL}, {WEATHER_CALL}]", "", [PARIS] * 2),
        (f"{WEATHER_CALL}\n{WEATHER_CALL}", "", [PARIS] * 2),
        (f"{WEATHER_CALL}; {WEATHER_CALL}", "", [PARIS] * 2),
        (f"{WEATHER_CALL}, right?", ", right?", [PARIS]),
        (f"```json\n{WEATHER_CALL}\n```", "", [PARIS]),
        (f"```\n[{WEATHER_CALL}]\n```", "", [PARIS]),
        (f"```json\n{WEATHER_CALL}", "", [PARIS]),
        (f"Here:\n```json\n{WEATHER_CALL}\n```\nand", None, [PARIS]),
        (f"Here:\n{WEATHER_CALL}", None, [PARIS]),
        ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', "", [PARIS]),
        ('{"name": "get_weather", "parameters": {"city": "Pa', "", []),
        ('{"name": "get_wea', '{"name": "get_wea', []),
        ("```json", "```json", []),
    ],
)
def test_bare_and_fenced_calls_of_offered_tools(read, family, text, content, calls):
    found = read(text, family)
    assert found.calls == calls
    assert content is None or found.content == content


@pytest.mark.parametrize("text", ['{"title"', '{"type": "report", "title"', '{"name": "Ann"', '[{"a"', "[1", "{ }"])
def test_a_json_answer_comes_as_soon_as_it_is_no_call(tools, text):
    parser = make_response_parser("hermes", None, tools=tools)
    assert parser.feed(text + ": 1") == [ContentText(text + ": 1")]


def test_without_tools_nothing_is_a_call(read):
    text = f"<tool_call>\n{WEATHER_CALL}\n</tool_call>"
    assert read(text, "hermes", tools=()).content == text


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<|python_tag|>{WEATHER_CALL}", "", [PARIS]),
        (f"Let me see. <|python_tag|>{WEATHER_CALL}; {WEATHER_CALL}", "Let me see. ", [PARIS] * 2),
        ('<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
    ],
)
def test_llama3_calls_behind_its_tag(read, text, content, calls):
    found = read(text, "llama3_json")
    assert (found.content, found.calls) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls", "ids"),
    [
        (f"[TOOL_CALLS] [{WEATHER_CALL}]", "", [PARIS], [None]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "a1"}]', "", [("f", {})], [None]),
        ('[TOOL_CALLS][{"id": "a1", "name": "f", "arguments": {}}]', "", [("f", {})], ["a1"]),
        ('hi[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "hi", [("f", {"a": 1}), ("g", {})], [None, None]),
        ('[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}', "", [("f", {"a": 1})], ["123456789"]),
        ('[TOOL_CALLS]f{"a": 1}', "", [("f", {"a": 1})], [None]),
        ("[TOOL_CALLS]", "", [], []),
        ('[TOOL_CALLS]f[ARGS]{"a": ', "", [], [None]),
        ("[TOOL_CALLS]two words", "[TOOL_CALLS]two words", [], []),
    ],
)
def test_mistral_calls(read, text, content, calls, ids):
    found = read(text, "mistral")
    assert (found.content, found.calls, found.ids) == (content, calls, ids)


def test_arguments_stream_as_they_come(tools):
    parser = make_response_parser("hermes", None, tools=tools)
    assert parser.feed("<tool_call>") == []
    assert parser.feed('{"name": "get_weather", "arguments": ') == []
    assert parser.feed('{"city": "Pa') == [ToolCallBegin(0, "get_weather"), ToolCallArguments(0, '{"city": "Pa')]
    assert parser.feed("ris") == [ToolCallArguments(0, "ris")]
    assert parser.feed('"}') == [ToolCallArguments(0, '"}')]
    assert parser.feed("}") == [ToolCallEnd(0)]
    assert parser.feed("</tool_call>") == []
    assert parser.end() == []


def test_a_call_that_breaks_off_has_no_end_and_is_given_back_as_content(read):
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call> so'
    found = read(text, "hermes")
    assert (found.begun, found.calls, found.content) == (["get_weather"], [], text)


def test_a_call_that_the_end_of_the_text_cuts_off_is_neither_call_nor_content(read):
    whole = f"<tool_call>\n{WEATHER_CALL}\n</tool_call>"
    for length in range(len("<tool_call>"), whole.rindex("}}") + 1):
        found = read("First. " + whole[:length], "hermes")
        assert (found.content, found.calls) == ("First.", [])


def test_depth_number_of_calls_and_names_are_bounded(read):
    deep = "[" * 2_000 + "]" * 2_000
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}}}}}</tool_call>'
    found = read(text, "hermes")
    assert (found.calls, found.content) == ([], text)
    many = f"<tool_call>{WEATHER_CALL}</tool_call>" * 130
    found = read(many, "hermes")
    assert len(found.calls) == 128
    assert found.content == f"<tool_call>{WEATHER_CALL}</tool_call>" * 2
    long = f'<tool_call>{{"name": "{"n" * 257}", "arguments": {{}}}}</tool_call>'
    assert read(long, "hermes").content == long


def test_deep_arguments_within_the_bound_are_whole(read):
    value: object = 1
    for _ in range(100):
        value = {"a": value}
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps(value)}}}</tool_call>'
    assert read(text, "hermes").calls == [("f", value)]
