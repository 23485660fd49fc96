"""Steering: input that a user sends while a response runs on a connection (OpenAI's `response.steer`).

accepted ──► the response ends ──► its successor begins with the input
                    └─ it called tools ──► pending, until the client sends their outputs
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from trioserve.api.responses.input_items import CALL_OUTPUTS, checked_items
from trioserve.api.responses.response_types import (
    CallItem,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    RequiredInput,
    SteeredInput,
    SteerError,
    SteeringEvent,
)
from trioserve.contracts.errors import InvalidRequest

__all__ = [
    "HAS_ENDED",
    "UNKNOWN",
    "Steer",
    "SteerEvent",
    "creation_failed",
    "required_input",
    "steer_failed",
    "with_steers",
]

HAS_ENDED = SteerError(code="response_already_completed", message="the response has ended")
UNKNOWN = SteerError(code="response_not_found", message="no such response runs on this connection")


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
            if not isinstance(item, MessageItem) or item.role != "user":
                raise InvalidRequest(
                    f"input has an item of the type {item.type!r} that is no message of the user: send it with "
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

    @property
    def shown(self) -> SteeredInput:
        return SteeredInput(id=self.id, previous_response_id=self.event.previous_response_id)


def steer_failed(event: SteerEvent, error: SteerError, *, steer_id: str | None = None) -> SteeringEvent:
    """Return the event that gives input back to the client.

    Args:
        event: The client's message.
        error: The reason.
        steer_id: Id of the input if it was accepted.
    """
    return SteeringEvent(
        type="response.steer.failed",
        steer=SteeredInput(
            id=UNSET if steer_id is None else steer_id,
            previous_response_id=event.previous_response_id,
            input=event.input,
        ),
        error=error,
    )


def creation_failed(steers: Iterable[Steer], message: str) -> Iterator[SteeringEvent]:
    """Yield the events that give input back to the client because the successor was refused.

    Args:
        steers: The input.
        message: Why the successor was refused.
    """
    error = SteerError(code="successor_creation_failed", message=message)
    return (steer_failed(steer.event, error, steer_id=steer.id) for steer in steers)


def required_input(output: Iterable[OutputItem]) -> list[RequiredInput]:
    """Return the input item that each tool call of a response needs.

    Args:
        output: Output items of the response.
    """
    return [
        RequiredInput(
            type=f"{item.type}_output",
            call_id=item.call_id,
            name=item.name if isinstance(item, FunctionCallItem) else UNSET,
        )
        for item in output
        if isinstance(item, CallItem)
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
