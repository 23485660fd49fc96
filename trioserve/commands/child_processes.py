"""Starts the child processes of a program, and defines their events and the orders for them.

Code that never waits makes the decisions of such a program: it receives events and returns orders. Each process has a
key, which is its name or its number.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import msgspec
import trio

from trioserve.commands.log_lines import announce
from trioserve.commands.program_end import StopSignals

__all__ = [
    "LINE_BYTES_MAX",
    "PARENT_PIPE",
    "Ended",
    "Order",
    "Serving",
    "Signalled",
    "relay_lines",
    "relay_signals",
    "start_child",
]

PARENT_PIPE = "TRIOSERVE_PARENT_PIPE"
"""Variable with the number of a pipe. A server stops when the pipe is closed, because its parent process has ended."""
LINE_BYTES_MAX = 64 * 1024  # maximum length of a line of output; a longer line is printed in pieces
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
            # The child has its own session. So Ctrl-C in a terminal reaches only the parent, which then stops the
            # children in the right order.
            start_new_session=True,
            **options,
        )
    )
    return process


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
