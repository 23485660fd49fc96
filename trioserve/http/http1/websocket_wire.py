"""The outgoing bytes of a websocket on an HTTP/1.1 connection."""

from __future__ import annotations

from typing import Protocol

import trio

from trioserve.http.pace import ResponsePace
from trioserve.trio_tools.tcp_stream import SendsAtOnce

__all__ = ["H11WebSocketWire", "WireOwner"]

# One write has at most this number of bytes. After each write, the client gets more time to read the next one.
WRITE_BYTES = 65536


class WireOwner(Protocol):
    """The methods that a wire calls on its connection. No method waits."""

    def client_left(self) -> None:
        """Cancel the handler, because the client has closed the connection."""

    def stalled(self, *, reads_some: bool) -> None:
        """Cancel the handler, because the client reads too slowly.

        Args:
            reads_some: True if the client reads too slowly, False if it reads nothing.
        """


class H11WebSocketWire:
    """The outgoing bytes of one websocket. A task writes them only while the kernel does not accept them at once.

    Args:
        owner: the connection.
        transport: the stream to the client.
        nursery: runs the task.
        pace: deadline for a slow client.

    Attributes:
        is_broken: True if a part of a frame may have been sent, and no other bytes can follow.
        sent_bytes_total: see WebSocketWire.
    """

    def __init__(self, owner: WireOwner, transport: trio.abc.Stream, nursery: trio.Nursery, pace: ResponsePace) -> None:
        self.is_broken = False
        self.sent_bytes_total = 0
        self._owner = owner
        self._transport = transport
        self._sends_at_once = transport if isinstance(transport, SendsAtOnce) else None
        self._nursery = nursery
        self._pace = pace
        self._outbox = bytearray()
        self._is_writing = False
        self._is_gone = False
        self._progressed = trio.Event()

    @property
    def unsent_bytes(self) -> int:
        return len(self._outbox)

    def push(self, data: bytes | bytearray) -> None:
        if self._is_gone:
            return
        self._outbox += data
        if self._is_writing:
            return
        if self._sends_at_once is not None:
            try:
                self._taken(self._sends_at_once.try_send(bytes(self._outbox)))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self._leave()
                return
        if self._outbox:
            self._is_writing = True
            self._nursery.start_soon(self._write)

    async def wait_for_client(self) -> None:
        await self._progressed.wait()

    def take_unsent(self) -> bytes:
        """Remove and return the bytes that no task writes, to send them when the connection is closed."""
        if self._is_writing or self.is_broken:
            return b""
        taken = bytes(self._outbox)
        self._outbox.clear()
        return taken

    async def _write(self) -> None:
        try:
            while self._outbox:
                piece = bytes(self._outbox[:WRITE_BYTES])
                self.is_broken = True  # The value is True until this write is complete.
                with trio.CancelScope(deadline=self._pace.start(trio.current_time())) as timeout:
                    await self._transport.send_all(piece)
                if timeout.cancelled_caught:
                    self._is_gone = True
                    self._owner.stalled(reads_some=self._pace.saw_progress)
                    return
                self.is_broken = False
                if len(piece) < len(self._outbox):
                    self._pace.advance(len(piece), trio.current_time())
                else:
                    self._pace.stop(len(piece), trio.current_time())
                self._taken(len(piece))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._leave()
        finally:
            self._is_writing = False

    def _taken(self, byte_count: int) -> None:
        del self._outbox[:byte_count]
        self.sent_bytes_total += byte_count
        self._progressed.set()
        self._progressed = trio.Event()

    def _leave(self) -> None:
        self._is_gone = True
        self.is_broken = False
        self._outbox.clear()
        self._owner.client_left()
