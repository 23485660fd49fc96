"""`python -m trioserve disagg`: runs a router, a prefill server and a decode server on one machine, as one program.

Router and servers are separate processes. Each line of their output gets the name of the process as a prefix. The
router starts when both servers accept requests. The router stops first, because its requests need the servers. If one
server ends, the router and the other server continue. The parent process imports no torch and loads no model.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
from typing import Literal, TypeVar

import msgspec
import trio

from trioserve.commands.child_processes import (
    LINE_BYTES_MAX,
    Ended,
    Order,
    Serving,
    Signalled,
    relay_lines,
    relay_signals,
    start_child,
)
from trioserve.commands.log_lines import announce
from trioserve.commands.program_end import EXIT_FAILED, StopSignals
from trioserve.config import Config, add_arguments, config_from
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, StartupError
from trioserve.options.router import RouterOptions
from trioserve.options.server import ServerOptions
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint

__all__ = ["DisaggSettings", "StartAndStop", "run_disagg"]

# Maximum number of waiting events. Three processes and a user cause fewer events. A dropped signal would only repeat an
# earlier signal.
EVENTS_MAX = 64
FINDING_SECONDS_MAX = 10.0  # enough time for several health checks
LOOKS_SECONDS = 0.05  # interval at which the router is polled, because it does not report the result of a health check

Name = Literal["router", "prefill", "decode"]
Kind = TypeVar("Kind", bound=ServerOptions)


class DisaggSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `trioserve disagg`.

    Attributes:
        router_args: Flags of `route`.
        server_args: Flags of `serve`, for both servers.
        prefill_port: Port of the prefill server.
        decode_port: Port of the decode server.
    """

    router_args: tuple[str, ...] = ()
    server_args: tuple[str, ...] = ()
    prefill_port: int = 8001
    decode_port: int = 8002

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> DisaggSettings:
        """Create settings from command line arguments.

        Args:
            arguments: Arguments of `trioserve disagg`.

        Raises:
            StartupError: A value cannot be split into flags.
        """
        try:
            router_args, server_args = shlex.split(arguments.router_args), shlex.split(arguments.server_args)
        except ValueError as error:
            raise StartupError(f"--router-args or --server-args cannot be split into words: {error}") from None
        return cls(
            router_args=tuple(router_args),
            server_args=tuple(server_args),
            prefill_port=arguments.prefill_port,
            decode_port=arguments.decode_port,
        )

    def commands(self, *, core_count: int) -> dict[Name, list[str]]:
        """Return the command line of each process, as arguments of trioserve.

        Without --threads, each server gets half of the cores, because two thread pools on the same cores would be
        slower.

        Args:
            core_count: Cores that this program may use.

        Raises:
            StartupError: A flag is unknown or invalid, or two processes have the same port.
        """
        route = _checked(self.router_args, RouterOptions, "--router-args")
        serve = _checked(self.server_args, Config, "--server-args")
        threads = [] if serve.threads is not None else ["--threads", str(max(1, core_count // 2))]
        scheme = "http" if serve.ssl_certfile is None else "https"
        ports = {"prefill": self.prefill_port, "decode": self.decode_port}
        if len({route.port or -1, *ports.values()}) < 3:
            raise StartupError(
                f"router and servers need different ports, but have {route.port}, {self.prefill_port} and "
                f"{self.decode_port}"
            )
        server = ["serve", *self.server_args, *threads]
        return {
            "prefill": [*server, "--role", "prefill", "--port", str(self.prefill_port)],
            "decode": [*server, "--role", "decode", "--port", str(self.decode_port)],
            "router": [
                "route",
                *self.router_args,
                "--prefill-endpoint",
                f"prefill={scheme}://127.0.0.1:{self.prefill_port}",
                "--decode-endpoint",
                f"decode={scheme}://127.0.0.1:{self.decode_port}",
            ],
        }


def _checked(flags: tuple[str, ...], kind: type[Kind], option: str) -> Kind:
    parser = argparse.ArgumentParser(prog=option, exit_on_error=False, add_help=False)
    add_arguments(parser, kind)
    try:
        parsed, unknown = parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise StartupError(f"{option}: {error}") from None
    if unknown:
        raise StartupError(f"{option} has {' '.join(unknown)}, which is not an option")
    return config_from(parsed, kind=kind)


# --- decisions (this code never waits) ---


Event = Serving[Name] | Ended[Name] | Signalled


class StartAndStop:
    """Decides when each process starts and stops: receives events and returns orders.

    Attributes:
        exit_code: Exit code of the program.
        is_over: True if all processes have ended.
        is_ready: True from the time when all three processes accept requests until the program stops.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._running: set[Name] = set()
        self._serving: set[Name] = set()
        self._is_stopping = False
        self._signal_count = 0

    @property
    def is_over(self) -> bool:
        return self._is_stopping and not self._running

    @property
    def is_ready(self) -> bool:
        return len(self._serving) == 3 and not self._is_stopping

    @property
    def serving(self) -> list[Name]:
        """Names of the running processes that accept requests, sorted."""
        return sorted(self._serving & self._running)

    def begin(self) -> list[Order[Name]]:
        return self._start("prefill", "decode")

    def note(self, event: Event) -> list[Order[Name]]:
        if isinstance(event, Serving):
            self._serving.add(event.key)
            is_routers_turn = self._serving == {"prefill", "decode"} and not self._is_stopping
            return self._start("router") if is_routers_turn else []
        if isinstance(event, Ended):
            self._running.discard(event.key)
            is_failure = event.code != 0 or not self._is_stopping
            if is_failure and not self.exit_code:
                self.exit_code = max(event.code, EXIT_FAILED)
            if not self._is_stopping:
                # One server alone is still useful: it computes prefill and decode of all requests.
                is_useful = self.is_ready and "router" in self._running and len(self._running) > 1
                return [] if is_useful else self._stop()
            return self._stop_next() if event.key == "router" else []
        self._signal_count += 1
        if not self._is_stopping:
            self.exit_code = self.exit_code if self.is_ready else 128 + event.number
            return self._stop()
        if self._signal_count == 2:
            return self._stop_next()  # After a second signal, the servers wait for a shorter time for their requests.
        return [Order("kill", name) for name in sorted(self._running)]

    def _start(self, *names: Name) -> list[Order[Name]]:
        self._running.update(names)
        return [Order("start", name) for name in names]

    def _stop(self) -> list[Order[Name]]:
        self._is_stopping = True
        return self._stop_next()

    def _stop_next(self) -> list[Order[Name]]:
        """Return orders that stop the router. If the router has ended, return orders that stop the servers."""
        names: list[Name] = ["router"] if "router" in self._running else sorted(self._running)
        return [Order("stop", name) for name in names]


# --- tasks and waiting ---


def run_disagg(settings: DisaggSettings) -> int:
    """Run the router and the servers until Ctrl-C or SIGTERM, or until one process fails.

    Args:
        settings: Settings of the program.

    Returns:
        Exit code of the program.

    Raises:
        StartupError: A flag is invalid.
    """
    core_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with StopSignals() as signals:
        return trio.run(_run, settings.commands(core_count=core_count), signals)


async def _run(commands: dict[Name, list[str]], signals: StopSignals) -> int:
    sender, events = trio.open_memory_channel[Event](EVENTS_MAX)
    decides = StartAndStop()
    processes: dict[Name, trio.Process] = {}
    stop_signal: int = signal.SIGTERM
    async with trio.open_nursery() as nursery, sender, events:
        await nursery.start(relay_signals, signals, processes, lambda: decides.serving, sender.send_nowait)
        orders = decides.begin()
        while True:
            for order in orders:
                if order.what == "start":
                    command = commands[order.key]
                    process = processes[order.key] = await nursery.start(_serve, order.key, command, sender)
                    announce(f"{order.key}: process {process.pid}: python -m trioserve {shlex.join(command)}")
                elif order.what == "stop":
                    processes[order.key].send_signal(stop_signal)
                else:
                    processes[order.key].kill()
            if decides.is_over:
                break
            was_ready = decides.is_ready
            event = await events.receive()
            if isinstance(event, Signalled):
                stop_signal = event.number  # The processes get the same signal: SIGINT skips a drain's minimum time.
            orders = decides.note(event)
            if decides.is_ready and not was_ready:
                announce("all three accept requests: the router sends them to prefill, then to decode (Ctrl-C stops)")
        nursery.cancel_scope.cancel()
    return decides.exit_code


async def _serve(
    name: Name,
    command: list[str],
    sender: trio.MemorySendChannel[Event],
    task_status: trio.TaskStatus[trio.Process] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run one process, report its events, and wait until it ends. A cancel of this function kills the process."""
    async with trio.open_nursery() as nursery:
        process = await start_child(nursery, ["-m", "trioserve", *command], stderr=subprocess.PIPE)
        task_status.started(process)
        assert process.stderr is not None

        async def report_serving(url: str) -> None:
            if name == "router":
                await _until_both_are_found(url)
            await sender.send(Serving(name))

        await relay_lines(name, process.stderr, lambda url: nursery.start_soon(report_serving, url))
        code = await process.wait()
        nursery.cancel_scope.cancel()
    await sender.send(Ended(name, code))


async def _until_both_are_found(url: str) -> None:
    """Wait until the router has checked both servers. An earlier request could see one server as the only endpoint.

    Returns early if the router refuses to list its endpoints, or after FINDING_SECONDS_MAX.
    """
    router = RemoteEndpoint(EndpointId("router"), EndpointAddress.parse(url))
    with trio.move_on_after(FINDING_SECONDS_MAX):
        while True:
            try:
                async with router.request("GET", "/endpoints", [], b"") as response:
                    listed = await response.whole(LINE_BYTES_MAX)
                if response.status != 200 or listed is None:
                    break
                if all(each.health == "healthy" for each in msgspec.json.decode(listed, type=_Endpoints).data):
                    break
            except (EndpointLost, msgspec.DecodeError):
                break
            await trio.sleep(LOOKS_SECONDS)
    router.close()


class _Endpoint(msgspec.Struct):
    health: str


class _Endpoints(msgspec.Struct):
    data: list[_Endpoint]
