"""Ranks that Ray places, as their server sees it: where they are, and how they come to it.

Who speaks with Ray is a process of its own, trioserve/commands/ray_place.py, which says in lines of JSON what becomes
of the ranks, and ends them when its standard input ends. Ray's client ends the process that it is in, when the
cluster's head has been gone for a minute; its calls wait in threads that nobody can cancel; and a process has one
connection, which may be somebody else's.
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
from trioserve.ranks.door import wait_for_ranks
from trioserve.ranks.host import free_port
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted, uninterrupted_context

__all__ = ["PlacedRanks", "RankDoor", "RankNode", "RanksTold", "RanksWanted", "placed_ranks"]

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "trioserve.commands.ray_place")
LEAVE_SECONDS_MAX = 10.0  # in which ranks and their room are given back; then the process is killed, and Ray does it
REMARK_SECONDS_MAX = 1.0
REMARK_BYTES_MAX = 2000  # of what Ray says as its process ends
RECEIVE_BYTES = 65536


class RanksWanted(msgspec.Struct, frozen=True, kw_only=True):
    """The first line to the process. model, revision: which each rank's node finds by itself. cpus, gpus: of one rank.
    address: of the cluster, as ray.init takes it; None: what RAY_ADDRESS says, or this machine's."""

    count: int
    model: str
    revision: str | None
    cpus: int
    gpus: int
    address: str | None


class RankDoor(msgspec.Struct, frozen=True):
    """The second line: where the ranks are to come, and what they have to know there."""

    host: str
    port: int
    key: str = ""

    def __repr__(self) -> str:
        return f"RankDoor({self.host}:{self.port})"  # the key is for no log


class RankNode(msgspec.Struct, frozen=True):
    """Where Ray has placed a rank. id: the node's, which may share its address with others. port: a free one there."""

    id: str
    address: str
    port: int


class RanksTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line from the process, one of these: what it waits for, in words; where the ranks are, in their order; why
    they cannot be, or are no more."""

    waits: str | None = None
    nodes: tuple[RankNode, ...] = ()
    failure: str | None = None


@uninterrupted
class PlacedRanks:
    """nodes: of each rank, in their order."""

    def __init__(self, process: trio.Process) -> None:
        self.nodes: tuple[RankNode, ...] = ()
        self._process = process
        self._failure: str | None = None
        self._have_come = False
        self._is_placed, self._has_failed = trio.Event(), trio.Event()
        self._remark = bytearray()
        self._has_said_all = trio.Event()

    def count_beside(self, rank: int) -> int:
        """Ranks on the node of this one, itself among them."""
        return sum(node.id == self.nodes[rank].id for node in self.nodes)

    async def come(self, *, on_wait: Callable[[list[int]], None]) -> dict[int, socket.socket]:
        """Connections of all ranks, the caller's to close. on_wait: see wait_for_ranks. Raises StartupError with Ray's
        reason if one of them dies before."""
        host = _address_towards(self.nodes[0].address)
        door = RankDoor(host, free_port(host), secrets.token_hex(32))
        found: dict[int, socket.socket] = {}

        is_open = trio.Event()

        def note(awaited: list[int]) -> None:
            is_open.set()
            on_wait(awaited)

        async def tell() -> None:
            await is_open.wait()  # else a rank might come too early, and again only a second later
            await self._say(door)

        async def wait() -> None:
            ranks = range(len(self.nodes))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tell)
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

    async def _say(self, message: RanksWanted | RankDoor) -> None:
        assert self._process.stdin is not None
        with suppress(trio.BrokenResourceError):  # it has ended, and whoever reads says why
            await self._process.stdin.send_all(msgspec.json.encode(message) + b"\n")

    async def _read(self) -> None:
        """What the process tells, until it ends."""
        assert self._process.stdout is not None
        held = bytearray()
        async for data in self._process.stdout:
            *lines, rest = (held + data).split(b"\n")
            held = bytearray(rest)
            for line in lines:
                self._note(bytes(line))
        with trio.move_on_after(REMARK_SECONDS_MAX):
            await self._has_said_all.wait()
        said = self._remark.decode(errors="replace").strip().rpartition("\n")[2]
        self._fail(f"the process that has Ray place ranks has ended: {said}")

    async def _keep_remark(self) -> None:
        assert self._process.stderr is not None
        async for data in self._process.stderr:
            self._remark[:] = (self._remark + data)[-REMARK_BYTES_MAX:]
        self._has_said_all.set()

    def _note(self, line: bytes) -> None:
        try:
            told = msgspec.json.decode(line, type=RanksTold)
        except msgspec.DecodeError as error:
            self._fail(f"what the process that has Ray place ranks says cannot be read: {error}")
            return
        if told.failure is not None:
            self._fail(told.failure)
        elif told.waits is not None:
            logger.info("%s", told.waits)
        else:
            self.nodes = told.nodes
            for rank, node in enumerate(self.nodes):
                logger.info("Ray has placed a rank rank=%d node=%s address=%s", rank, node.id, node.address)
            self._is_placed.set()

    def _fail(self, why: str) -> None:
        """The first time counts: what comes later may come of it."""
        if self._failure is None:
            self._failure = why
            self._has_failed.set()
            if self._have_come:  # otherwise somebody waits, and raises it
                logger.warning("of ranks that Ray has placed: %s", why)


@uninterrupted_context
async def placed_ranks(wanted: RanksWanted, *, command: Sequence[str] | None = None) -> AsyncIterator[PlacedRanks]:
    """Ranks, each in its place on a node, that are still to come. It waits until Ray has room for them, however long
    that takes. Leaving ends them and gives their room back, also when cancelled, within LEAVE_SECONDS_MAX.

    command: what speaks with Ray, for tests. Raises StartupError if Ray cannot be asked, or a rank cannot be started.
    """
    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    command or COMMAND,
                    stdin=subprocess.PIPE,  # it ends when this is closed, by whatever ends this process
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    check=False,
                    deliver_cancel=_leave,
                    start_new_session=True,  # Ctrl-C in a terminal is for the server
                )
            )
            placed = PlacedRanks(process)
            nursery.start_soon(placed._read)
            nursery.start_soon(placed._keep_remark)
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
    """That of this machine by which a node reaches it. Raises StartupError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of datagrams, which sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StartupError(f"this machine does not reach the node {node} of Ray, where a rank is: {error}") from None
