"""The server's view of one rank: a process, and a connection that carries orders to the rank and reports back."""

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

from trioserve.ranks.messages import FrameReader, RankPlace, Report, decode_report, framed
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["KILLED", "Connection", "Process", "RankLink", "RankProcess", "SocketConnection"]

logger = logging.getLogger(__name__)

KILLED = "was killed"  # A killed rank is always the cause of a failure. Other ranks may end because they lost a rank.
RECEIVE_BYTES = 1 << 16
# Longest wait for the end of a process after the end of its connection. A process closes its files before it ends.
EXIT_SECONDS_MAX = 0.05
# Longest wait for the end of a process after SIGKILL. A GPU driver may need time to free memory.
REAP_SECONDS_MAX = 5.0


class Connection(Protocol):
    """A byte stream between the server and a rank."""

    @property
    def peer_host(self) -> str:
        """Address of the machine of a rank that connected from another machine."""
        ...

    async def wait_readable(self) -> None: ...
    async def wait_writable(self) -> None: ...

    def receive(self, byte_count_max: int) -> bytes:
        """Return the bytes that have arrived, or no bytes at the end of the stream.

        Args:
            byte_count_max: most bytes to return.

        Raises:
            BlockingIOError: nothing has arrived yet.
            OSError: the connection is lost.
        """
        ...

    def send(self, content: bytes | bytearray) -> int:
        """Send without waiting, and return the number of bytes that the kernel accepted.

        Args:
            content: bytes to send.

        Raises:
            BlockingIOError: the send buffer is full.
            OSError: the connection is lost.
        """
        ...

    def close(self) -> None: ...


class Process(Protocol):
    """Interface of the process of a rank on this machine. RankProcess implements it."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    async def exited(self) -> None: ...
    def how_ended(self) -> str | None: ...
    def close(self) -> None: ...


@uninterrupted
class SocketConnection:
    """A Connection on a socket.

    Args:
        socket: a connected socket, which this object owns and closes.
    """

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
    """A child process that computes one rank.

    The calling thread must be the thread of the event loop, because the kernel kills the child process when the thread
    that started it ends (see rank_process).

    Args:
        connection: the child's socket of the connection. This object closes its copy after the start.
        place: place of the rank, passed on the command line.
    """

    def __init__(self, connection: socket.socket, place: RankPlace) -> None:
        others = (place.memory, place.kv_memory, place.before, place.behind)
        place_json = msgspec.json.encode(place).decode()
        with connection:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trioserve.ranks.rank_process", str(connection.fileno()), place_json],
                pass_fds=(connection.fileno(), *(other for other in others if other is not None)),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal must interrupt only the server.
            )
        self._exit_file = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        self._process.kill()

    async def exited(self) -> None:
        """Wait until the process has ended."""
        await trio.lowlevel.wait_readable(self._exit_file)

    def how_ended(self) -> str | None:
        """Return how the process ended, such as "ended with code 1". None while the process runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"{KILLED} by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"

    def close(self) -> None:
        """Kill the process and wait until it has ended. A second call does nothing."""
        if self._exit_file < 0:
            return
        self.kill()
        # This wait blocks the thread, because the process must have ended in every case when the scope ends. After
        # SIGKILL, a process usually ends within milliseconds.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS_MAX)
        os.close(self._exit_file)
        self._exit_file = -1


@uninterrupted
class RankLink:
    """The connection to one rank, and the process of the rank if it runs on this machine.

    Args:
        rank: number of the rank.
        connection: connection to the rank. This object owns and closes it.
        on_report: called with the rank and each report.
        on_end: called once when the connection has ended, with the rank and how the rank ended.
        process: the rank's process. None if the rank runs on another machine.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        on_report: Callable[[int, Report], None],
        on_end: Callable[[int, str], None],
        process: Process | None = None,
    ) -> None:
        self.rank = rank
        self.process = process
        self.host = connection.peer_host
        """Address of the machine of a rank that connected from another machine."""
        self._connection = connection
        self._on_report, self._on_end = on_report, on_end
        self._unsent = bytearray()
        self._has_unsent = trio.Event()

    def __str__(self) -> str:
        place = f"process {self.process.pid}" if self.process is not None else f"on {self.host}"
        return f"rank {self.rank} ({place})"

    def send(self, message: bytes) -> None:
        """Send a message without waiting. Bytes that the kernel does not accept are sent later, in order.

        The number of unsent bytes has no limit. A rank that reads nothing also answers nothing, so RankGroup.watch
        breaks the group.

        Args:
            message: one encoded order.
        """
        frame = framed(message)
        if self._unsent:
            self._unsent += frame
            return
        sent = self._sent(frame)
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._has_unsent.set()

    async def run(self) -> None:
        """Receive reports and send kept bytes until the connection ends, then call on_end."""
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
                return f"sent an invalid message ({error})"

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
            return len(content)  # The connection is lost. `_receive` notices the loss and reports it.

    def close(self) -> None:
        """Close the connection, which ends a rank on another machine, and kill a process on this machine."""
        self._connection.close()
        if self.process is not None:
            self.process.close()


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except (OSError, IndexError):  # The socket is already closed, or has no address.
        return "another machine"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
