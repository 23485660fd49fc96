"""Parts of a response: content, reasoning and tool calls. The parser of a model family splits the text into parts."""

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
    """A piece of the content, which is meant for the reader."""

    text: str


class ReasoningText(msgspec.Struct, frozen=True):
    """A piece of the reasoning."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True):
    """Beginning of a call.

    Attributes:
        index: Index of the call in the response: 0, 1, ...
        name: Name of the function.
        id: Id that the model wrote, or None if its family writes no ids.
    """

    index: int
    name: str
    id: str | None = None


class ToolCallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments. Once the call has ended, the joined pieces are one JSON object.

    Attributes:
        index: Index of the call.
        text: The piece.
    """

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """End of a complete call. A call without this part was cut off, and must not be shown as complete.

    Attributes:
        index: Index of the call.
    """

    index: int


ResponsePart = ContentText | ReasoningText | ToolCallBegin | ToolCallArguments | ToolCallEnd


class ResponseParser(Protocol):
    """Splits the text of one choice into parts.

    The result depends only on the text: however it is cut into pieces, the joined parts are equal. Text is held back
    only while its meaning is undecided. No text of a model raises an error: text that is not a valid call is content.
    """

    def feed(self, text: str) -> list[ResponsePart]:
        """Process a piece of the text.

        Args:
            text: The piece.

        Returns:
            The parts that are complete now.
        """
        ...

    def end(self) -> list[ResponsePart]:
        """Return the parts of the text that was held back. Call this once, when no more text follows."""
        ...
