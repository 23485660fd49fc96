"""Opens TCP connections. Its stream can send without waiting, if the kernel accepts the bytes at once.

Sending through Trio's socket costs a scheduler pass for every write, even if the kernel accepts the bytes at once. For
small events, this pass takes as long as the rest of the write.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import operator
import socket
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import trio

__all__ = ["VANISHED_SECONDS", "SendsAtOnce", "delivered_bytes", "end_when_vanished", "TcpStream", "connect_tcp"]


VANISHED_SECONDS = 20.0
"""Default time until a connection breaks. It is longer than interruptions from which a network recovers (a few
retransmissions), and shorter than clients wait.
"""
PROBES = 3
TCP_INFO_BYTES = 136
ACKNOWLEDGED_AT = 120  # offset of tcpi_bytes_acked (64 bits) in struct tcp_info (linux/tcp.h)


class _Socket(Protocol):
    def setsockopt(self, level: int, option: int, value: int, /) -> Any: ...


def end_when_vanished(connection: _Socket, seconds: float = VANISHED_SECONDS, *, unread_seconds: float = 0.0) -> None:
    """Make the kernel break a connection whose other end acknowledges nothing. All connections use this, in both
    directions.

    A machine that loses power or network sends no FIN. A NAT or load balancer that forgets a connection drops its
    packets silently. Without these options, such a connection stays open for hours (if we send) or forever (if we only
    receive).

    The first keepalive probe is sent after half of the time. Two more probes follow, a sixth of the time apart.
    Unacknowledged data breaks the connection after the same time. Options that this system lacks are skipped.

    Args:
        connection: A TCP socket, or an object with a socket's `setsockopt`. Sockets of other families raise OSError.
        seconds: Time until the connection breaks, at least 6. Keepalive counts in whole seconds.
        unread_seconds: Time for which the other end may acknowledge probes without reading data (a window of zero). The
            kernel has a single timeout for this case and for unacknowledged data, so the larger value is used.
    """
    idle, interval = max(1, round(seconds / 2)), max(1, round(seconds / 6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", PROBES),
        ("TCP_USER_TIMEOUT", round(max(seconds, unread_seconds) * 1000)),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def delivered_bytes(connection: socket.socket) -> tuple[int, int] | None:
    """Return the number of bytes that the other end's kernel has acknowledged, and of bytes in flight.

    Args:
        connection: A TCP socket.

    Returns:
        Both numbers, or None if they are unknown: not on Linux, not a TCP socket, or a closed socket.
    """
    if sys.platform != "linux" or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    with contextlib.suppress(OSError, struct.error):
        tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        waiting = array.array("i", [0])
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, waiting)
        return struct.unpack_from("Q", tcp_info, ACKNOWLEDGED_AT)[0], waiting[0]
    return None


RECEIVE_BYTES = 65_536
CLOSED_ERRNOS = (errno.EBADF, errno.ENOTSOCK)


async def connect_tcp(host: str, port: int, *, vanished_seconds: float = VANISHED_SECONDS) -> trio.SocketStream:
    """Open a TCP connection that breaks when its other end vanishes.

    All code of this project that connects to another machine with Trio uses this function. It only detects a peer whose
    kernel no longer answers. For a peer that acknowledges data but sends nothing, the caller must set a timeout.

    Args:
        host: Host name or IP address.
        port: TCP port.
        vanished_seconds: Time after which the connection breaks if the other end acknowledges nothing.

    Raises:
        OSError: the host is unknown, or refuses the connection.
    """
    stream = await trio.open_tcp_stream(host, port)
    try:
        end_when_vanished(stream, vanished_seconds)
    except OSError:
        stream.socket.close()  # The connection broke immediately after it was opened.
        raise
    return stream


@runtime_checkable
class SendsAtOnce(Protocol):
    """A stream that can send without waiting."""

    def try_send(self, data: bytes, /) -> int:
        """Send the bytes that are accepted at once, and return their number. Raises as `send_all`.

        Args:
            data: Bytes to send.
        """


class TcpStream(trio.abc.HalfCloseableStream):
    """A TCP connection with non-blocking sends. It takes over the socket of a trio.SocketStream.

    Args:
        stream: The connection. The caller must not use this stream afterwards.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)
        self._is_sending = False
        self._has_sent_eof = False

    def try_send(self, data: bytes | bytearray | memoryview) -> int:
        """Send the bytes that the kernel accepts at once.

        Args:
            data: Bytes to send.

        Returns:
            The number of bytes sent.
        """
        self._check_not_sending()
        return self._try_send(data)

    def delivered_bytes(self) -> tuple[int, int] | None:
        """See tcp_options.delivered_bytes."""
        return delivered_bytes(self._socket)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._one_sender(), memoryview(data) as view:
            await trio.lowlevel.checkpoint()
            self._check_open()
            sent_bytes = 0
            while sent_bytes < len(view):
                with view[sent_bytes:] as rest:
                    sent_bytes += self._try_send(rest)
                if sent_bytes < len(view):
                    await trio.lowlevel.wait_writable(self._socket)

    async def wait_send_all_might_not_block(self) -> None:
        with self._one_sender():
            self._check_open()
            await trio.lowlevel.wait_writable(self._socket)

    async def send_eof(self) -> None:
        with self._one_sender():
            await trio.lowlevel.checkpoint()
            self._check_open()
            self._has_sent_eof = True
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError as error:
                if error.errno != errno.ENOTCONN:  # Some systems report this error for a second shutdown.
                    raise _translated(error) from error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}, allowed is 1 or more")
        while True:
            # Wait before the call of recv. At this time, data has rarely arrived, so an earlier call would be useless.
            self._check_open()
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(max_bytes or RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise _translated(error) from error

    def close(self) -> None:
        """Close the connection at once. Tasks that wait for the stream get ClosedResourceError."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._socket.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int) -> int:
        return self._socket.getsockopt(level, option)

    def _try_send(self, data: bytes | bytearray | memoryview) -> int:
        if self._has_sent_eof:
            raise trio.ClosedResourceError("nothing can be sent after send_eof")
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise _translated(error) from error

    def _check_open(self) -> None:
        if self._socket.fileno() < 0:
            raise trio.ClosedResourceError("this stream was closed")

    def _check_not_sending(self) -> None:
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending through this stream")

    @contextmanager
    def _one_sender(self) -> Iterator[None]:
        self._check_not_sending()
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False


def _translated(error: OSError) -> trio.ClosedResourceError | trio.BrokenResourceError:
    if error.errno in CLOSED_ERRNOS:
        return trio.ClosedResourceError("this stream was closed")
    return trio.BrokenResourceError(f"the connection is broken: {error}")
