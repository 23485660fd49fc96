"""Three ways to close a connection: gracefully, quickly, or with a reset that the client notices."""

from __future__ import annotations

import contextlib
import socket
import struct

import trio

from trioserve.trio_tools.tcp_stream import TcpStream

__all__ = ["break_off", "close_after", "close_now"]

# Most bytes that are read from the client after our last byte. A client that sends more is in the middle of an upload.
LINGER_BYTES_MAX = 1024 * 1024


async def close_after(stream: trio.abc.Stream, final_bytes: bytes, *, seconds_max: float, more_expected: bool) -> None:
    """Send the final bytes, close our sending half, and read until the client closes.

    If we closed without reading, TCP would answer unread bytes with a reset. The reset may arrive before the final
    bytes (RFC 9112, 9.6). TLS cannot close only the sending half. With TLS, reading would only delay the close, which
    may mark the end of a response. So a TLS stream is read only if `more_expected` is true. The stream is always
    closed, also on cancellation.

    Args:
        stream: the connection.
        final_bytes: bytes to send first.
        seconds_max: time limit for sending and reading. Closing may take the same time again.
        more_expected: True if the client may still send bytes.
    """
    try:
        with (
            trio.move_on_after(seconds_max),
            contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError),
        ):
            if final_bytes:
                await stream.send_all(final_bytes)
            if isinstance(stream, trio.abc.HalfCloseableStream):
                await stream.send_eof()
                more_expected = True
            left = LINGER_BYTES_MAX if more_expected else 0
            while left > 0:
                received = await stream.receive_some(16384)
                if not received:
                    break
                left -= len(received)
    finally:
        await close_now(stream, b"", seconds_max=seconds_max)


async def close_now(stream: trio.abc.Stream, final_bytes: bytes, *, seconds_max: float) -> None:
    """Send the final bytes and close the connection, even if the calling task is cancelled.

    Args:
        stream: the connection.
        final_bytes: bytes to send first.
        seconds_max: time limit, which also bounds the shield against cancellation.
    """
    with trio.CancelScope(deadline=trio.current_time() + seconds_max, shield=True):
        try:
            if final_bytes:
                await stream.send_all(final_bytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass  # the client has already closed the connection
        finally:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.aclose()


async def break_off(stream: trio.abc.Stream) -> None:
    """Close the connection with a TCP reset and without TLS close_notify, so that a partial response does not look
    complete.

    Args:
        stream: the connection.
    """
    transport: object = stream
    while isinstance(transport, trio.SSLStream):
        transport = transport.transport_stream
    if isinstance(transport, (trio.SocketStream, TcpStream)):
        with contextlib.suppress(OSError):  # the connection may already be closed
            transport.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(stream)
