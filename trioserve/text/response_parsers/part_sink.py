"""Collects the parts of a response: joins their pieces, counts calls, and knows which call is open."""

from __future__ import annotations

from typing import Final

from trioserve.text.response_parsers.text_source import NotACall
from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

__all__ = ["ARGUMENT_CHARACTERS_MAX", "CALLS_MAX", "NAME_CHARACTERS_MAX", "PartSink"]

CALLS_MAX: Final = 128  # per response, as many as OpenAI allows tools in a request; further calls are content
NAME_CHARACTERS_MAX: Final = 256  # four times OpenAI's limit
ARGUMENT_CHARACTERS_MAX: Final = 8 << 20  # per call; more than any context, and bounds the memory of held text


class PartSink:
    """Receives the parts of a response. A call is begun, gets arguments, and is then ended or given up.

    A call that is given up has no ToolCallEnd.

    Attributes:
        calls_ended: Number of complete calls.
        in_call: True while a call is open.
    """

    __slots__ = ("_argument_characters", "_calls", "_held", "_kind", "_parts", "_texts", "calls_ended", "in_call")

    def __init__(self) -> None:
        self._parts: list[ResponsePart] = []
        self._kind: type[ContentText] | type[ReasoningText] | type[ToolCallArguments] | None = None
        self._texts: list[str] = []
        self._calls = 0
        self._held: list[ResponsePart] | None = None
        self._argument_characters = 0
        self.calls_ended = 0
        self.in_call = False

    @property
    def calls_begun(self) -> int:
        return self._calls

    def drain(self) -> list[ResponsePart]:
        """Return the parts since the last call of `drain`."""
        self._join()
        parts, self._parts = self._parts, []
        return parts

    def content(self, text: str) -> None:
        self._add(ContentText, text)

    def reasoning(self, text: str) -> None:
        self._add(ReasoningText, text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call.

        Args:
            name: Name of the function.
            call_id: Id that the model wrote, or None.

        Raises:
            NotACall: The name is empty or too long, or the response has too many calls.
        """
        if not 0 < len(name) <= NAME_CHARACTERS_MAX or self._calls >= CALLS_MAX:
            raise NotACall
        assert not self.in_call
        self._join()
        self._shown().append(ToolCallBegin(self._calls, name, call_id))
        self._calls += 1
        self._argument_characters = 0
        self.in_call = True

    def arguments(self, text: str) -> None:
        """Add a piece of the open call's arguments.

        Args:
            text: The piece.

        Raises:
            NotACall: The arguments are too long.
        """
        assert self.in_call
        self._argument_characters += len(text)
        if self._argument_characters > ARGUMENT_CHARACTERS_MAX:
            raise NotACall
        self._add(ToolCallArguments, text)

    def end_call(self) -> None:
        assert self.in_call
        self._join()
        self._parts.append(ToolCallEnd(self._calls - 1))
        self.in_call = False
        self.calls_ended += 1

    def close_call(self) -> None:
        """Close the open call, which counts only once end_closed_calls is called.

        Later parts are held back until then.
        """
        assert self.in_call
        self._join()
        self.in_call = False
        if self._held is None:
            self._held = []
        self._held.append(ToolCallEnd(self._calls - 1))

    def end_closed_calls(self) -> None:
        """Complete all closed calls, and release the parts that were held back."""
        assert self._held is not None
        self._parts += self._held
        self.calls_ended += sum(isinstance(part, ToolCallEnd) for part in self._held)
        self._held = None

    def give_up_call(self) -> None:
        """Give up the open call and all closed calls, since they are invalid or were cut off."""
        self.in_call = False
        if self._held is not None:
            self._join()
            self._calls -= sum(isinstance(part, ToolCallBegin) for part in self._held)
            self._held = None

    def _add(self, kind: type[ContentText] | type[ReasoningText] | type[ToolCallArguments], text: str) -> None:
        if not text:
            return
        if kind is not self._kind:
            self._join()
            self._kind = kind
        self._texts.append(text)

    def _join(self) -> None:
        if self._kind is None:
            return
        text = "".join(self._texts)
        shown = self._shown()
        if self._kind is ToolCallArguments:
            shown.append(ToolCallArguments(self._calls - 1, text))
        elif self._kind is ContentText:
            shown.append(ContentText(text))
        else:
            shown.append(ReasoningText(text))
        self._kind = None
        self._texts.clear()

    def _shown(self) -> list[ResponsePart]:
        return self._parts if self._held is None else self._held
