"""Parts of a response: content, reasoning and tool calls.

The parser of a model family splits the text into parts. APIs that send a response as a whole join its parts again.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    "JoinedResponse",
    "WholeCall",
]


class ContentText(msgspec.Struct, frozen=True):
    """A piece of the content, which is meant for the user."""

    text: str


class ReasoningText(msgspec.Struct, frozen=True):
    """A piece of the reasoning."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True):
    """Beginning of a call.

    Attributes:
        index: Index of the call in the response: 0, 1, ...
        name: Name of the function.
        id: Id that the model wrote, or None if the model's family writes no ids.
    """

    index: int
    name: str
    id: str | None = None


class ToolCallArguments(msgspec.Struct, frozen=True):
    """A piece of a call's arguments. The joined pieces of a complete call are one JSON object.

    Attributes:
        index: Index of the call.
        text: The piece.
    """

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """End of a complete call. A call without this part is incomplete, and must not be shown as complete.

    Attributes:
        index: Index of the call.
    """

    index: int


ResponsePart = ContentText | ReasoningText | ToolCallBegin | ToolCallArguments | ToolCallEnd


class ResponseParser(Protocol):
    """Splits the text of one choice into parts.

    The joined parts depend only on the text, and not on how it is cut into pieces. Text is held back only while its
    meaning is undecided. No text of a model raises an error, since text that is not a valid call is content.
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
        """Return the parts of the text that was held back. Call this method once, when no more text follows."""
        ...


class WholeCall(msgspec.Struct, frozen=True):
    """A complete call.

    Attributes:
        name: Name of the function.
        arguments: JSON text of an object.
        id: Id that the model wrote, or None.
    """

    name: str
    arguments: str
    id: str | None = None


class JoinedResponse:
    """Collects the parts of a response.

    Args:
        parts: The first parts.

    Attributes:
        calls: Complete calls so far. A call that has not ended is not included.
        content: Joined content so far.
        reasoning: Joined reasoning so far.
    """

    def __init__(self, parts: Iterable[ResponsePart] = ()) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._open: ToolCallBegin | None = None
        self._arguments: list[str] = []
        self.calls: list[WholeCall] = []
        self.take(parts)

    def take(self, parts: Iterable[ResponsePart]) -> None:
        """Add parts. They must be added in the order of the response."""
        for part in parts:
            if isinstance(part, ContentText):
                self._content.append(part.text)
            elif isinstance(part, ReasoningText):
                self._reasoning.append(part.text)
            elif isinstance(part, ToolCallBegin):
                self._open = part
                self._arguments.clear()
            elif isinstance(part, ToolCallArguments):
                self._arguments.append(part.text)
            else:
                assert isinstance(part, ToolCallEnd)
                assert self._open is not None
                self.calls.append(WholeCall(self._open.name, "".join(self._arguments), self._open.id))
                self._open = None

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)
