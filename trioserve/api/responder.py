"""The ways to answer a request of the API, with the headers that every response carries. What was asked is
elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from trioserve.api.caller import ANYBODY, Caller
from trioserve.api.error_responses import REASON_HEADER, ErrorResponse
from trioserve.api.request_end import Outcome, outcome_of_error
from trioserve.api.sse import encode
from trioserve.api.surface import OPENAI, REQUEST_ID_HEADER, Surface
from trioserve.api.unread_fields import IGNORED_HEADER, shown_names
from trioserve.api.whole_response import LargeJson
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.http.clock_and_ids import ClockAndIds

if TYPE_CHECKING:
    from trioserve.api.heartbeat import Heartbeat
    from trioserve.http.exchange import Exchange, HeaderFields

__all__ = ["REQUEST_ID_HEADER", "TENANT_HEADER", "Responder", "request_id_from"]

TENANT_HEADER = "x-tenant-id"
REQUEST_ID_CHARACTERS_MAX = 128  # it is repeated in headers, log lines and every event


class Responder:
    """Whoever has one answers it once: with `respond_json` or `respond_bytes`, or with `start_events`, `exchange.send`
    and `finish`.

    request_id: the client's, or ours; the client has it in the head of every response.
    status: of the response; None as long as there is none.
    caller: who asks, as the API key tells.
    surface: how errors and ids are worded.
    span: of the request, where it is traced.
    outcome, reason: how it ended so far, and why if not as asked.
    ignored_fields: of the request's body, those that nobody reads. The head of the response names them.
    """

    def __init__(self, exchange: Exchange, clock_and_ids: ClockAndIds) -> None:
        self.exchange = exchange
        self.request_id = clock_and_ids.new_request_id()
        self.clock_and_ids = clock_and_ids
        self.status: int | None = None
        self.caller: Caller = ANYBODY
        self.surface: Surface = OPENAI
        self.outcome = Outcome.LEFT
        self.reason: str | None = None
        self.span: Span = NO_SPAN
        self.ignored_fields: tuple[str, ...] = ()
        self._streaming = False

    @property
    def named_tenant(self) -> str | None:
        """Whose this is, as the request says; what that counts for, the caller tells."""
        return None

    @property
    def owner(self) -> str | None:
        """Whose requests this caller may see and abort, and to whom a new one belongs; None: all, and nobody's."""
        return self.caller.owner

    def begin_heartbeat(self) -> Heartbeat | None:
        """Begin to send signs of life within the response, if the request asks for them. The caller owes `end`."""
        return None

    async def respond_json(
        self, value: object, *, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Send `value` as JSON."""
        await self.respond_bytes(encode(value), "application/json", status=status, headers=headers)

    async def respond_large(self, large: LargeJson, value: object) -> None:
        """Send `value`, of which `large` has the lists that were encoded piece by piece. Holds only what is unsent."""
        if large.is_empty:
            await self.respond_json(value)
            return
        held = large.byte_count
        self.note_large_bytes(held)
        try:
            await self.start_bytes("application/json")
            for piece in large.pieces(value):
                await self.exchange.send(piece)
                self.note_large_bytes(large.byte_count - held)
                held = large.byte_count
                await trio.lowlevel.checkpoint()
            await self.exchange.finish()
        finally:
            self.note_large_bytes(-held)

    def release(self) -> None:
        """The request is over: give back what its response held."""

    def note_large_bytes(self, change: int) -> None:
        """Bytes of a large response were encoded, or sent or given up."""

    async def respond_bytes(
        self, body: bytes, content_type: str, *, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.status = status
        await self.exchange.respond(status, self._head(content_type, headers), body)

    async def start_events(
        self, headers: tuple[tuple[str, str], ...] = (), *, media_type: str = "text/event-stream; charset=utf-8"
    ) -> None:
        """Send the head of a streamed response, whose events go to the exchange; the client has the request's id
        now."""
        self.status = 200
        self._streaming = True
        # Buffering proxies (nginx) would hold tokens back.
        headers = (("cache-control", "no-cache"), ("x-accel-buffering", "no"), *headers)
        await self.exchange.start(200, self._head(media_type, headers))

    async def start_bytes(self, content_type: str, *, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Send the head of a response whose bytes go to the exchange piece by piece."""
        self.status = 200
        await self.exchange.start(200, self._head(content_type, headers))

    async def start_stream(self, status: int, headers: HeaderFields) -> None:
        """The same with the head of a stream that somebody else makes."""
        self.status = status
        self._streaming = True
        await self.exchange.start(status, headers)

    async def finish(self, last: bytes = b"") -> None:
        await self.exchange.finish(last)

    async def fail(self, error: ErrorResponse) -> bool:
        """Tell the client of an error: as a response, or, in a stream, as its last event. False if it is too late."""
        self.reason = dict(error.headers).get(REASON_HEADER) or error.code or error.type
        self.outcome = outcome_of_error(error.status, self.reason, has_begun=self.exchange.started)
        if not self.exchange.started:
            body = self.surface.body(error, self.request_id)
            status = self.surface.status(error)
            await self.respond_bytes(body, "application/json", status=status, headers=error.headers)
            return True
        if self._streaming:
            await self.exchange.finish(self.surface.event(error, self.request_id))
            return True
        return False

    def note_early_head(self) -> None:
        """The client got status 200 before the response was known, so an error came as the body."""
        self.status = 200
        if self.outcome is Outcome.REFUSED:
            self.outcome = Outcome.FAILED

    def json_head(self) -> HeaderFields:
        """Make the header fields of a JSON response, as far as they are known by now."""
        return self._head("application/json", ())

    def _head(self, content_type: str, headers: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
        fields = [("content-type", content_type), *self.surface.id_fields(self.request_id), *headers]
        if names := self.ignored_names():
            fields.append((IGNORED_HEADER, shown_names(names)))
        return fields

    def ignored_names(self) -> tuple[str, ...]:
        """Return the names that the response's head lists as ignored."""
        return self.ignored_fields


def request_id_from(value: str | None) -> str | None:
    """The client's id for this request, checked; None if it sent none. Raises InvalidRequest."""
    if value is None:
        return None
    if not 1 <= len(value) <= REQUEST_ID_CHARACTERS_MAX or not all(" " <= character <= "~" for character in value):
        raise InvalidRequest(
            f"X-Request-Id has {len(value)} characters; allowed are 1 to {REQUEST_ID_CHARACTERS_MAX}, printable ASCII",
            param="X-Request-Id",
        )
    return value
