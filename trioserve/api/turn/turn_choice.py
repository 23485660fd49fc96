"""One choice of a turn. Its deltas are turned into parts, and its tool calls determine its finish reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from trioserve.api.generation import PARTIAL_FINISH, is_partial
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.weights import add_versions
from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponseParser,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

__all__ = ["CollectedChoice", "OpenCalls", "ToolCall", "TurnChoice", "TurnFinish"]

TurnFinish = Literal["stop", "length", "tool_calls", "abort"]


class TurnChoice:
    """One choice while it is read.

    Args:
        index: Index of the choice.
        parser: Parser of the model family. None: all text is content.
        calls_max: Tool calls beyond this number are dropped. None: no limit.
        new_call_id: Returns an id for a call to which the model gave none.
        is_resumable: The client may resume an aborted choice and then gets only the rest. So at an abort, text that the
            parser holds back is not sent.

    Attributes:
        finish_reason: None until the last delta. "tool_calls" means that all calls are complete. With "length" the last
            call may be incomplete, and then it has no ToolCallEnd.
        tools: Names of the called tools so far.
        reasoning_token_count: Number of reasoning tokens so far. An estimate for deltas that contain reasoning and
            other text.
    """

    def __init__(
        self,
        index: int,
        parser: ResponseParser | None,
        *,
        calls_max: int | None,
        new_call_id: Callable[[], str],
        is_resumable: bool = False,
    ) -> None:
        self.index = index
        self.finish_reason: TurnFinish | None = None
        self.reasoning_token_count = 0
        self.tools: list[str] = []
        self._parser = parser
        self._calls_max = calls_max
        self._is_resumable = is_resumable
        self._new_call_id = new_call_id
        self._begun_count = self._ended_count = 0
        self._is_thinking = False

    def take(self, delta: Delta) -> list[ResponsePart]:
        """Return the parts of a delta. Empty while the parser holds text back.

        Args:
            delta: Next output of the choice.
        """
        if self._parser is None:
            if delta.finish_reason is not None:
                self.finish_reason = _turn_finish(delta.finish_reason)
            return [ContentText(delta.text)] if delta.text else []
        parsed = self._parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            if not (self._is_resumable and is_partial(delta.finish_reason)):
                parsed += self._parser.end()
        elif len(parsed) == 1 and type(parsed[0]) is ContentText:  # This is the usual case, and its code is kept fast.
            self._is_thinking = False
            return parsed
        self._count_reasoning(delta, parsed)
        parts = [part for part in map(self._shown_part, parsed) if part is not None]
        if delta.finish_reason is not None:
            self.finish_reason = _turn_finish(delta.finish_reason)
            if self.finish_reason == "stop" and self._begun_count and self._begun_count == self._ended_count:
                self.finish_reason = "tool_calls"
        return parts

    def _shown_part(self, part: ResponsePart) -> ResponsePart | None:
        """Return the part as the client gets it, or None if it is dropped."""
        if isinstance(part, ContentText | ReasoningText):
            return part
        if self._calls_max is not None and part.index >= self._calls_max:
            return None
        if isinstance(part, ToolCallBegin):
            self._begun_count += 1
            self.tools.append(part.name)
            return part if part.id is not None else msgspec.structs.replace(part, id=self._new_call_id())
        if isinstance(part, ToolCallEnd):
            self._ended_count += 1
        return part

    def _count_reasoning(self, delta: Delta, parts: Sequence[ResponsePart]) -> None:
        """Count the reasoning tokens of a delta. If the delta also has other text, estimate the count from the lengths
        of the texts.
        """
        reasoning = other = 0
        for part in parts:
            if isinstance(part, ReasoningText):
                reasoning += len(part.text)
                self._is_thinking = True
            else:
                other += len(part.text) if isinstance(part, ContentText | ToolCallArguments) else 1
                self._is_thinking = False
        if reasoning and other:
            self.reasoning_token_count += round(len(delta.token_ids) * reasoning / (reasoning + other))
        elif reasoning or (self._is_thinking and not other):
            self.reasoning_token_count += len(delta.token_ids)


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A complete tool call.

    Attributes:
        id: Id of the call.
        name: Name of the function.
        arguments: JSON text as the model wrote it.
    """

    id: str
    name: str
    arguments: str


class OpenCalls:
    """Tool calls whose parts arrive one by one."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[ToolCallBegin, list[str]]] = {}

    def take(self, part: ResponsePart) -> ToolCall | None:
        """Return the call that this part completes, or None.

        Args:
            part: Next part of the response. Parts of other kinds are ignored.
        """
        if isinstance(part, ToolCallBegin):
            self._open[part.index] = (part, [])
        elif isinstance(part, ToolCallArguments):
            self._open[part.index][1].append(part.text)
        elif isinstance(part, ToolCallEnd):
            begin, pieces = self._open.pop(part.index)
            assert begin.id is not None
            return ToolCall(id=begin.id, name=begin.name, arguments="".join(pieces))
        return None


class CollectedChoice:
    """One choice that is assembled from its parts.

    Attributes:
        tool_calls: The complete calls. Incomplete calls are left out.
        weight_versions: Weight version of the output tokens, in runs of tokens. See add_versions.
    """

    def __init__(self) -> None:
        self.contents: list[str] = []
        self.reasonings: list[str] = []
        self.tool_calls: list[ToolCall] = []
        self.token_ids: list[int] = []
        self.weight_versions: list[tuple[str, int]] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: TurnFinish | None = None
        self.stop_reason: int | str | None = None
        self.kv_transfer: KVTransferParams | None = None
        self.reasoning_token_count = 0
        self._open = OpenCalls()

    @property
    def content(self) -> str | None:
        """The content. None if the choice has tool calls and no content."""
        text = "".join(self.contents)
        return text if text or not self.tool_calls else None

    @property
    def reasoning(self) -> str | None:
        """The reasoning, or None if there is none."""
        return "".join(self.reasonings) or None

    def take(self, choice: TurnChoice, parts: Sequence[ResponsePart], delta: Delta) -> None:
        """Add the parts that TurnChoice made of a delta.

        Args:
            choice: The choice that made the parts.
            parts: The new parts.
            delta: The delta.
        """
        for part in parts:
            if isinstance(part, ContentText):
                self.contents.append(part.text)
            elif isinstance(part, ReasoningText):
                self.reasonings.append(part.text)
            elif (call := self._open.take(part)) is not None:
                self.tool_calls.append(call)
        add_versions(self.weight_versions, len(self.token_ids), delta.weight_versions, len(delta.token_ids))
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = choice.finish_reason, delta.stop_reason
            self.kv_transfer = delta.kv_transfer
            self.reasoning_token_count = choice.reasoning_token_count


def _turn_finish(reason: FinishReason) -> TurnFinish:
    """Return the finish reason for an end without tool calls.

    Aborts and deadlines raise errors earlier (see foreign_end), unless the client asked for partial results.
    """
    if is_partial(reason):
        return PARTIAL_FINISH
    return "length" if reason is FinishReason.LENGTH else "stop"
