"""How a connection's bytes end: with final bytes that the client gets to read, or broken off so that it notices."""

from __future__ import annotations

import contextlib
import socket
import struct

import trio

from trioserve.trio_tools.tcp_stream import TcpStream

__all__ = ["break_off", "close_after", "close_now"]

LINGER_BYTES_MAX = 1024 * 1024  # of what the client still sends; more than that is not on its way, it is an upload


async def close_after(stream: trio.abc.Stream, final_bytes: bytes, *, seconds_max: float, more_expected: bool) -> None:
    """Send `final_bytes`, end our half, and read on until the client has closed, all within `seconds_max`.

    Without the reading, a TCP stack answers bytes that nobody read with a reset, which may overtake the final bytes
    (RFC 9112, 9.6). TLS has no half to end: there the reading would only hold up the close, which may be the end of
    a response, so it is done only where more is expected from the client. Always closes the stream, cancelled or not.
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
    """Send `final_bytes` and close, within `seconds_max` even when cancelled: for a server that has to leave."""
    with trio.CancelScope(deadline=trio.current_time() + seconds_max, shield=True):
        try:
            if final_bytes:
                await stream.send_all(final_bytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            pass  # the client was faster
        finally:
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.aclose()


async def break_off(stream: trio.abc.Stream) -> None:
    """Close so that the client cannot take what it got for the whole: a TCP reset, and no TLS close_notify."""
    transport: object = stream
    while isinstance(transport, trio.SSLStream):
        transport = transport.transport_stream
    if isinstance(transport, (trio.SocketStream, TcpStream)):
        with contextlib.suppress(OSError):  # the connection may be gone already
            transport.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(stream)
