"""A template without a place for tools does not drop them: they become plain messages in a format that is parsed."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.chat_template import ChatTemplate

PLAIN = """{% for message in messages %}<{{ message.role }}>{{ message['content'] }}</{{ message.role }}>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
WITH_TOOLS = """{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor %}</{{ message.role }}>
{% endfor %}"""
NO_SYSTEM = (
    """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}""" + PLAIN
)
NAMES_TOOLS_ONLY = "{% if tools %}{# what comes of them is nothing #}{% endif %}" + PLAIN
PARTS = """{% for message in messages %}<{{ message.role }}>{% for part in message.content %}{{ part.text }}{% endfor %}
{% endfor %}"""

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city."}}]
USER = {"role": "user", "content": "Oslo?"}
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
HISTORY: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "rain"},
]


def rendered(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **fields: Any) -> str:
    template = ChatTemplate(source, bos_token=None, eos_token="</s>")
    return template.render(ChatPrompt(messages=messages, tools=tools, **fields), tool_family="hermes")


@pytest.mark.parametrize("source", [PLAIN, NAMES_TOOLS_ONLY, PARTS])
def test_tools_that_a_template_drops_stand_in_the_system_message(source: str) -> None:
    text = rendered(source, [{"role": "system", "content": "Be brief."}, USER], TOOLS)
    assert text.startswith("<system>Be brief.\n\n# Tools")
    assert "Weather of a city." in text
    assert "<tool_call>" in text
    assert text != rendered(source, [{"role": "system", "content": "Be brief."}, USER], None)


def test_a_template_with_a_place_for_tools_is_left_to_itself() -> None:
    text = rendered(WITH_TOOLS, HISTORY, TOOLS)
    assert text.startswith("<tools>")
    assert '<call>weather {"city": "Oslo"}</call>' in text
    assert "<tool>rain</tool>" in text
    assert "# Tools" not in text


def test_calls_and_results_that_a_template_drops_are_text() -> None:
    text = rendered(PLAIN, HISTORY, None)
    assert (
        '<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call></assistant>' in text
    )
    assert "<user><tool_response>\nrain\n</tool_response></user>" in text
    assert "# Tools" not in text


def test_without_a_place_for_the_system_the_user_says_it() -> None:
    text = rendered(NO_SYSTEM, [USER], TOOLS)
    assert text.startswith("<user># Tools")
    assert text.endswith("Oslo?</user>\n<assistant>")


def test_what_a_template_cannot_take_at_all_is_refused_in_a_sentence() -> None:
    strict = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}" + PLAIN
    with pytest.raises(InvalidRequest, match="one message only"):
        rendered(strict, HISTORY, TOOLS)


def test_a_chat_without_tools_is_as_it_was() -> None:
    assert rendered(PLAIN, [USER], None) == "<user>Oslo?</user>\n<assistant>"


def test_the_last_message_can_be_continued_behind_tools() -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    text = rendered(PLAIN, messages, TOOLS, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<assistant>It is")
    assert "# Tools" in text


def test_wrong_arguments_are_named_by_their_place() -> None:
    broken = [USER, {**HISTORY[1], "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}]
    for source in (PLAIN, WITH_TOOLS):
        with pytest.raises(InvalidRequest, match="not JSON") as caught:
            rendered(source, broken, TOOLS)
        assert caught.value.param == "messages[1].tool_calls[0]"
