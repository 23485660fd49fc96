"""What the paths of detached streams do and may answer: for the API's own description."""

from __future__ import annotations

from typing import Literal

import msgspec

from trioserve.api.described_operation import DescribedOperation

__all__ = ["OPERATIONS"]


class DeletedStream(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    object: Literal["stream"]
    deleted: bool


KEPT_ID = "the X-Trioserve-Keep that it was asked for with"
ID = "the X-Session-Id that it was asked for with"

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("GET", "/v1/streams/{stream}"): DescribedOperation(
        summary="Go on reading a stream whose connection was lost",
        description="Of a request that was sent with X-Session-Id and X-Detach-Timeout. The events are those of its "
        "API, each with its number as its SSE id. An earlier reader is told that another one has taken over.",
        response="text/event-stream",
        query={"after": ("only the events behind the one with this number", {"type": "integer", "minimum": 0})},
        errors=(400, 404, 409, 410),
        path_parameter=ID,
    ),
    ("DELETE", "/v1/streams/{stream}"): DescribedOperation(
        summary="End a stream, and forget its events",
        response=DeletedStream,
        errors=(400, 404),
        path_parameter=ID,
    ),
    ("GET", "/v1/kept_streams/{stream}"): DescribedOperation(
        summary="Go on with a stream whose router has died",
        description="For routers: all of a stream that another router has asked for with X-Trioserve-Keep, from its "
        "first event on. An earlier reader is told that another one has taken over.",
        response="text/event-stream",
        query={"unread": ("only if nobody reads it", {"type": "string"})},
        errors=(400, 404, 409, 410),
        path_parameter=KEPT_ID,
    ),
    ("DELETE", "/v1/kept_streams/{stream}"): DescribedOperation(
        summary="End such a stream: its client has left",
        response=DeletedStream,
        query={"reader": ("only if this reader is the last one", {"type": "integer", "minimum": 1})},
        errors=(400, 404),
        path_parameter=KEPT_ID,
    ),
}
