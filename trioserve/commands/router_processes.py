"""`route --router-processes N`: N processes that work together as one router, and their parent process.

The parent starts the processes, forwards signals, and ends after the last process has ended. It serves no requests.

The parent opens one listening socket per process, all at the same port, and each process inherits its socket. So the
parent knows the port, and reports errors of the port, before a process starts. When a process ends, its socket closes,
and the kernel sends no more connections to this process.

The parent does not restart a process that fails, because the process has lost its streams, and a restart would hide the
cause. Instead, the other processes drain, and the parent fails. Its supervisor (systemd, Kubernetes) then restarts the
whole router.

Each process ends as soon as its connection to the parent closes, because then the parent has ended, for any reason.

The parent runs each process as `python -m trioserve.commands.router_processes FD`, where FD is a socket that is
connected to the parent. The process reads its start message, and reports when it accepts requests.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
import trio

from trioserve.commands.child_processes import Ended, Order, Serving, Signalled, relay_signals, start_child
from trioserve.commands.log_lines import announce
from trioserve.commands.program_end import EXIT_FAILED, EXIT_INTERRUPTED, StopSignals
from trioserve.commands.route import InheritedPlace, checked_routing, serve_router
from trioserve.commands.serving import announce_serving, frontend_limits, run_until_signal, server_tls, server_urls
from trioserve.contracts.errors import StartupError, TrioserveError
from trioserve.http.listener import open_listeners, open_shared_listeners
from trioserve.options.router import RouterOptions
from trioserve.proxy.peers.processes import ProcessPlace

__all__ = [
    "ProcessEvent",
    "ProcessStart",
    "ProcessStates",
    "SERVING",
    "check_processes",
    "main",
    "run_router_processes",
]

# Maximum number of waiting events. Each process causes two events. A dropped signal would only repeat an earlier
# signal.
EVENTS_MAX = 256
LINE_BYTES_MAX = 1024
LATE_SECONDS = 5.0  # A process that still runs this long after its own deadline hangs, and is killed.
# The first signal starts the drain, the second signal ends the drain, and the third signal ends the grace period. The
# fourth signal kills the processes.
SIGNALS_FORWARDED = 3

SERVING = b"serving\n"
"""Line that a process sends to its parent once it accepts requests."""


class ProcessStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start message from the parent to a process, sent as one line of JSON."""

    config: RouterOptions
    inherited: InheritedPlace


def check_processes(config: RouterOptions) -> None:
    """Check that this router can run as several processes.

    Args:
        config: options of the router.

    Raises:
        StartupError: the system or another option does not allow several processes.
    """
    asked = f"--router-processes is {config.router_processes}"
    if not sys.platform.startswith("linux"):
        raise StartupError(f"{asked}, but only Linux distributes connections over processes: remove it")
    if config.uds is not None:
        raise StartupError(
            f"{asked}, but several processes cannot share a Unix domain socket: remove --uds, or use one process"
        )
    if config.router_peers:
        raise StartupError(
            f"{asked}, but each call of another router would reach a random process: remove --router-peers, or "
            "start several routers of one process each"
        )


# --- decisions (this code never waits) ---


class Late(msgspec.Struct, frozen=True):
    """Event: the deadline by which all processes must stop has passed."""


ProcessEvent = Serving[int] | Ended[int] | Signalled | Late


