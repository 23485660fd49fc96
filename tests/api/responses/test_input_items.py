"""Tests the translation of input items to chat messages: the position of reasoning, tool calls and tool results."""

from __future__ import annotations

import pytest

from trioserve.api.responses.input_items import checked_items, messages_of

ASKED = {"role": "user", "content": "go"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "r"}
SHOWN_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SHOWN_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "r", "name": "f"}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("items", "expect"),
    [
        (
            [THOUGHT, CALL, RESULT],
            [message("assistant", "", reasoning_content="hm", tool_calls=[SHOWN_CALL]), SHOWN_RESULT],
        ),
        (
            [{"role": "assistant", "content": "So:"}, CALL, {**CALL, "call_id": "c2"}],
            [message("assistant", "So:", tool_calls=[SHOWN_CALL, {**SHOWN_CALL, "id": "c2"}])],
        ),
        (
            [CALL, RESULT, THOUGHT, {"role": "assistant", "content": "x"}],
            [
                message("assistant", "", tool_calls=[SHOWN_CALL]),
                SHOWN_RESULT,
                message("assistant", "x", reasoning_content="hm"),
            ],
        ),
        (
            [{"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}],
            [message("assistant", "x"), message("assistant", "y")],
        ),
        (
            [{"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a"b'}],
            [
                message(
                    "assistant",
                    "",
                    tool_calls=[
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "patch", "arguments": '{"input": "a\\"b"}'},
                        }
                    ],
                )
            ],
        ),
        (
            [
                {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
                {"type": "local_shell_call_output", "id": "c", "output": "files"},
            ],
            [
                message(
                    "assistant",
                    "",
                    tool_calls=[
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "local_shell", "arguments": '{"command": ["ls"]}'},
                        }
                    ],
                ),
                message("tool", "files", tool_call_id="c"),
            ],
        ),
        ([{"type": "web_search_call", "id": "ws", "status": "completed"}], []),
    ],
)
def test_input_items_become_chat_messages(items, expect):
    assert messages_of(checked_items([ASKED, *items]), None) == [ASKED, *expect]
