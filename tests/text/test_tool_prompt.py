"""Tests of tools and calls in prompts whose template does not show them."""

from __future__ import annotations

import json

import pytest

from trioserve.text.response_parsers.families import TOOL_FAMILIES
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.templates.template_support import plain_messages, tools_text

WEATHER = OfferedTool(name="get_weather", description="Tells the weather", parameters={"type": "object"})
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}


def test_the_system_message_describes_every_tool_and_the_format_of_calls():
    [system, user] = plain_messages([{"role": "user", "content": "Hi"}], [WEATHER], "hermes")
    assert system["role"] == "system"
    assert (
        '{"type": "function", "function": {"name": "get_weather", "description": "Tells the weather"'
        in (system["content"])
    )
    assert (
        '<tool_call>\n{"name": "function_name", "arguments": {"argument_name": "value"}}\n</tool_call>'
        in (system["content"])
    )
    assert user == {"role": "user", "content": "Hi"}


def test_tools_are_appended_to_the_system_message():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    plain = plain_messages(messages, [WEATHER], "hermes")
    assert plain[0]["content"].startswith("Be brief.\n\n# Tools")
    assert len(plain) == 2
    assert messages[0]["content"] == "Be brief."


def test_calls_and_results_become_the_text_of_messages():
    messages = [
        {"role": "user", "content": "Where is it warmer?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "20"},
        {"role": "tool", "tool_call_id": "c1", "content": "21"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "22"},
        {"role": "user", "content": "Well?"},
    ]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert plain_messages(messages, [], "hermes") == [
        {"role": "user", "content": "Where is it warmer?"},
        {"role": "assistant", "content": f"I look.\n{call}\n{call}"},
        {
            "role": "user",
            "content": "<tool_response>\n20\n</tool_response>\n<tool_response>\n21\n</tool_response>",
        },
        {"role": "assistant", "content": call},
        {"role": "user", "content": "<tool_response>\n22\n</tool_response>"},
        {"role": "user", "content": "Well?"},
    ]


def test_arguments_may_be_objects_and_calls_may_have_the_older_shape():
    call = {"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    [message] = plain_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], [], "llama3_json")
    assert message["content"] == '{"name": "get_weather", "parameters": {"city": "Zürich"}}'
    old = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    [message] = plain_messages([old], [], "llama3_json")
    assert json.loads(message["content"])["parameters"] == {"city": "Paris"}


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
def test_every_family_can_describe_its_format_of_calls(family):
    assert "function_name" in tools_text(family, [WEATHER])
