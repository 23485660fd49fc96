"""What the two clients share: how a request is asked and heard, why it failed, how a connection is opened.

The body of a response is handed to its listener in the task that reads the socket, with the time at which it was read:
no task switch and no queue lies between the wire and the clock. What the bytes mean is the listener's matter.
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

CONNECT_SECONDS_MAX = 10.0  # a connection that takes longer is as good as none
RECEIVE_BYTES = 65_536

OpenStream = Callable[[], Awaitable[trio.abc.Stream]]


class FailureKind(enum.Enum):
    CONNECT = "connect"  # no connection
    DISCONNECT = "disconnect"  # the connection ended before the response did
    UNPROCESSED = "unprocessed"  # the same, and the server says, or shows, that it never saw the request
    RESET = "reset"  # the server reset the HTTP/2 stream
    PROTOCOL = "protocol"  # not HTTP, or not this version
    TIMEOUT = "timeout"
    STATUS = "status"  # another status than 200
    RESPONSE = "answer"  # status 200, but not the stream of tokens that was asked for


class Failure(msgspec.Struct, frozen=True):
    """Why a request failed. code: the status or HTTP/2 error, or nothing. message: one sentence for a person."""

    kind: FailureKind
    message: str
    code: str = ""

    @property
    def name(self) -> str:
        """What failures are counted by, such as "status 503"."""
        return f"{self.kind.value} {self.code}".rstrip()


class Listener(Protocol):
    """Whoever made a request. Both are called in the reader's task, must not wait and must not raise."""

    def head(self, status: int) -> None:
        """The final status has come."""

    def body(self, data: bytes, now_seconds: float) -> bool:
        """A piece of the body, and when it was read (trio's clock). False: leave now, the rest is not wanted."""


class Client(Protocol):
    async def request(
        self, method: str, path: str, body: bytes, listener: Listener, *, withheld_bytes: int = 0
    ) -> Failure | None:
        """Send one request and return when its response has ended or the listener has left.

        Returns None, or why there was no whole response; a status is not judged here. Leaving by cancellation resets
        the stream or closes the connection at once. withheld_bytes: so much at the end of the body is announced and
        never sent, for a client that leaves before.
        """

    async def aclose(self) -> None: ...


def stream_opener(target: Target, http: int) -> OpenStream:
    """Opens connections to the target that speak this HTTP version. Opening raises OSError (TLS errors are some)."""
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
    """As receive_some. The kernel is asked when something has come, not before to be told that nothing has: that is a
    fifth of what a token costs a load generator, and what it uses a server beside it lacks."""
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
    """trio tries every address of a name; its own message leaves out why each attempt failed."""
    attempts = cause.exceptions if isinstance(cause, BaseExceptionGroup) else (cause,)
    reasons = {attempt.strerror or str(attempt) for attempt in attempts if isinstance(attempt, OSError)}
    return f" ({', '.join(sorted(reasons))})" if reasons else ""


# --- HTTP/1.1 -------------------------------------------------------------------------------------------------------


def disconnected(kind: FailureKind) -> Failure:
    return Failure(kind, "the server closed the connection before the response was complete")


# --- HTTP/2 ---------------------------------------------------------------------------------------------------------
