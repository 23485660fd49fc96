"""`route --router-processes N`: the parent of several processes that are one router. It starts them, passes signals on,
and ends when they have ended. It serves nobody itself.

It opens the listening sockets, one for each process at the same port, and leaves them to the processes. So the port is
known, and anything wrong with it is said, before there is a process; and the kernel stops giving connections to a
process in the moment in which it ends.

None is started anew. A process that ends unasked has a reason, which a new one would hide, and has lost its streams; so
the others drain, and whoever watches the router (systemd, Kubernetes) sees that it failed and starts all of it.

A process ends when its connection to the parent does: then the parent is gone, whatever has ended it.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Literal

import msgspec
import trio

from trioserve.commands.log_lines import announce
from trioserve.commands.program_end import EXIT_FAILED, EXIT_INTERRUPTED, StopSignals
from trioserve.commands.route import InheritedPlace, checked_routing
from trioserve.commands.serving import announce_serving, frontend_limits, server_tls, server_urls
from trioserve.config import RouteConfig, engine_settings
from trioserve.contracts.errors import StartupError
from trioserve.http.listener import open_listeners, open_shared_listeners
from trioserve.proxy.peers.processes import ProcessPlace

__all__ = [
    "SERVING",
    "Ended",
    "Happening",
    "Lives",
    "Order",
    "ProcessStart",
    "Serving",
    "Signalled",
    "check_processes",
    "run_router_processes",
]

HAPPENINGS_MAX = 256  # each process causes two; a signal too many says nothing new
LINE_BYTES_MAX = 1024
LATE_SECONDS = 5.0  # beyond its own bounds a process that stops is taken for one that hangs
SIGNALS_OBEYED = 3  # drain, end the draining, end the grace; the next one kills

SERVING = b"serving\n"
"""What a process says to its parent."""


class ProcessStart(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process is told, in one line of JSON."""

    config: RouteConfig
    inherited: InheritedPlace


def check_processes(config: RouteConfig) -> None:
    """Whether this router can be several processes. Raises StartupError."""
    asked = f"--router-processes is {config.router_processes}"
    if not sys.platform.startswith("linux"):
        raise StartupError(f"{asked}, and only Linux spreads connections over them: leave it out")
    if config.uds is not None:
        raise StartupError(
            f"{asked}, and a Unix domain socket cannot be shared by several processes: leave out --uds, or have one"
        )
    if config.router_peers:
        raise StartupError(
            f"{asked}, and other routers would find another process at each question: leave out --router-peers, or "
            "start a router of one process for each of them"
        )


# --- what decides ---


class Serving(msgspec.Struct, frozen=True):
    """It says that it serves. number: of the process, from 1."""

    number: int


class Ended(msgspec.Struct, frozen=True):
    """It is over. code: as Popen has it, below 0 for a signal."""

    number: int
    code: int


class Signalled(msgspec.Struct, frozen=True):
    """A signal that stops the program: SIGINT or SIGTERM."""

    number: int = signal.SIGINT


class Late(msgspec.Struct, frozen=True):
    """Whoever was to stop has had time enough."""


Happening = Serving | Ended | Signalled | Late


class Order(msgspec.Struct, frozen=True):
    """What to do with a process: ask it to stop (once more), or kill it."""

    what: Literal["stop", "kill"]
    number: int


class Lives:
    """Which processes live, and what is to become of them. Told what happens, it says what to do.

    failures: what went wrong, a sentence each. is_stopping: they are to end. all_serve: all of them do.
    """

    def __init__(self, count: int) -> None:
        self.failures: list[str] = []
        self.is_stopping = False
        self._count = count
        self._living = set(range(1, count + 1))
        self._serving: set[int] = set()
        self._was_ready = False
        self._signal_count = 0
        self._early_exit_code = EXIT_INTERRUPTED

    @property
    def all_serve(self) -> bool:
        return len(self._serving) == self._count and not self.is_stopping

    @property
    def serving(self) -> list[int]:
        """The processes that serve, in order."""
        return sorted(self._serving & self._living)

    @property
    def is_over(self) -> bool:
        return not self._living

    @property
    def exit_code(self) -> int:
        if self.failures:
            return EXIT_FAILED
        return 0 if self._was_ready else self._early_exit_code

    def note(self, happening: Happening) -> list[Order]:
        if isinstance(happening, Serving):
            self._serving.add(happening.number)
            self._was_ready = self._was_ready or self.all_serve
            return []
        if isinstance(happening, Ended):
            return self._note_end(happening)
        if isinstance(happening, Signalled):
            self._signal_count += 1
            if self._signal_count == 1:
                self._early_exit_code = 128 + happening.number
            return self._stop() if self._signal_count <= SIGNALS_OBEYED else self._all("kill")
        self.failures.append(f"did not stop in time and is killed: process {self._named()}")
        return self._all("kill")

    def _note_end(self, ended: Ended) -> list[Order]:
        self._living.discard(ended.number)
        if self.is_stopping and (ended.code == 0 or not self._was_ready or self._signal_count > SIGNALS_OBEYED):
            return []
        how = f"was killed by {_signal_name(-ended.code)}" if ended.code < 0 else f"ended with code {ended.code}"
        rest = "" if self.is_stopping or not self._living else "; the others drain and end, too"
        self.failures.append(f"process {ended.number} of this router {how}{rest}")
        return [] if self.is_stopping else self._stop()

    def _stop(self) -> list[Order]:
        self.is_stopping = True
        return self._all("stop")

    def _all(self, what: Literal["stop", "kill"]) -> list[Order]:
        return [Order(what, number) for number in sorted(self._living)]

    def _named(self) -> str:
        return ", ".join(map(str, sorted(self._living)))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- what waits ---


