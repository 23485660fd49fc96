"""Turns the parts of a turn into the events and the output of a response. Does no I/O: the time is an argument.

    begin ──► take, for each piece of the turn ──► complete | end_partial | fail | cancel

Events are numbered from 0 without gaps. An item keeps its id and its output index from its first event to its last. An
incomplete tool call is never reported as complete: it gets no `done` event and is not in the output, because some
clients run every call that they find.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

from msgspec import UNSET, UnsetType

from trioserve.api.generation import PARTIAL_FINISH, Usage
from trioserve.api.openai.response_types import ChatToken
from trioserve.api.responses.response_object import SERVER_ERROR, ResponseHead, item_id, response_usage
from trioserve.api.responses.response_types import (
    CallItem,
    CustomToolCallItem,
    FunctionCallItem,
    IncompleteDetails,
    ItemStatus,
    LocalShellCallItem,
    MessageItem,
    OutputItem,
    OutputTextPart,
    ReasoningItem,
    ReasoningTextPart,
    ResponseErrorDetail,
    ResponseEvent,
    ResponseObject,
    ResponseStatus,
    SteeringEvent,
    SummaryTextPart,
)
from trioserve.api.responses.tools import CallKind
from trioserve.api.sse import one_line_json
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.turn.chat_turn import TurnFinish
from trioserve.contracts.output import Delta
from trioserve.contracts.weights import WeightVersions
from trioserve.text.response_parts import (
    ContentText,
    ReasoningText,
    ResponsePart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)

__all__ = ["Ended", "ResponseEvents", "event_bytes"]

Ended = tuple[list[ResponseEvent], ResponseObject]
"""The last events, and the whole response."""
Logprobs = Callable[[Delta], list[ChatToken]]


def event_bytes(event: ResponseEvent) -> bytes:
    """Return an event as server-sent event bytes. The event's type is also its SSE name."""
    return b"event: " + event.type.encode() + b"\ndata: " + one_line_json(event) + b"\n\n"


