"""What a model's text consists of besides text for people: thoughts and calls of tools. The parsers of the families of
models turn a response, piece by piece, into these parts."""

from __future__ import annotations

from typing import Protocol

import msgspec

__all__ = [
    "ContentText",
    "ReasoningText",
    "ResponseParser",
    "ResponsePart",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
]


class ContentText(msgspec.Struct, frozen=True):
    """A piece of what the reader is to see."""

    text: str


class ReasoningText(msgspec.Struct, frozen=True):
    """A piece of a thought."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True):
    """A call begins. index: 0, 1, ... within the response. id: as the model wrote it, where its family writes ids."""

    index: int
    name: str
    id: str | None = None


class ToolCallArguments(msgspec.Struct, frozen=True):
    """A piece of the call's arguments. When its ToolCallEnd has come, the pieces join to one JSON object."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """The call is complete. A call without it was cut off, and must not be shown as complete."""

    index: int


ResponsePart = ContentText | ReasoningText | ToolCallBegin | ToolCallArguments | ToolCallEnd


class ResponseParser(Protocol):
    """One choice's text to parts; a pure function of the text: however it is cut into pieces, the parts join to the
    same. Holds back no more than what may still become something else. Never raises for what a model writes: what is
    no call is content."""

    def feed(self, text: str) -> list[ResponsePart]: ...

    def end(self) -> list[ResponsePart]:
        """The text is over: what was held back. To be called once, and nothing after it."""
        ...
