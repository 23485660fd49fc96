"""Tests the translation of Anthropic's messages and tools to OpenAI's chat format."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trioserve.api.anthropic.bodies import CountTokensBody, MessagesBody
from trioserve.api.anthropic.turn import chat_messages, chat_tools
from trioserve.api.openai.request_types import decode_body
from trioserve.contracts.errors import InvalidRequest


def body_of(messages: list[dict[str, Any]], **fields: Any) -> CountTokensBody:
    return decode_body(msgspec.json.encode({"messages": messages, **fields}), CountTokensBody)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def use(id: str = "toolu_1", name: str = "get_weather", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": given}


def result(content: Any = None, id: str = "toolu_1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **fields}


def called(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    "messages, system, expected",
    [
        ([user("Hi")], None, [user("Hi")]),
        ([user([text("Hi"), text("there")])], "Be brief.", [("system", "Be brief."), user("Hi\nthere")]),
        ([user("Hi")], [text("One."), text("Two.")], [("system", "One.\nTwo."), user("Hi")]),
        (
            [user("Hi")],
            [text("x-anthropic-billing-header: cc_version=1"), text("Two.")],
            [("system", "Two."), user("Hi")],
        ),
        ([user("Hi")], "", [user("Hi")]),
        ([user("a"), user("b")], None, [user("a\nb")]),
        ([user("a"), assistant("b"), assistant("c")], None, [user("a"), assistant("b\nc")]),
        ([user("a"), {"role": "system", "content": "s"}, user("b")], None, [user("a"), ("system", "s"), user("b")]),
    ],
)
def test_text_messages_become_chat_messages(messages: Any, system: Any, expected: Any) -> None:
    wanted = [{"role": m[0], "content": m[1]} if isinstance(m, tuple) else m for m in expected]
    assert chat_messages(body_of(messages, system=system)) == wanted


def test_tool_call_and_its_result_become_chat_messages() -> None:
    made = chat_messages(
        body_of(
            [
                user("Weather?"),
                assistant(
                    [
                        {"type": "thinking", "thinking": "I need it.", "signature": "s"},
                        {"type": "redacted_thinking", "data": "xx"},
                        text("Let me see."),
                        use(city="Paris"),
                        use("toolu_2", "get_time"),
                    ]
                ),
                user(
                    [result([text("sunny"), text("warm")]), result("no clock", "toolu_2", is_error=True), text("Well?")]
                ),
            ]
        )
    )
    assert made == [
        user("Weather?"),
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I need it.",
            "tool_calls": [called("toolu_1", "get_weather", {"city": "Paris"}), called("toolu_2", "get_time", {})],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "name": "get_weather", "content": "sunny\nwarm"},
        {"role": "tool", "tool_call_id": "toolu_2", "name": "get_time", "content": "Error: no clock"},
        user("Well?"),
    ]


def test_text_documents_and_search_results_become_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Once."}
    parts = {"type": "content", "content": [text("Twice.")]}
    made = chat_messages(
        body_of(
            [
                user(
                    [
                        {"type": "document", "source": source, "title": "Tale", "context": "old"},
                        {"type": "document", "source": parts},
                        {"type": "search_result", "source": "u", "title": "t", "content": [text("found")]},
                    ]
                )
            ]
        )
    )
    assert made == [user("Tale\nold\nOnce.\nTwice.\nt\nu\nfound")]


def test_images_keep_their_position_among_texts() -> None:
    base64 = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    url = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    made = chat_messages(body_of([user([text("See"), text("this"), base64, text("and"), url]), user("Well?")]))
    parts = [
        {"type": "text", "text": "See\nthis"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
        {"type": "text", "text": "Well?"},
    ]
    assert made == [{"role": "user", "content": parts}]


@pytest.mark.parametrize(
    "messages, param, words",
    [
        ([], "messages", "empty"),
        ([user([{"type": "image", "source": {}}])], "messages[0].content[0].source", "must have a source"),
        ([user("a"), assistant([{"type": "image", "source": {}}])], "messages[1].content[0]", "of the user only"),
        (
            [user("a"), assistant([use()]), user([result([{"type": "image", "source": {}}])])],
            "messages[2].content[0].content[0]",
            "of the user only",
        ),
        ([user([{"type": "document", "source": {"type": "base64"}}])], "messages[0].content[0].source", "is not a"),
        ([user([result("x", "nobody")])], "messages[0].content[0].tool_use_id", "'nobody'"),
        ([user([use()])], "messages[0].content[0]", "tool_use is not allowed in a message of the role user"),
        ([assistant([result()])], "messages[0].content[0]", "tool_result is not allowed"),
        ([user("a"), assistant([use()])], "messages[1]", "send the tool_result"),
    ],
)
def test_invalid_content_block_is_refused_with_its_path(messages: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words.replace("[", r"\[")) as caught:
        chat_messages(body_of(messages))
    assert caught.value.param == param


def test_unknown_content_block_type_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="server_tool_use"):
        body_of([user([{"type": "server_tool_use"}])])


def test_tools_of_anthropic_become_functions_of_openai() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"name": "get_weather", "description": "d", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    body = body_of([user("a")], tools=[tool, {**tool, "type": "custom", "strict": True}])
    function = {"name": "get_weather", "description": "d", "parameters": schema}
    assert chat_tools(body.tools) == [
        {"type": "function", "function": function},
        {"type": "function", "function": {**function, "strict": True}},
    ]
    assert chat_tools(None) is chat_tools([]) is None


@pytest.mark.parametrize(
    "tool, param",
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "tools[0].type"),
        ({"name": "f"}, "tools[0].input_schema"),
        ({"name": "", "input_schema": {}}, "tools[0].name"),
        ({"name": "a b", "input_schema": {}}, "tools[0].name"),
        ({"name": "f" * 129, "input_schema": {}}, "tools[0].name"),
    ],
)
def test_invalid_tools_of_a_message_are_refused(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_tools(body_of([user("a")], tools=[tool]).tools)
    assert caught.value.param == param


def test_message_without_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_body(b'{"messages": []}', MessagesBody)
    assert caught.value.param == "max_tokens"
