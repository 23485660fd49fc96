"""One rank, as its server sees it: a process, and a connection on which orders go out and reports come in."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import msgspec
import trio

from trioserve.ranks.frames import FrameReader, framed
from trioserve.ranks.messages import RankPlace, Report, decode_report
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["KILLED", "Connection", "Process", "RankLink", "RankProcess", "SocketConnection"]

logger = logging.getLogger(__name__)

KILLED = "was killed"  # what is a cause; everything else may be what came of it
RECEIVE_BYTES = 1 << 16
EXIT_SECONDS_MAX = 0.05  # from the end of its connection to that of a process: the kernel closes the one in the other
REAP_SECONDS_MAX = 5.0  # of a process that was killed: what a driver does with its memory may take a while


class Connection(Protocol):
    """Bytes to a rank, and from it."""

    @property
    def peer_host(self) -> str:
        """The address of a rank that came from another machine."""
        ...

    async def wait_readable(self) -> None: ...
    async def wait_writable(self) -> None: ...

    def receive(self, byte_count_max: int) -> bytes:
        """What has come; empty when nothing comes any more. Raises BlockingIOError if nothing has, and OSError."""
        ...

    def send(self, content: bytes | bytearray) -> int:
        """Returns how many bytes were taken. Raises BlockingIOError if none can be now, and OSError."""
        ...

    def close(self) -> None: ...


class Process(Protocol):
    """What a link asks of the process of a rank on this machine. See RankProcess."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    async def exited(self) -> None: ...
    def how_ended(self) -> str | None: ...
    def close(self) -> None: ...


@uninterrupted
class SocketConnection:
    """socket: its own from then on."""

    def __init__(self, socket: socket.socket) -> None:
        socket.setblocking(False)
        self._socket = socket
        self.peer_host = _peer(socket)

    async def wait_readable(self) -> None:
        await trio.lowlevel.wait_readable(self._socket)

    async def wait_writable(self) -> None:
        await trio.lowlevel.wait_writable(self._socket)

    def receive(self, byte_count_max: int) -> bytes:
        return self._socket.recv(byte_count_max)

    def send(self, content: bytes | bytearray) -> int:
        return self._socket.send(content)

    def close(self) -> None:
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


@uninterrupted
class RankProcess:
    """A child process, from its start to its end. It is started in the calling thread, so that the kernel kills it with
    that thread, which is the event loop's: see rank_process."""

    def __init__(self, connection: socket.socket, place: RankPlace) -> None:
        """connection: its end of it, which it alone has from then on."""
        others = (place.memory, place.kv_memory, place.before, place.behind)
        told = msgspec.json.encode(place).decode()
        with connection:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trioserve.ranks.rank_process", str(connection.fileno()), told],
                pass_fds=(connection.fileno(), *(other for other in others if other is not None)),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for the server
            )
        self._exit_file = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Whatever it is doing, also if it is stopped."""
        self._process.kill()

    async def exited(self) -> None:
        """Waits for its end."""
        await trio.lowlevel.wait_readable(self._exit_file)

    def how_ended(self) -> str | None:
        """In words that follow its name; None: it has not."""
        code = self._process.poll()
        if code is None:
            return None
        return f"{KILLED} by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"

    def close(self) -> None:
        """It is killed, and waited for. A second call does nothing."""
        if self._exit_file < 0:
            return
        self.kill()
        # Here and now, so that nobody is left however this scope is left: a killed process is gone within milliseconds.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS_MAX)
        os.close(self._exit_file)
        self._exit_file = -1


@uninterrupted
class RankLink:
    """rank: its number. on_report, on_end: what it says, and that it says no more, with how it ended."""

    def __init__(
        self,
        rank: int,
        connection: Connection,
        on_report: Callable[[int, Report], None],
        on_end: Callable[[int, str], None],
        process: Process | None = None,
    ) -> None:
        """process: None: it runs where the connection comes from."""
        self.rank = rank
        self.process = process
        self.host = connection.peer_host
        """The address of a rank that came from another machine."""
        self._connection = connection
        self._on_report, self._on_end = on_report, on_end
        self._unsent = bytearray()
        self._has_unsent = trio.Event()

    def __str__(self) -> str:
        place = f"process {self.process.pid}" if self.process is not None else f"on {self.host}"
        return f"rank {self.rank} ({place})"

    def send(self, message: bytes) -> None:
        """Never waits. What the kernel does not take at once follows; a rank that reads nothing is noticed by its
        answers, which do not come."""
        frame = framed(message)
        if self._unsent:
            self._unsent += frame
            return
        sent = self._sent(frame)
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._has_unsent.set()

    async def run(self) -> None:
        """Until its connection ends; then on_end was called."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_rest)
            how = await self._receive()
            nursery.cancel_scope.cancel()
        if self.process is not None:
            with trio.move_on_after(EXIT_SECONDS_MAX):
                await self.process.exited()
            how = self.process.how_ended() or how
        self._on_end(self.rank, how)

    async def _receive(self) -> str:
        reader = FrameReader()
        while True:
            await self._connection.wait_readable()
            try:
                received = self._connection.receive(RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                return f"cannot be reached any more ({error.strerror})"
            if not received:
                return "has closed its connection"
            try:
                for message in reader.feed(received):
                    self._on_report(self.rank, decode_report(message))
            except (ValueError, msgspec.MsgspecError) as error:
                return f"said what nobody understands ({error})"

    async def _send_rest(self) -> None:
        while True:
            if not self._unsent:
                self._has_unsent = trio.Event()
                await self._has_unsent.wait()
            await self._connection.wait_writable()
            sent = self._sent(self._unsent)
            del self._unsent[:sent]

    def _sent(self, content: bytes | bytearray) -> int:
        try:
            return self._connection.send(content)
        except BlockingIOError:
            return 0
        except OSError:
            return len(content)  # it is gone, as whoever reads notices

    def close(self) -> None:
        """The process ends with its connection, if it has not been killed."""
        self._connection.close()
        if self.process is not None:
            self.process.close()


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except (OSError, IndexError):  # it is gone already, or has no address
        return "another machine"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
