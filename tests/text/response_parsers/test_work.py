"""Tests that parsing work is linear in the length of the text.

The work is counted in function calls and copied characters, not in seconds.
"""

from __future__ import annotations

import sys

import pytest

from trioserve.text.response_parsers.families import TOOL_FAMILIES
from trioserve.text.response_parsers.registry import make_response_parser
from trioserve.text.response_parsers.scripts import TextSource
from trioserve.text.response_parts import WholeCall

# These families cover each kind of call format.
KINDS = [
    "hermes",
    "mistral",
    "pythonic",
    "qwen3_coder",
    "glm45",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "gemma4",
    "openai",
]


class Work:
    """Counts function calls, calls of builtins included, and characters that are copied from piece to piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        push = TextSource.push

        def counting_push(source: TextSource, piece: str) -> None:
            push(source, piece)
            self.count += len(source.text)

        monkeypatch.setattr(TextSource, "push", counting_push)

    def of(self, family: str, tools: object, text: str) -> int:
        self.count = 0
        parser = make_response_parser(family, "qwen3", tools=tools)  # type: ignore[arg-type]
        previous = sys.getprofile()

        def count(_frame: object, event: str, _argument: object) -> None:
            self.count += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for character in text:
                parser.feed(character)
            parser.end()
        finally:
            sys.setprofile(previous)
        return self.count


def hostile_texts(family: str, length: int) -> list[str]:
    """Return texts of about a given length that repeat the beginning of a construct, or never end a construct."""
    call = TOOL_FAMILIES[family].call_format.written([WholeCall("write_file", '{"content": "CONTENT"}')])
    before, after = call.split("CONTENT")
    opener = next(iter(TOOL_FAMILIES[family].readers), "<|channel|>")
    return [
        before + "x " * (length // 2) + after,
        before + "\n" * length,
        before + (after[:-1] + "y") * (length // len(after)),
        opener * (length // len(opener)),
        opener + " " * length,
        opener[:-1] * (length // len(opener[:-1])),
        '{"name": "get_time", "arguments": ' + '{"a": ' * (length // 6),
        '{"arguments": {"a": "' + "b" * length,
        "\n" * length,
        "\n[{" * (length // 3),
        "```json\n" * (length // 8),
        "<think>" * (length // 7),
        "<think>" + "</think" * (length // 7),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_parsing_work_doubles_if_the_text_is_twice_as_long(monkeypatch, tools, family):
    work = Work(monkeypatch)
    for short, long in zip(hostile_texts(family, 200), hostile_texts(family, 400), strict=True):
        assert work.of(family, tools, long) < 2.5 * work.of(family, tools, short), long[:60]


@pytest.mark.slow
def test_parser_copies_a_megabyte_in_single_characters_less_than_three_times(monkeypatch, tools):
    work = Work(monkeypatch)
    parser = make_response_parser("hermes", None, tools=tools)
    before, after = '<tool_call>{"name": "write_file", "arguments": ', "}</tool_call>"
    said, arguments = "A word, <b>. " * 70_000, '{"content": "' + "x\\n" * 40_000 + '"}'
    text = said + before + arguments + after
    assert len(text) > 1_000_000
    shown = sum(len(getattr(part, "text", "")) for character in text for part in parser.feed(character))
    assert shown == len(said.rstrip()) + len(arguments)
    assert parser.end() == []
    assert work.count < 3 * len(text)  # The number of copied characters is linear, too.
