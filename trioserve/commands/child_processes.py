"""Starts the child processes of a program, and defines their events and the orders for them.

Code that never waits makes the decisions of such a program: it receives events and returns orders. Each process has a
key, which is its name or its number.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import msgspec
import trio

from trioserve.commands.program_end import StopSignals

__all__ = ["Ended", "Order", "Serving", "Signalled", "relay_signals", "start_child"]

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
