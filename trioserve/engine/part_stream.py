"""The response of a chat as its parts (content, reasoning, tool calls), for programs that embed an engine."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from trioserve.contracts.arguments import refuse
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import Delta
from trioserve.text.response_families import ResponseFamilies
from trioserve.text.response_parsers.offered_tools import offered_tools
from trioserve.text.response_parts import ResponseParser, ResponsePart
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["ChoiceParts", "PartStream", "ReadStream"]


class ReadStream(Protocol):
    """The interface of `RequestStream` that `PartStream` needs, for Trio and asyncio."""

    def __anext__(self) -> Awaitable[Delta]: ...

    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...

    @property
    def known(self) -> tuple[Delta, ...]: ...


class ChoiceParts(msgspec.Struct, frozen=True):
    """New parts of one choice.

    Attributes:
        index: index of the choice.
        parts: the new parts. May be empty.
        delta: the delta from which the parts were read. The last delta of a choice has a finish_reason.
    """

    index: int
    parts: list[ResponsePart]
    delta: Delta


@uninterrupted
class PartStream:
    """Iterates over the parts of a response: `async for parts in engine.read_parts(stream, tools=...)`.

    Use this inside the stream's scope, instead of iterating over the stream. Iteration raises the errors of the stream.
    A complete tool call ends with a `ToolCallEnd`. If a choice is aborted or passes its deadline, text that the parser
    still held back is dropped.
    """

    def __init__(
        self,
        stream: ReadStream,
        families: ResponseFamilies,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Store the stream, and check the tools.

        Args:
            stream: the entered stream.
            families: response formats of the model.
            tools: tools of the request, in OpenAI's format. None: no tools.

        Raises:
            InvalidRequest: an entry of `tools` is not a function tool.
        """
        for tool in tools or ():
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                refuse("tools", tool, 'a list of {"type": "function", "function": {"name": ...}}', verb="holds")
        self._stream = stream
        self._families = families
        self._tools = offered_tools(tools)
        self._parsers: dict[int, ResponseParser] = {}

    def __aiter__(self) -> PartStream:
        return self

    async def __anext__(self) -> ChoiceParts:
        delta = await self._stream.__anext__()
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._families.new_parser(
                self._tools, prompt_token_ids=self._stream.prompt_token_ids
            )
            for known in self._stream.known:  # the reader got these parts from an earlier stream
                if known.index == delta.index and known.text:
                    parser.feed(known.text)
        parts = parser.feed(delta.text) if delta.text else []
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            parts += parser.end()
        return ChoiceParts(delta.index, parts, delta)
