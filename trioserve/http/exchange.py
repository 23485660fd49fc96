"""The interface between connections and handlers: a request, its header fields, its response, and errors of its body.

Each protocol implements Exchange. The connection moves the bytes and cancels the handler when the client leaves. All
protocols encode header fields here, with the time and the ids of ClockAndIds.
"""

from __future__ import annotations

import abc
import dataclasses
import email.utils
import functools
import http
import os
import re
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import trio

from trioserve.contracts.errors import InvalidRequest

__all__ = [
    "Beats",
    "BodyTimeout",
    "BodyTooLarge",
    "ClockAndIds",
    "Exchange",
    "Handler",
    "HeaderFields",
    "Headers",
    "REASONS",
    "RequestHead",
    "ResponseState",
    "UnknownCoding",
    "WebSocket",
    "WrappedExchange",
    "encode_fields",
    "printable",
    "split_target",
]


class Headers:
    """The header fields of one request.

    Args:
        fields: names and values in the order of the message. A name may occur more than once, in upper or lower case.

    Attributes:
        get: returns the value of a field by its name in lower case, or None if the request has no such field. The
            values of repeated fields are joined with ", " (RFC 9110, 5.3).
    """

    __slots__ = ("_fields", "get")

    def __init__(self, fields: Iterable[tuple[str, str]]) -> None:
        self._fields: list[tuple[str, str]] = []
        values: dict[str, str] = {}
        for name, value in fields:
            name = name.lower()
            self._fields.append((name, value))
            values[name] = f"{values[name]}, {value}" if name in values else value
        # Each request looks up about twenty names. The dict's own method does that without a Python call.
        self.get: Callable[[str], str | None] = values.get

    def items(self) -> Iterator[tuple[str, str]]:
        """Return each field in the order of the message, with its name in lower case. Repeated fields stay separate."""
        return iter(self._fields)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        # The text has only the names of the fields, because a value may be an API key.
        return f"Headers({', '.join(name for name, _ in self._fields)})"


HeaderFields = Sequence[tuple[str, str]]


class Beats(msgspec.Struct, frozen=True, kw_only=True):
    """Heartbeats: bytes that show the client that its response still makes progress.

    Attributes:
        fields: header fields of the response head, and of each interim response (102) before the head.
        within: the bytes to insert into a streamed body as a heartbeat, by media type. Bodies of other types get no
            heartbeats.
    """

    fields: HeaderFields
    within: Mapping[str, bytes]


class BodyTooLarge(InvalidRequest):
    """The request body is larger than body_bytes_max. The response is 413."""


class BodyTimeout(InvalidRequest):
    """The request body arrived too slowly: see BodyPace. The response is 408."""


class UnknownCoding(InvalidRequest):
    """The request body has an unsupported content-encoding. The response is 415."""


