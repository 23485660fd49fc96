"""Operations of /v1/streams/{id} for clients and /v1/kept_streams/{id} for routers: resume or end a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.error_responses import refusal
from trioserve.api.form import Query
from trioserve.api.response import Response
from trioserve.api.route_table import Forwarding, Operation
from trioserve.api.server_context import ServerContext
from trioserve.api.streams.cursors import LAST_EVENT_ID
from trioserve.contracts.errors import InvalidRequest

if TYPE_CHECKING:
    from trioserve.api.server_context import ServerContext

__all__ = ["OPERATIONS", "delete_stream", "end_kept_stream", "read_kept_stream", "read_stream"]

NUMBER_MAX = 2**53
READERS_MAX = 2**31


class DeletedStream(Response, tag_field="object", tag="stream"):
    id: str
    deleted: bool


async def read_stream(context: ServerContext) -> None:
    """Send the events after the number in `after` or in the header Last-Event-ID, by default from the first event.

    Args:
        context: The request.
    """
    stream = context.server.detached.find(_stream_id(context), context.owner)
    last_seen = context.exchange.headers.get(LAST_EVENT_ID)
    query = Query(context.exchange.query, {} if last_seen is None else {"after": last_seen})
    after = query.number("after", 0, low=0, high=NUMBER_MAX)
    if stream.head is None:
        raise refusal("stream_not_begun", f"the stream {stream.id} has not begun yet: its request is still queued")
    if after > stream.log.last:
        raise InvalidRequest(f"after is {after}, but the last event so far is {stream.log.last}", param="after")
    stream.check_kept(after)
    await context.start_events()
    await stream.read(after, context.exchange.send)
    await context.finish()


async def delete_stream(context: ServerContext) -> None:
    """End a stream. Its reader gets a last event that reports the end.

    Args:
        context: The request.
    """
    stream = context.server.detached.find(_stream_id(context), context.owner)
    await context.server.detached.delete(stream)
    await context.respond_json(DeletedStream(id=stream.id, deleted=True))


async def read_kept_stream(context: ServerContext) -> None:
    """Send a whole stream, with the head that its first reader got.

    An earlier reader gets an event saying that another reader has taken over. With `unread` in the query, a stream that
    has a reader is refused.

    Args:
        context: The request.
    """
    streams = context.server.router_streams
    stream = streams.find(_stream_id(context), context.owner)
    if stream.head is None:
        raise refusal("stream_not_begun", f"the stream {stream.id} has not begun yet: its request is still queued")
    if stream.has_reader and Query(context.exchange.query).text("unread"):
        raise refusal("stream_is_read", f"the stream {stream.id} has a reader")
    stream.check_kept(0)
    streams.taken_over_total += 1
    status, fields = stream.head
    stream.reader_count += 1
    await context.start_stream(status, [*fields, *streams.head_fields(stream, stream.reader_count)])
    await stream.read(0, context.exchange.send)
    await context.finish()


async def end_kept_stream(context: ServerContext) -> None:
    """End a stream, unless another reader has taken over from the reader that sends this request.

    Args:
        context: The request.
    """
    streams = context.server.router_streams
    stream = streams.find(_stream_id(context), context.owner)
    reader = Query(context.exchange.query).number("reader", 1, low=1, high=READERS_MAX)
    is_ended = reader >= stream.reader_count
    if is_ended:
        await streams.delete(stream)
    await context.respond_json(DeletedStream(id=stream.id, deleted=is_ended))


def _stream_id(context: ServerContext) -> str:
    return context.exchange.path.split("/")[3]


KEPT_ID = "value of X-Trioserve-Keep in the request that began the stream"
ID = "value of X-Session-Id in the request that began the stream"


OPERATIONS: tuple[Operation[ServerContext], ...] = (
    Operation(
        method="GET",
        path="/v1/streams/{stream}",
        handler=read_stream,
        summary="Resume reading a stream after its connection was lost",
        forwarding=Forwarding.STREAM,
        description="The stream belongs to a request that was sent with X-Session-Id and X-Detach-Timeout. Its events "
        "are those of the request's API, and each SSE id is the event's number. An earlier reader gets an event saying "
        "that another reader has taken over.",
        response="text/event-stream",
        query={"after": ("send only events after the event with this number", {"type": "integer", "minimum": 0})},
        errors=(400, 404, 409, 410),
        path_parameter=ID,
    ),
    Operation(
        method="DELETE",
        path="/v1/streams/{stream}",
        handler=delete_stream,
        summary="End a stream and delete its events",
        forwarding=Forwarding.STREAM,
        response=DeletedStream,
        errors=(400, 404),
        path_parameter=ID,
    ),
    Operation(
        method="GET",
        path="/v1/kept_streams/{stream}",
        handler=read_kept_stream,
        summary="Take over a stream whose router has died",
        description="For routers. Sends all events of a stream that another router requested with X-Trioserve-Keep. "
        "An earlier reader gets an event saying that another reader has taken over.",
        response="text/event-stream",
        query={"unread": ("refuse if the stream has a reader", {"type": "string"})},
        errors=(400, 404, 409, 410),
        path_parameter=KEPT_ID,
    ),
    Operation(
        method="DELETE",
        path="/v1/kept_streams/{stream}",
        handler=end_kept_stream,
        summary="End a stream whose client has left",
        response=DeletedStream,
        query={"reader": ("end the stream only if this reader is the latest", {"type": "integer", "minimum": 1})},
        errors=(400, 404),
        path_parameter=KEPT_ID,
    ),
)
