"""GET and DELETE /v1/streams/{id}: going on with a stream whose connection was lost, each event once, and ending it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.error_responses import REASON_HEADER, ErrorResponse, Refusal
from trioserve.api.queries import number_in, query_of
from trioserve.contracts.errors import InvalidRequest

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext

__all__ = ["delete_stream", "read_stream"]

NUMBER_MAX = 2**53


async def read_stream(context: RequestContext) -> None:
    """The events behind the one with the number `after`, or in the header Last-Event-ID; without either from the first
    one on."""
    stream = context.detached.find(_stream_id(context), context.owner)
    query = query_of(context.exchange)
    last_seen = context.exchange.headers.get("last-event-id")
    if last_seen is not None:
        query = {"after": last_seen, **query}
    after = number_in(query, "after", 0, low=0, high=NUMBER_MAX)
    if stream.head is None:
        raise _refused(409, "stream_not_begun", f"the stream {stream.id} has not begun yet: it waits for its turn")
    if after > stream.log.last:
        raise InvalidRequest(f"after is {after}, but the last event so far is {stream.log.last}", param="after")
    stream.check_kept(after)
    await context.start_events()
    await stream.read(after, context.exchange.send)
    await context.finish()


async def delete_stream(context: RequestContext) -> None:
    """A reader gets an event that tells of the end."""
    stream = context.detached.find(_stream_id(context), context.owner)
    await context.detached.delete(stream)
    await context.respond_json({"id": stream.id, "object": "stream", "deleted": True})


def _stream_id(context: RequestContext) -> str:
    return context.exchange.path.split("/")[3]


def _refused(status: int, code: str, message: str) -> Refusal:
    return Refusal(
        ErrorResponse(
            status=status,
            type="invalid_request_error",
            code=code,
            message=message,
            headers=((REASON_HEADER, code),),
        )
    )
