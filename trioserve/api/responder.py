"""Methods that answer a request of the API, with the header fields of every response, and the fields that identify a
request in log lines.

A request ends with a record for operators: a log line and HTTP metrics. The record never contains the text of prompts
or responses.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from trioserve.api.caller import ANYBODY, Caller
from trioserve.api.error_responses import REASON_HEADER, ErrorResponse
from trioserve.api.sse import encode
from trioserve.api.surface import OPENAI, REQUEST_ID_HEADER, Surface
from trioserve.api.unread_fields import IGNORED_HEADER, shown_names
from trioserve.api.whole_response import LargeJson
from trioserve.contracts.deadlines import Deadline
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.http.exchange import ClockAndIds

if TYPE_CHECKING:
    from trioserve.api.heartbeat import Heartbeat
    from trioserve.http.exchange import Exchange, HeaderFields, WebSocket
    from trioserve.metrics.metric import PlainHistogram
    from trioserve.metrics.registry import Metrics

__all__ = [
    "REQUEST_ID_HEADER",
    "TENANT_CHARACTERS_MAX",
    "TENANT_HEADER",
    "HttpCounts",
    "Outcome",
    "Responder",
    "current_request",
    "end_line",
    "outcome_of_error",
    "request_fields",
    "request_id_from",
    "tenant_shown",
]


PLAIN = re.compile(r"[!-~]+")
QUOTED = re.compile(r"[\"=\\]")


class Outcome(enum.StrEnum):
    FINISHED = "finished"
    LEFT = "left"
    """Cancelled: the client left or stopped reading, or the server stopped waiting at its shutdown."""
    REFUSED = "refused"
    """The response was an error with its own status."""
    DEADLINE = "deadline"
    """A deadline of the request passed, before or after its response began."""
    FAILED = "failed"
    """An error ended the response after its head was sent."""


DEADLINE_REASONS = frozenset({*(deadline.value for deadline in Deadline), "deadline_exceeded"})


def outcome_of_error(status: int, reason: str | None, *, has_begun: bool) -> Outcome:
    """Classify a request that ended with an error.

    Args:
        status: status of the error.
        reason: code of the error, or value of the header X-Trioserve-Reason.
        has_begun: True: the head of a response was sent before the error.
    """
    if status == 504 or reason in DEADLINE_REASONS:
        return Outcome.DEADLINE
    return Outcome.FAILED if has_begun else Outcome.REFUSED


def end_line(fields: Mapping[str, object]) -> str:
    """Write `request ended key=value ...`, without the fields that are None.

    A value that is not a single word is quoted as in JSON. Clients choose ids and paths, and must not forge fields.

    Args:
        fields: values by name.
    """
    return " ".join(
        ["request ended", *(f"{name}={_word(str(value))}" for name, value in fields.items() if value is not None)]
    )


def _word(value: str) -> str:
    return value if PLAIN.fullmatch(value) and not QUOTED.search(value) else json.dumps(value)


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER_PATH = "other"
OTHER_METHOD = "other"
NO_HANDLER = "none"  # Metrics by handler usually have this label for an unknown route.
LEFT = "left"  # Requests whose client has left have this label instead of a status.


class HttpCounts:
    """Counts requests, and writes the counts to the metrics at every scrape.

    The counts of each request are kept in a dict, because updating a metric with labels costs more.

    Args:
        metrics: metrics of the server.

    Attributes:
        open_count: requests whose handler runs. The app adds each one, and `end` subtracts it.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.open_count = self._open_shown = 0
        # The counts since the last scrape, by route, method, status and is_left_out.
        self._counts: dict[tuple[str | None, str, int | None, bool], int] = {}
        self._seconds: dict[tuple[str | None, str], PlainHistogram] = {}
        metrics.on_scrape(self._show)

    def end(self, route: str | None, method: str, status: int | None, seconds: float, *, is_left_out: bool) -> None:
        """Count the end of a request.

        Args:
            route: path template of the route. None: unknown path.
            method: HTTP method.
            status: status of the response. None: there was no response.
            seconds: time since the request's head arrived.
            is_left_out: True: machines poll the route, or the server sent the request. It is left out of the metrics by
                handler.
        """
        self.open_count -= 1
        method = self.note(route, method, status, is_left_out=is_left_out)
        if is_left_out:
            return
        histogram = self._seconds.get((route, method))
        if histogram is None:
            histogram = self._metrics.http_request_duration_seconds.labels(route or NO_HANDLER, method)
            self._seconds[route, method] = histogram
        histogram.observe(seconds)
        self._metrics.http_request_duration_highr_seconds.observe(seconds)

    def note(self, route: str | None, method: str, status: int | None, *, is_left_out: bool) -> str:
        """Count a response, even if no handler ran for the request.

        Args:
            route: path template of the route. None: unknown path.
            method: HTTP method.
            status: status of the response. None: there was no response.
            is_left_out: see `end`.

        Returns:
            The method as the metrics name it.
        """
        method = method if method in METHODS else OTHER_METHOD
        key = (route, method, status, is_left_out)
        self._counts[key] = self._counts.get(key, 0) + 1
        return method

    def _show(self) -> None:
        metrics = self._metrics
        metrics.streams_open.inc(self.open_count - self._open_shown)
        self._open_shown = self.open_count
        for (route, method, status, is_left_out), count in self._counts.items():
            metrics.http_requests_total.labels(route or OTHER_PATH, str(status or LEFT)).inc(count)
            if not is_left_out:
                status_class = LEFT if status is None else f"{status // 100}xx"
                metrics.http_requests_by_handler_total.labels(route or NO_HANDLER, method, status_class).inc(count)
        self._counts.clear()