class WebSocket(abc.ABC):
    """One accepted websocket (RFC 6455). `Exchange.accept_websocket` returns it.

    The handler runs in the cancel scope of its exchange. The connection cancels this scope as soon as the client
    leaves: a close frame, a reset, a close or a half close of its connection, a ping without a reply, an error of the
    protocol, a limit of FrontendLimits, or a client that reads too slowly. So a handler needs no code for a client that
    has left. When the handler returns, the connection closes the websocket with the code 1000. If the handler raises an
    Exception, the code is 1011. If the server cancels the handler, the code is 1001.

    One task at a time may receive. Several tasks of the handler may send.

    Attributes:
        draining: set when the server starts to drain. A handler without work in progress then closes the websocket with
            the code 1001. At the drain timeout, the server cancels the handler.
    """

    draining: trio.Event

    @abc.abstractmethod
    async def receive(self) -> str | bytes:
        """Wait for the next message of the client.

        The bytes of a message count against bodies_bytes_max until the next call. A client that sends
        websocket_unread_bytes_max ahead of these calls loses its connection.

        Returns:
            A whole message: str for text, bytes for binary.
        """

    @abc.abstractmethod
    async def send(self, message: str | bytes) -> None:
        """Send one message. Return when at most stream_buffer_bytes_max are still unsent.

        Args:
            message: str is sent as text, bytes as binary.
        """

    @abc.abstractmethod
    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Send a close frame, and wait for the client's close frame, at most close_seconds_max.

        The handler must return after this call. Until it does, `receive` and `send` cancel the handler's scope.

        Args:
            code: close code: 1000 to 1003, 1007 to 1014, or 3000 to 4999.
            reason: text for the client's log. It is cut after 123 bytes of UTF-8.
        """

    @abc.abstractmethod
    def take_slot(self) -> Callable[[], None]:
        """Count a response of this websocket as a running request. An open websocket without a response does not count.
        The websocket is not idle until the response ends.

        Returns:
            A function that ends the count. Call it once, when the response has ended.

        Raises:
            Overloaded: too many requests are running. An ASGI host limits its requests itself.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Release all resources of the websocket. The connection calls this method when the handler has ended. If no
        close frame was sent, this method sends one with the code 1001, if the connection allows that without waiting.
        """


class Exchange(abc.ABC):
    """One request and its response.

    The handler runs in its own cancel scope. The connection cancels this scope as soon as the client leaves: the client
    resets the stream, closes the connection or its sending half, reads nothing for stall_seconds_max, or reads too
    slowly (see ResponsePace). So a handler needs no code for a client that has left: when the handler is cancelled, it
    frees its resources. Only one task at a time may use an exchange, except for `beat`.

    To send a response, call either `respond`, or `start`, then `send` any number of times, then `finish`. Any other
    order of calls raises RuntimeError. If the handler raises an Exception or returns without a response, the client
    gets 500. If the response has already started, the connection breaks the response off (stream reset, connection
    closed), so that a partial response never looks complete.

    The connection adds the fields that frame the message: content-length for `respond`, transfer-encoding, connection,
    date. The connection drops the body for HEAD and for status 204 and 304. It checks header names and values: a line
    break or a character outside latin-1 raises ValueError.
    """

    method: str
    """The method as the client sent it. Standard methods are in upper case."""
    path: str
    """The path, percent-decoded and without the query. It begins with a slash, or is "*"."""
    query: str
    """The text after the question mark, not decoded. It is empty if the target has no query."""
    headers: Headers
    http_version: str
    """"1.0", "1.1" or "2"."""
    peer: str
    """The client's address and port, for log lines. "unknown" if the transport has no address."""
    is_websocket: bool = False
    """True if the request opens a websocket. The method is then GET, also over HTTP/2. Such a handler either calls
    `accept_websocket`, or refuses the websocket with a response of status 300 to 599."""

    async def accept_websocket(self, headers: HeaderFields = ()) -> WebSocket:
        """Accept the websocket that the request opens. Call this instead of `respond` or `start`.

        Args:
            headers: fields of the response, such as sec-websocket-protocol.

        Raises:
            RuntimeError: the request opens no websocket, or the response has already started.
        """
        raise RuntimeError(f"the request for {self.path} opens no websocket: check is_websocket first")

    def expect_beats(self, beats: Beats) -> bool:
        """Prepare for calls of `beat`, and return whether the connection sends heartbeats.

        Args:
            beats: the heartbeats to send.

        Returns:
            False if this connection sends no heartbeats: HTTP/2, HTTP/1.0, ASGI.
        """
        return False

    def beat(self) -> None:
        """Send a heartbeat, unless the connection has sent something since the last call.

        This method never waits. A task other than the handler's may call it.
        """
        return

    def fill_silence(self) -> None:
        """Allow white space before a complete JSON response that takes long. Only WhiteSpaceExchange sends such white
        space.
        """
        return

    @property
    @abc.abstractmethod
    def started(self) -> bool:
        """True once the handler has given the response head to the connection. From then on the status is fixed."""

    @abc.abstractmethod
    async def body(self) -> bytes:
        """Read the whole request body, and decompress it (gzip, deflate).

        Call this before the response starts. Further calls return the same bytes. The body counts against
        bodies_bytes_max until the exchange ends. If the server starts to drain while a part of the body is missing, the
        connection cancels the exchange.

        Raises:
            BodyTooLarge: the body is larger than body_bytes_max. It is raised before reading if content-length is too
                large.
            BodyTimeout: the body is body_wait_seconds_max later than body_bytes_per_second_min allows, or takes longer
                than body_seconds_max.
            UnknownCoding: the content-encoding is neither gzip nor deflate.
            InvalidRequest: the framing or the compression of the body is broken.
            Overloaded: the bodies of all clients together reach bodies_bytes_max.
        """

    @abc.abstractmethod
    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        """Send a complete response. Return when at most stream_buffer_bytes_max of the response are still unsent.

        Args:
            status: HTTP status, 200 to 599.
            headers: fields of the response, without the fields that frame the message.
            body: the whole body.
        """

    @abc.abstractmethod
    async def start(self, status: int, headers: HeaderFields) -> None:
        """Start a streamed response, and send its head before the first byte of the body.

        Args:
            status: HTTP status, 200 to 599.
            headers: fields of the response, without the ones that frame the message.
        """

    @abc.abstractmethod
    async def send(self, data: bytes) -> None:
        """Send a part of the body.

        At most stream_buffer_bytes_max bytes wait for the client. If there are more, the call waits until the client
        reads.

        The call always checks for cancellation. It lets other tasks run only if many bytes wait. So a handler that
        sends without a pause cannot block other tasks.

        Args:
            data: the next bytes of the body.
        """

    @abc.abstractmethod
    async def finish(self, last: bytes = b"") -> None:
        """Send the last bytes and end the body, in one write if possible.

        After this call, the handler may return and free its resources: the connection sends the rest of the buffer.

        Args:
            last: the last bytes of the body.
        """


