"""The server's view of ranks on the nodes of a Ray cluster: their nodes and their connections.

Only a separate process, trioserve/commands/ray_place.py, uses Ray. It sends reports about the ranks as lines of JSON,
and ends the ranks when its standard input ends. A separate process is needed for three reasons: Ray's client ends its
own process if the head of the cluster cannot be reached for a minute, the client's calls block threads that cannot be
cancelled, and the client allows only one connection per process.
"""

from __future__ import annotations

import logging
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import trio

from trioserve.contracts.errors import StartupError
from trioserve.ranks.host import free_port
from trioserve.ranks.link import wait_for_ranks
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted, uninterrupted_context

__all__ = ["PlacedRanks", "RankDoor", "RankNode", "RanksUpdate", "RanksRequest", "placed_ranks"]

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "trioserve.commands.ray_place")
# Longest wait until the process has ended the ranks and released their resources. After SIGKILL, Ray releases them.
LEAVE_SECONDS_MAX = 10.0
STDERR_SECONDS_MAX = 1.0
STDERR_BYTES_MAX = 2000  # number of bytes that are kept from the end of the process's stderr
RECEIVE_BYTES = 65536


class RanksRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that the server sends to the Ray process.

    Attributes:
        count: number of ranks.
        model: path or name of the model. Each node resolves the name itself.
        revision: revision of the model. None selects the default revision.
        cpus: CPUs of each rank.
        gpus: GPUs of each rank.
        address: the cluster's address, as ray.init accepts it. None uses RAY_ADDRESS, or a cluster on this machine.
    """

    count: int
    model: str
    revision: str | None
    cpus: int
    gpus: int
    address: str | None


class RankDoor(msgspec.Struct, frozen=True):
    """The second line that the server sends to the Ray process: the address where ranks connect to the server.

    Attributes:
        host: address of this machine.
        port: port where the server listens.
        key: the shared key of the handshake.
    """

    host: str
    port: int
    key: str = ""

    def __repr__(self) -> str:
        return f"RankDoor({self.host}:{self.port})"  # The key is left out, because no log may contain it.


class RankNode(msgspec.Struct, frozen=True):
    """The node where Ray has placed a rank.

    Attributes:
        id: the node's id. Several nodes may share one address.
        address: address of the node.
        port: a port that is free on the node.
    """

    id: str
    address: str
    port: int


class RanksUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line that the Ray process sends to the server. Exactly one field is set.

    Attributes:
        waits: a sentence that says what the process waits for.
        nodes: the node of each rank, in the order of the ranks.
        failure: why the ranks cannot start, or have ended.
    """

    waits: str | None = None
    nodes: tuple[RankNode, ...] = ()
    failure: str | None = None


