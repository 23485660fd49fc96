"""Tests the content blocks of whole and streamed responses, which the client library itself reads."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from trioserve.api.anthropic.messages import BlockEvents, ContentBlocks
from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

EVENT = TypeAdapter(RawMessageStreamEvent)
START = {
    "type": "message_start",
    "message": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 0},
    },
}

TEXT = [ContentText("Hel"), ContentText("lo")]
THOUGHT = [ReasoningText("I "), ReasoningText("think")]


def call(index: int, *pieces: str, ends: bool = True) -> list[ResponsePart]:
    begin = ToolCallBegin(index=index, name=f"f{index}", id=f"call_{index}")
    arguments = [ToolCallArguments(index=index, text=piece) for piece in pieces]
    return [begin, *arguments, *([ToolCallEnd(index=index)] if ends else [])]


def events_of(raw: bytes) -> list[dict[str, Any]]:
    events = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        EVENT.validate_python(value, strict=True)
        events.append(value)
    return events


def streamed(parts: list[ResponsePart], **options: Any) -> tuple[list[dict[str, Any]], Any]:
    """Return the events, and the content that the client library assembles from the events."""
    maker = BlockEvents(**options)
    events = events_of(b"".join([*(maker.of([part]) for part in parts), maker.end()]))
    snapshot = None
    buffers: dict[int, bytes] = {}
    for event in [START, *events]:
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)  # type: ignore[arg-type]
    assert snapshot is not None
    return events, snapshot.to_dict()["content"]


def whole(parts: list[ResponsePart], **options: Any) -> list[dict[str, Any]]:
    blocks = ContentBlocks(**options)
    blocks.take(parts)
    content = json.loads(msgspec.json.encode(blocks.whole()))
    Message.model_validate({**START["message"], "content": content}, strict=True)  # type: ignore[dict-item]
    return content


def shape(content: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    fields = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block["type"], block[fields[block["type"]]]) for block in content]


@pytest.mark.parametrize(
    "parts, expected",
    [
        (TEXT, [("text", "Hello")]),
        ([], [("text", "")]),
        ([ContentText("")], [("text", "")]),
        ([*THOUGHT, *TEXT], [("thinking", "I think"), ("text", "Hello")]),
        ([*TEXT, *THOUGHT, *TEXT], [("text", "Hello"), ("thinking", "I think"), ("text", "Hello")]),
        (call(0, '{"a":', " 1}"), [("tool_use", {"a": 1})]),
        (call(0), [("tool_use", {})]),
        (
            [*THOUGHT, *TEXT, *call(0, '{"a": "é\\n\\u2028"}'), *call(1, "{}"), *TEXT],
            [
                ("thinking", "I think"),
                ("text", "Hello"),
                ("tool_use", {"a": "é\n\u2028"}),
                ("tool_use", {}),
                ("text", "Hello"),
            ],
        ),
    ],
)
def test_streamed_and_whole_response_have_the_same_blocks(parts: Any, expected: Any) -> None:
    events, content = streamed(parts)
    assert shape(content) == shape(whole(parts)) == expected
    assert [block.get("signature") for block in content] == [block.get("signature") for block in whole(parts)]
    begun = [event["index"] for event in events if event["type"] == "content_block_start"]
    ended = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert begun == ended == list(range(len(expected)))


def test_block_ends_before_the_next_block_begins() -> None:
    events, _ = streamed([*THOUGHT, *TEXT, *call(0, "{}")])
    kinds = [(event["type"], event.get("delta", {}).get("type")) for event in events]
    assert kinds == [
        ("content_block_start", None),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", None),
        ("content_block_delta", "text_delta"),
        ("content_block_delta", "text_delta"),
        ("content_block_stop", None),
        ("content_block_start", None),
        ("content_block_delta", "input_json_delta"),
        ("content_block_stop", None),
    ]


def test_omitted_reasoning_keeps_its_signature() -> None:
    events, content = streamed([*THOUGHT, *TEXT], shows_reasoning=False)
    assert (
        shape(content)
        == shape(whole([*THOUGHT, *TEXT], shows_reasoning=False))
        == [
            ("thinking", ""),
            ("text", "Hello"),
        ]
    )
    assert content[0]["signature"]
    assert b"think" not in b"".join(str(event.get("delta")).encode().replace(b"thinking", b"") for event in events)


def test_incomplete_tool_call_is_not_in_a_whole_response() -> None:
    parts = [*TEXT, *call(0, '{"a": 1}'), *call(1, '{"a"', ends=False)]
    assert shape(whole(parts)) == [("text", "Hello"), ("tool_use", {"a": 1})]
    events, _ = streamed(parts)
    assert events[-1]["type"] == "content_block_stop"


def test_numbers_in_tool_call_arguments_are_not_reformatted() -> None:
    blocks = ContentBlocks()
    blocks.take(call(0, '{"big": 123456789012345678901234567890, "odd": "\\ud800"}'))
    assert b'{"big": 123456789012345678901234567890, "odd": "\\ud800"}' in msgspec.json.encode(blocks.whole())