class WrappedExchange(Exchange):
    """An exchange that passes each call to another exchange. A subclass changes some of the calls.

    Args:
        exchange: the other exchange.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.method = exchange.method
        self.path = exchange.path
        self.query = exchange.query
        self.headers = exchange.headers
        self.http_version = exchange.http_version
        self.peer = exchange.peer
        self.is_websocket = exchange.is_websocket
        self.exchange = exchange

    async def accept_websocket(self, headers: HeaderFields = ()) -> WebSocket:
        return await self.exchange.accept_websocket(headers)

    def expect_beats(self, beats: Beats) -> bool:
        return self.exchange.expect_beats(beats)

    def beat(self) -> None:
        self.exchange.beat()

    def fill_silence(self) -> None:
        self.exchange.fill_silence()

    @property
    def started(self) -> bool:
        return self.exchange.started

    async def body(self) -> bytes:
        return await self.exchange.body()

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        await self.exchange.respond(status, headers, body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        await self.exchange.start(status, headers)

    async def send(self, data: bytes) -> None:
        await self.exchange.send(data)

    async def finish(self, last: bytes = b"") -> None:
        await self.exchange.finish(last)


Handler = Callable[[Exchange], Awaitable[None]]
"""A function that answers one request. The connection calls it in its own task and cancel scope."""


class ResponseState:
    """Progress of one response: not started, started, finished. The state never goes back.

    Args:
        method: method of the request.
        is_websocket: True if the request opens a websocket.

    Attributes:
        started: True once the handler has given the head to the connection.
        finished: True once the handler has given the whole body to the connection, or has closed the websocket.
        bodiless: True if the connection drops the body (HEAD, 204, 304).
        websocket: the websocket, once the handler has accepted it.
    """

    __slots__ = ("_is_head_request", "_is_websocket", "bodiless", "finished", "started", "websocket")

    def __init__(self, *, method: str, is_websocket: bool = False) -> None:
        self.started = False
        self.finished = False
        self.bodiless = False
        self.websocket: WebSocket | None = None
        self._is_head_request = method == "HEAD"
        self._is_websocket = is_websocket

    def start(self, status: int) -> None:
        if self.started:
            raise RuntimeError(f"the response has already started: a second one with status {status} is not possible")
        status_min = 300 if self._is_websocket else 200  # Over HTTP/2, a status of 2xx accepts the websocket.
        if not status_min <= status <= 599:
            raise ValueError(f"status is {status}, allowed is {status_min} to 599")
        self.started = True
        self.bodiless = self._is_head_request or status in (204, 304)

    def accept(self, websocket: WebSocket) -> None:
        """Start the response by accepting a websocket.

        Raises:
            RuntimeError: the response has already started.
        """
        if self.started:
            raise RuntimeError("the response has already started: the websocket cannot be accepted any more")
        self.started = True
        self.websocket = websocket

    def check_open(self) -> None:
        """Raise RuntimeError unless the response has started and is not finished."""
        if self.websocket is not None:
            raise RuntimeError("the response is a websocket: use the methods of the websocket")
        if not self.started or self.finished:
            raise RuntimeError(
                "the response is already finished" if self.finished else "the response has not been started"
            )

    def finish(self) -> None:
        self.check_open()
        self.finished = True

    def check_body_readable(self) -> None:
        """Raise RuntimeError if the response has started: the connection may have dropped the rest of the body."""
        if self.started:
            raise RuntimeError("the response has already started: read the request body before it")


def _new_request_id() -> str:
    return os.urandom(16).hex()


@dataclasses.dataclass(frozen=True, slots=True)
class ClockAndIds:
    """Sources of time and ids.

    Args:
        wall_clock: returns seconds since 1970.
        new_request_id: returns an id that is unique and cannot be guessed.
        cpu_clock: returns CPU seconds of the current thread.
    """

    wall_clock: Callable[[], float] = time.time
    new_request_id: Callable[[], str] = _new_request_id
    cpu_clock: Callable[[], float] = time.thread_time

    def unix_seconds(self) -> int:
        return int(self.wall_clock())


TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")  # RFC 9110, 5.6.2 defines a token.
REASONS = {status.value: status.phrase.encode("ascii") for status in http.HTTPStatus}
"""Reason phrases of HTTP/1.1. Some clients reject a status line without a phrase."""
LOGGED_CHARACTERS_MAX = 200
BREAKS = re.compile(r"[\0\r\n]")
FRAMING_FIELDS = frozenset({"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"})


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    """A request without its body.

    Attributes:
        method, path, query, headers, http_version, peer, is_websocket: see Exchange.
    """

    method: str
    path: str
    query: str
    headers: Headers
    http_version: str
    peer: str
    is_websocket: bool = False


def split_target(target: str) -> tuple[str, str]:
    """Split a request target into path and query.

    Args:
        target: "/a%20b?c=d", "http://host/a?c=d" (as sent to a proxy), "*", or "host:443" (of CONNECT).

    Returns:
        The percent-decoded path, and the query as sent. A target without a path ("host:443") is returned as the path.
    """
    if not target.startswith(("/", "*")) and "://" in target:
        _, _, rest = target.partition("://")
        slash = re.search(r"[/?]", rest)
        target = rest[slash.start() :] if slash else "/"
        if target.startswith("?"):
            target = "/" + target
    path, _, query = target.partition("#")[0].partition("?")
    return urllib.parse.unquote(path, errors="replace"), query


def encode_fields(
    fields: HeaderFields, *, unix_seconds: int, content_length: int | None = None
) -> list[tuple[bytes, bytes]]:
    """Check and encode the header fields of a response.

    Args:
        fields: names and values of the header fields, from the handler.
        unix_seconds: the time for the field `date`, which is added unless the handler set it.
        content_length: bytes of the body. Ignored if the handler set content-length, which it may do for HEAD. If None,
            no content-length is added.

    Returns:
        Fields with lower-case names, in the order of `fields`, then content-length and date.

    Raises:
        ValueError: a name or a value would break the message, or the handler set a field that only the connection may
            set.
    """
    encoded = []
    names = set()
    for name, value in fields:
        name = name.lower()
        if not TOKEN.fullmatch(name) or BREAKS.search(value):
            raise ValueError(
                f"header field {name!r}: {value!r} cannot be sent: it has a line break or a wrong character"
            )
        if name in FRAMING_FIELDS:
            raise ValueError(f"header field {name!r} is set by the connection: leave it out")
        names.add(name)
        encoded.append((name.encode("ascii"), value.strip(" \t").encode("latin-1")))
    if content_length is not None and "content-length" not in names:
        encoded.append((b"content-length", str(content_length).encode("ascii")))
    if "date" not in names:
        encoded.append((b"date", _date(unix_seconds)))
    return encoded


def printable(text: str) -> str:
    """Escape text from a client, so that the text is safe in a log line.

    Args:
        text: any text.

    Returns:
        At most LOGGED_CHARACTERS_MAX characters of `text`, with line breaks and control characters escaped.
    """
    return text[:LOGGED_CHARACTERS_MAX].encode("unicode_escape").decode("ascii")


@functools.lru_cache(maxsize=1)
def _date(unix_seconds: int) -> bytes:
    return email.utils.formatdate(unix_seconds, usegmt=True).encode("ascii")
