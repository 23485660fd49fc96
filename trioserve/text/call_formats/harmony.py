"""gpt-oss: messages in channels. The header of a message names its recipient and channel.

    <|channel|>analysis<|message|>...<|end|>                                        reasoning
    <|start|>assistant<|channel|>final<|message|>...<|return|>                      content, like commentary
    <|start|>assistant to=functions.NAME<|channel|>commentary <|constrain|>json<|message|>{...}<|call|>

The text of a message may contain the spelling of a mark. The text after the spelling shows whether it is a mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from trioserve.text.response_parsers.call_format import (
    CallFormat,
    CallReading,
    Piece,
    RawUntil,
    arguments_of,
    read_arguments,
)
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.raw_values import Closing, read_raw_value
from trioserve.text.response_parsers.scripts import NotACall, PartSink, Script, TextEnded, TextSource

__all__ = ["HARMONY_FORMAT", "HARMONY_TOKENS", "read_harmony"]

_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGE: Final = "<|message|>"
_CONSTRAIN: Final = "<|constrain|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_TOKENS: Final = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_RECIPIENT_MARK: Final = " to="
_HEADER_CHARACTERS_MAX: Final = 1024
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTIONS: Final = "functions."
_REASONING_CHANNELS: Final = ("analysis",)
_CHANNEL_MESSAGES = tuple(f"{_CHANNEL}{name}{_MESSAGE}" for name in ("analysis", "commentary", "final"))
_CLOSINGS = (
    *(Closing(tag=end, followed_by=(_START, _CHANNEL), ends_text=True) for end in _ENDS),
    Closing(tag=_START, followed_by=("assistant",), is_read=False),
    *(Closing(tag=message, is_read=False) for message in _CHANNEL_MESSAGES),
)


def read_harmony(
    source: TextSource, sink: PartSink, tools: Mapping[str, OfferedTool], begins_inside: bool | None
) -> Script[None]:
    """Read a whole response, from the end of its prompt on.

    The prompt ends with <|start|>assistant, or inside of reasoning if `begins_inside` is True.

    Args:
        source: Text of the response.
        sink: Receives the parts.
        tools: Offered tools by name.
        begins_inside: True if the prompt has opened reasoning.
    """
    reading = CallReading(source, sink, tools)
    try:
        if begins_inside:
            yield from _read_text(source, sink.reasoning)
        while (yield from source.peek()):
            yield from _read_message(reading)
    except TextEnded:
        source.at = len(source.text)  # The text ended within a header or a call, so the rest is dropped.


def _read_message(reading: CallReading) -> Script[None]:
    source, sink = reading.source, reading.sink
    has_header = yield from source.find_whole((_START, _CHANNEL, _MESSAGE))
    if not (has_header or (yield from source.find((_RECIPIENT_MARK,)))):
        yield from _read_text(source, sink.content)  # A message without a header is content.
        return
    source.mark()
    try:
        header, mark = yield from source.take_until((_MESSAGE, *_ENDS), _HEADER_CHARACTERS_MAX)
        if mark != _MESSAGE:
            raise NotACall
    except NotACall:
        sink.content(source.unmark())
        return
    recipients = _RECIPIENT.findall(header)
    channels = _CHANNEL_NAME.findall(header)
    name = _called(recipients[-1] if recipients else None, reading.tools)
    if name is not None:
        yield from _read_call(reading, name)
        return
    source.unmark()
    if recipients and not _is_for_the_user(recipients[-1]):
        # The message calls a built-in tool of the model that the request does not offer, so its text is dropped.
        yield from _read_text(source, _drop)
    elif channels and channels[-1] in _REASONING_CHANNELS:
        yield from _read_text(source, sink.reasoning)
    else:
        yield from _read_text(source, sink.content)


def _called(recipient: str | None, tools: Mapping[str, OfferedTool]) -> str | None:
    """Return the name of the tool that a message calls, or None if the message calls no tool."""
    if recipient is None or not tools:
        return None
    if recipient.startswith(_FUNCTIONS):
        return recipient.removeprefix(_FUNCTIONS)
    return recipient if recipient in tools else None


def _is_for_the_user(recipient: str) -> bool:
    return recipient in ("assistant", "user", "all")


def _drop(_text: str) -> None:
    pass


def _read_call(reading: CallReading, name: str) -> Script[None]:
    """Read the arguments of a call. The header was already read, and the source records all text since the header."""
    source, sink = reading.source, reading.sink
    try:
        yield from source.need_after_space()
        sink.begin_call(name)
        yield from read_arguments(reading)
        reading.end_call()
        yield from source.skip_space()
        yield from source.take_whole(_ENDS)
        source.unmark()
    except NotACall:
        sink.abandon_call()
        sink.content(source.unmark())
        yield from _read_text(source, sink.content)


def _read_text(source: TextSource, use: Callable[[str], None]) -> Script[None]:
    """Read the text of a message and the mark that ends the message."""
    try:
        yield from read_raw_value(source, _CLOSINGS, use, trims_lines=False)
    except TextEnded:
        source.at = len(source.text)


def _call_pieces(tool: OfferedTool) -> Sequence[Piece]:
    head = f"{_CHANNEL}commentary to={_FUNCTIONS}{tool.name} {_CONSTRAIN}json{_MESSAGE}"
    return (head, arguments_of(tool), _ENDS[1])


HARMONY_FORMAT = CallFormat(
    call=_call_pieces,
    separator=f"{_START}assistant",
    before=(f"{_CHANNEL}analysis{_MESSAGE}", RawUntil(_ENDS[0]), f"{_START}assistant"),
)
