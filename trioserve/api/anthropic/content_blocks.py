"""Turns the parts of a response into content blocks, as a whole or as events. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import msgspec

from trioserve.api.anthropic.surface import event
from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

__all__ = ["BlockEvents", "ContentBlocks"]

SIGNATURE_BYTES = 24
DIRECT = {"type": "direct"}  # the model made the call itself, not a program that the model wrote


class _OpenBlock:
    """A content block that is still growing.

    Args:
        index: Index of the block.
        kind: Type of the block.
        call_index: Index of the tool call, for blocks of tool calls.

    Attributes:
        digest: Hash of the reasoning so far.
    """

    def __init__(self, index: int, kind: str, call_index: int | None = None) -> None:
        self.index = index
        self.kind = kind
        self.call_index = call_index
        self.digest = blake2b(digest_size=SIGNATURE_BYTES)

    def signature(self) -> str:
        """Return the signature of the reasoning.

        Clients send it back with the reasoning and require that it is not empty. It proves nothing, and is not checked.
        """
        return self.digest.hexdigest()


class BlockEvents:
    """Turns parts into events: content_block_start, content_block_delta and content_block_stop.

    A tool call that is incomplete at max_tokens gets a stop event, as in Anthropic's API. The stop_reason of the
    message says that the call is incomplete.

    Args:
        shows_reasoning: If False, a reasoning block has no text.
    """

    def __init__(self, *, shows_reasoning: bool = True) -> None:
        self._shows_reasoning = shows_reasoning
        self._count = 0
        self._open: _OpenBlock | None = None

    def of(self, parts: Iterable[ResponsePart]) -> bytes:
        return b"".join([piece for part in parts for piece in self._part(part)])

    def end(self) -> bytes:
        """Return the last events.

        A message without content gets one empty text block, because clients expect a block.
        """
        pieces = self._begin("text", {"type": "text", "text": ""}) if not self._count else []
        return b"".join([*pieces, *self._stop()])

    def _part(self, part: ResponsePart) -> list[bytes]:
        if isinstance(part, ContentText):
            pieces = self._begin("text", {"type": "text", "text": "", "citations": None})
            return [*pieces, self._delta({"type": "text_delta", "text": part.text})] if part.text else pieces
        if isinstance(part, ReasoningText):
            pieces = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            assert self._open is not None
            self._open.digest.update(part.text.encode("utf-8", "surrogatepass"))
            if self._shows_reasoning and part.text:
                pieces.append(self._delta({"type": "thinking_delta", "thinking": part.text}))
            return pieces
        if isinstance(part, ToolCallBegin):
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}, "caller": DIRECT}
            return self._begin("tool_use", block, part.index)
        is_open = self._open is not None and self._open.call_index == part.index
        assert is_open, "arguments or end of a tool call that is not the open block"
        if isinstance(part, ToolCallArguments):
            return [self._delta({"type": "input_json_delta", "partial_json": part.text})]
        return self._stop()

    def _begin(self, kind: str, block: dict[str, Any], call_index: int | None = None) -> list[bytes]:
        """Return the events that begin a block. Empty if such a block is open already."""
        if self._open is not None and self._open.kind == kind and self._open.call_index == call_index:
            return []
        stop = self._stop()
        self._open = _OpenBlock(self._count, kind, call_index)
        self._count += 1
        start = {"type": "content_block_start", "index": self._open.index, "content_block": block}
        return [*stop, event("content_block_start", start)]

    def _delta(self, delta: dict[str, str]) -> bytes:
        assert self._open is not None
        value = {"type": "content_block_delta", "index": self._open.index, "delta": delta}
        return event("content_block_delta", value)

    def _stop(self) -> list[bytes]:
        if self._open is None:
            return []
        pieces = []
        if self._open.kind == "thinking":
            pieces.append(self._delta({"type": "signature_delta", "signature": self._open.signature()}))
        pieces.append(event("content_block_stop", {"type": "content_block_stop", "index": self._open.index}))
        self._open = None
        return pieces


class ContentBlocks:
    """Collects parts into the blocks of a whole response.

    An incomplete tool call is left out, because its input is not a JSON object.

    Args:
        shows_reasoning: If False, a reasoning block has no text.
    """

    def __init__(self, *, shows_reasoning: bool = True) -> None:
        self._shows_reasoning = shows_reasoning
        self._kind: str | None = None
        self._texts: list[str] = []
        self._call: ToolCallBegin | None = None
        self._blocks: list[dict[str, Any]] = []

    def take(self, parts: Iterable[ResponsePart]) -> None:
        for part in parts:
            if isinstance(part, ToolCallBegin):
                self._close()
                self._kind, self._call = "tool_use", part
            elif isinstance(part, ToolCallEnd):
                self._end_call()
            else:
                kind = {ContentText: "text", ReasoningText: "thinking"}.get(type(part), "tool_use")
                if kind != self._kind:
                    self._close()
                    self._kind = kind
                self._texts.append(part.text)

    def whole(self) -> list[dict[str, Any]]:
        """Return all blocks after the response has ended."""
        self._close()
        return self._blocks or [_text_block("")]

    def _close(self) -> None:
        text = "".join(self._texts)
        if self._kind == "text":
            self._blocks.append(_text_block(text))
        elif self._kind == "thinking":
            signature = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=SIGNATURE_BYTES).hexdigest()
            shown = text if self._shows_reasoning else ""
            self._blocks.append({"type": "thinking", "thinking": shown, "signature": signature})
        self._kind, self._call = None, None
        self._texts.clear()

    def _end_call(self) -> None:
        call = self._call
        assert call is not None
        # The model's own text. In a complete call, the text is one JSON object.
        given = msgspec.Raw("".join(self._texts).encode() or b"{}")
        self._blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given, "caller": DIRECT})
        self._kind, self._call = None, None
        self._texts.clear()


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}
