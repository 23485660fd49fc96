"""What a handler sees: the request, the ways to answer it, and a scope that ends when the client leaves.

How bytes reach the client, and who notices that it left, is the business of the connection behind it.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.http.headers import Headers

__all__ = ["Beats", "BodyTimeout", "BodyTooLarge", "Exchange", "Handler", "HeaderFields", "UnknownCoding"]

HeaderFields = Sequence[tuple[str, str]]


class Beats(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that say that a response is alive while nothing else of it can be sent.

    Args:
        fields: header fields of the response's head, and of each interim response (102) before it.
        within: what goes between two writes of a body, by its media type. A body of another type has no beats.
    """

    fields: HeaderFields
    within: Mapping[str, bytes]


class BodyTooLarge(InvalidRequest):
    """The request's body is larger than body_bytes_max. To be answered with 413."""


class BodyTimeout(InvalidRequest):
    """The request's body fell body_wait_seconds_max behind its pace, or took body_seconds_max. Answer with 408."""


class UnknownCoding(InvalidRequest):
    """The request's body is compressed in a way that is not read here. To be answered with 415."""


class Exchange(abc.ABC):
    """One request and its response.

    The handler runs in a cancel scope of its own, which is cancelled at once when the client leaves: it resets the
    stream, closes the connection or its sending half, takes nothing for stall_seconds_max, or falls so far behind the
    pace of responses. So a handler needs no case for a client that is gone; whatever it holds hangs from that scope.
    One task at a time may use an exchange.

    A response is `respond`, or `start`, any number of `send`, then `finish`; another order is a RuntimeError. A handler
    that returns without a response, or raises an Exception, before `started` makes a 500; later than that the client
    sees the response break off (stream reset, connection closed), never a complete one.

    The connection adds what frames the message: content-length for `respond`, transfer-encoding, connection, date.
    After HEAD, and with status 204 or 304, bodies are dropped. Header names and values are checked: a line break or a
    character outside latin-1 is a ValueError.
    """

    method: str
    """In upper case, as clients send it."""
    path: str
    """Percent-decoded, without the query; begins with a slash (or is "*")."""
    query: str
    """Behind the question mark, as it came; empty if there was none."""
    headers: Headers
    http_version: str
    """"1.0", "1.1" or "2"."""
    peer: str
    """The client's address and port for log lines; "unknown" where the transport has none."""

    def expect_beats(self, beats: Beats) -> bool:
        """Prepare for `beat`. Returns False where this connection has none (HTTP/2, HTTP/1.0, other front ends)."""
        return False

    def beat(self) -> None:
        """Send a sign of life, unless something was sent since the last call. Never waits, and may be called by
        another task than the one that uses the exchange."""
        return

    def fill_silence(self) -> None:
        """Allow white space before a whole JSON response that takes long. Only WhiteSpaceExchange sends some."""
        return

    @property
    @abc.abstractmethod
    def started(self) -> bool:
        """Whether the head of the response was given to the connection; after that the status is fixed."""

    @abc.abstractmethod
    async def body(self) -> bytes:
        """The whole body of the request, unfolded if it came compressed (gzip, deflate); a second call gives the same
        bytes. To be awaited before the response starts.

        A body that has not come whole when the server begins to leave is not waited for: the exchange is cancelled.

        Raises BodyTooLarge beyond body_bytes_max (before reading it, if content-length says so), BodyTimeout when
        it falls body_wait_seconds_max behind body_bytes_per_second_min or takes body_seconds_max, UnknownCoding for
        another content-encoding, InvalidRequest when its framing is broken, and Overloaded when all clients' bodies
        together reach bodies_bytes_max. What was read counts there until the exchange ends.
        """

    @abc.abstractmethod
    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        """Give one whole response. Returns when at most stream_buffer_bytes_max of it are still unsent."""

    @abc.abstractmethod
    async def start(self, status: int, headers: HeaderFields) -> None:
        """Begin a streamed response; the head is on its way when this returns, before the first byte of the body."""

    @abc.abstractmethod
    async def send(self, data: bytes) -> None:
        """Add to the body. Holds at most stream_buffer_bytes_max for the client and waits for it beyond that.

        Always notices a cancellation, but gives other tasks a turn only when much is held: who sends without ever
        waiting for something is stopped by that.
        """

    @abc.abstractmethod
    async def finish(self, last: bytes = b"") -> None:
        """Add the last bytes to the body and end it, in one write where that is possible. What is still unsent is the
        connection's care: the handler may return and let go of things."""


Handler = Callable[[Exchange], Awaitable[None]]
"""Called once for each request, in a task and a cancel scope of its own."""
