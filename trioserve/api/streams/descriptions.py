"""Descriptions of the operations on detached streams, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

import msgspec

from trioserve.api.described_operation import DescribedOperation

__all__ = ["OPERATIONS"]


class DeletedStream(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["stream"]
    deleted: bool


KEPT_ID = "value of X-Trioserve-Keep in the request that began the stream"
ID = "value of X-Session-Id in the request that began the stream"

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("GET", "/v1/streams/{stream}"): DescribedOperation(
        summary="Resume reading a stream after its connection was lost",
        description="The stream belongs to a request that was sent with X-Session-Id and X-Detach-Timeout. Its events "
        "are those of the request's API, and each SSE id is the event's number. An earlier reader gets an event saying "
        "that another reader has taken over.",
        response="text/event-stream",
        query={"after": ("send only events after the event with this number", {"type": "integer", "minimum": 0})},
        errors=(400, 404, 409, 410),
        path_parameter=ID,
    ),
    ("DELETE", "/v1/streams/{stream}"): DescribedOperation(
        summary="End a stream and delete its events",
        response=DeletedStream,
        errors=(400, 404),
        path_parameter=ID,
    ),
    ("GET", "/v1/kept_streams/{stream}"): DescribedOperation(
        summary="Take over a stream whose router has died",
        description="For routers. Sends all events of a stream that another router requested with X-Trioserve-Keep. "
        "An earlier reader gets an event saying that another reader has taken over.",
        response="text/event-stream",
        query={"unread": ("refuse if the stream has a reader", {"type": "string"})},
        errors=(400, 404, 409, 410),
        path_parameter=KEPT_ID,
    ),
    ("DELETE", "/v1/kept_streams/{stream}"): DescribedOperation(
        summary="End a stream whose client has left",
        response=DeletedStream,
        query={"reader": ("end the stream only if this reader is the latest", {"type": "integer", "minimum": 1})},
        errors=(400, 404),
        path_parameter=KEPT_ID,
    ),
}
