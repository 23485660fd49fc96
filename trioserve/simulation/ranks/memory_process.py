"""A simulated rank as its link sees it: a connection in memory, and a process object without a process.

Time is virtual.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import trio

from trioserve.ranks.link import KILLED

__all__ = ["PEER_HOST", "MemoryConnection", "MemoryProcess"]

PEER_HOST = "10.0.0.2"


class MemoryConnection:
    """Both ends of a connection. The server's end is a Connection. The rank's end are the methods below it.

    Args:
        pipe_bytes: most bytes on their way to the rank.
        piece_bytes: most bytes that the server gets at a time.

    Attributes:
        is_closed: whether the server has closed it.
    """

    def __init__(self, pipe_bytes: int, piece_bytes: int) -> None:
        self._pipe_bytes, self._piece_bytes = pipe_bytes, piece_bytes
        self._to_rank, self._from_rank = bytearray(), bytearray()
        self._is_ended = False
        self.is_closed = False
        self.peer_host = PEER_HOST
        self._changed = trio.Event()

    # --- the server's end ---

    async def wait_readable(self) -> None:
        await self._until(lambda: bool(self._from_rank) or self._is_ended)

    async def wait_writable(self) -> None:
        await self._until(lambda: len(self._to_rank) < self._pipe_bytes or self._is_ended)

    def receive(self, byte_count_max: int) -> bytes:
        assert not self.is_closed, "the server reads from a connection that it has closed"
        if self._from_rank:
            piece = bytes(self._from_rank[: min(byte_count_max, self._piece_bytes)])
            del self._from_rank[: len(piece)]
            return piece
        if not self._is_ended:
            raise BlockingIOError
        if self._to_rank:  # like the kernel, if something was not read
            raise OSError(errno.ECONNRESET, "Connection reset by peer")
        return b""

    def send(self, content: bytes | bytearray) -> int:
        assert not self.is_closed, "the server writes to a connection that it has closed"
        if self._is_ended:
            raise OSError(errno.EPIPE, "Broken pipe")
        room = self._pipe_bytes - len(self._to_rank)
        if room <= 0:
            raise BlockingIOError
        self._to_rank += content[:room]
        self._note()
        return min(room, len(content))

    def close(self) -> None:
        self.is_closed = True
        self._note()

    # --- the rank's end ---

    async def take(self) -> bytes:
        """Wait for content from the server.

        Returns:
            All received bytes, or none when the server has closed the connection.
        """
        await self._until(lambda: bool(self._to_rank) or self.is_closed)
        taken = bytes(self._to_rank)
        self._to_rank.clear()
        self._note()
        return taken

    def send_to_server(self, content: bytes) -> None:
        self._from_rank += content
        self._note()

    def end(self) -> None:
        """End the rank's side, as when its process is gone."""
        self._is_ended = True
        self._note()

    async def _until(self, holds: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint()
        while not holds():
            await self._changed.wait()

    def _note(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class MemoryProcess:
    """A Process.

    Args:
        pid: the process id.
        on_kill: ends the simulated rank.
    """

    def __init__(self, pid: int, on_kill: Callable[[], None]) -> None:
        self.pid = pid
        self._on_kill = on_kill
        self._how: str | None = None
        self._ended = trio.Event()

    def kill(self) -> None:
        if self._how is None:
            self.end(f"{KILLED} by SIGKILL")
        self._on_kill()

    async def exited(self) -> None:
        await self._ended.wait()

    def how_ended(self) -> str | None:
        return self._how

    def close(self) -> None:
        self.kill()

    def end(self, how: str) -> None:
        """Note how the process ended, in the kernel's words.

        Args:
            how: how it ended.
        """
        self._how = self._how or how
        self._ended.set()
