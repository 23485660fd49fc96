"""Streams that routers ask for: they outlive the router that asked, for a few seconds, so that another one may go on.

A router that dies closes its connections without a word, and so does one whose client has left. So the router says
which of them it was: it ends what its client does not want, by name, and its silence means that it is gone. Only a
router that sends `X-Trioserve-Keep` has its streams kept; for everybody else leaving cancels as ever.

    router ── POST, x-trioserve-keep: NAME ──► endpoint      the head says x-trioserve-kept: SECONDS;reader=1
           ── DELETE /v1/kept_streams/NAME?reader=1 ──►      its client has left: ended at once
    another router ── GET /v1/kept_streams/NAME ──►          all of it from the first event on, as reader 2

The name is as good as the stream: whoever knows it may read it. Routers make it from the caller, the request's id and
its body, so that nobody else's retry can have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.api.error_responses import refusal
from trioserve.api.streams.detached_stream import DetachedStream
from trioserve.api.streams.detached_streams import DetachedStreams, Wish
from trioserve.api.streams.settings import DetachSettings
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.stored_objects import is_id

if TYPE_CHECKING:
    from trioserve.api.request_context import RequestContext
    from trioserve.http.exchange import HeaderFields

__all__ = ["KEEP_HEADER", "KEPT_HEADER", "RouterStreams"]

KEEP_HEADER = "x-trioserve-keep"
"""Of a request: the name of its stream."""
KEPT_HEADER = "x-trioserve-kept"
"""Of a response: for how many seconds it goes on without a reader, and which reader this one is."""


class RouterStreams(DetachedStreams):
    """The table of them. Unlike a stream that a client wants detached, one that finds no room is served all the same,
    and only not kept; and its events are not numbered, since they have ids of their own."""

    def __init__(self, settings: DetachSettings) -> None:
        super().__init__(settings)
        self.taken_over_total = 0
        self.expired_total = 0

    def wish_of(self, context: RequestContext) -> Wish | None:
        """Raises InvalidRequest."""
        name = context.exchange.headers.get(KEEP_HEADER)
        if name is None or context.exchange.method != "POST" or self._settings.seconds_max <= 0 or self._is_draining:
            return None
        if not is_id(name):
            raise InvalidRequest(
                f"X-Trioserve-Keep is {name[:80]!r}: it names a stream, in up to 128 letters, digits and -_.:",
                param="X-Trioserve-Keep",
            )
        return Wish(name, self._settings.seconds_max)

    def find(self, stream_id: str, owner: str | None) -> DetachedStream:
        """Raises Refusal (404)."""
        stream = self._streams.get((owner, stream_id))
        if stream is None:
            raise refusal("stream_not_found", f"no stream {stream_id[:80]!r} is kept here, or not any more")
        return stream

    def head_fields(self, stream: DetachedStream, reader: int) -> HeaderFields:
        """What a reader is told of the stream."""
        return ((KEPT_HEADER, f"{self._settings.seconds_max:g};reader={reader}"),)

    # --- inside ---

    def _make(self, context: RequestContext, wish: Wish) -> DetachedStream | None:
        existing = self._streams.get((context.owner, wish.stream_id))
        if existing is None:
            if not self._has_room():
                return None
        elif existing.has_reader:
            return None  # the same request once more, beside the first: it is served, and the first stays findable
        else:
            self._remove(existing)  # nobody reads it, and its router has begun anew
        return self._new_stream(context, wish, is_numbered=False)

    def _has_room(self) -> bool:
        """Takes the oldest away that is over and not read, if there are too many."""
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
