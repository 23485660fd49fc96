"""Streams that continue after their client has left.

By default a request is cancelled when its client leaves. The header `X-Detach-Timeout` asks for a number of seconds
that the stream continues without a reader, and `X-Session-Id` names the stream for later readers.

The handler then runs in a task of the server, not of the connection. The connection becomes the stream's first reader.
Only streams are kept: if the client leaves before the stream has begun, or if the response is not a stream, the request
is cancelled.

Streams that routers request outlive their router in the same way, see RouterStreams.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from trioserve.api.error_responses import Refusal, coded_response, refusal
from trioserve.api.limits import DetachSettings
from trioserve.api.session_fields import SESSION_HEADER
from trioserve.api.streams.cursors import DETACH_HEADER, KEEP_HEADER, KEPT_HEADER
from trioserve.api.streams.detached_stream import DetachedStream, LoggedExchange
from trioserve.contracts.errors import Draining, InvalidRequest, Overloaded
from trioserve.store.stored_objects import is_id
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.http.exchange import Exchange, HeaderFields

__all__ = ["DetachedStreams", "RouterStreams"]

logger = logging.getLogger(__name__)

STREAMS_FULL = "detached_full"
"""Reason of a refusal."""
ENDED = coded_response("stream_ended", "the stream was ended before its response was complete")
"""Last event of a stream that was cancelled."""

Context = TypeVar("Context", bound="RequestContext")


class StreamRequest(msgspec.Struct, frozen=True):
    """Option of a request whose stream must continue without a reader.

    Attributes:
        stream_id: Name of the stream.
        seconds: Time that the stream continues without a reader.
    """

    stream_id: str
    seconds: float


@uninterrupted
class DetachedStreams:
    """All kept streams, by owner and id. Use inside of `async with self.running()`.

    A finished stream is kept until it had no reader for the number of seconds in its request.

    Args:
        settings: Limits.
    """

    MISSING = ": its request had no X-Detach-Timeout"
    """Reason why a stream may not exist, for the error."""

    def __init__(self, settings: DetachSettings) -> None:
        self._settings = settings
        self._streams: dict[tuple[str | None, str], DetachedStream] = {}
        self._nursery: trio.Nursery | None = None
        self._is_draining = False
        self._working_count = 0
        self._idle = trio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the tasks of the streams. Leaving cancels all streams."""
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    yield
                finally:
                    self._nursery = None
                    nursery.cancel_scope.cancel()
                    for stream in list(self._streams.values()):
                        self._remove(stream)

    # --- state ---

    @property
    def detached_count(self) -> int:
        """Number of running streams that have no reader."""
        return sum(not stream.has_reader and not stream.over.is_set() for stream in self._streams.values())

    @property
    def kept_count(self) -> int:
        """Number of streams, including finished ones."""
        return len(self._streams)

    @property
    def kept_bytes(self) -> int:
        """Size of all kept events."""
        return sum(stream.log.byte_count for stream in self._streams.values())

    def find(self, stream_id: str, owner: str | None) -> DetachedStream:
        """Return a stream.

        Args:
            stream_id: Name of the stream.
            owner: Caller that asks. Only the owner can find a stream.

        Raises:
            Refusal: The caller has no stream of this name (404).
        """
        stream = self._streams.get((owner, stream_id))
        if stream is None:
            raise refusal(
                "stream_not_found",
                f"there is no stream {stream_id[:80]!r}{self.MISSING}, or its time has passed",
            )
        return stream

    def head_fields(self, stream: DetachedStream, reader: int) -> HeaderFields:
        """Return header fields that describe the stream to a reader. This class adds no fields.

        Args:
            stream: Detached stream that the response reads.
            reader: Number of the reader, from 1.
        """
        return ()

    # --- requests ---

    def requested_stream(self, context: RequestContext) -> StreamRequest | None:
        """Return the stream that a request's headers ask for, or None.

        Args:
            context: The request.

        Raises:
            InvalidRequest: The headers are invalid.
        """
        headers = context.exchange.headers
        timeout, session = headers.get(DETACH_HEADER), headers.get(SESSION_HEADER)
        if timeout is None or context.exchange.method != "POST":
            return None
        seconds_max = self._settings.seconds_max
        if seconds_max <= 0:
            raise InvalidRequest(
                "X-Detach-Timeout is set, but this server ends a request when its client leaves: leave the header out, "
                "or start the server with --detach-timeout-max",
                param="X-Detach-Timeout",
            )
        try:
            seconds = float(timeout)
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= seconds_max:
            raise InvalidRequest(
                f"X-Detach-Timeout is {timeout[:40]!r}, allowed is a number of seconds, above 0 and up to "
                f"{seconds_max:g}",
                param="X-Detach-Timeout",
            )
        if session is None or not is_id(session):
            raise InvalidRequest(
                f"X-Session-Id is {'missing' if session is None else repr(session[:80])}: with X-Detach-Timeout, send "
                "a name for the stream, in up to 128 letters, digits and -_.:",
                param="X-Session-Id",
            )
        return StreamRequest(session, seconds)

    async def serve(
        self,
        context: Context,
        stream_request: StreamRequest,
        new_context: Callable[[Exchange], Context],
        handle: Callable[[Context], Awaitable[None]],
    ) -> bool:
        """Answer a request in a task that may outlive its connection. Its client reads the stream.

        Args:
            context: The request.
            stream_request: The request's option to keep its stream. From `requested_stream`.
            new_context: Creates the context for the task.
            handle: Answers the request. It also reports errors to the client.

        Returns:
            False if the stream cannot be kept. The caller then answers the request in its own task.

        Raises:
            Refusal: Another stream has this id. Nothing has begun.
            Overloaded: Too many streams are kept. Nothing has begun.
        """
        exchange = context.exchange
        body = await exchange.body()
        if self._nursery is None or self._is_draining:
            raise Draining("the server is shutting down", reason="draining", retry_after_seconds=5)
        stream = self._make(context, stream_request)
        if stream is None:
            return False
        self._streams[context.owner, stream_request.stream_id] = stream
        inner = new_context(LoggedExchange(exchange, body, stream))
        inner.request_id, inner.caller, inner.surface = context.request_id, context.caller, context.surface
        inner.span = context.span
        inner.streams = context.streams  # The log line of the request needs the streams.
        assert self._nursery is not None
        self._working_count += 1
        self._nursery.start_soon(self._work, stream, inner, handle)
        try:
            await stream.has_responded.wait()
            if stream.head is not None:
                status, fields = stream.head
                await context.start_stream(status, [*fields, *self.head_fields(stream, 1)])
                await stream.read(0, exchange.send)
        finally:
            stream.stop_waiting()
            if stream.head is None:
                self._remove(stream)  # The client has left or gets a whole response, so no stream is kept.
            elif not stream.has_reader:
                self._note_unread(stream)
        if stream.head is not None:
            await exchange.finish()
        elif stream.whole is not None:
            context.status = stream.whole[0]
            await exchange.respond(*stream.whole)
        else:
            raise Refusal(ENDED)
        return True

    def drain(self) -> None:
        """End all streams without a reader, and later each stream whose reader leaves. No new readers are expected."""
        self._is_draining = True
        for stream in list(self._streams.values()):
            if not stream.has_reader:
                self._remove(stream)

    async def wait_until_idle(self) -> None:
        """Return when no handler runs. Call drain() before."""
        while self._working_count:
            self._idle = trio.Event()
            await self._idle.wait()

    async def delete(self, stream: DetachedStream) -> None:
        """End a stream. Return when its handler has released all resources."""
        self._remove(stream)
        await stream.over.wait()

    # --- private methods ---

    def _make(self, context: RequestContext, stream_request: StreamRequest) -> DetachedStream | None:
        """Create a stream, and remove a finished stream if the table is full.

        Returns:
            The stream, or None if the request is answered without a kept stream.

        Raises:
            Refusal: Another running stream has this id.
            Overloaded: Too many streams are kept.
        """
        existing = self._streams.get((context.owner, stream_request.stream_id))
        if existing is not None:
            if not existing.over.is_set():
                raise refusal(
                    "stream_exists",
                    f"the stream {stream_request.stream_id} is running: read it with GET "
                    f"/v1/streams/{stream_request.stream_id}, end it with DELETE, or send another X-Session-Id",
                )
            self._remove(existing)
        self._make_room(context.owner)
        return self._new_stream(context, stream_request, is_numbered=True)

    def _new_stream(
        self, context: RequestContext, stream_request: StreamRequest, *, is_numbered: bool
    ) -> DetachedStream:
        return DetachedStream(
            stream_request.stream_id,
            context.owner,
            seconds=stream_request.seconds,
            bytes_max=self._settings.bytes_max,
            call_at=context.engine.call_at,
            on_unread=self._note_unread,
            on_expired=self._expire,
            is_numbered=is_numbered,
            silent_seconds_max=context.services.rules.keep_alive_seconds,
        )

    def _make_room(self, owner: str | None) -> None:
        """Remove the oldest finished stream without a reader if a limit is reached.

        Raises:
            Overloaded: No stream can be removed.
        """
        settings = self._settings
        every_stream = list(self._streams.values())
        own = [stream for stream in every_stream if stream.owner == owner]
        for streams, streams_max in ((own, settings.streams_of_one_max), (every_stream, settings.streams_max)):
            if len(streams) < streams_max:
                continue
            if not self._remove_finished(streams):
                raise Overloaded(
                    f"this caller has {len(own)} streams that outlive their clients (allowed: "
                    f"{settings.streams_of_one_max}), and all callers have {len(every_stream)} (allowed: "
                    f"{settings.streams_max}): end one, or leave X-Detach-Timeout out",
                    reason=STREAMS_FULL,
                    retry_after_seconds=5,
                )

    def _remove_finished(self, streams: Iterable[DetachedStream]) -> bool:
        """Remove the oldest finished stream without a reader. Return False if there is none."""
        done = next((stream for stream in streams if stream.over.is_set() and not stream.has_reader), None)
        if done is not None:
            self._remove(done)
        return done is not None

    async def _work(self, stream: DetachedStream, inner: Context, handle: Callable[[Context], Awaitable[None]]) -> None:
        try:
            with stream.scope:
                await handle(inner)
            if stream.scope.cancelled_caught and stream.head is not None and not stream.log.is_ended:
                stream.end(inner.surface.event(ENDED, inner.request_id))
        except Exception:
            # The handler could not report the error to its client. The reader sees an incomplete response.
            logger.exception("detached stream broke off stream=%s request=%s", stream.id, inner.request_id)
        finally:
            stream.finish()
            self._working_count -= 1
            if not self._working_count:
                self._idle.set()

    def _note_unread(self, stream: DetachedStream) -> None:
        if self._streams.get((stream.owner, stream.id)) is not stream:
            return
        if self._is_draining:
            self._remove(stream)
        else:
            stream.start_clock()

    def _expire(self, stream: DetachedStream) -> None:
        logger.debug("detached stream ended without a reader stream=%s", stream.id)
        self._remove(stream)

    def _remove(self, stream: DetachedStream) -> None:
        if self._streams.get((stream.owner, stream.id)) is stream:
            del self._streams[stream.owner, stream.id]
        stream.close()