@uninterrupted
class PlacedRanks:
    """Ranks that Ray has placed on nodes. Created by placed_ranks.

    Attributes:
        nodes: the node of each rank, in the order of the ranks.
    """

    def __init__(self, process: trio.Process) -> None:
        self.nodes: tuple[RankNode, ...] = ()
        self._process = process
        self._failure: str | None = None
        self._have_come = False
        self._is_placed, self._has_failed = trio.Event(), trio.Event()
        self._stderr = bytearray()
        self._has_read_stderr = trio.Event()

    def count_beside(self, rank: int) -> int:
        """Return the number of ranks on the same node as a rank, including that rank.

        Args:
            rank: number of the rank.
        """
        return sum(node.id == self.nodes[rank].id for node in self.nodes)

    async def come(self, *, on_wait: Callable[[list[int]], None]) -> dict[int, socket.socket]:
        """Send the server's address to the ranks, and wait until all ranks have connected to this process.

        Args:
            on_wait: see wait_for_ranks.

        Returns:
            A connection to each rank. The caller closes it.

        Raises:
            StartupError: a rank ended before it connected. The message has Ray's reason.
        """
        host = _address_towards(self.nodes[0].address)
        door = RankDoor(host, free_port(host), secrets.token_hex(32))
        found: dict[int, socket.socket] = {}

        is_open = trio.Event()

        def note(awaited: list[int]) -> None:
            is_open.set()
            on_wait(awaited)

        async def announce() -> None:
            # A rank that connects before the server listens retries only after a second.
            await is_open.wait()
            await self._say(door)

        async def wait() -> None:
            ranks = range(len(self.nodes))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(announce)
                found.update(await wait_for_ranks(door.host, door.port, ranks, door.key, on_wait=note))

        try:
            await self._unless_failed(wait)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        self._have_come = True
        return found

    async def _unless_failed(self, wait: Callable[[], Awaitable[object]]) -> None:
        async with trio.open_nursery() as nursery:

            async def raise_failure() -> None:
                await self._has_failed.wait()
                raise StartupError(self._failure)

            nursery.start_soon(raise_failure)
            await wait()
            nursery.cancel_scope.cancel()

    async def _say(self, message: RanksRequest | RankDoor) -> None:
        assert self._process.stdin is not None
        with suppress(trio.BrokenResourceError):  # The process has ended, and `_read` reports the reason.
            await self._process.stdin.send_all(msgspec.json.encode(message) + b"\n")

    async def _read(self) -> None:
        """Handle the lines that the process writes, until the process ends."""
        assert self._process.stdout is not None
        held = bytearray()
        async for data in self._process.stdout:
            *lines, rest = (held + data).split(b"\n")
            held = bytearray(rest)
            for line in lines:
                self._note(bytes(line))
        with trio.move_on_after(STDERR_SECONDS_MAX):
            await self._has_read_stderr.wait()
        last_line = self._stderr.decode(errors="replace").strip().rpartition("\n")[2]
        self._fail(f"the process that asks Ray to place ranks has ended: {last_line}")

    async def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        async for data in self._process.stderr:
            self._stderr[:] = (self._stderr + data)[-STDERR_BYTES_MAX:]
        self._has_read_stderr.set()

    def _note(self, line: bytes) -> None:
        try:
            update = msgspec.json.decode(line, type=RanksUpdate)
        except msgspec.DecodeError as error:
            self._fail(f"the process that asks Ray to place ranks wrote an invalid line: {error}")
            return
        if update.failure is not None:
            self._fail(update.failure)
        elif update.waits is not None:
            logger.info("%s", update.waits)
        else:
            self.nodes = update.nodes
            for rank, node in enumerate(self.nodes):
                logger.info("Ray has placed a rank rank=%d node=%s address=%s", rank, node.id, node.address)
            self._is_placed.set()

    def _fail(self, why: str) -> None:
        """Keep only the first failure, because it may have caused the later failures."""
        if self._failure is None:
            self._failure = why
            self._has_failed.set()
            if self._have_come:  # Until all ranks have connected, `_unless_failed` raises the failure instead.
                logger.warning("ranks that Ray has placed have failed: %s", why)


@uninterrupted_context
async def placed_ranks(wanted: RanksRequest, *, command: Sequence[str] | None = None) -> AsyncIterator[PlacedRanks]:
    """Let Ray place ranks on nodes, and end the ranks at the end of the block.

    The wait for resources of the cluster has no time limit. The end of the block ends the ranks and releases their
    resources within LEAVE_SECONDS_MAX, even after a cancel.

    Args:
        wanted: number of ranks, and the resources that each rank needs.
        command: the command line of the process that talks to Ray, for tests.

    Raises:
        StartupError: Ray cannot be reached, or a rank cannot start.
    """
    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    command or COMMAND,
                    # When this process ends for any reason, the kernel closes the pipe, and then the child ends.
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    check=False,
                    deliver_cancel=_leave,
                    start_new_session=True,  # Ctrl-C in a terminal must interrupt only the server.
                )
            )
            placed = PlacedRanks(process)
            nursery.start_soon(placed._read)
            nursery.start_soon(placed._read_stderr)
            await placed._say(wanted)
            await placed._unless_failed(placed._is_placed.wait)
            yield placed
            nursery.cancel_scope.cancel()


async def _leave(process: trio.Process) -> None:
    assert process.stdin is not None
    with trio.move_on_after(LEAVE_SECONDS_MAX):
        await process.stdin.aclose()
        await process.wait()
    process.kill()


def _address_towards(node: str) -> str:
    """Return the address at which a node can reach this machine.

    Raises:
        StartupError: there is no route to the node.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # `connect` of a UDP socket sends no packet.
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StartupError(f"this machine cannot reach the Ray node {node}, where a rank runs: {error}") from None
