"""Tests that events stay intact for every client that splits a stream into lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trioserve.api.sse import ChunkWriter, encode

# Python's str.splitlines splits at all of these characters.
LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


@pytest.mark.parametrize("character", LINE_ENDS)
def test_no_character_in_a_text_ends_a_line_of_an_event(character: str) -> None:
    text = f"a{character}ö\\{character}b"
    writer = ChunkWriter({"model": text}, null_usage=False)
    event = writer.chunk(encode({"text": text}), fields=b"").decode()
    [line, blank] = event.splitlines()
    assert blank == ""
    assert json.loads(line.removeprefix("data: ")) == {"model": text, "choices": [{"text": text}]}


async def test_a_streamed_response_may_hold_any_character(api: Any) -> None:
    api.engine.script = api.say(LINE_ENDS, "\x00\x7fé🙂", '"\\')
    text = LINE_ENDS + "\x00\x7fé🙂" + '"\\'
    events = (await api.chat(stream=True)).events()[:-1]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text
    events = (await api.complete(stream=True, logprobs=1)).events()[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == text


def test_usage_is_null_only_if_a_later_event_has_it() -> None:
    assert json.loads(ChunkWriter({"id": "a"}, null_usage=True).chunk(b"{}")[6:])["usage"] is None
    assert "usage" not in json.loads(ChunkWriter({"id": "a"}, null_usage=False).chunk(b"{}")[6:])
