"""Turns the parts of a turn into the events and the output of a response. Does no I/O: the time is an argument.

    begin ──► take, for each piece of the turn ──► complete | end_partial | fail | cancel

Events are numbered from 0 without gaps. An item keeps its id and its output index from its first event to its last. An
incomplete tool call is never reported as complete: it gets no `done` event and is not in the output, because some
clients run every call that they find.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from trioserve.api.generation import PARTIAL_FINISH, Usage
from trioserve.api.openai.response_types import ChatToken
from trioserve.api.responses.response_object import Item, ResponseHead, item_id, response_error, usage_object
from trioserve.api.responses.steering import STEERED
from trioserve.api.responses.tools import CallKind
from trioserve.api.sse import one_line_json
from trioserve.api.streams.cursors import ResumeBody
from trioserve.api.turn.turn_choice import TurnFinish
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

__all__ = ["Event", "ResponseEvents", "event_bytes"]

Event = dict[str, Any]
CALL_TYPES = frozenset(kind.value for kind in CallKind)
Logprobs = Callable[[Delta], list[ChatToken]]


def event_bytes(event: Event) -> bytes:
    """Return an event as server-sent event bytes. The event's type is also its SSE name.

    Args:
        event: The event.
    """
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + one_line_json(event) + b"\n\n"


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
        self.status = "queued"
        self.weight_versions: WeightVersions = ()
        self._logprobs_of = logprobs_of
        self._number = 0
        # The output items, in order of their output_index. An incomplete call is None.
        self._items: list[Item | None] = []
        self._text: _OpenText | None = None
        self._calls: dict[int, _OpenCall] = {}
        self._blank = ""  # White space that has not been sent yet, because it may be the beginning of a message.

    @property
    def output(self) -> list[Item]:
        """Output items so far. A growing message has its text so far. An unfinished tool call has no arguments yet."""
        if self._text is not None:
            self._text.fill("in_progress")
        return [dict(item) for item in self._items if item is not None]

    @property
    def has_calls(self) -> bool:
        """True if the response has begun a tool call."""
        return bool(self._calls) or any(item is not None and item["type"] in CALL_TYPES for item in self._items)

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

    def begin(self) -> list[Event]:
        """Return the first events of a response that runs at once."""
        self.status = "in_progress"
        snapshot = self.head.object("in_progress", output=[])
        return [
            self._event("response.created", response=snapshot),
            self._event("response.in_progress", response=snapshot),
        ]

    def queue(self) -> list[Event]:
        """Return the first events of a response that waits in the queue.

        Call this method instead of `begin`, and `run` when the response leaves the queue.
        """
        snapshot = self.head.object("queued", output=[])
        return [
            self._event("response.created", response=snapshot),
            self._event("response.queued", response=snapshot),
        ]

    def run(self) -> list[Event]:
        """Return the event for the start of a queued response."""
        self.status = "in_progress"
        return [self._event("response.in_progress", response=self.head.object("in_progress", output=[]))]

    def take(self, parts: Sequence[ResponsePart], delta: Delta) -> list[Event]:
        """Return the events for the parts of a delta.

        Args:
            parts: Parts that the turn made of the delta.
            delta: The delta.
        """
        events: list[Event] = []
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

    def complete(self, finish_reason: TurnFinish | None, usage: Usage, now: int) -> tuple[list[Event], dict[str, Any]]:
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
        response = self.head.object(
            self.status,
            output=self.output,
            usage=usage_object(usage),
            completed_at=None if is_cut else now,
            incomplete_reason="max_output_tokens" if is_cut else None,
        )
        response |= self._versions_field()
        events.append(self._event(f"response.{self.status}", response=response))
        return events, response

    def fail(
        self, message: str, code: str = "server_error", *, usage: Usage | None = None
    ) -> tuple[list[Event], dict[str, Any]]:
        """Return the last event and the whole response for a response that failed.

        Args:
            message: Error message.
            code: Error code.
            usage: Token counts, if known.
        """
        response = self._break_off("failed", usage, response_error(message, code))
        return [self._event("response.failed", response=response)], response

    def cancel(
        self, resume: ResumeBody | None = None, *, usage: Usage | None = None
    ) -> tuple[list[Event], dict[str, Any]]:
        """Return the last event and the whole response for a response that its client cancelled.

        OpenAI's API has no event for this, so the event is `response.incomplete`.

        Args:
            resume: State to resume the response. None if the client did not ask for it.
            usage: Token counts, if known.
        """
        response = self._break_off("cancelled", usage, None) | _resume_field(resume)
        return [self._event("response.incomplete", response=response)], response

    def end_partial(
        self, stop_reason: int | str | None, resume: ResumeBody | None, *, usage: Usage
    ) -> tuple[list[Event], dict[str, Any]]:
        """Return the last events and the response after an abort or a deadline.

        Used for a client that asked for partial results. Other clients get an error.

        Args:
            stop_reason: Why the response was stopped. None after an abort by id.
            resume: State to resume the response.
            usage: Token counts.
        """
        details = {"reason": PARTIAL_FINISH, "stop_reason": stop_reason}
        return self._end_early(details, usage, _resume_field(resume))

    def end_steered(self, *, usage: Usage) -> tuple[list[Event], dict[str, Any]]:
        """Return the last events and the response that was cut, because its user has sent new input.

        Args:
            usage: Token counts.
        """
        return self._end_early({"reason": STEERED}, usage, {})

    def _end_early(
        self, details: dict[str, Any], usage: Usage, fields: dict[str, Any]
    ) -> tuple[list[Event], dict[str, Any]]:
        events = self._close_text("incomplete")
        response = self._break_off("incomplete", usage, None) | fields
        response["incomplete_details"] = details
        return [*events, self._event("response.incomplete", response=response)], response

    def steer_event(self, kind: str, fields: Event) -> Event:
        """Return an event about input for a successor of this response.

        Args:
            kind: Last part of the event's type.
            fields: Fields of the event.
        """
        return self._event(f"response.steer.{kind}", **fields)

    # --- content and reasoning ---

    def _take_text(self, text: str, logprobs: list[ChatToken]) -> list[Event]:
        events: list[Event] = []
        opened = self._text
        if opened is None or not opened.is_message:
            # Models write line breaks between reasoning and a tool call. These line breaks must not become a message.
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return []
            self._blank = ""
            events += self._open_message()
            opened = self._text
        assert opened is not None
        opened.pieces.append(text)
        opened.logprobs += logprobs
        fields: Event = {"content_index": 0, "delta": text, "logprobs": logprobs}
        events.append(self._item_event("response.output_text.delta", opened, **fields))
        return events

    def _open_message(self) -> list[Event]:
        events = self._close_text("completed")
        opened = _OpenText(self._new_item("message", role="assistant", content=[]), len(self._items) - 1, "message")
        opened.pieces.append(self._blank)
        self._text, self._blank = opened, ""
        return [
            *events,
            self._event("response.output_item.added", output_index=opened.index, item=dict(opened.item)),
            self._item_event("response.content_part.added", opened, content_index=0, part=_text_part("", [])),
        ]

    def _take_reasoning(self, text: str) -> list[Event]:
        events: list[Event] = []
        opened = self._text
        as_summary = self.head.body.reasoning is not None and self.head.body.reasoning.wants_summary
        if opened is None or opened.is_message:
            if not text:
                return []
            events += self._close_text("completed")
            kind = "summary" if as_summary else "reasoning"
            opened = _OpenText(self._new_item("reasoning", summary=[], content=[]), len(self._items) - 1, kind)
            self._text = opened
            events.append(self._event("response.output_item.added", output_index=opened.index, item=dict(opened.item)))
            if as_summary:
                fields: Event = {"summary_index": 0, "part": {"type": "summary_text", "text": ""}}
                events.append(self._item_event("response.reasoning_summary_part.added", opened, **fields))
            else:
                fields = {"content_index": 0, "part": {"type": "reasoning_text", "text": ""}}
                events.append(self._item_event("response.content_part.added", opened, **fields))
        opened.pieces.append(text)
        if as_summary:
            events.append(
                self._item_event("response.reasoning_summary_text.delta", opened, summary_index=0, delta=text)
            )
        else:
            events.append(self._item_event("response.reasoning_text.delta", opened, content_index=0, delta=text))
        return events

    def _close_text(self, status: str) -> list[Event]:
        opened, self._text = self._text, None
        if opened is None:
            return []
        text, part = opened.fill(status)
        if opened.kind == "message":
            done: Event = {"content_index": 0, "text": text, "logprobs": opened.logprobs}
            events = [
                self._item_event("response.output_text.done", opened, **done),
                self._item_event("response.content_part.done", opened, content_index=0, part=part),
            ]
        elif opened.kind == "summary":
            events = [
                self._item_event("response.reasoning_summary_text.done", opened, summary_index=0, text=text),
                self._item_event("response.reasoning_summary_part.done", opened, summary_index=0, part=part),
            ]
        else:
            events = [
                self._item_event("response.reasoning_text.done", opened, content_index=0, text=text),
                self._item_event("response.content_part.done", opened, content_index=0, part=part),
            ]
        events.append(self._event("response.output_item.done", output_index=opened.index, item=dict(opened.item)))
        return events

    # --- tool calls ---

    def _begin_call(self, part: ToolCallBegin) -> list[Event]:
        events = self._close_text("completed")
        self._blank = ""
        kind = self.head.tools.kind_of(part.name)
        namespace = self.head.tools.namespace_of(part.name)
        assert part.id is not None
        fields: Item = {"call_id": part.id}
        if kind is CallKind.LOCAL_SHELL:
            fields["action"] = {"type": "exec", "command": [], "env": {}}
        else:
            fields |= {"name": part.name, "input" if kind is CallKind.CUSTOM else "arguments": ""}
        if namespace is not None:
            fields["namespace"] = namespace
        call = _OpenCall(self._new_item(kind.value, **fields), len(self._items) - 1, kind)
        self._calls[part.index] = call
        events.append(self._event("response.output_item.added", output_index=call.index, item=dict(call.item)))
        return events

    def _take_arguments(self, part: ToolCallArguments) -> list[Event]:
        call = self._calls.get(part.index)
        if call is None or not part.text:
            return []
        call.pieces.append(part.text)
        if call.kind is not CallKind.FUNCTION:
            return []  # The input of custom and shell calls is parsed from the complete arguments.
        return [self._item_event("response.function_call_arguments.delta", call, delta=part.text)]

    def _end_call(self, part: ToolCallEnd) -> list[Event]:
        call = self._calls.pop(part.index, None)
        if call is None:
            return []
        arguments = "".join(call.pieces)
        call.item["status"] = "completed"
        events: list[Event] = []
        if call.kind is CallKind.FUNCTION:
            call.item["arguments"] = arguments
            done = {"name": call.item["name"], "arguments": arguments}
            events.append(self._item_event("response.function_call_arguments.done", call, **done))
        elif call.kind is CallKind.CUSTOM:
            text = _custom_input(arguments)
            call.item["input"] = text
            events.append(self._item_event("response.custom_tool_call_input.delta", call, delta=text))
            events.append(self._item_event("response.custom_tool_call_input.done", call, input=text))
        else:
            call.item["action"] = _shell_action(arguments)
        events.append(self._event("response.output_item.done", output_index=call.index, item=dict(call.item)))
        return events

    def _drop_calls(self) -> None:
        for call in self._calls.values():
            self._items[call.index] = None
        self._calls.clear()

    # --- helpers ---

    def _break_off(self, status: str, usage: Usage | None, error: dict[str, str] | None) -> dict[str, Any]:
        number = self._number
        # Closing the text adds it to `output`. The events of closing are dropped, because the last event of the
        # response reports the end.
        self._close_text("incomplete")
        self._number = number
        self._drop_calls()
        self.status = status
        response = self.head.object(
            status, output=self.output, usage=None if usage is None else usage_object(usage), error=error
        )
        return response | self._versions_field()

    def _versions_field(self) -> dict[str, Any]:
        return {"weight_versions": self.weight_versions} if self.weight_versions else {}

    def _new_item(self, kind: str, **fields: Any) -> Item:
        item: Item = {"id": item_id(kind, self.head.id, len(self._items)), "type": kind, "status": "in_progress"}
        item |= fields
        self._items.append(item)
        return item

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def _item_event(self, kind: str, opened: _OpenText | _OpenCall, **fields: Any) -> Event:
        return self._event(kind, item_id=opened.item["id"], output_index=opened.index, **fields)


class _OpenText:
    """A message or reasoning item to which the response still adds text.

    Args:
        item: The item. It gets the text when `fill` is called.
        index: Output index.
        kind: "message", "reasoning", or "summary" for reasoning that the client gets as a summary.
    """

    def __init__(self, item: Item, index: int, kind: str) -> None:
        self.item = item
        self.index = index
        self.kind = kind
        self.pieces: list[str] = []
        self.logprobs: list[ChatToken] = []

    @property
    def is_message(self) -> bool:
        return self.kind == "message"

    def fill(self, status: str) -> tuple[str, dict[str, Any]]:
        """Put the text so far and the status into the item. Return the text, and the item's part."""
        text = "".join(self.pieces)
        self.pieces = [text]
        part: dict[str, Any] = {"type": _PART_TYPES[self.kind], "text": text}
        if self.is_message:
            part = _text_part(text, self.logprobs)
        self.item |= {"status": status, "summary" if self.kind == "summary" else "content": [part]}
        return text, part


def _resume_field(resume: ResumeBody | None) -> dict[str, Any]:
    return {} if resume is None else {"resume": msgspec.to_builtins(resume)}


_PART_TYPES = {"message": "output_text", "summary": "summary_text", "reasoning": "reasoning_text"}


class _OpenCall:
    def __init__(self, item: Item, index: int, kind: CallKind) -> None:
        self.item = item
        self.index = index
        self.kind = kind
        self.pieces: list[str] = []


def _text_part(text: str, logprobs: list[ChatToken]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


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
