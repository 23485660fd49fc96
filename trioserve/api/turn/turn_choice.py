"""One choice of a turn while it is read: its deltas become parts, and its end a finish reason that tells of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from trioserve.api.generation import CUT_OFF, is_cut_off
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.output import Delta
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
    """index: of the choice. finish_reason: known with the choice's last delta. "tool_calls" means that every call of
    the response is complete; with "length" the last one may have been cut off, and then it had no ToolCallEnd.
    reasoning_token_count: of its tokens so far, those of thoughts.

    parser: None: all text is content. may_go_on: whoever has a choice that was cut off is shown the rest of it alone,
    so that of what may still become something else nothing is shown then. calls_max: of calls beyond it no part is
    given. new_call_id: for a call to which the model gave no id.
    """

    def __init__(
        self,
        index: int,
        parser: ResponseParser | None,
        *,
        calls_max: int | None,
        new_call_id: Callable[[], str],
        may_go_on: bool = False,
    ) -> None:
        self.index = index
        self.finish_reason: TurnFinish | None = None
        self.reasoning_token_count = 0
        self._parser = parser
        self._calls_max = calls_max
        self._may_go_on = may_go_on
        self._new_call_id = new_call_id
        self._begun_count = self._ended_count = 0
        self._is_thinking = False

    def take(self, delta: Delta) -> list[ResponsePart]:
        """The parts that this delta brings; none while the parser waits for more."""
        if self._parser is None:
            if delta.finish_reason is not None:
                self.finish_reason = _own_end(delta.finish_reason)
            return [ContentText(delta.text)] if delta.text else []
        parsed = self._parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            if not (self._may_go_on and is_cut_off(delta.finish_reason)):
                parsed += self._parser.end()
        elif len(parsed) == 1 and type(parsed[0]) is ContentText:  # what most deltas are
            self._is_thinking = False
            return parsed
        self._count_thought(delta, parsed)
        parts = [part for part in map(self._own, parsed) if part is not None]
        if delta.finish_reason is not None:
            self.finish_reason = _own_end(delta.finish_reason)
            if self.finish_reason == "stop" and self._begun_count and self._begun_count == self._ended_count:
                self.finish_reason = "tool_calls"
        return parts

    def _own(self, part: ResponsePart) -> ResponsePart | None:
        """The part as it is shown, if it is."""
        if isinstance(part, ContentText | ReasoningText):
            return part
        if self._calls_max is not None and part.index >= self._calls_max:
            return None
        if isinstance(part, ToolCallBegin):
            self._begun_count += 1
            return part if part.id is not None else msgspec.structs.replace(part, id=self._new_call_id())
        if isinstance(part, ToolCallEnd):
            self._ended_count += 1
        return part

    def _count_thought(self, delta: Delta, parts: Sequence[ResponsePart]) -> None:
        """Tokens of one delta belong to what its parts are; of a mixed one, by the share of their text."""
        thought = other = 0
        for part in parts:
            if isinstance(part, ReasoningText):
                thought += len(part.text)
                self._is_thinking = True
            else:
                other += len(part.text) if isinstance(part, ContentText | ToolCallArguments) else 1
                self._is_thinking = False
        if thought and other:
            self.reasoning_token_count += round(len(delta.token_ids) * thought / (thought + other))
        elif thought or (self._is_thinking and not other):
            self.reasoning_token_count += len(delta.token_ids)


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A complete call. arguments: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class OpenCalls:
    """Calls whose parts come one by one."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[ToolCallBegin, list[str]]] = {}

    def take(self, part: ResponsePart) -> ToolCall | None:
        """The call that this part completes, if it does."""
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
    """One choice, put together from its parts. tool_calls: the complete ones; one that was cut off is left out."""

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
        """None where there are calls and nothing but calls."""
        text = "".join(self.contents)
        return text if text or not self.tool_calls else None

    @property
    def reasoning(self) -> str | None:
        """None where there is no thought."""
        return "".join(self.reasonings) or None

    def take(self, choice: TurnChoice, parts: Sequence[ResponsePart], delta: Delta) -> None:
        """What TurnChoice gave of this delta."""
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


def _own_end(reason: FinishReason) -> TurnFinish:
    """Others' ends are errors, and raised before they get here (see foreign_end), unless the client wants to have what
    there is."""
    if is_cut_off(reason):
        return CUT_OFF
    return "length" if reason is FinishReason.LENGTH else "stop"
