"""Interfaces and helpers that both HTTP clients share: requests, listeners, failures and connections.

The listener gets the body in the task that reads the socket, with the time of the read. No task switch and no queue
lies between the socket and the clock. Only the listener knows the meaning of the bytes.
"""

from __future__ import annotations

import enum
import os
import ssl
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import trio

from trioserve.bench.settings import Target
from trioserve.trio_tools.tcp_stream import connect_tcp

__all__ = [
    "CONNECT_SECONDS_MAX",
    "RECEIVE_BYTES",
    "Client",
    "Failure",
    "FailureKind",
    "Listener",
    "OpenStream",
    "disconnected",
    "opened",
    "receive",
    "stream_opener",
]

CONNECT_SECONDS_MAX = 10.0  # A connection that takes longer counts as failed.
RECEIVE_BYTES = 65_536

OpenStream = Callable[[], Awaitable[trio.abc.Stream]]


class FailureKind(enum.Enum):
    CONNECT = "connect"  # no connection
    DISCONNECT = "disconnect"  # the connection ended before the response did
    UNPROCESSED = "unprocessed"  # like DISCONNECT, but the server says or shows that it did not process the request
    RESET = "reset"  # the server reset the HTTP/2 stream
    PROTOCOL = "protocol"  # not HTTP, or another version
    TIMEOUT = "timeout"
    STATUS = "status"  # a status other than 200
    RESPONSE = "answer"  # status 200, but not the requested stream of tokens


class Failure(msgspec.Struct, frozen=True):
    """Why a request failed.

    Attributes:
        kind: kind of the failure.
        message: one sentence for people.
        code: HTTP status or HTTP/2 error, or "".
    """

    kind: FailureKind
    message: str
    code: str = ""

    @property
    def name(self) -> str:
        """Name by which failures are counted, such as "status 503"."""
        return f"{self.kind.value} {self.code}".rstrip()


class Listener(Protocol):
    """Receiver of a response. Both methods are called in the task that reads, and must neither wait nor raise."""

    def head(self, status: int) -> None:
        """Receive the final status.

        Args:
            status: HTTP status.
        """

    def body(self, data: bytes, now_seconds: float) -> bool:
        """Receive a piece of the body.

        Args:
            data: the piece.
            now_seconds: time at which it was read, by Trio's clock.

        Returns:
            False to leave now, without the rest of the response.
        """


class Client(Protocol):
    async def request(
        self, method: str, path: str, body: bytes, listener: Listener, *, withheld_bytes: int = 0
    ) -> Failure | None:
        """Send one request, and return when its response has ended or the listener has left.

        If this call is cancelled, the client resets the stream or closes the connection at once.

        Args:
            method: HTTP method.
            path: path and query.
            body: the body.
            listener: receiver of the response.
            withheld_bytes: number of bytes at the end of the body that are announced but never sent, for a client that
                leaves before.

        Returns:
            None, or why there is no whole response. The status is not judged here.
        """

    async def aclose(self) -> None: ...


def stream_opener(target: Target, http: int) -> OpenStream:
    """Return a function that opens connections. It raises OSError, also for errors of TLS.

    Args:
        target: the server.
        http: HTTP version, 1 or 2, which TLS negotiates.
    """
    context: ssl.SSLContext | None = None
    protocol = "h2" if http == 2 else "http/1.1"
    if target.scheme == "https":
        context = ssl.create_default_context()
        context.set_alpn_protocols([protocol])

    async def open_stream() -> trio.abc.Stream:
        stream = await connect_tcp(target.host, target.port)
        if context is None:
            return stream
        secured = trio.SSLStream(stream, context, server_hostname=target.host, https_compatible=True)
        agreed = False
        try:
            await secured.do_handshake()
            if http == 2 and secured.selected_alpn_protocol() != protocol:
                raise ConnectionError(f"{target.authority} did not agree to HTTP/2 (by ALPN)")
            agreed = True
        except trio.BrokenResourceError as error:
            raise ConnectionError(f"no TLS with {target.authority}: {error.__cause__ or error}") from error
        finally:
            if not agreed:
                await trio.aclose_forcefully(stream)
        return secured

    return open_stream


async def opened(open_stream: OpenStream) -> trio.abc.Stream | Failure:
    try:
        with trio.fail_after(CONNECT_SECONDS_MAX):
            return await open_stream()
    except trio.TooSlowError:
        return Failure(FailureKind.CONNECT, f"no connection within {CONNECT_SECONDS_MAX:g} s")
    except OSError as error:
        return Failure(FailureKind.CONNECT, f"{error}{_attempt_reasons(error.__cause__)}")


async def receive(stream: trio.abc.Stream) -> bytes:
    """Receive as receive_some does, but wait before the first read.

    The kernel is not asked before data is there. The failed read would be a fifth of a load generator's cost per token,
    which a server on the same machine would lack.

    Args:
        stream: the connection.
    """
    if not isinstance(stream, trio.SocketStream):
        return bytes(await stream.receive_some(RECEIVE_BYTES))
    while True:
        await trio.lowlevel.wait_readable(stream.socket)
        try:
            return os.read(stream.socket.fileno(), RECEIVE_BYTES)
        except BlockingIOError:
            continue
        except OSError as error:
            raise trio.BrokenResourceError(f"the connection is broken: {error}") from error


def _attempt_reasons(cause: BaseException | None) -> str:
    """Return why the attempts to connect failed.

    Trio tries every address of a name, and its own message has no reasons.
    """
    attempts = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause,)
    reasons = {attempt.strerror or str(attempt) for attempt in attempts if isinstance(attempt, OSError)}
    return f" ({', '.join(sorted(reasons))})" if reasons else ""


def disconnected(kind: FailureKind) -> Failure:
    return Failure(kind, "the server closed the connection before the response was complete")
