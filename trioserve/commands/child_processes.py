"""Starts the child processes of a program, and defines their events and the orders for them.

Code that never waits makes the decisions of such a program: it receives events and returns orders. Each process has a
key, which is its name or its number.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
import trio

from trioserve.commands.log_lines import announce
from trioserve.commands.program_end import StopSignals

if TYPE_CHECKING:
    from trioserve.assemble_model import LoadProgress

__all__ = [
    "LINE_BYTES_MAX",
    "PARENT_SOCKET",
    "Ended",
    "LoadMessage",
    "Order",
    "ParentProcess",
    "Serving",
    "Signalled",
    "child_sockets",
    "ended_with_scope",
    "open_child",
    "relay_lines",
    "relay_progress",
    "relay_signals",
    "start_child",
]

PARENT_SOCKET = "TRIOSERVE_PARENT_SOCKET"
"""Variable with the file descriptor of a socket to the process that started a server. See ParentProcess."""
PROCESS_NAME = Path("/proc/self/comm")
MESSAGE_BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 64 * 1024  # maximum length of a line of output; a longer line is printed in pieces
OWN_SESSION = True
"""Each child has its own session. Ctrl-C in a terminal reaches only the parent, which stops the children in order."""
KILL_SECONDS_MAX = 5.0  # The system ends a killed process much sooner, unless the process waits for a device.
SERVING = re.compile(r"serving .* at (\S+) ")

Key = TypeVar("Key")


class Serving(msgspec.Struct, Generic[Key], frozen=True):
    """Event: a process accepts requests.

    Attributes:
        key: Name or number of the process.
    """

    key: Key


class Ended(msgspec.Struct, Generic[Key], frozen=True):
    """Event: a process has ended.

    Attributes:
        key: Name or number of the process.
        code: Exit code, or the negative number of the signal that killed the process.
    """

    key: Key
    code: int


class Signalled(msgspec.Struct, frozen=True):
    """Event: the program received a signal that stops it.

    Attributes:
        number: SIGINT or SIGTERM.
    """

    number: int = signal.SIGINT


class Order(msgspec.Struct, Generic[Key], frozen=True):
    """Order for one process.

    Attributes:
        what: "start" starts the process, "stop" sends the stop signal (perhaps several times), and "kill" sends
            SIGKILL.
        key: Name or number of the process.
    """

    what: Literal["start", "stop", "kill"]
    key: Key


class LoadMessage(msgspec.Struct, frozen=True):
    """Message of a child process: the progress of loading its model.

    Attributes:
        activity: current activity, for people.
        share: share of the activity that is done, from 0 to 1. None: it is unknown.
    """

    activity: str
    share: float | None


def child_sockets() -> tuple[socket.socket, socket.socket]:
    """Create the sockets between a parent process and a child process, which keep the borders of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class ParentProcess:
    """The process that started this server. It stops this server by its end, and receives the progress of loading.

    Args:
        connection: socket to the parent process. None if no server started this one.
    """

    def __init__(self, connection: socket.socket | None) -> None:
        self._connection = connection
        self._last: LoadMessage | None = None

    @classmethod
    def of_environment(cls) -> ParentProcess:
        """Find the parent process, and remove the variable that names its socket."""
        number = os.environ.pop(PARENT_SOCKET, None)
        return cls(None if number is None else socket.socket(fileno=int(number)))

    def stop_with_it(self) -> None:
        """Stop this server when the parent process has ended."""
        connection = self._connection
        if connection is None:
            return

        def wait() -> None:
            with contextlib.suppress(OSError):
                while connection.recv(1):
                    pass
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=wait, name="parent", daemon=True).start()

    def name_process(self, name: str) -> None:
        """Show a name instead of "python" in the lists of `ps` and `top` if a server started this one. Linux only.

        Args:
            name: the served model. The system keeps 15 bytes.
        """
        if self._connection is not None:
            with contextlib.suppress(OSError):
                PROCESS_NAME.write_text(name)

    def report(self, progress: LoadProgress) -> None:
        """Report the progress of loading in steps of one per cent. The thread that loads calls this method.

        Args:
            progress: current activity, and how much of it is done.
        """
        share = progress.share
        message = LoadMessage(progress.what, None if share is None else int(100 * share) / 100)
        if self._connection is None or message == self._last:
            return
        self._last = message
        with contextlib.suppress(OSError):  # If the parent process is slow, it misses a message.
            self._connection.send(msgspec.json.encode(message), socket.MSG_DONTWAIT)