class RouterStreams(DetachedStreams):
    """All streams that routers requested. They outlive their router for a few seconds, so that another router can take
    over.

    A router that dies closes its connections without a message. A router whose client has left would look the same. So
    if a client has left, the router ends its stream by name. A closed connection alone means that the router has died.
    Only the streams of requests with the header `X-Trioserve-Keep` are kept. All other requests are cancelled when the
    connection closes.

        router ── POST, x-trioserve-keep: NAME ──► endpoint     response header x-trioserve-kept: SECONDS;reader=1
               ── DELETE /v1/kept_streams/NAME?reader=1 ──►     the client has left: the stream ends at once
        another router ── GET /v1/kept_streams/NAME ──►         all events from the first, as reader 2

    A request with the router's key and the name can read the stream. Routers derive the name from the caller, the
    request's id and its body, so that another caller's retry cannot get the stream.

    There are two differences to streams that clients request. If the table is full, the request is served and its
    stream is not kept. Events get no numbers here, because they have ids already.

    Args:
        settings: Limits.

    Attributes:
        taken_over_total: Number of times that a reader took over a stream.
        expired_total: Running streams that ended because no router took over.
    """

    MISSING = ""

    def __init__(self, settings: DetachSettings) -> None:
        super().__init__(settings)
        self.taken_over_total = 0
        self.expired_total = 0

    def requested_stream(self, context: RequestContext) -> StreamRequest | None:
        """Return the stream that a router's request asks for, or None.

        Args:
            context: The request.

        Raises:
            InvalidRequest: The name of the stream is invalid.
        """
        name = context.exchange.headers.get(KEEP_HEADER)
        if name is None or context.exchange.method != "POST" or self._settings.seconds_max <= 0 or self._is_draining:
            return None
        if not is_id(name):
            raise InvalidRequest(
                f"X-Trioserve-Keep is {name[:80]!r}: send a name for the stream, in up to 128 letters, digits and -_.:",
                param="X-Trioserve-Keep",
            )
        return StreamRequest(name, self._settings.seconds_max)

    def head_fields(self, stream: DetachedStream, reader: int) -> HeaderFields:
        """Return the header field with the time limit and the reader's number.

        Args:
            stream: Stream that the response reads.
            reader: Number of the reader, from 1.
        """
        return ((KEPT_HEADER, f"{self._settings.seconds_max:g};reader={reader}"),)

    # --- private methods ---

    def _make(self, context: RequestContext, stream_request: StreamRequest) -> DetachedStream | None:
        existing = self._streams.get((context.owner, stream_request.stream_id))
        if existing is None:
            if len(self._streams) >= self._settings.streams_max and not self._remove_finished(self._streams.values()):
                return None
        elif existing.has_reader:
            # The request is a duplicate of a running request. The duplicate is served, but its stream is not kept.
            return None
        else:
            self._remove(existing)  # The stream has no reader, because its router has restarted the request.
        return self._new_stream(context, stream_request, is_numbered=False)

    def _expire(self, stream: DetachedStream) -> None:
        self.expired_total += not stream.over.is_set()
        super()._expire(stream)
