"""Interface of the client side of an HTTP connection, for all HTTP versions. It parses and produces bytes, without I/O.

The owner of the network stream reads and writes the bytes, in pieces of any size. `receive` calls the listeners of the
responses whose bytes arrive.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

__all__ = ["Fields", "HttpClientProtocol", "ResponseEnd", "ResponseListener", "ResponseResult"]

Fields = list[tuple[str, str]]


class ResponseResult(enum.Enum):
    """How a response ended."""

    COMPLETE = "complete"
    RESET = "reset"  # the server reset the HTTP/2 stream
    UNPROCESSED = "unprocessed"  # GOAWAY: the server did not process the request
    DISCONNECTED = "disconnected"  # the connection ended before the response did


class ResponseEnd(NamedTuple):
    """End of a response.

    Attributes:
        result: How the response ended.
        error: Name of an HTTP/2 error, or "" if there was none.
        was_request_sent: False if a part of the request's body was not sent. That part will not be sent any more.
    """

    result: ResponseResult
    error: str = ""
    was_request_sent: bool = True


class ResponseListener(Protocol):
    """Receives one response. HttpClientProtocol.receive calls its methods, which must not wait or raise."""

    def on_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """Receive the final status and the header fields.

        Args:
            status: HTTP status, 200 or more.
            fields: Header fields without pseudo-headers. Names are in lower case.
        """

    def on_body(self, data: bytes) -> None: ...

    def on_end(self, end: ResponseEnd) -> None:
        """Receive the end of the response. Called once, unless the client resets the request before.

        Args:
            end: How the response ended.
        """


class HttpClientProtocol(Protocol):
    """The client's state of one connection. Each request has a number, which is never reused."""

    def begin(self, method: str, path: str, fields: Fields, listener: ResponseListener, *, has_body: bool) -> int:
        """Begin a request: queue its head for sending.

        Args:
            method: HTTP method.
            path: Path with query.
            fields: Header fields without host and pseudo-headers.
            listener: Receives the response.
            has_body: True if `send_body` follows.

        Returns:
            The number of the request.
        """

    def send_body(self, number: int, data: bytes, *, is_last: bool) -> None:
        """Append data to the body of a request. Does nothing if the response has ended.

        Data beyond the server's flow control window waits until the server gives credit.

        Args:
            number: Number of the request.
            data: Bytes to send.
            is_last: True if the body ends with this data.
        """

    def unsent_bytes(self, number: int) -> int:
        """Return how many bytes of a request's body wait for the server's credit.

        Args:
            number: Number of the request.
        """

    def reset(self, number: int) -> bool:
        """Queue a reset, which informs the server that the client does not want the response. The listener gets no
        further calls.

        Args:
            number: Number of the request.

        Returns:
            False if the protocol has no reset. Then the caller must close the connection.
        """

    def withhold_credit(self, number: int) -> bool:
        """Stop giving credit for a response, so that the server can send only the rest of its window.

        Args:
            number: Number of the request.

        Returns:
            False if the protocol has no flow control.
        """

    def give_credit(self, number: int) -> None:
        """Give credit for a response again, after `withhold_credit`.

        Args:
            number: Number of the request.
        """

    def receive(self, data: bytes) -> None:
        """Process received bytes.

        Args:
            data: Received bytes, or b"" if the connection has ended.

        Raises:
            h11.RemoteProtocolError: the server violated HTTP/1.1. The connection is unusable.
            h2.exceptions.ProtocolError: the server violated HTTP/2. The connection is unusable.
        """

    def take_unsent(self) -> bytes:
        """Remove and return the bytes to send now. The caller must send them."""
