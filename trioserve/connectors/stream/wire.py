"""A connection that reads and writes KV blocks only while it may.

Every byte is preceded by a look at whether it may still be moved, with nothing awaited in between. Trio's own recv_into
may complete and be cancelled in the same pass of its loop, and would then have written to blocks that are not ours any
more; so here it only says when a socket is ready, and the moving is a call that does not wait.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol

import trio

__all__ = ["MayNot", "SocketWire", "StreamWire", "Wire", "always"]

PIECES_MAX = 512  # in one call; the kernel takes 1,024
PART_BYTES = 65_536  # of a stream, at a time: it is silent when not even so much goes


class MayNot(Exception):
    """What was to be moved must not be touched any more. has_begun: some bytes of it went over the connection, which is
    of no use then."""

    def __init__(self, *, has_begun: bool) -> None:
        super().__init__("it must not be touched any more")
        self.has_begun = has_begun


def always() -> bool:
    return True


class Wire(Protocol):
    """silence_seconds: how long nothing may move while something should; after that trio.TooSlowError. A connection
    that broke raises trio.BrokenResourceError, or trio.ClosedResourceError after close(). Where everything can be moved
    at once, nobody else gets to run in between."""

    silence_seconds: float

    async def send(self, pieces: Sequence[memoryview | bytes], may: Callable[[], bool] = always) -> None:
        """All of it, in order. Raises MayNot."""
        ...

    async def receive(self, byte_count: int) -> bytes:
        """Exactly so many."""
        ...

    async def receive_into(self, pieces: Sequence[memoryview], may: Callable[[], bool] = always) -> None:
        """Fill them all, in order. Raises MayNot."""
        ...

    def close(self) -> None:
        """At once. Whoever waits for it gets an error."""
        ...


class SocketWire:
    """A plain TCP connection: blocks are sent from where they lie, and arrive where they belong."""

    def __init__(self, stream: trio.SocketStream, silence_seconds: float) -> None:
        """Takes the socket over."""
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
                raise trio.BrokenResourceError("the other side has closed the connection")
            has_begun = True
            _advance(rest, received_bytes)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


class StreamWire:
    """Over any stream of Trio's, TLS above all. What is sent is copied first, since a stream may look at it later; what
    arrives is copied where it belongs."""

    def __init__(self, stream: trio.abc.Stream, silence_seconds: float, close: Callable[[], None]) -> None:
        """close: closes the stream, or what is below it, without waiting."""
        self._stream = stream
        self._close = close
        self._early = b""  # received, and not asked for yet
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
                    raise trio.BrokenResourceError("the other side has closed the connection")
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
    """Take what has been moved off the front."""
    done = 0
    while done < len(rest) and byte_count >= len(rest[done]):
        byte_count -= len(rest[done])
        done += 1
    del rest[:done]
    if byte_count:
        rest[0] = rest[0][byte_count:]
