"""Steering: input that a user sends while a response runs on a connection (OpenAI's `response.steer`).

accepted ──► the response ends ──► its successor begins with the input
                    └─ it called tools ──► pending, until the client sends their outputs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from trioserve.api.responses.input_items import CALL_OUTPUTS, checked_items
from trioserve.api.responses.response_object import Item
from trioserve.contracts.errors import InvalidRequest

__all__ = ["STEERED", "Steer", "SteerEvent", "failed_fields", "required_input", "with_steers"]

STEERED = "steered"
"""Reason of an incomplete response that was cut for new input."""

_OUTPUT_OF = {call: output for output, call in CALL_OUTPUTS.items()}


class SteerEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's message that steers a response.

    Attributes:
        type: Kind of the message.
        previous_response_id: Response to steer.
        input: A text, or messages of the user.
    """

    type: str
    previous_response_id: str
    input: str | list[dict[str, Any]]

    def check(self) -> None:
        """Check the input.

        Raises:
            InvalidRequest: The input is empty, or has other items than messages of the user.
        """
        if not self.input:
            raise InvalidRequest("input is empty: send a text, or messages of the user", param="input")
        for item in checked_items(self.input):
            if item["type"] != "message" or item["role"] != "user":
                raise InvalidRequest(
                    f"input has an item of the type {item['type']!r} that is no message of the user: send it with "
                    "response.create",
                    param="input",
                )


class Steer(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted input that no response has yet.

    Attributes:
        id: Id of the input.
        event: The client's message.
        byte_count: Size of the message.
    """

    id: str
    event: SteerEvent
    byte_count: int

    def fields(self) -> dict[str, Any]:
        return {"steer": {"id": self.id, "previous_response_id": self.event.previous_response_id}}


def failed_fields(event: SteerEvent, code: str, message: str, *, steer_id: str | None = None) -> dict[str, Any]:
    """Return the fields of the event `response.steer.failed`, which gives the input back to the client.

    Args:
        event: The client's message.
        code: OpenAI's code for the reason.
        message: Sentence for people.
        steer_id: Id of the input if it was accepted.
    """
    steer: dict[str, Any] = {"previous_response_id": event.previous_response_id, "input": event.input}
    if steer_id is not None:
        steer["id"] = steer_id
    return {"error": {"type": "invalid_request_error", "code": code, "message": message}, "steer": steer}


def required_input(output: Iterable[Item]) -> list[Item]:
    """Return an input item without its output for each tool call of a response.

    Args:
        output: Output items of the response.
    """
    calls = [item for item in output if item["type"] in _OUTPUT_OF]
    return [
        {"type": _OUTPUT_OF[call["type"]], "call_id": call["call_id"]}
        | ({"name": call["name"]} if call["type"] == "function_call" else {})
        for call in calls
    ]


def with_steers(given: str | list[dict[str, Any]] | None, steers: Sequence[Steer]) -> list[dict[str, Any]]:
    """Return a request's input with the input of steers, which comes directly after the outputs of tools.

    Args:
        given: Field "input" of the request.
        steers: The steers, in the order of their messages.
    """
    own = _as_items(given or [])
    count = next((index for index, item in enumerate(own) if item.get("type") not in CALL_OUTPUTS), len(own))
    return [*own[:count], *(item for steer in steers for item in _as_items(steer.event.input)), *own[count:]]


def _as_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given