async def relay_progress(connection: trio.socket.SocketType, note: Callable[[str, float | None], None]) -> None:
    """Receive the progress of a child process until the child process ends.

    Args:
        connection: the parent's socket.
        note: called with the activity and its share of each message.
    """
    while data := await connection.recv(MESSAGE_BYTES_MAX):
        message = msgspec.json.decode(data, type=LoadMessage)
        note(message.activity, message.share)


async def start_child(nursery: trio.Nursery, arguments: list[str], **options: Any) -> trio.Process:
    """Start a process with the same Python interpreter. If the nursery is cancelled, the process is killed.

    Args:
        nursery: Nursery of the task that waits for the end of the process.
        arguments: Arguments of the interpreter.
        options: Further options of trio.run_process.
    """
    process: trio.Process = await nursery.start(
        partial(
            trio.run_process,
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            check=False,
            deliver_cancel=_kill,
            start_new_session=OWN_SESSION,
            **options,
        )
    )
    return process


async def open_child(arguments: list[str], **options: Any) -> trio.Process:
    """Start a process with the same Python interpreter. The caller kills it, see `ended_with_scope`.

    Args:
        arguments: Arguments of the interpreter.
        options: Further options of trio.lowlevel.open_process.
    """
    command = [sys.executable, *arguments]
    return await trio.lowlevel.open_process(command, start_new_session=OWN_SESSION, **options)


@asynccontextmanager
async def ended_with_scope(process: trio.Process) -> AsyncIterator[None]:
    """Kill a process that still runs at the end of the scope, and wait until its memory is free."""
    try:
        yield
    finally:
        process.kill()
        with trio.move_on_after(KILL_SECONDS_MAX, shield=True):
            await process.wait()


async def relay_signals(
    signals: StopSignals,
    processes: Mapping[Key, trio.Process],
    serving: Callable[[], Iterable[Key]],
    note: Callable[[Signalled], None],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Report stop signals, and forward SIGHUP to the processes that accept requests.

    SIGHUP would end a process that is still starting.

    Args:
        signals: Signals of the program.
        processes: Running processes.
        serving: Returns the keys of the processes that accept requests.
        note: Called with each stop signal. A signal that finds no space for its event is dropped.
        task_status: Reports to the parent task that signals are received.
    """
    async for number in signals.receive(task_status=task_status):
        if number == signal.SIGHUP:
            for key in serving():
                processes[key].send_signal(number)
            continue
        with contextlib.suppress(trio.WouldBlock):
            note(Signalled(number))


async def _kill(process: trio.Process) -> None:
    process.kill()


async def relay_lines(name: str, output: trio.abc.ReceiveStream, on_serving: Callable[[str], None]) -> str:
    """Print the output of a process with its name as a prefix.

    Args:
        name: name of the process.
        output: standard error of the process.
        on_serving: called with the URL when the process reports that it accepts requests.

    Returns:
        The last line that is not empty, or "".
    """
    is_reported = False
    held, last = b"", ""
    async for data in output:
        *lines, held = (held + data).split(b"\n")
        if len(held) > LINE_BYTES_MAX:
            lines, held = [*lines, held], b""
        for line in lines:
            text = line.decode("utf-8", "replace")
            last = text.strip() or last
            announce(f"{name}: {text}")
            found = SERVING.match(text)
            if found is not None and not is_reported:
                is_reported = True
                on_serving(found[1])
    if held:
        last = held.decode("utf-8", "replace")
        announce(f"{name}: {last}")
    return last
