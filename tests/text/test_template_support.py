"""Tests that tools become plain messages, in a format that the server can parse, if the template does not show them."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.templates.chat_template import ChatTemplate

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
def test_tools_that_a_template_drops_are_described_in_the_system_message(source: str) -> None:
    text = rendered(source, [{"role": "system", "content": "Be brief."}, USER], TOOLS)
    assert text.startswith("<system>Be brief.\n\n# Tools")
    assert "Weather of a city." in text
    assert "<tool_call>" in text
    assert text != rendered(source, [{"role": "system", "content": "Be brief."}, USER], None)


def test_tools_are_not_converted_to_plain_messages_if_the_template_shows_tools() -> None:
    text = rendered(WITH_TOOLS, HISTORY, TOOLS)
    assert text.startswith("<tools>")
    assert '<call>weather {"city": "Oslo"}</call>' in text
    assert "<tool>rain</tool>" in text
    assert "# Tools" not in text


def test_calls_and_results_that_a_template_drops_become_text() -> None:
    text = rendered(PLAIN, HISTORY, None)
    assert (
        '<assistant><tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call></assistant>' in text
    )
    assert "<user><tool_response>\nrain\n</tool_response></user>" in text
    assert "# Tools" not in text


def test_without_system_messages_the_users_message_describes_the_tools() -> None:
    text = rendered(NO_SYSTEM, [USER], TOOLS)
    assert text.startswith("<user># Tools")
    assert text.endswith("Oslo?</user>\n<assistant>")


def test_a_chat_that_the_template_refuses_fails_with_its_message() -> None:
    strict = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}" + PLAIN
    with pytest.raises(InvalidRequest, match="one message only"):
        rendered(strict, HISTORY, TOOLS)


def test_a_chat_without_tools_is_unchanged() -> None:
    assert rendered(PLAIN, [USER], None) == "<user>Oslo?</user>\n<assistant>"


def test_the_final_message_can_be_continued_in_a_chat_with_tools() -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    text = rendered(PLAIN, messages, TOOLS, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<assistant>It is")
    assert "# Tools" in text


def test_invalid_arguments_are_refused_and_the_error_names_their_field() -> None:
    broken = [USER, {**HISTORY[1], "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}]
    for source in (PLAIN, WITH_TOOLS):
        with pytest.raises(InvalidRequest, match="not JSON") as caught:
            rendered(source, broken, TOOLS)
        assert caught.value.param == "messages[1].tool_calls[0]"


JOINS = """{% if tools %}<tools>{{ tools | tojson }}{% endif %}
{%- for message in messages %}{% if message.role == 'user' %}<user>{{ message.content }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{%- for call in message.tool_calls %}<call>{{ call.function.name + ' ' + call.function.arguments }}</call>
{%- endfor %}
{%- elif message.role == 'assistant' %}<assistant>{{ message.content }}
{%- elif message.role == 'tool' %}<tool>{{ message.content }}{% endif %}
{% endfor %}"""
PRINTS = JOINS.replace("' ' + call.function.arguments", "' ' ~ call.function.arguments")
FIRST_SYSTEM = """{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}
{% endif %}{% for message in messages %}{% if message.role in ['user', 'assistant'] %}
<{{ message.role }}>{{ message.content }}{% endif %}{% endfor %}"""
KNOWS_DEVELOPER = """{% for message in messages %}{% if message.role in ('developer', 'system') %}<developer>
{%- else %}<{{ message.role }}>{% endif %}{{ message.content }}
{% endfor %}"""
SYSTEM = {"role": "system", "content": "Be brief."}
LATER = {"role": "system", "content": "Be kind."}
ANSWER = {"role": "assistant", "content": "Rain."}


@pytest.mark.parametrize("source", [JOINS, PRINTS])
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_templates_that_join_arguments_to_text_get_json_text(source: str, tools: list[dict[str, Any]] | None) -> None:
    text = rendered(source, HISTORY, tools)
    assert '<call>weather {"city": "Oslo"}</call>' in text
    assert "<tool>rain" in text
    as_object = [*HISTORY[:1], {**HISTORY[1], "tool_calls": [_with_arguments({"city": "Oslo"})]}, *HISTORY[2:]]
    assert rendered(source, as_object, tools) == text


def _with_arguments(arguments: object) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}


@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_templates_that_dump_arguments_get_an_object(tools: list[dict[str, Any]] | None) -> None:
    assert '<call>weather {"city": "Oslo"}</call>' in rendered(WITH_TOOLS, HISTORY, tools)


def test_arguments_that_stay_json_text_are_checked_too() -> None:
    broken = [USER, {**HISTORY[1], "tool_calls": [_with_arguments("{")]}, HISTORY[2]]
    with pytest.raises(InvalidRequest, match="not JSON"):
        rendered(JOINS, broken, None)


def test_calls_in_a_request_without_tools_become_text_if_the_template_drops_them() -> None:
    source = "{% if not tools %}" + PLAIN + "{% else %}" + WITH_TOOLS + "{% endif %}"
    assert "<call>weather" in rendered(source, HISTORY, TOOLS)
    assert "<tool_response>\nrain" in rendered(source, HISTORY, None)


def test_role_developer_becomes_system_unless_the_template_shows_developer() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    for source in (PLAIN, FIRST_SYSTEM):
        assert rendered(source, messages, None) == rendered(source, [SYSTEM, USER], None)
    assert rendered(KNOWS_DEVELOPER, messages, None).startswith("<developer>Be brief.")


@pytest.mark.parametrize("later", [LATER, {**LATER, "role": "developer"}])
def test_system_messages_that_a_template_would_drop_are_moved(later: dict[str, Any]) -> None:
    text = rendered(FIRST_SYSTEM, [SYSTEM, later, USER], None)
    assert text.startswith("<system>Be brief.\n\nBe kind.\n")
    text = rendered(FIRST_SYSTEM, [SYSTEM, USER, ANSWER, later, USER], None)
    assert text.endswith("<assistant>Rain.<user>Be kind.\n\nOslo?")
    text = rendered(FIRST_SYSTEM, [USER, ANSWER, later], None)
    assert text.endswith("<user>Be kind.")
    text = rendered(JOINS, [SYSTEM, USER], None)
    assert text.startswith("<user>Be brief.\n\nOslo?")


def test_parts_of_a_moved_system_message_are_kept() -> None:
    later = {**LATER, "content": [{"type": "text", "text": "Be kind."}]}
    assert "<user>Be kind.\nOslo?" in rendered(JOINS, [USER, ANSWER, later, USER], None)


def test_system_messages_that_a_template_shows_are_not_moved() -> None:
    text = rendered(PLAIN, [SYSTEM, LATER, USER, ANSWER, LATER, USER], None)
    assert text.count("<system>Be kind.</system>") == 2


def test_content_of_a_message_with_calls_becomes_a_separate_message_if_dropped() -> None:
    messages = [USER, {**HISTORY[1], "content": "Let me look."}, HISTORY[2]]
    assert "<assistant>Let me look.<call>weather" in rendered(JOINS, messages, TOOLS)
    assert rendered(WITH_TOOLS, messages, TOOLS).count("Let me look.") == 1


def test_an_unknown_role_is_refused_and_the_error_lists_known_roles() -> None:
    for source in (PLAIN, FIRST_SYSTEM):
        with pytest.raises(InvalidRequest, match="'critic', allowed are assistant, developer, function") as caught:
            rendered(source, [USER, {"role": "critic", "content": "No."}], None)
        assert caught.value.param == "messages[1].role"


@pytest.mark.parametrize("test", ["message.role == 'critic'", "message['role'] in ['critic', 'judge']"])
def test_a_role_that_the_template_names_is_accepted(test: str) -> None:
    source = PLAIN.replace("<{{ message.role }}>", "{% if " + test + " %}!{% endif %}<{{ message.role }}>", 1)
    assert "!<critic>No." in rendered(source, [USER, {"role": "critic", "content": "No."}], None)