class ResponseEvents:
    """The events of one response.

    Args:
        head: The unchanging properties of the response.
        logprobs_of: Returns the log probabilities of a delta in the shape of the API. None if the client did not ask
            for them.

    Attributes:
        status: Current status of the response.
        weight_versions: Weight versions of the output tokens, reported at the end. Empty if the weights were never
            replaced.
    """

    def __init__(self, head: ResponseHead, *, logprobs_of: Logprobs | None = None) -> None:
        self.head = head
        self.status: ResponseStatus = "queued"
        self.weight_versions: WeightVersions = ()
        self._logprobs_of = logprobs_of
        self._number = 0
        # The output items, in order of their output_index. An incomplete call is None.
        self._items: list[OutputItem | None] = []
        self._text: _OpenText | None = None
        self._calls: dict[int, _OpenCall] = {}
        self._blank = ""  # White space that has not been sent yet, because it may be the beginning of a message.

    @property
    def output(self) -> list[OutputItem]:
        """Output items so far. A growing message has its text so far. An unfinished tool call has no arguments yet."""
        if self._text is not None:
            self._text.fill("in_progress")
        return [copy.copy(item) for item in self._items if item is not None]

    @property
    def has_calls(self) -> bool:
        """True if the response has begun a tool call."""
        return bool(self._calls) or any(isinstance(item, CallItem) for item in self._items)

    @property
    def next_number(self) -> int:
        """Number of the next event."""
        return self._number

    def continue_at(self, number: int) -> None:
        """Set the number of the next event, for a response that another server began.

        This server cannot compute the number, because the other server may have split the text into other pieces.

        Args:
            number: Number of the next event.
        """
        self._number = number

    # --- beginning and end ---

    def begin(self) -> list[ResponseEvent]:
        """Return the first events of a response that runs at once."""
        self.status = "in_progress"
        snapshot = self.head.object("in_progress", output=[])
        return [
            self._event("response.created", response=snapshot),
            self._event("response.in_progress", response=snapshot),
        ]

    def queue(self) -> list[ResponseEvent]:
        """Return the first events of a response that waits in the queue.

        Call this method instead of `begin`, and `run` when the response leaves the queue.
        """
        snapshot = self.head.object("queued", output=[])
        return [
            self._event("response.created", response=snapshot),
            self._event("response.queued", response=snapshot),
        ]

    def run(self) -> list[ResponseEvent]:
        """Return the event for the start of a queued response."""
        self.status = "in_progress"
        return [self._event("response.in_progress", response=self.head.object("in_progress", output=[]))]

    def take(self, parts: Sequence[ResponsePart], delta: Delta) -> list[ResponseEvent]:
        """Return the events for the parts of a delta.

        Args:
            parts: Parts that the turn made of the delta.
        """
        events: list[ResponseEvent] = []
        logprobs = self._logprobs_of(delta) if self._logprobs_of is not None and delta.logprobs else []
        for part in parts:
            if isinstance(part, ContentText):
                events += self._take_text(part.text, logprobs)
                logprobs = []  # The log probabilities of one delta are reported only once.
            elif isinstance(part, ReasoningText):
                events += self._take_reasoning(part.text)
            elif isinstance(part, ToolCallBegin):
                events += self._begin_call(part)
            elif isinstance(part, ToolCallArguments):
                events += self._take_arguments(part)
            else:
                events += self._end_call(part)
        return events

    def complete(self, finish_reason: TurnFinish | None, usage: Usage, now: int) -> Ended:
        """Return the last events and the whole response. Its status is completed, or incomplete at the token limit.

        Args:
            finish_reason: Finish reason of the choice.
            usage: Token counts.
            now: Unix time in seconds.
        """
        generates = self.head.body.generates
        is_cut = generates and finish_reason == "length"
        if generates and not self._items and not self._calls:
            # If the output has only white space, it becomes one message, which may be empty.
            events = self._open_message()
        else:
            events = []
        events += self._close_text("incomplete" if is_cut else "completed")
        self._drop_calls()
        self.status = "incomplete" if is_cut else "completed"
        response = self._object(
            usage,
            completed_at=None if is_cut else now,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
        )
        return [*events, self._event(f"response.{self.status}", response=response)], response

    def fail(self, message: str, code: str = SERVER_ERROR, *, usage: Usage | None = None) -> Ended:
        """Return the last event and the whole response for a response that failed.

        Args:
            message: Error message.
            code: Error code.
            usage: Token counts, if known.
        """
        response = self._break_off("failed", usage, error=ResponseErrorDetail(code=code, message=message))
        return [self._event("response.failed", response=response)], response

    def cancel(self, resume: ResumeBody | None = None, *, usage: Usage | None = None) -> Ended:
        """Return the last event and the whole response for a response that its client cancelled.

        OpenAI's API has no event for this, so the event is `response.incomplete`.

        Args:
            resume: State to resume the response. None if the client did not ask for it.
            usage: Token counts, if known.
        """
        response = self._break_off("cancelled", usage, resume=resume)
        return [self._event("response.incomplete", response=response)], response

    def end_partial(self, stop_reason: str | None, resume: ResumeBody | None, *, usage: Usage) -> Ended:
        """Return the last events and the response after an abort or a deadline.

        Used for a client that asked for partial results. Other clients get an error.

        Args:
            stop_reason: Why the response was stopped. None after an abort by id.
            resume: State to resume the response.
            usage: Token counts.
        """
        return self._end_early(IncompleteDetails(reason=PARTIAL_FINISH, stop_reason=stop_reason), usage, resume)

    def end_steered(self, *, usage: Usage) -> Ended:
        """Return the last events and the response that was cut, because its user has sent new input.

        Args:
            usage: Token counts.
        """
        return self._end_early(IncompleteDetails(reason="steered"), usage)

    def _end_early(self, details: IncompleteDetails, usage: Usage, resume: ResumeBody | None = None) -> Ended:
        events = self._close_text("incomplete")
        response = self._break_off("incomplete", usage, incomplete_details=details, resume=resume)
        return [*events, self._event("response.incomplete", response=response)], response

    def number(self, event: SteeringEvent) -> SteeringEvent:
        """Give an event about input for a successor the next number of this response. Return the event."""
        event.sequence_number = self._number
        self._number += 1
        return event

    # --- content and reasoning ---

    def _take_text(self, text: str, logprobs: list[ChatToken]) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        opened = self._text
        if opened is None or opened.kind is not _MESSAGE:
            # Models write line breaks between reasoning and a tool call. These line breaks must not become a message.
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return []
            self._blank = ""
            events += self._open_message()
            opened = self._text
        assert opened is not None
        opened.logprobs += logprobs
        return [*events, self._add_text(opened, text, logprobs=logprobs)]

    def _open_message(self) -> list[ResponseEvent]:
        message = MessageItem(id=self._new_id("message"), status="in_progress", role="assistant", content=[])
        events = self._open_text(message, _MESSAGE, OutputTextPart(text="", annotations=[], logprobs=[]))
        assert self._text is not None
        self._text.pieces.append(self._blank)
        self._blank = ""
        return events

    def _take_reasoning(self, text: str) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if self._text is None or self._text.kind is _MESSAGE:
            if not text:
                return []
            item = ReasoningItem(id=self._new_id("reasoning"), status="in_progress", summary=[], content=[])
            options = self.head.body.reasoning
            if options is not None and options.wants_summary:
                events = self._open_text(item, _SUMMARY, SummaryTextPart(text=""))
            else:
                events = self._open_text(item, _REASONING, ReasoningTextPart(text=""))
        assert self._text is not None
        return [*events, self._add_text(self._text, text)]

    def _open_text(self, item: MessageItem | ReasoningItem, kind: _TextKind, part: _Part) -> list[ResponseEvent]:
        events = self._close_text("completed")
        self._text = opened = _OpenText(item, len(self._items), kind)
        added = self._add_item(item)
        return [*events, added, self._item_event(f"{kind.part_event}.added", opened, **kind.place, part=part)]

    def _add_text(
        self, opened: _OpenText, text: str, *, logprobs: list[ChatToken] | UnsetType = UNSET
    ) -> ResponseEvent:
        # Built without the helpers below, which take a fifth of the time of an event.
        opened.pieces.append(text)
        kind, number = opened.kind, self._number
        self._number = number + 1
        return ResponseEvent(
            type=kind.delta_event,
            sequence_number=number,
            item_id=opened.item.id,
            output_index=opened.index,
            content_index=kind.content_index,
            summary_index=kind.summary_index,
            delta=text,
            logprobs=logprobs,
        )

    def _close_text(self, status: ItemStatus) -> list[ResponseEvent]:
        opened, self._text = self._text, None
        if opened is None:
            return []
        kind, part = opened.kind, opened.fill(status)
        logprobs = opened.logprobs if kind is _MESSAGE else UNSET
        return [
            self._item_event(f"{kind.text_event}.done", opened, **kind.place, text=part.text, logprobs=logprobs),
            self._item_event(f"{kind.part_event}.done", opened, **kind.place, part=part),
            self._item_done(opened),
        ]

    # --- tool calls ---

    def _begin_call(self, part: ToolCallBegin) -> list[ResponseEvent]:
        events = self._close_text("completed")
        self._blank = ""
        kind = self.head.tools.kind_of(part.name)
        namespace = self.head.tools.namespace_of(part.name)
        assert part.id is not None
        fields: dict[str, Any] = {"id": self._new_id(kind.value), "call_id": part.id, "status": "in_progress"}
        named: dict[str, Any] = {"name": part.name, "namespace": UNSET if namespace is None else namespace}
        item: FunctionCallItem | CustomToolCallItem | LocalShellCallItem
        if kind is CallKind.LOCAL_SHELL:
            item = LocalShellCallItem(action=_shell_action("{}"), **fields)
        elif kind is CallKind.CUSTOM:
            item = CustomToolCallItem(input="", **fields, **named)
        else:
            item = FunctionCallItem(arguments="", **fields, **named)
        self._calls[part.index] = _OpenCall(item, len(self._items))
        return [*events, self._add_item(item)]

    def _take_arguments(self, part: ToolCallArguments) -> list[ResponseEvent]:
        call = self._calls.get(part.index)
        if call is None or not part.text:
            return []
        call.pieces.append(part.text)
        if not isinstance(call.item, FunctionCallItem):
            return []  # The input of custom and shell calls is parsed from the complete arguments.
        return [self._item_event("response.function_call_arguments.delta", call, delta=part.text)]

    def _end_call(self, part: ToolCallEnd) -> list[ResponseEvent]:
        call = self._calls.pop(part.index, None)
        if call is None:
            return []
        item, arguments = call.item, "".join(call.pieces)
        item.status = "completed"
        events: list[ResponseEvent] = []
        if isinstance(item, FunctionCallItem):
            item.arguments = arguments
            done = {"name": item.name, "arguments": arguments}
            events.append(self._item_event("response.function_call_arguments.done", call, **done))
        elif isinstance(item, CustomToolCallItem):
            item.input = _custom_input(arguments)
            events.append(self._item_event("response.custom_tool_call_input.delta", call, delta=item.input))
            events.append(self._item_event("response.custom_tool_call_input.done", call, input=item.input))
        else:
            item.action = _shell_action(arguments)
        return [*events, self._item_done(call)]

    def _drop_calls(self) -> None:
        for call in self._calls.values():
            self._items[call.index] = None
        self._calls.clear()

    # --- helpers ---

    def _break_off(self, status: ResponseStatus, usage: Usage | None, **fields: Any) -> ResponseObject:
        number = self._number
        # Closing the text adds it to `output`. The events of closing are dropped, because the last event of the
        # response reports the end.
        self._close_text("incomplete")
        self._number = number
        self._drop_calls()
        self.status = status
        return self._object(usage, **fields)

    def _object(self, usage: Usage | None, **fields: Any) -> ResponseObject:
        return self.head.object(
            self.status,
            output=self.output,
            usage=None if usage is None else response_usage(usage),
            weight_versions=self.weight_versions,
            **fields,
        )

    def _new_id(self, kind: str) -> str:
        return item_id(kind, self.head.id, len(self._items))

    def _add_item(self, item: OutputItem) -> ResponseEvent:
        self._items.append(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=copy.copy(item))

    def _item_done(self, opened: _OpenText | _OpenCall) -> ResponseEvent:
        return self._event("response.output_item.done", output_index=opened.index, item=copy.copy(opened.item))

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = ResponseEvent(type=cast("Any", kind), sequence_number=self._number, **fields)
        self._number += 1
        return event

    def _item_event(self, kind: str, opened: _OpenText | _OpenCall, **fields: Any) -> ResponseEvent:
        return self._event(kind, item_id=opened.item.id, output_index=opened.index, **fields)