TENANT_HEADER = "x-tenant-id"
REQUEST_ID_CHARACTERS_MAX = 128  # The length is limited, because headers, log lines and every event repeat the id.


class HasClock(Protocol):
    """Parts of a server that every request needs: the time of day, and new ids."""

    @property
    def clock_and_ids(self) -> ClockAndIds: ...


class Responder:
    """Sends the only response to one request.

    Answer with `respond_json` or `respond_bytes`, or with `start_events`, `exchange.send` and `finish`.

    Args:
        exchange: the HTTP exchange of the request.
        services: parts of the server, shared by all requests.

    Attributes:
        request_id: the id that the client sent, or a new id. The head of the response repeats the id.
        status: status of the response. None: no response was sent yet.
        caller: owner of the API key in the request.
        surface: writes errors and ids in the format of the API.
        span: trace span of the request.
        outcome: outcome of the request, as far as it is known.
        reason: reason of the error, if the request did not end normally.
        ignored_fields: fields of the body that no handler reads. The head of the response lists them.
    """

    def __init__(self, exchange: Exchange, services: HasClock) -> None:
        self.exchange = exchange
        self.services = services
        self.clock_and_ids = services.clock_and_ids
        self.request_id = services.clock_and_ids.new_request_id()
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
        """Tenant that the request's header names. The caller decides whether the name counts."""
        return None

    @property
    def owner(self) -> str | None:
        """Owner of the requests that this caller may see and abort. None: the caller sees all requests."""
        return self.caller.owner

    def begin_heartbeat(self, asked: str) -> Heartbeat | None:
        """Begin to send heartbeats within the response.

        Args:
            asked: value of the request's header HEARTBEAT_HEADER.

        Returns:
            The heartbeats, which the caller must end with `end`, or None if the server sends none.
        """
        return None

    async def respond_json(
        self, value: msgspec.Struct, *, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """Send a value as JSON.

        Args:
            value: the response, in the type that its operation declares.
            status: HTTP status of the response.
            headers: further header fields.
        """
        await self.respond_bytes(encode(value), "application/json", status=status, headers=headers)

    async def respond_large(self, large: LargeJson, value: msgspec.Struct) -> None:
        """Send a value as JSON, piece by piece. Each piece is freed when it has been sent.

        Args:
            large: the lists of `value` that were encoded before.
            value: the response, with placeholders for the lists in `large`.
        """
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
        """Release the bytes that were counted for the response. Called at the end of the request."""

    def note_large_bytes(self, change: int) -> None:
        """Report a change in the bytes that large responses hold.

        Args:
            change: bytes that were encoded; negative for bytes that were sent or dropped.
        """

    async def respond_bytes(
        self, body: bytes, content_type: str, *, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.status = status
        await self.exchange.respond(status, self._head(content_type, headers), body)

    async def start_events(
        self, headers: tuple[tuple[str, str], ...] = (), *, media_type: str = "text/event-stream; charset=utf-8"
    ) -> None:
        """Send the head of a streamed response. The caller then sends the events to the exchange.

        Args:
            headers: further header fields.
            media_type: content type of the stream.
        """
        self.status = 200
        self._streaming = True
        # Buffering proxies such as nginx would otherwise delay tokens.
        headers = (("cache-control", "no-cache"), ("x-accel-buffering", "no"), *headers)
        await self.exchange.start(200, self._head(media_type, headers))

    async def accept_websocket(self) -> WebSocket:
        """Accept the websocket that the request opens."""
        self.status = 101
        return await self.exchange.accept_websocket(self.surface.id_fields(self.request_id))

    async def start_bytes(self, content_type: str, *, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Send the head of a response. The caller then sends the body in pieces, through `exchange`.

        Args:
            content_type: content type of the response.
            headers: further header fields.
        """
        self.status = 200
        await self.exchange.start(200, self._head(content_type, headers))

    async def start_stream(self, status: int, headers: HeaderFields) -> None:
        """Send the head of a stream that another server produced.

        Args:
            status: HTTP status of the head.
            headers: all header fields of the head.
        """
        self.status = status
        self._streaming = True
        await self.exchange.start(status, headers)

    async def finish(self, last: bytes = b"") -> None:
        await self.exchange.finish(last)

    async def fail(self, error: ErrorResponse) -> bool:
        """Send an error to the client: as the response, or as the last event of a stream.

        Returns:
            False if the response has begun and is no stream, so the client cannot be informed.
        """
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
        """Correct status and outcome after a head with status 200 was sent before the response was known."""
        self.status = 200
        if self.outcome is Outcome.REFUSED:
            self.outcome = Outcome.FAILED

    def json_head(self) -> HeaderFields:
        """Make the header fields of a JSON response that are known at the time of this call."""
        return self._head("application/json", ())

    def _head(self, content_type: str, headers: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
        fields = [("content-type", content_type), *self.surface.id_fields(self.request_id), *headers]
        if names := self.ignored_names():
            fields.append((IGNORED_HEADER, shown_names(names)))
        return fields

    def ignored_names(self) -> tuple[str, ...]:
        """List the names that the response's head reports as ignored."""
        return self.ignored_fields


def request_id_from(value: str) -> str:
    """Check the client's id of a request.

    Args:
        value: value of X-Request-Id.

    Raises:
        InvalidRequest: the id is too long, or not printable ASCII.
    """
    if not 1 <= len(value) <= REQUEST_ID_CHARACTERS_MAX or not all(" " <= character <= "~" for character in value):
        raise InvalidRequest(
            f"X-Request-Id has {len(value)} characters; allowed are 1 to {REQUEST_ID_CHARACTERS_MAX}, printable ASCII",
            param="X-Request-Id",
        )
    return value


TENANT_CHARACTERS_MAX = 64  # The length is limited, because clients choose the name if there are no API keys.

current_request: ContextVar[Responder | None] = ContextVar("request", default=None)
"""Request that this task serves."""


def tenant_shown(request: Responder) -> str | None:
    """Return the tenant's name for logs and traces, which reveals nothing of the key.

    Args:
        request: any request.

    Returns:
        The name, or None if the request has no tenant.
    """
    name = request.caller.tenant_for_endpoint(request.named_tenant)
    return name[:TENANT_CHARACTERS_MAX] if name else None


def request_fields() -> dict[str, str]:
    """Return request id, tenant and trace id of the request that this task serves, without unknown ones."""
    request = current_request.get()
    if request is None:
        return {}
    fields = {"request": request.request_id, "tenant": tenant_shown(request), "trace": request.span.trace_id}
    return {name: value for name, value in fields.items() if value}