def run_router_processes(config: RouteConfig) -> int:
    """Until Ctrl-C or SIGTERM, or one of them ends. Returns the exit code; raises StartupError."""
    check_processes(config)
    with StopSignals() as signals:
        return trio.run(_run, config, signals)


async def _run(config: RouteConfig, signals: StopSignals) -> int:
    checked_routing(config)  # what is wrong is said once, and not by each process
    server_tls(config)
    limits = frontend_limits(config)
    count = config.router_processes
    lives = Lives(count)
    sender, happenings = trio.open_memory_channel[Happening](HAPPENINGS_MAX)
    settings = engine_settings(config)
    stop_seconds_max = settings.drain_seconds_max + settings.grace_seconds_max + LATE_SECONDS

    async def wait_for_the_late() -> None:
        await trio.sleep(stop_seconds_max)
        await sender.send(Late())

    async with trio.open_nursery() as nursery, sender, happenings:
        processes: dict[int, trio.Process] = {}
        await nursery.start(_relay_signals, signals, processes, lives, sender)
        shared = await open_shared_listeners(config.host, config.port, count, limits=limits)
        urls = server_urls(config, shared[0])
        doors = [(await open_listeners("127.0.0.1", 0))[0] for _ in range(count)]
        for number, start in enumerate(_starts(config, shared, doors), start=1):
            processes[number] = await nursery.start(_serve, number, start, sender)
            # Theirs alone from now on: what nobody listens to any more takes no connections.
            for listener in (*shared[number - 1], doors[number - 1]):
                listener.socket.close()
        is_told = is_late_awaited = False
        failures_told = 0
        stop_signal: int = signal.SIGTERM
        while not lives.is_over:
            happening = await happenings.receive()
            if isinstance(happening, Signalled):
                stop_signal = happening.number  # SIGINT skips the least time of a drain
            for order in lives.note(happening):
                processes[order.number].send_signal(stop_signal if order.what == "stop" else signal.SIGKILL)
            for sentence in lives.failures[failures_told:]:
                announce(f"trioserve: {sentence}")
            failures_told = len(lives.failures)
            if lives.all_serve and not is_told:
                is_told = True
                pids = ", ".join(str(process.pid) for process in processes.values())
                announce(f"the router is {count} processes: {pids}")
                announce_serving("a router", urls, config)
            if lives.is_stopping and not is_late_awaited:
                is_late_awaited = True
                nursery.start_soon(wait_for_the_late)
        nursery.cancel_scope.cancel()
    announce("stopped")
    return lives.exit_code


def _starts(
    config: RouteConfig, shared: list[list[trio.SocketListener]], doors: list[trio.SocketListener]
) -> Iterator[ProcessStart]:
    ports = tuple(door.socket.getsockname()[1] for door in doors)
    run, secret = secrets.token_hex(4), secrets.token_hex(16)
    for number, (listeners, door) in enumerate(zip(shared, doors, strict=True), start=1):
        yield ProcessStart(
            config=config,
            inherited=InheritedPlace(
                place=ProcessPlace(number=number, doors=ports, run=run, secret=secret),
                listeners=tuple(listener.socket.fileno() for listener in listeners),
                door=door.socket.fileno(),
            ),
        )


async def _relay_signals(
    signals: StopSignals,
    processes: dict[int, trio.Process],
    lives: Lives,
    sender: trio.MemorySendChannel[Happening],
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    async for number in signals.receive(task_status=task_status):
        if number == signal.SIGHUP:
            for name in lives.serving:  # the signal would end a process whose Python is just starting
                processes[name].send_signal(number)
            continue
        with contextlib.suppress(trio.WouldBlock):
            sender.send_nowait(Signalled(number))


async def _serve(
    number: int,
    start: ProcessStart,
    sender: trio.MemorySendChannel[Happening],
    task_status: trio.TaskStatus[trio.Process] = trio.TASK_STATUS_IGNORED,
) -> None:
    """One process, from its start to its end; cancelling this kills it."""
    ours, its = socket.socketpair()
    inherited = start.inherited
    async with trio.open_nursery() as nursery, trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as connection:
        with its:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    [sys.executable, "-m", "trioserve.commands.router_process", str(its.fileno())],
                    pass_fds=(its.fileno(), *inherited.listeners, inherited.door),
                    stdin=subprocess.DEVNULL,
                    check=False,
                    deliver_cancel=_kill,
                    # Ctrl-C in a terminal is for the parent, which passes it on.
                    start_new_session=True,
                )
            )
        task_status.started(process)
        with contextlib.suppress(trio.BrokenResourceError):
            await connection.send_all(msgspec.json.encode(start) + b"\n")
            if await connection.receive_some(LINE_BYTES_MAX) == SERVING:
                await sender.send(Serving(number))
        code = await process.wait()
        nursery.cancel_scope.cancel()
    await sender.send(Ended(number, code))


async def _kill(process: trio.Process) -> None:
    process.kill()
