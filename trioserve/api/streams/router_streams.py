"""Streams that routers request. They outlive their router for a few seconds, so that another router can take over.

A router that dies closes its connections without a message. A router whose client has left would look the same. So if
a client has left, the router ends its stream by name. A closed connection alone means that the router has died. Only
the streams of requests with the header `X-Trioserve-Keep` are kept. All other requests are cancelled when the
connection closes.

    router ── POST, x-trioserve-keep: NAME ──► endpoint      response header x-trioserve-kept: SECONDS;reader=1
           ── DELETE /v1/kept_streams/NAME?reader=1 ──►      the client has left: the stream ends at once
    another router ── GET /v1/kept_streams/NAME ──►          all events from the first, as reader 2

A request with the router's key and the name can read the stream. Routers derive the name from the caller, the request's
id and its body, so that another caller's retry cannot get the stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.error_responses import refusal
from trioserve.api.streams.detached_stream import DetachedStream
from trioserve.api.streams.detached_streams import DetachedStreams, StreamRequest
from trioserve.api.streams.settings import DetachSettings
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.stored_objects import is_id

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.http.exchange import HeaderFields

__all__ = ["KEEP_HEADER", "KEPT_HEADER", "RouterStreams"]

KEEP_HEADER = "x-trioserve-keep"
"""Request header: name of the stream."""
KEPT_HEADER = "x-trioserve-kept"
"""Response header: seconds that the stream continues without a reader, and the number of this reader."""


class RouterStreams(DetachedStreams):
    """All streams that routers requested.

    There are two differences to streams that clients request. If the table is full, the request is served and its
    stream is not kept. Events get no numbers here, because they have ids already.

    Args:
        settings: Limits.

    Attributes:
        taken_over_total: Number of times that a reader took over a stream.
        expired_total: Running streams that ended because no router took over.
    """

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

    def find(self, stream_id: str, owner: str | None) -> DetachedStream:
        """Return a stream.

        Args:
            stream_id: Name of the stream.
            owner: Caller that asks. Only the owner can find a stream.

        Raises:
            Refusal: No stream of this name is kept (404).
        """
        stream = self._streams.get((owner, stream_id))
        if stream is None:
            raise refusal("stream_not_found", f"there is no stream {stream_id[:80]!r}, or its time has passed")
        return stream

    def head_fields(self, stream: DetachedStream, reader: int) -> HeaderFields:
        """Return the header field with the time limit and the reader's number.

        Args:
            stream: The stream.
            reader: Number of the reader, from 1.
        """
        return ((KEPT_HEADER, f"{self._settings.seconds_max:g};reader={reader}"),)

    # --- inside ---

    def _make(self, context: RequestContext, stream_request: StreamRequest) -> DetachedStream | None:
        existing = self._streams.get((context.owner, stream_request.stream_id))
        if existing is None:
            if not self._has_room():
                return None
        elif existing.has_reader:
            return None  # A duplicate of a running request. It is served, and the first stream keeps the name.
        else:
            self._remove(existing)  # The stream has no reader: its router has restarted the request.
        return self._new_stream(context, stream_request, is_numbered=False)

    def _has_room(self) -> bool:
        """Return True if another stream can be kept.

        If necessary, remove the oldest finished stream without a reader.
        """
        if len(self._streams) < self._settings.streams_max:
            return True
        done = next(
            (stream for stream in self._streams.values() if stream.over.is_set() and not stream.has_reader), None
        )
        if done is not None:
            self._remove(done)
        return done is not None

    def _expire(self, stream: DetachedStream) -> None:
        self.expired_total += not stream.over.is_set()
        super()._expire(stream)