class ProcessStates:
    """Tracks the states of the processes, and decides when to stop or kill them.

    Args:
        count: number of processes.

    Attributes:
        failures: one sentence for each failure so far.
        is_stopping: True once all processes must stop.
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
        """True if all processes accept requests and no process must stop."""
        return len(self._serving) == self._count and not self.is_stopping

    @property
    def serving(self) -> list[int]:
        """Numbers of the processes that accept requests, sorted."""
        return sorted(self._serving & self._living)

    @property
    def is_over(self) -> bool:
        return not self._living

    @property
    def exit_code(self) -> int:
        if self.failures:
            return EXIT_FAILED
        return 0 if self._was_ready else self._early_exit_code

    def note(self, event: ProcessEvent) -> list[Order[int]]:
        """Update the states after an event.

        Args:
            event: the latest event.

        Returns:
            Orders for processes, which the caller must send now.
        """
        if isinstance(event, Serving):
            self._serving.add(event.key)
            self._was_ready = self._was_ready or self.all_serve
            return []
        if isinstance(event, Ended):
            return self._note_end(event)
        if isinstance(event, Signalled):
            self._signal_count += 1
            if self._signal_count == 1:
                self._early_exit_code = 128 + event.number
            return self._stop() if self._signal_count <= SIGNALS_FORWARDED else self._all("kill")
        self.failures.append(f"did not stop in time and is killed: process {self._named()}")
        return self._all("kill")

    def _note_end(self, ended: Ended[int]) -> list[Order[int]]:
        self._living.discard(ended.key)
        if self.is_stopping and (ended.code == 0 or not self._was_ready or self._signal_count > SIGNALS_FORWARDED):
            return []
        how = f"was killed by {_signal_name(-ended.code)}" if ended.code < 0 else f"ended with code {ended.code}"
        rest = "" if self.is_stopping or not self._living else "; the other processes drain and end"
        self.failures.append(f"process {ended.key} of this router {how}{rest}")
        return [] if self.is_stopping else self._stop()

    def _stop(self) -> list[Order[int]]:
        self.is_stopping = True
        return self._all("stop")

    def _all(self, what: Literal["stop", "kill"]) -> list[Order[int]]:
        return [Order(what, number) for number in sorted(self._living)]

    def _named(self) -> str:
        return ", ".join(map(str, sorted(self._living)))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- tasks and waiting ---


def run_router_processes(config: RouterOptions) -> int:
    """Run the processes of a router until Ctrl-C, SIGTERM, or the end of one process. Then stop all of them.

    Args:
        config: options of the router.

    Returns:
        Exit code of the program.

    Raises:
        StartupError: an option is wrong, or the router cannot listen.
    """
    check_processes(config)
    with StopSignals() as signals:
        return trio.run(_run, config, signals)


async def _run(config: RouterOptions, signals: StopSignals) -> int:
    # Check the options in the parent, so that an error is reported once and not by each process.
    checked_routing(config)
    server_tls(config)
    limits = frontend_limits(config)
    count = config.router_processes
    states = ProcessStates(count)
    sender, events = trio.open_memory_channel[ProcessEvent](EVENTS_MAX)
    settings = config.stopping_settings()
    stop_seconds_max = settings.drain_seconds_max + settings.grace_seconds_max + LATE_SECONDS

    async def report_late() -> None:
        await trio.sleep(stop_seconds_max)
        await sender.send(Late())

    async with trio.open_nursery() as nursery, sender, events:
        processes: dict[int, trio.Process] = {}
        await nursery.start(relay_signals, signals, processes, lambda: states.serving, sender.send_nowait)
        shared = await open_shared_listeners(config.host, config.port, count, limits=limits)
        urls = server_urls(config, shared[0])
        doors = [(await open_listeners("127.0.0.1", 0))[0] for _ in range(count)]
        for number, start in enumerate(_starts(config, shared, doors), start=1):
            processes[number] = await nursery.start(_serve, number, start, sender)
            # Close the parent's copies of the sockets. Then a socket closes when its process ends, and the kernel sends
            # no more connections to it.
            for listener in (*shared[number - 1], doors[number - 1]):
                listener.socket.close()
        is_announced = has_stop_deadline = False
        failures_announced = 0
        stop_signal: int = signal.SIGTERM
        while not states.is_over:
            event = await events.receive()
            if isinstance(event, Signalled):
                stop_signal = event.number  # The processes get the same signal: SIGINT skips a drain's minimum time.
            for order in states.note(event):
                processes[order.key].send_signal(stop_signal if order.what == "stop" else signal.SIGKILL)
            for sentence in states.failures[failures_announced:]:
                announce(f"trioserve: {sentence}")
            failures_announced = len(states.failures)
            if states.all_serve and not is_announced:
                is_announced = True
                pids = ", ".join(str(process.pid) for process in processes.values())
                announce(f"the router runs in {count} processes: {pids}")
                announce_serving("a router", urls, config)
            if states.is_stopping and not has_stop_deadline:
                has_stop_deadline = True
                nursery.start_soon(report_late)
        nursery.cancel_scope.cancel()
    announce("stopped")
    return states.exit_code


def _starts(
    config: RouterOptions, shared: list[list[trio.SocketListener]], doors: list[trio.SocketListener]
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


async def _serve(
    number: int,
    start: ProcessStart,
    sender: trio.MemorySendChannel[ProcessEvent],
    task_status: trio.TaskStatus[trio.Process] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Start a process, report its events, and wait until it ends. A cancel of this function kills the process."""
    ours, theirs = socket.socketpair()
    inherited = start.inherited
    async with (
        trio.open_nursery() as nursery,
        trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as connection,
    ):
        with theirs:
            process = await start_child(
                nursery,
                ["-m", "trioserve.commands.router_processes", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), *inherited.listeners, inherited.door),
            )
        task_status.started(process)
        with contextlib.suppress(trio.BrokenResourceError):
            await connection.send_all(msgspec.json.encode(start) + b"\n")
            if await connection.receive_some(LINE_BYTES_MAX) == SERVING:
                await sender.send(Serving(number))
        code = await process.wait()
        nursery.cancel_scope.cancel()
    await sender.send(Ended(number, code))


RECEIVE_BYTES = 65536


def main(file_descriptor: int) -> int:
    """Route until SIGTERM, then drain. End at once when the parent ends.

    Args:
        file_descriptor: socket that is connected to the parent.

    Returns:
        Exit code of the process.
    """
    parent = socket.socket(fileno=file_descriptor)
    parent.set_inheritable(False)
    message = _line(parent)
    if message is None:
        return EXIT_FAILED  # The parent has already ended.
    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    start = msgspec.json.decode(message, type=ProcessStart)

    async def serve(orders: trio.MemoryReceiveChannel[object], announce: Callable[[list[str]], None]) -> None:
        await serve_router(start.config, orders, on_serving=announce, inherited=start.inherited)

    try:
        return run_until_signal(start.config, serve, what="a router", on_serving=lambda: parent.sendall(SERVING))
    except TrioserveError as error:
        print(f"trioserve: {error}", file=sys.stderr)
        return EXIT_FAILED


def _line(connection: socket.socket) -> bytes | None:
    held = b""
    while not held.endswith(b"\n"):
        received = connection.recv(RECEIVE_BYTES)
        if not received:
            return None
        held += received
    return held


def _end_with(parent: socket.socket) -> None:
    """End this process when the parent ends. The kernel closes the connection even if the parent is killed.

    The function runs in a thread, so that it works even if the event loop hangs.
    """
    try:
        while parent.recv(RECEIVE_BYTES):
            pass
    except OSError:
        pass  # The kernel resets the connection if the parent ended before it had read all bytes.
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
