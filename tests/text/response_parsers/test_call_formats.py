"""Tests of calls in formats other than plain JSON: names, typed values, closing tags in values, texts without calls."""

from __future__ import annotations

import pytest

PARIS = ("get_weather", {"city": "Paris"})
DSML = "\uff5cDSML\uff5c"


def qwen(*parameters: str, name: str = "get_weather") -> str:
    values = "".join(f"<parameter={parameter}\n</parameter>\n" for parameter in parameters)
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        # Values get the types of the schema.
        ("qwen3_coder", qwen("city>\nParis", "days>\n3"), "", [("get_weather", {"city": "Paris", "days": 3})]),
        ("qwen3_coder", qwen("city>\n3", "days>\nthree"), "", [("get_weather", {"city": "3", "days": "three"})]),
        ("qwen3_coder", qwen("days>\n007"), "", [("get_weather", {"days": 7})]),
        ("qwen3_coder", qwen("lines>\n[1, True]", name="write_file"), "", [("write_file", {"lines": [1, True]})]),
        ("qwen3_coder", qwen("lines>\n['a', None]", name="write_file"), "", [("write_file", {"lines": ["a", None]})]),
        ("qwen3_coder", qwen("unknown>\n3"), "", [("get_weather", {"unknown": "3"})]),
        ("glm45", "<tool_call>get_weather\n<arg_key>unknown</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", "",
         [("get_weather", {"unknown": 3})]),
        # One line break at each end of a value belongs to the tags. Further line breaks belong to the value.
        ("qwen3_coder", qwen("city>\n\n Paris \n"), "", [("get_weather", {"city": "\n Paris \n"})]),
        ("qwen3_coder", "<tool_call><function=get_time></function></tool_call>", "", [("get_time", {})]),
        # Values may contain the text of tags.
        ("qwen3_coder", qwen("content>\nx </parameter> y </function> z", name="write_file"), "",
         [("write_file", {"content": "x </parameter> y </function> z"})]),
        ("qwen3_coder", qwen("content>\n</parameter>x\n<b>", name="write_file"), "",
         [("write_file", {"content": "</parameter>x\n<b>"})]),
        # Closing tags are missing.
        ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nParis\n</function>", "", [PARIS]),
        ("qwen3_coder", qwen("city>\nParis").removesuffix("\n</tool_call>"), "", [PARIS]),
        ("qwen3_coder", qwen("city>\nParis").removesuffix("</function>\n</tool_call>"), "", []),
        ("qwen3_coder", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "",
         [PARIS]),
        ("qwen3_coder", "The tag <function=x> opens", "The tag <function=x> opens", []),
        ("qwen3_coder", "<function=unknown>\n</function>", "<function=unknown>\n</function>", []),
        ("qwen3_coder", qwen("city>\na", "city>\nb"), qwen("city>\na", "city>\nb"), []),
        ("seed_oss", qwen("city>\nParis").replace("tool_call", "seed:tool_call"), "", [PARIS]),
        ("glm45", "<tool_call>two words</tool_call>", "<tool_call>two words</tool_call>", []),
        ("glm47", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a</arg_value> b</arg_value></tool_call>", "",
         [("get_weather", {"city": "a</arg_value> b"})]),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
         '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>', "",
         [("get_weather", {"city": "Paris", "days": 3})]),
        ("deepseek_v32", f'<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
         f'<{DSML}parameter name="city" string="false">3</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
         "",
         [("get_weather", {"city": 3})]),
        ("deepseek_v4", f"<{DSML}tool_calls>none</{DSML}tool_calls>", f"<{DSML}tool_calls>none</{DSML}tool_calls>", []),
        ("pythonic", '[get_weather(city="Paris")]', "", [PARIS]),
        ("pythonic", "[get_weather(city='Paris', days=-3,), get_time()]", "",
         [("get_weather", {"city": "Paris", "days": -3}), ("get_time", {})]),
        ("pythonic", "[write_file(content='''a\n\"b\" 'c' ''', path='')]", "",
         [("write_file", {"content": "a\n\"b\" 'c' ", "path": ""})]),
        ("pythonic", r"[write_file(content='\x41\u00e9\n\d\'', lines=[1_000, .5, {'a': (1)}])]", None, []),
        ("pythonic", r"[write_file(content='\x41\u00e9\n\d\'', lines=[1_000, .5, {'a': None}])]", "",
         [("write_file", {"content": "A\u00e9\n\\d'", "lines": [1000, 0.5, {"a": None}]})]),
        ("pythonic", "[not_offered(a=1)]", "[not_offered(a=1)]", []),
        ("pythonic", "[get_weather('Paris')]", "[get_weather('Paris')]", []),
        ("pythonic", "[get_weather(city=get_time())]", "[get_weather(city=get_time())]", []),
        ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
        ("pythonic", "[get_time(), get_weather(city=", "", []),
        ("pythonic", "[get_time(), nothing]", "[get_time(), nothing]", []),
        ("pythonic", '[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
        ("olmo3", '<function_calls>\nget_weather(city="Paris")\nget_time()\n</function_calls>', "",
         [PARIS, ("get_time", {})]),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>', "",
         [("get_weather", {"city": "Paris", "days": 3})]),
        ("gemma4", '<|tool_call>call:f{a:{b c:[true,<|"|>"x"<|"|>]},d:word}<tool_call|>!', "!",
         [("f", {"a": {"b c": [True, '"x"']}, "d": "word"})]),
        ("gemma4", "<|tool_call>call:f<tool_call|>", "<|tool_call>call:f<tool_call|>", []),
        ("kimi_k2", "a <|tool_call_begin|>functions.get_time:3<|tool_call_argument_begin|>{}<|tool_call_end|>", "a ",
         [("get_time", {})]),
        ("lfm2", "<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|>Done", "Done", [PARIS]),
        ("cohere_command3", '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "get_time", "parameters": {}}\n]'
         "<|END_ACTION|>", "", [("get_time", {})]),
        ("granite", '<|tool_call|>[{"name": "get_time", "arguments": {}}]', "", [("get_time", {})]),
        ("phi4_mini_json", 'functools[{"name": "get_time", "arguments": {}}]', "", [("get_time", {})]),
    ],
)  # fmt: skip
def test_parser_reads_calls_in_the_format_of_each_family(read, family, text, content, calls):
    found = read(text, family)
    assert found.calls == calls
    assert content is None or found.content == content


