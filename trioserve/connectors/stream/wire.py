"""Connections that read from and write to KV blocks only while the blocks may be used.

Before each piece, the connection checks that the blocks may still be used. Nothing is awaited between the check and the
copy. Trio's recv_into cannot be used for this: it can complete and be cancelled in the same pass of the event loop, and
could write to blocks that now belong to another request. Trio therefore only waits until the socket is ready. The copy
is a call that does not wait.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

__all__ = ["MayNot", "SocketWire", "StreamWire", "Wire", "always"]

PIECES_MAX = 512  # maximum number of pieces per system call; the limit of the kernel is 1,024
PART_BYTES = 65_536  # maximum bytes per call of a stream; a call that takes longer than silence_seconds fails


class MayNot(Exception):
    """The blocks of a transfer must not be used any more.

    Args:
        has_begun: True if some bytes were already transferred. In that case, the connection cannot be used any more.
    """

    def __init__(self, *, has_begun: bool) -> None:
        super().__init__("the blocks must not be used any more")
        self.has_begun = has_begun


def always() -> bool:
    return True


class Wire(Protocol):
    """Connection that moves bytes between a peer and KV blocks.

    All methods that wait raise trio.TooSlowError after `silence_seconds` without progress, trio.BrokenResourceError if
    the connection fails, and trio.ClosedResourceError after close(). A call that can move all bytes at once does not
    yield to other tasks.

    Attributes:
        silence_seconds: Time without progress after which a call fails.
    """

    silence_seconds: float

    async def send(self, pieces: Sequence[memoryview | bytes], may: Callable[[], bool] = always) -> None:
        """Send all pieces in order.

        Args:
            pieces: Bytes to send.
            may: Returns True while the pieces may be read. Called before each read.

        Raises:
            MayNot: `may` returned False.
        """
        ...

    async def receive(self, byte_count: int) -> bytes:
        """Receive an exact number of bytes.

        Args:
            byte_count: Number of bytes.
        """
        ...

    async def receive_into(self, pieces: Sequence[memoryview], may: Callable[[], bool] = always) -> None:
        """Fill all pieces in order.

        Args:
            pieces: Memory to fill.
            may: Returns True while the pieces may be written. Called before each write.

        Raises:
            MayNot: `may` returned False.
        """
        ...

    def close(self) -> None:
        """Close the connection without waiting. Tasks that wait for this connection get an error."""
        ...


class SocketWire:
    """Plain TCP connection that sends from and receives into blocks without a copy.

    Args:
        stream: Stream whose socket is taken over. The caller must not use it any more.
        silence_seconds: Time without progress after which a call fails.
    """

    def __init__(self, stream: trio.SocketStream, silence_seconds: float) -> None:
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)
        self.silence_seconds = silence_seconds

    async def send(self, pieces: Sequence[memoryview | bytes], may: Callable[[], bool] = always) -> None:
        rest = [memoryview(piece) for piece in pieces]
        has_begun = False
        while rest:
            if not may():
                raise MayNot(has_begun=has_begun)
            try:
                sent_bytes = self._socket.sendmsg(rest[:PIECES_MAX])
            except (BlockingIOError, InterruptedError):
                with trio.fail_after(self.silence_seconds):
                    await trio.lowlevel.wait_writable(self._socket)
                continue
            except OSError as error:
                raise trio.BrokenResourceError(f"the connection is broken: {error}") from error
            has_begun = True
            _advance(rest, sent_bytes)

    async def receive(self, byte_count: int) -> bytes:
        content = bytearray(byte_count)
        await self.receive_into([memoryview(content)])
        return bytes(content)

    async def receive_into(self, pieces: Sequence[memoryview], may: Callable[[], bool] = always) -> None:
        rest = [piece for piece in pieces if len(piece)]
        has_begun = False
        while rest:
            if not may():
                raise MayNot(has_begun=has_begun)
            try:
                received_bytes = self._socket.recvmsg_into(rest[:PIECES_MAX])[0]
            except (BlockingIOError, InterruptedError):
                with trio.fail_after(self.silence_seconds):
                    await trio.lowlevel.wait_readable(self._socket)
                continue
            except OSError as error:
                raise trio.BrokenResourceError(f"the connection is broken: {error}") from error
            if not received_bytes:
                raise trio.BrokenResourceError("the peer has closed the connection")
            has_begun = True
            _advance(rest, received_bytes)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


class StreamWire:
    """Connection over any Trio stream, mostly TLS.

    The connection copies blocks before it sends them, because a stream may read its argument later. It copies received
    bytes into the blocks.

    Args:
        stream: Stream to use.
        silence_seconds: Time without progress after which a call fails.
        close: Closes the stream, or the socket below it, without waiting.
    """

    def __init__(self, stream: trio.abc.Stream, silence_seconds: float, close: Callable[[], None]) -> None:
        self._stream = stream
        self._close = close
        self._early = b""  # received bytes that no call has returned yet
        self.silence_seconds = silence_seconds

    async def send(self, pieces: Sequence[memoryview | bytes], may: Callable[[], bool] = always) -> None:
        if not may():
            raise MayNot(has_begun=False)
        copied = memoryview(b"".join(pieces))
        for start in range(0, len(copied), PART_BYTES):
            with trio.fail_after(self.silence_seconds):
                await self._stream.send_all(copied[start : start + PART_BYTES])

    async def receive(self, byte_count: int) -> bytes:
        content = bytearray(byte_count)
        await self.receive_into([memoryview(content)])
        return bytes(content)

    async def receive_into(self, pieces: Sequence[memoryview], may: Callable[[], bool] = always) -> None:
        rest = [piece for piece in pieces if len(piece)]
        has_begun = False
        while rest:
            if not self._early:
                with trio.fail_after(self.silence_seconds):
                    self._early = bytes(await self._stream.receive_some(PART_BYTES))
                if not self._early:
                    raise trio.BrokenResourceError("the peer has closed the connection")
            if not may():
                raise MayNot(has_begun=has_begun)
            has_begun = True
            count = min(len(self._early), len(rest[0]))
            rest[0][:count] = self._early[:count]
            self._early = self._early[count:]
            _advance(rest, count)

    def close(self) -> None:
        self._close()


def _advance(rest: list[memoryview], byte_count: int) -> None:
    """Remove the bytes that were transferred from the front of `rest`."""
    done = 0
    while done < len(rest) and byte_count >= len(rest[done]):
        byte_count -= len(rest[done])
        done += 1
    del rest[:done]
    if byte_count:
        rest[0] = rest[0][byte_count:]
