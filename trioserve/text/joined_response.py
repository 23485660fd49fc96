"""Joins the parts of a response, for APIs that send it as a whole."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

__all__ = ["JoinedResponse", "WholeCall"]


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
        """Add parts in the order of the response.

        Args:
            parts: The parts.
        """
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