_Part = OutputTextPart | ReasoningTextPart | SummaryTextPart


class _TextKind(NamedTuple):
    """Where events report the text of an item. An item of this server has one part, so one of the indices is 0.

    Attributes:
        text_event: Beginning of the types of events about the text.
        part_event: Beginning of the types of events about the item's part.
        delta_event: Type of events with a piece of the text.
        content_index: Index of the part in `content`.
        summary_index: Index of the part in `summary`.
    """

    text_event: str
    part_event: str
    delta_event: Literal[
        "response.output_text.delta", "response.reasoning_text.delta", "response.reasoning_summary_text.delta"
    ]
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET

    @property
    def place(self) -> dict[str, int | UnsetType]:
        return {"content_index": self.content_index, "summary_index": self.summary_index}


_MESSAGE = _TextKind("response.output_text", "response.content_part", "response.output_text.delta", content_index=0)
_REASONING = _TextKind(
    "response.reasoning_text", "response.content_part", "response.reasoning_text.delta", content_index=0
)
_SUMMARY = _TextKind(
    "response.reasoning_summary_text",
    "response.reasoning_summary_part",
    "response.reasoning_summary_text.delta",
    summary_index=0,
)


class _OpenText:
    """A message or reasoning item to which the response still adds text.

    Args:
        item: The item. It gets the text when `fill` is called.
        index: Output index.
        kind: Kind of text.
    """

    def __init__(self, item: MessageItem | ReasoningItem, index: int, kind: _TextKind) -> None:
        self.item = item
        self.index = index
        self.kind = kind
        self.pieces: list[str] = []
        self.logprobs: list[ChatToken] = []

    def fill(self, status: ItemStatus) -> _Part:
        """Put the text so far and the status into the item. Return the item's part."""
        text = "".join(self.pieces)
        self.pieces = [text]
        self.item.status = status
        part: _Part
        if isinstance(self.item, MessageItem):
            part = OutputTextPart(text=text, annotations=[], logprobs=self.logprobs)
            self.item.content = [part]
        elif self.kind is _SUMMARY:
            part = SummaryTextPart(text=text)
            self.item.summary = [part]
        else:
            part = ReasoningTextPart(text=text)
            self.item.content = [part]
        return part


class _OpenCall:
    def __init__(self, item: FunctionCallItem | CustomToolCallItem | LocalShellCallItem, index: int) -> None:
        self.item = item
        self.index = index
        self.pieces: list[str] = []


def _custom_input(arguments: str) -> str:
    """Return the free text from the argument `input`. If the arguments are not a JSON object with a text in `input`,
    return them unchanged.
    """
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        return str(value["input"])
    return value if isinstance(value, str) else arguments


def _shell_action(arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = {}
    command = value.get("command") if isinstance(value, dict) else None
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    action: dict[str, Any] = {"type": "exec", "command": command if isinstance(command, list) else [], "env": {}}
    for name in ("working_directory", "timeout_ms"):
        if isinstance(value, dict) and value.get(name) is not None:
            action[name] = value[name]
    return action
