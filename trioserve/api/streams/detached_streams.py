"""Leaving cancels, unless the request asked for more: `X-Session-Id` names its stream, and `X-Detach-Timeout` says for
how many seconds it goes on after its client has left.

The handler runs in a task of the server's then, and not in that of the connection, which becomes the stream's first
reader. Only streams are kept: before one has begun, and where the response is whole, leaving cancels as ever.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from trioserve.api.error_responses import Refusal, coded_response, refusal
from trioserve.api.streams.detached_stream import DetachedStream
from trioserve.api.streams.logged_exchange import LoggedExchange
from trioserve.api.streams.settings import DetachSettings
from trioserve.contracts.errors import Draining, InvalidRequest, Overloaded
from trioserve.store.stored_objects import is_id
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.http.exchange import Exchange, HeaderFields

__all__ = ["DetachedStreams"]

logger = logging.getLogger(__name__)

SESSION_HEADER = "x-session-id"
TIMEOUT_HEADER = "x-detach-timeout"
STREAMS_FULL = "detached_full"
ENDED = coded_response("stream_ended", "the stream was ended before its response was complete")
"""The reason of a refusal."""

Context = TypeVar("Context", bound="RequestContext")


class Wish(msgspec.Struct, frozen=True):
    stream_id: str
    seconds: float


@uninterrupted
class DetachedStreams:
    """Those that live, by owner and id; the finished ones, too, until their time without a reader is over. To be used
    inside of `async with self.running()`."""

    def __init__(self, settings: DetachSettings) -> None:
        self._settings = settings
        self._streams: dict[tuple[str | None, str], DetachedStream] = {}
        self._nursery: trio.Nursery | None = None
        self._is_draining = False
        self._working_count = 0
        self._idle = trio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Leaving cancels them all."""
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

    # --- what is there ---

    @property
    def detached_count(self) -> int:
        """Streams that go on, and that nobody reads."""
        return sum(not stream.has_reader and not stream.over.is_set() for stream in self._streams.values())

    @property
    def kept_count(self) -> int:
        return len(self._streams)

    @property
    def kept_bytes(self) -> int:
        return sum(stream.log.byte_count for stream in self._streams.values())

    def find(self, stream_id: str, owner: str | None) -> DetachedStream:
        """Raises Refusal (404)."""
        stream = self._streams.get((owner, stream_id))
        if stream is None:
            raise refusal(
                "stream_not_found",
                f"there is no stream {stream_id[:80]!r}: it was not asked for with X-Detach-Timeout, or its time is "
                "over",
            )
        return stream

    def head_fields(self, stream: DetachedStream, reader: int) -> HeaderFields:
        """What the head of a response says of it, for the reader with this number."""
        return ()

    # --- asking for one ---

    def wish_of(self, context: RequestContext) -> Wish | None:
        """What this request asks for. Raises InvalidRequest."""
        headers = context.exchange.headers
        timeout, session = headers.get(TIMEOUT_HEADER), headers.get(SESSION_HEADER)
        if timeout is None or context.exchange.method != "POST":
            return None
        seconds_max = self._settings.seconds_max
        if seconds_max <= 0:
            raise InvalidRequest(
                "X-Detach-Timeout is set, but here a request ends when its client leaves: leave it out, or start the "
                "server with --detach-timeout-max",
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
                f"X-Session-Id is {'missing' if session is None else repr(session[:80])}: with X-Detach-Timeout it "
                "names the stream, in up to 128 letters, digits and -_.:",
                param="X-Session-Id",
            )
        return Wish(session, seconds)

    async def serve(
        self,
        context: Context,
        wish: Wish,
        new_context: Callable[[Exchange], Context],
        handle: Callable[[Context], Awaitable[None]],
    ) -> bool:
        """Answer a request in a task that may outlive its connection.

        Args:
            context: the request. Its client reads the stream.
            wish: the stream that the request asks for.
            new_context: makes the context that the task answers.
            handle: answers the request, errors included.

        Returns:
            False if the stream cannot be kept. The caller then answers the request without a stream.

        Raises:
            Refusal: another stream has this id. Nothing has begun.
            Overloaded: too many streams are kept. Nothing has begun.
        """
        exchange = context.exchange
        body = await exchange.body()
        if self._nursery is None or self._is_draining:
            raise Draining("the server is leaving", reason="draining", retry_after_seconds=5)
        stream = self._make(context, wish)
        if stream is None:
            return False
        self._streams[context.owner, wish.stream_id] = stream
        inner = new_context(LoggedExchange(exchange, body, stream))
        inner.request_id, inner.caller, inner.surface = context.request_id, context.caller, context.surface
        inner.span = context.span
        inner.streams = context.streams  # what the log tells of this request
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
                self._remove(stream)  # the client has left, or gets a whole response: nothing is kept
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
        """Nobody will come to go on reading: what nobody reads is ended, now and from now on."""
        self._is_draining = True
        for stream in list(self._streams.values()):
            if not stream.has_reader:
                self._remove(stream)

    async def wait_until_idle(self) -> None:
        """Returns when no handler works for one. For use after drain()."""
        while self._working_count:
            self._idle = trio.Event()
            await self._idle.wait()

    async def delete(self, stream: DetachedStream) -> None:
        """End it; returns when its handler has let go of everything."""
        self._remove(stream)
        await stream.over.wait()

    # --- inside ---

    def _make(self, context: RequestContext, wish: Wish) -> DetachedStream | None:
        """A new one, with room for it; None: its wish is left out. Raises Refusal and Overloaded."""
        existing = self._streams.get((context.owner, wish.stream_id))
        if existing is not None:
            if not existing.over.is_set():
                raise refusal(
                    "stream_exists",
                    f"the stream {wish.stream_id} goes on: read it with GET /v1/streams/{wish.stream_id}, end it with "
                    "DELETE, or take another X-Session-Id",
                )
            self._remove(existing)
        self._make_room(context.owner)
        return self._new_stream(context, wish, is_numbered=True)

    def _new_stream(self, context: RequestContext, wish: Wish, *, is_numbered: bool) -> DetachedStream:
        return DetachedStream(
            wish.stream_id,
            context.owner,
            seconds=wish.seconds,
            bytes_max=self._settings.bytes_max,
            call_at=context.engine.call_at,
            on_unread=self._note_unread,
            on_expired=self._expire,
            is_numbered=is_numbered,
            silent_seconds_max=context.rules.keep_alive_seconds,
        )

    def _make_room(self, owner: str | None) -> None:
        """Take the oldest away that is over and not read, as long as there are too many. Raises Overloaded."""
        settings = self._settings
        everybodys = list(self._streams.values())
        own = [stream for stream in everybodys if stream.owner == owner]
        for streams, streams_max in ((own, settings.streams_of_one_max), (everybodys, settings.streams_max)):
            if len(streams) < streams_max:
                continue
            done = next((stream for stream in streams if stream.over.is_set() and not stream.has_reader), None)
            if done is None:
                raise Overloaded(
                    f"{len(own)} streams of this caller and {len(everybodys)} of all may be detached, at most "
                    f"{settings.streams_of_one_max} and {settings.streams_max} may at a time: end one, or leave "
                    "X-Detach-Timeout out",
                    reason=STREAMS_FULL,
                    retry_after_seconds=5,
                )
            self._remove(done)

    async def _work(self, stream: DetachedStream, inner: Context, handle: Callable[[Context], Awaitable[None]]) -> None:
        try:
            with stream.scope:
                await handle(inner)
            if stream.scope.cancelled_caught and stream.head is not None and not stream.log.is_ended:
                stream.end(inner.surface.event(ENDED, inner.request_id))
        except Exception:
            # The handler could not tell its client any more; the reader sees the response break off.
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
