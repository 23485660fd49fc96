"""The response of a chat as its parts, for programs that embed an engine: content, thoughts, calls of tools."""

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
    """A RequestStream, of whichever loop."""

    def __anext__(self) -> Awaitable[Delta]: ...

    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...

    @property
    def known(self) -> tuple[Delta, ...]: ...


class ChoiceParts(msgspec.Struct, frozen=True):
    """index: of the choice. parts: those that are new, perhaps none. delta: what brought them; the choice's last one
    has a finish_reason."""

    index: int
    parts: list[ResponsePart]
    delta: Delta


@uninterrupted
class PartStream:
    """`async for parts in engine.read_parts(stream, tools=...)`, inside of the stream's scope, instead of iterating
    over the stream. Raises what that raises.

    A call has its ToolCallEnd when it is complete. What the parser held back when a choice was aborted, or its deadline
    passed, is not given.
    """

    def __init__(
        self,
        stream: ReadStream,
        families: ResponseFamilies,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Raises InvalidRequest for tools that are none."""
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
            for known in self._stream.known:  # its parts were given before
                if known.index == delta.index and known.text:
                    parser.feed(known.text)
        parts = parser.feed(delta.text) if delta.text else []
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            parts += parser.end()
        return ChoiceParts(delta.index, parts, delta)
