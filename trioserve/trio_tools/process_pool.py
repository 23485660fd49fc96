"""Runs code of other libraries that cannot be interrupted in child processes, which can be killed.

A process does one job at a time and is reused. The pool kills it when its job takes too long or its caller is
cancelled. The next job then starts another process. Processes start only when a job needs them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import trio

from trioserve.contracts.errors import AlreadyEnded

__all__ = ["FRAME", "JobTooLong", "ProcessLost", "ProcessPool"]

FRAME = struct.Struct("<II")
"""Header of each message, in both directions: byte counts of the message's head and content."""

HEAD_BYTES_MAX = 65_536
RECEIVE_BYTES = 1_048_576
REAP_SECONDS_MAX = 2.0  # longest wait for the end of a killed process, which usually takes milliseconds
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Environment variables that children get, in addition to PYTHON*. Children must not get API keys."""


class JobTooLong(Exception):
    """The job did not end in time, and its process was killed."""


class ProcessLost(Exception):
    """The process ended during the job. The message says how."""


class ProcessPool:
    """Up to `processes_max` child processes, shared fairly between owners of jobs. `close` kills all children.

    Children start in the event loop's thread, so that the kernel kills them with that thread (PR_SET_PDEATHSIG).

    Args:
        command: Returns the command line for the file descriptor of the child's connection.
        processes_max: Maximum number of children, at least 2. A single owner never uses all of them.
    """

    def __init__(self, command: Callable[[int], Sequence[str]], *, processes_max: int) -> None:
        self._command = command
        self._processes_max = processes_max
        self._own_max = max(1, processes_max - 1)
        self._idle: list[_Child] = []
        self._busy: set[_Child] = set()
        self._killed: list[_Child] = []  # killed children that the kernel has not ended yet
        self._running: Counter[str] = Counter()  # number of open turns by owner
        self._waiting: dict[str, deque[trio.Event]] = {}  # waiting turns by owner; the first owner is served next
        self._is_closed = False
        self.started_total = 0

    @property
    def process_ids(self) -> list[int]:
        """Return the ids of children that were started and not killed."""
        return [child.process_id for child in (*self._idle, *self._busy)]

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait until the owner may run jobs in a child. The owner may run jobs while the scope is open. Owners take
        turns, and no owner uses all children at once.

        Args:
            owner: Name of the owner of the jobs, such as an API key.
        """
        granted = trio.Event()
        self._waiting.setdefault(owner, deque()).append(granted)
        self._grant()
        try:
            await granted.wait()
            yield
        finally:
            if granted.is_set():
                self._running[owner] -= 1
                self._running += Counter()  # This addition removes owners with a count of 0.
            else:
                self._waiting[owner].remove(granted)
                if not self._waiting[owner]:
                    del self._waiting[owner]
            self._grant()

    def _grant(self) -> None:
        while self._running.total() < self._processes_max:
            owner = next((owner for owner in self._waiting if self._running[owner] < self._own_max), None)
            if owner is None:
                return
            events = self._waiting.pop(owner)
            events.popleft().set()
            self._running[owner] += 1
            if events:
                self._waiting[owner] = events  # This owner is now served after all other owners.

    async def ask(
        self, head: bytes, content: bytes, *, seconds_max: float, reply_bytes_max: int
    ) -> tuple[bytes, bytearray]:
        """Run one job in a child. Call this inside of a turn. If the caller is cancelled, it returns at once.

        The system may end an idle child at any time, for example when the machine is short of memory. If a child has
        ended when its job begins, the job runs once more in a new child.

        Args:
            head: Head of the message to the child.
            content: Content of the message to the child.
            seconds_max: Time until the end of the reply, including the start of a process.
            reply_bytes_max: Maximum size of the reply's content in bytes.

        Returns:
            Head and content of the reply.

        Raises:
            JobTooLong: the job took longer than seconds_max.
            ProcessLost: the process ended, or sent an invalid reply.
            AlreadyEnded: the pool is closed.
            OSError: no process could be started.
        """
        if self._is_closed:
            raise AlreadyEnded("no process is started any more: their pool is closed")
        with trio.move_on_after(seconds_max):
            child = self._idle_child()
            if child is not None:
                with contextlib.suppress(ProcessLost):
                    return await self._ask(child, head, content, reply_bytes_max)
            return await self._ask(self._new_child(), head, content, reply_bytes_max)
        raise JobTooLong

    async def _ask(self, child: _Child, head: bytes, content: bytes, reply_bytes_max: int) -> tuple[bytes, bytearray]:
        self._busy.add(child)
        is_done = False
        try:
            reply = await child.ask(head, content, reply_bytes_max)
            is_done = True
            return reply
        finally:
            self._busy.remove(child)
            if is_done and not self._is_closed:
                self._idle.append(child)
            else:
                child.kill()
                self._killed.append(child)

    def close(self) -> None:
        """Kill all children and wait until they have ended. A second call does nothing."""
        self._is_closed = True
        children = [*self._idle, *self._busy, *self._killed]
        self._idle.clear()
        self._killed.clear()
        for child in children:
            child.kill()
        for child in children:
            child.reap()

    def _idle_child(self) -> _Child | None:
        self._killed = [child for child in self._killed if child.is_alive]
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            child.kill()
        return None

    def _new_child(self) -> _Child:
        self.started_total += 1
        return _Child(self._command)


class _Child:
    def __init__(self, command: Callable[[int], Sequence[str]]) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command(theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=_environment(),
                    start_new_session=True,  # Ctrl-C in a terminal must interrupt only the server.
                )
        except BaseException:
            ours.close()
            raise
        self._socket = trio.socket.from_stdlib_socket(ours)

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, head: bytes, content: bytes, reply_bytes_max: int) -> tuple[bytes, bytearray]:
        try:
            for part in (FRAME.pack(len(head), len(content)) + head, content):
                await self._send(part)
            head_bytes, content_bytes = FRAME.unpack(await self._receive(FRAME.size))
            if head_bytes > HEAD_BYTES_MAX or content_bytes > reply_bytes_max:
                raise ProcessLost(f"it sent {content_bytes} bytes, and at most {reply_bytes_max} are allowed")
            return bytes(await self._receive(head_bytes)), await self._receive(content_bytes)
        except OSError as error:
            raise ProcessLost(self._how_ended()) from error
        except trio.ClosedResourceError as error:
            raise AlreadyEnded("the process was killed: its pool is closed") from error

    async def _send(self, content: bytes) -> None:
        with memoryview(content) as view:
            sent = 0
            while sent < len(view):
                sent += await self._socket.send(view[sent : sent + RECEIVE_BYTES])

    async def _receive(self, byte_count: int) -> bytearray:
        received = bytearray(byte_count)
        with memoryview(received) as view:
            first = 0
            while first < byte_count:
                count = await self._socket.recv_into(view[first : first + RECEIVE_BYTES])
                if not count:
                    raise ProcessLost(self._how_ended())
                first += count
        return received

    def _how_ended(self) -> str:
        """Kill and reap the process, and describe how it ended. Call this when the connection to the process ends,
        because that is a process's last action.
        """
        self.kill()
        self.reap()
        code = self._process.returncode or 0
        return f"killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        """Kill the process at once."""
        self._socket.close()
        self._process.kill()

    def reap(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS_MAX)


def _environment() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name in ENVIRONMENT or name.startswith("PYTHON")}
    return {**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # A child must compute on one core.


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
