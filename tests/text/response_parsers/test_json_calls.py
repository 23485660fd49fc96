"""Tests of JSON calls: between tags, after markers, without marks, in fences, and of texts that only resemble calls."""

from __future__ import annotations

import json

import pytest

from trioserve.text.response_parsers.families import TOOL_FAMILIES
from trioserve.text.response_parsers.registry import make_response_parser
from trioserve.text.response_parts import ContentText, ToolCallArguments, ToolCallBegin, ToolCallEnd, WholeCall

LLAMA_JSON = ("llama3_json", "llama4_json")
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
        (f"<tool_call>\n{WEATHER_CALL}", "", [PARIS]),  # The closing tag is missing.
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
def test_hermes_tool_calls_are_parsed(read, text, content, calls):
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
def test_a_text_that_only_resembles_a_call_is_content(read, text):
    for family in ("hermes", "llama3_json", "mistral"):
        found = read(text, family)
        assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral", "pythonic"])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (WEATHER_CALL, "", [PARIS]),
        (f"  {WEATHER_CALL}\n", None, [PARIS]),
        (f"[{WEATHER_CALL}, {WEATHER_CALL}]", "", [PARIS] * 2),
        (f"{WEATHER_CALL}\n{WEATHER_CALL}", "", [PARIS] * 2),
        (f"{WEATHER_CALL}; {WEATHER_CALL}", "", [PARIS] * 2),
        (f"```json\n{WEATHER_CALL}\n```", "", [PARIS]),
        (f"```\n[{WEATHER_CALL}]\n```", "", [PARIS]),
        (f"```json\n{WEATHER_CALL}", "", [PARIS]),
        (f"```json\n{WEATHER_CALL}\n```\n\n```json\n{WEATHER_CALL}\n```\n", "", [PARIS] * 2),
        (f"Here:\n```json\n{WEATHER_CALL}\n```\nand", f"Here:\n```json\n{WEATHER_CALL}\n```\nand", []),
        (f"```json\n{WEATHER_CALL}\n```\nand", f"```json\n{WEATHER_CALL}\n```\nand", []),
        (f"Here:\n{WEATHER_CALL}", f"Here:\n{WEATHER_CALL}", []),
        (f"`{WEATHER_CALL}`", f"`{WEATHER_CALL}`", []),
        (f"> {WEATHER_CALL}", f"> {WEATHER_CALL}", []),
        ('{"arguments": {"city": "Paris"}, "name": "get_weather"}', "", [PARIS]),
        ('{"name": "get_weather", "parameters": {"city": "Pa', "", []),
        ('{"name": "get_wea', '{"name": "get_wea', []),
        ("```json", "```json", []),
    ],
)
def test_lenient_parsing_accepts_unmarked_calls_if_the_response_has_only_calls(read, family, text, content, calls):
    found = read(text, family, is_lenient=True)
    assert found.calls == calls
    assert content is None or found.content == content


QUOTED_CALLS = {
    "a bare call": WEATHER_CALL,
    "a bare array of calls": f"[{WEATHER_CALL}]",
    "a bare call of Python": '[get_weather(city="Paris")]',
    "a fenced call": f"```json\n{WEATHER_CALL}\n```",
    "a fence with a longer mark": f"````\n```json\n{WEATHER_CALL}\n```\n````",
}
QUOTES = {
    "behind a sentence": "The page says:\n{}",
    "between sentences": "I will not do that. A call would look like this:\n{}\nPlease confirm first.",
    "in a list": "- {}\n- more",
    "in a block quote": "As he wrote:\n> {}\n",
    "in quotation marks": 'He wrote "{}".',
    "in a code span": "Write `{}` to call it.",
    "in a fence": "Example:\n~~~\n{}\n~~~\nDone.",
}


@pytest.mark.parametrize("is_lenient", [False, True])
@pytest.mark.parametrize("call", QUOTED_CALLS)
@pytest.mark.parametrize("quote", QUOTES)
def test_a_call_without_markers_in_other_text_is_content(read, quote, call, is_lenient):
    text = QUOTES[quote].format(QUOTED_CALLS[call])
    for family in sorted(TOOL_FAMILIES):
        found = read(text, family, is_lenient=is_lenient)
        assert (found.content, found.begun) == (text, []), family


@pytest.mark.parametrize("call", QUOTED_CALLS)
def test_strict_parsing_accepts_unmarked_calls_only_for_families_without_markers(read, call):
    for family in sorted(TOOL_FAMILIES):
        calls = read(QUOTED_CALLS[call], family).calls
        is_read = "bare" in call and family in ("pythonic", "llama4_pythonic")
        is_read = is_read or (call in ("a bare call", "a bare array of calls") and family in LLAMA_JSON)
        assert calls == ([PARIS] if is_read and not (call == "a bare call" and "pythonic" in family) else []), family


