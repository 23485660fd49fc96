"""TCP connections: how to open one, and a stream that can send what the kernel takes without waiting.

Sending through Trio's socket costs a pass of the scheduler for every write, also when the kernel takes it at once. For
streams of small events that is as much as all the rest of the write.
"""

from __future__ import annotations

import errno
import operator
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from trioserve.trio_tools.tcp_options import VANISHED_SECONDS, delivered_bytes, end_when_vanished

__all__ = ["TcpStream", "connect_tcp"]

RECEIVE_BYTES = 65_536
CLOSED_ERRNOS = (errno.EBADF, errno.ENOTSOCK)


async def connect_tcp(host: str, port: int, *, vanished_seconds: float = VANISHED_SECONDS) -> trio.SocketStream:
    """Open a TCP connection that breaks when its other end vanishes.

    Everything here that connects to another machine with Trio does it with this function. It bounds silence below TCP
    alone: a peer that acknowledges bytes and says nothing has to be bounded by the caller.

    Args:
        vanished_seconds: until a connection breaks whose other end acknowledges nothing.

    Raises:
        OSError: nobody listens there, or the name is unknown.
    """
    stream = await trio.open_tcp_stream(host, port)
    try:
        end_when_vanished(stream, vanished_seconds)
    except OSError:
        stream.socket.close()  # it broke at once
        raise
    return stream


class TcpStream(trio.abc.HalfCloseableStream):
    """Takes the socket over from a trio.SocketStream, which is closed then."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)
        self._is_sending = False
        self._has_sent_eof = False

    def try_send(self, data: bytes | bytearray | memoryview) -> int:
        """Send as much as the kernel takes, and say how many bytes."""
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
                if error.errno != errno.ENOTCONN:  # a second time on some systems
                    raise _translated(error) from error

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}, allowed is 1 or more")
        while True:
            # What comes is most often not there yet, so asking the kernel first would be for nothing.
            self._check_open()
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(max_bytes or RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise _translated(error) from error

    def close(self) -> None:
        """At once: whoever waits for the stream gets ClosedResourceError."""
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
