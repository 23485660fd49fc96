"""A connection in memory whose two ends behave like sockets: the buffer is bounded, and each end may vanish."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import trio

__all__ = ["MemoryEnd", "memory_connection"]

# Maximum number of unread bytes in one direction. Sockets have larger buffers. So tests see back pressure early.
BUFFER_BYTES = 65_536
RECEIVE_BYTES = 65_536


def memory_connection(*, buffer_bytes: int = BUFFER_BYTES) -> tuple[MemoryEnd, MemoryEnd]:
    """Return the client's end and the server's end of a new connection.

    Args:
        buffer_bytes: maximum number of unread bytes. A sender waits while there are more.
    """
    there, back = _Pipe(buffer_bytes), _Pipe(buffer_bytes)
    return MemoryEnd(outgoing=there, incoming=back), MemoryEnd(outgoing=back, incoming=there)


class _Pipe:
    """One direction of a connection."""

    def __init__(self, buffer_bytes: int) -> None:
        self.data = bytearray()
        self.buffer_bytes = buffer_bytes
        self.ended = False  # True if the sender will send no more data
        self.is_silent = False  # True if new data is lost, and neither end notices this
        self.broken = False  # True if the receiver reads no more data, or unread data is lost
        self.changed = trio.lowlevel.ParkingLot()

    def put(self, data: bytes | bytearray | memoryview) -> None:
        if self.is_silent:
            return
        self.data += data
        self.changed.unpark_all()

    def end(self) -> None:
        if self.is_silent:
            return
        self.ended = True
        self.changed.unpark_all()

    def break_(self) -> None:
        if self.is_silent:
            return
        self.broken = True
        self.data.clear()
        self.changed.unpark_all()


class MemoryEnd(trio.abc.HalfCloseableStream):
    """One end of a connection. At most one task may send, and one task may receive. `close` and `abort` do not wait."""

    def __init__(self, *, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._is_closed = False
        self._is_sending = False
        self._is_receiving = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        with self._one_sender():
            self.send_nowait(data)
            await self._room()

    def send_nowait(self, data: bytes | bytearray | memoryview) -> None:
        """Send without waiting, even if the buffer is full.

        Args:
            data: bytes to send.

        Raises:
            trio.ClosedResourceError: this end was closed, or send_eof was called.
            trio.BrokenResourceError: the other end is gone.
        """
        self._check_open()
        if self._outgoing.ended:
            raise trio.ClosedResourceError("nothing can be sent after send_eof")
        if self._outgoing.broken:
            raise trio.BrokenResourceError("the other end is gone")
        self._outgoing.put(data)

    def try_send(self, data: bytes) -> int:
        """Send the bytes for which the buffer has space, and return their number.

        Args:
            data: bytes to send.
        """
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending through this end")
        room = max(0, self._outgoing.buffer_bytes - len(self._outgoing.data))
        self.send_nowait(data[:room])
        return min(room, len(data))

    async def wait_send_all_might_not_block(self) -> None:
        with self._one_sender():
            await self._room()

    async def _room(self) -> None:
        await trio.lowlevel.checkpoint()
        outgoing = self._outgoing
        while len(outgoing.data) > outgoing.buffer_bytes and not (outgoing.broken or self._is_closed):
            await outgoing.changed.park()
        self._check_open()
        if outgoing.broken:
            raise trio.BrokenResourceError("the other end is gone")

    async def send_eof(self) -> None:
        with self._one_sender():
            await trio.lowlevel.checkpoint()
            self._check_open()
            self._outgoing.end()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if max_bytes is not None and operator.index(max_bytes) < 1:
            raise ValueError(f"max_bytes is {max_bytes}, allowed is 1 or more")
        if self._is_receiving:
            raise trio.BusyResourceError("another task is receiving from this end")
        self._is_receiving = True
        try:
            await trio.lowlevel.checkpoint()
            incoming = self._incoming
            while not (incoming.data or incoming.ended or incoming.broken or self._is_closed):
                await incoming.changed.park()
        finally:
            self._is_receiving = False
        self._check_open()
        if incoming.broken:
            raise trio.BrokenResourceError("the other end is gone")
        received = bytes(incoming.data[: max_bytes or RECEIVE_BYTES])
        del incoming.data[: len(received)]
        incoming.changed.unpark_all()
        return received

    def close(self) -> None:
        """Close this end, as a socket is closed. The other end can still read the unread bytes, but cannot send."""
        self._is_closed = True
        self._outgoing.end()
        self._incoming.break_()
        for pipe in (self._outgoing, self._incoming):
            pipe.changed.unpark_all()  # This wakes the tasks of this end, even if the connection is silent.

    def abort(self) -> None:
        """Reset the connection. Unread bytes are lost, and the other end gets an error at once."""
        self._is_closed = True
        self._outgoing.break_()
        self._incoming.break_()

    def go_silent(self) -> None:
        """Lose all later data in both directions, as on a connection that a NAT has forgotten.

        Neither end notices the loss.
        """
        self._incoming.is_silent = self._outgoing.is_silent = True

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    @contextmanager
    def _one_sender(self) -> Iterator[None]:
        if self._is_sending:
            raise trio.BusyResourceError("another task is sending through this end")
        self._is_sending = True
        try:
            yield
        finally:
            self._is_sending = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError("this end was closed")