def test_parser_keeps_call_ids_that_kimi_writes(read):
    text = "<|tool_call_begin|>functions.get_time:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read(text, "kimi_k2").ids == ["functions.get_time:3"]


CALL = '<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Paris"}'


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "Hm.", "Yes.",
         []),
        (f"<|channel|>analysis<|message|>Hm.<|end|>{CALL}<|call|>", "Hm.", "", [PARIS]),
        (f"<|channel|>analysis<|message|>Hm.<|end|>{CALL}<|call|>{CALL}", "Hm.", "", [PARIS] * 2),
        (f"<|channel|>analysis<|message|>I see <|end|> tags{CALL}", "I see <|end|> tags", "", [PARIS]),
        ("<|channel|>final<|message|>A<|end|> and <|channel|>final too", "", "A<|end|> and <|channel|>final too", []),
        ("Without any header.<|return|>", "", "Without any header.", []),
        ("<|channel|>commentary to=python<|message|>print(1)<|end|>", "", "", []),
        (f"<|channel|>analysis<|message|>Hm.<|end|>{CALL[:-2]}", "Hm.", "", []),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|chan", "Hm.", "", []),
        ("<|start|>assistant to=functions.f<|channel|>commentary<|message|>no JSON<|call|>", "",
         "<|start|>assistant to=functions.f<|channel|>commentary<|message|>no JSON", []),
        ("", "", "", []),
    ],
)  # fmt: skip
def test_harmony_messages_are_parsed(read, text, reasoning, content, calls):
    # For families with channels, the reasoning family determines the format.
    for tool_family in ("openai", None, "hermes"):
        found = read(text, tool_family, "openai_gptoss")
        assert (found.reasoning, found.content, found.calls) == (reasoning, content, calls)


def test_harmony_parser_finds_no_calls_if_the_request_has_no_tools(read):
    assert read(f"<|channel|>analysis<|message|>Hm.<|end|>{CALL}", None, "openai", tools=()).calls == []


@pytest.mark.parametrize("tools_there", [True, False])
def test_channel_marks_of_kimi_k3_are_not_content(read, tools, tools_there):
    text = "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>"
    found = read(text, None, "kimi_k3", begins_inside=True, tools=tools if tools_there else ())
    assert (found.reasoning, found.content) == ("Hm.", "Yes.")


def test_channel_marks_of_cohere_are_not_content(read):
    text = "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    found = read(text, None, "cohere_command3", tools=())
    assert (found.reasoning, found.content) == ("Hm.", "Yes.")


@pytest.mark.parametrize("family", ["qwen3_coder", "kimi_k2"])
def test_tool_call_ends_reasoning_without_a_closing_tag(read, family):
    text = {
        "qwen3_coder": "Hm.\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        "kimi_k2": "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    }[family]
    found = read(text, family, "qwen3", begins_inside=True)
    assert (found.reasoning, found.calls) == ("Hm.", [("get_time", {})])
    assert read(text, family, "qwen3", begins_inside=True, tools=()).reasoning == text
