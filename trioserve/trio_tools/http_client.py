"""What a client's side of a connection can do, whichever version of HTTP it speaks: bytes in, bytes out, no I/O.

Whoever owns the stream reads and writes it, in pieces of any size, and decides when. What has come of a response is
told to its listener while the bytes that hold it are taken in.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

__all__ = ["Fields", "HttpClientProtocol", "ResponseEnd", "ResponseListener", "ResponseResult"]

Fields = list[tuple[str, str]]


class ResponseResult(enum.Enum):
    COMPLETE = "complete"
    RESET = "reset"  # the server reset the HTTP/2 stream
    UNPROCESSED = "unprocessed"  # GOAWAY: the server never looked at the request
    DISCONNECTED = "disconnected"  # the connection ended before the response did


class ResponseEnd(NamedTuple):
    """How a response ended. error: the name of an HTTP/2 error, or nothing. was_request_sent: False if some of the
    request's body has not gone out yet, and nobody wants it any more."""

    result: ResponseResult
    error: str = ""
    was_request_sent: bool = True


class ResponseListener(Protocol):
    """Hears of one response. Called while bytes are taken in: must not wait and must not raise."""

    def on_head(self, status: int, fields: list[tuple[bytes, bytes]]) -> None:
        """The final status and the header fields, without pseudo-headers, names in lower case."""

    def on_body(self, data: bytes) -> None: ...

    def on_end(self, end: ResponseEnd) -> None:
        """Nothing more will come. Called once, unless the client resets the request before."""


class HttpClientProtocol(Protocol):
    """One connection. A request has a number, which is never used again."""

    def begin(self, method: str, path: str, fields: Fields, listener: ResponseListener, *, has_body: bool) -> int:
        """Make the head of a request; returns its number. fields: without host and pseudo-headers."""

    def send_body(self, number: int, data: bytes, *, is_last: bool) -> None:
        """Append to the body. What may not go yet is kept, and goes when the server gives credit. Nothing happens if
        the response has ended. is_last: with these bytes the body ends."""

    def unsent_bytes(self, number: int) -> int:
        """Of the body: how many bytes wait for credit."""

    def reset(self, number: int) -> bool:
        """Make what tells the server that nobody wants the response; its listener hears nothing more. False: this
        protocol has no such thing, and only the end of the connection tells it."""

    def withhold_credit(self, number: int) -> bool:
        """Let the server send no more of this response than it may by now. False: the protocol cannot."""

    def give_credit(self, number: int) -> None:
        """Let it send again."""

    def receive(self, data: bytes) -> None:
        """Take in what came; nothing: the connection has ended. Raises h11.RemoteProtocolError or
        h2.exceptions.ProtocolError for what a server may not send; after that the connection is of no use."""

    def take_unsent(self) -> bytes:
        """What is to be sent now; whoever takes it sends it."""