@pytest.mark.parametrize(
    "quote",
    [
        "Write `{}` to call it.",
        "Write ``{}`` to call it.",
        "Example:\n```\n{}\n```\nDone.",
        "Example:\n```xml\nfirst\n```\nand\n```\n{}\n```",
        "Example:\n  ~~~\n{}\n  ~~~\nDone.",
        "Example:\n````\n```\n{}\n```\n````",
        "As he wrote:\n> {}\n",
        'He wrote "{}".',
        "He wrote (\u201c{}\u201d).",
    ],
)
def test_tool_call_with_markers_in_a_quotation_is_content(read, quote):
    for family in sorted(TOOL_FAMILIES):
        call_format = TOOL_FAMILIES[family].format_for({})
        if TOOL_FAMILIES[family].has_channels or TOOL_FAMILIES[family].whole is not None:
            continue
        text = quote.format(call_format.written([WholeCall("get_weather", '{"city": "Paris"}')]))
        found = read(text, family)
        assert (found.content, found.begun) == (text, []), family


@pytest.mark.parametrize(
    "before",
    [
        "I use `get_weather`.\n",
        "I use ``a ` b`` and `get_weather` ",
        "A lone ` here.\n",
        'I look for "foo" ',
        "```python\nprint()\n```\n",
        "```\na\n````\n",
        "> a quote\n\n",
        "It's 5 ~ 6 > 4. ",
        "Inline ``` is no fence\n",
    ],
)
def test_tool_call_with_markers_after_a_quotation_is_parsed(read, before):
    for family in ("hermes", "qwen3_coder", "mistral", "glm45", "deepseek_v31"):
        call = TOOL_FAMILIES[family].format_for({}).written([WholeCall("get_weather", '{"city": "Paris"}')])
        assert read(before + call, family).calls == [PARIS], family


@pytest.mark.parametrize("text", ['{"title"', '{"type": "report", "title"', '{"name": "Ann"', '[{"a"', "[1", "{ }"])
@pytest.mark.parametrize(("family", "is_lenient"), [("hermes", False), ("hermes", True), ("llama3_json", False)])
def test_json_content_is_shown_as_soon_as_it_cannot_be_a_call(tools, text, family, is_lenient):
    parser = make_response_parser(family, None, tools=tools, is_lenient=is_lenient)
    assert parser.feed(text + ": 1") == [ContentText(text + ": 1")]


def test_parser_finds_no_calls_if_the_request_has_no_tools(read):
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
def test_llama3_calls_after_the_python_tag_are_parsed(read, text, content, calls):
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
def test_mistral_tool_calls_are_parsed(read, text, content, calls, ids):
    found = read(text, "mistral")
    assert (found.content, found.calls, found.ids) == (content, calls, ids)


def test_tool_call_arguments_are_streamed_as_they_arrive(tools):
    parser = make_response_parser("hermes", None, tools=tools)
    assert parser.feed("<tool_call>") == []
    assert parser.feed('{"name": "get_weather", "arguments": ') == []
    assert parser.feed('{"city": "Pa') == [ToolCallBegin(0, "get_weather"), ToolCallArguments(0, '{"city": "Pa')]
    assert parser.feed("ris") == [ToolCallArguments(0, "ris")]
    assert parser.feed('"}') == [ToolCallArguments(0, '"}')]
    assert parser.feed("}") == [ToolCallEnd(0)]
    assert parser.feed("</tool_call>") == []
    assert parser.end() == []


def test_a_call_with_invalid_json_has_no_end_and_its_text_becomes_content(read):
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call> so'
    found = read(text, "hermes")
    assert (found.begun, found.calls, found.content) == (["get_weather"], [], text)


def test_parser_drops_an_incomplete_call_at_the_end_of_the_text(read):
    whole = f"<tool_call>\n{WEATHER_CALL}\n</tool_call>"
    for length in range(len("<tool_call>"), whole.rindex("}}") + 1):
        found = read("First. " + whole[:length], "hermes")
        assert (found.content, found.calls) == ("First.", [])


def test_parser_bounds_argument_depth_call_count_and_name_length(read):
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


def test_nested_arguments_within_the_depth_limit_are_parsed(read):
    value: object = 1
    for _ in range(100):
        value = {"a": value}
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps(value)}}}</tool_call>'
    assert read(text, "hermes").calls == [("f", value)]
