"""`python -m trioserve.commands.ray_place`: lets Ray run the ranks of one model while standard input is open.

`serve --distributed-executor-backend ray` starts this process. trioserve/ranks/placed.py defines the lines of its input
and output.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol

import msgspec

from trioserve.commands.program_end import EXIT_FAILED
from trioserve.contracts.errors import StartupError
from trioserve.ranks.placed import LEAVE_SECONDS_MAX, RankDoor, RankNode, RanksRequest, RanksUpdate

__all__ = ["RankPlaces", "keep_placed", "main"]

LOOK_SECONDS = 0.2  # maximum time of one call to Ray; afterwards, this process checks whether the server has ended

# Number of failed checks for free resources before a shortage is reported. Even an idle cluster needs some time.
LOOKS_UNREPORTED = 10


class RankPlaces(Protocol):
    """The calls to Ray that place ranks.

    Methods with `seconds_max` return early if the state of the ranks changes. They raise StartupError with Ray's reason
    if a rank has ended.
    """

    def reserve(self) -> None:
        """Request resources for all ranks."""

    def has_room(self, seconds_max: float) -> bool: ...

    def shortage(self) -> str:
        """Describe the resources that the cluster lacks."""

    def start(self) -> None:
        """Start the ranks on the reserved resources."""

    def nodes(self, seconds_max: float) -> Sequence[RankNode] | None:
        """Return the node of each rank, or None if some ranks have not started yet.

        Args:
            seconds_max: time to wait for the ranks.
        """

    def send(self, door: RankDoor) -> None:
        """Send the server's address to all ranks.

        Args:
            door: address and key of the server.
        """

    def watch(self, seconds_max: float) -> None: ...

    def remove(self) -> None:
        """End the ranks and release their resources."""


def keep_placed(
    places: RankPlaces, doors: queue.SimpleQueue[RankDoor | None], tell: Callable[[RanksUpdate], None]
) -> None:
    """Place the ranks, and watch them until `doors` yields None. At the end, always remove them from the cluster.

    Args:
        places: calls to Ray.
        doors: yields the address of the server, and None when the server has ended.
        tell: reports progress or a failure to the server.
    """
    server = _Server(doors)
    try:
        try:
            _keep_placed(places, server, tell)
        except StartupError as error:
            tell(RanksUpdate(failure=str(error)))
            # If the ranks ended before the server, the server would report their end as the cause.
            server.wait_for_end()
    finally:
        places.remove()


def _keep_placed(places: RankPlaces, server: _Server, tell: Callable[[RanksUpdate], None]) -> None:
    places.reserve()
    look_count = 0
    while not places.has_room(LOOK_SECONDS):
        look_count += 1
        if look_count == LOOKS_UNREPORTED:
            tell(RanksUpdate(waits=places.shortage()))
        if server.is_over():
            return
    places.start()
    while (nodes := places.nodes(LOOK_SECONDS)) is None:
        if server.is_over():
            return
    tell(RanksUpdate(nodes=tuple(nodes)))
    if (door := server.wait_for_door()) is None:
        return
    places.send(door)
    while not server.is_over():
        places.watch(LOOK_SECONDS)


class _Server:
    """Receives the messages of the server.

    Args:
        doors: yields the address of the server, and None when the server has ended.
    """

    def __init__(self, doors: queue.SimpleQueue[RankDoor | None]) -> None:
        self._doors = doors
        self._is_over = False

    def is_over(self) -> bool:
        if not self._doors.empty():
            self.wait_for_door()
        return self._is_over

    def wait_for_door(self) -> RankDoor | None:
        """Return the address of the server, or None if the server has ended."""
        door = self._doors.get()
        self._is_over = door is None
        return door

    def wait_for_end(self) -> None:
        while not self._is_over:
            self.wait_for_door()


def main() -> int:
    """Place ranks until standard input ends. Return the exit code, which is EXIT_FAILED if Ray cannot be reached."""
    wanted = msgspec.json.decode(sys.stdin.buffer.readline(), type=RanksRequest)
    doors: queue.SimpleQueue[RankDoor | None] = queue.SimpleQueue()
    threading.Thread(target=_receive_doors, args=(doors,), name="server", daemon=True).start()
    from trioserve.ray_engines import RayPlaces, connected

    lines = sys.stdout.buffer
    try:
        with connected(wanted.address):
            keep_placed(RayPlaces(wanted), doors, lambda report: _write(lines, report))
    except StartupError as error:
        _write(lines, RanksUpdate(failure=str(error)))
        return EXIT_FAILED
    return 0


def _receive_doors(doors: queue.SimpleQueue[RankDoor | None]) -> None:
    for line in sys.stdin.buffer:
        doors.put(msgspec.json.decode(line, type=RankDoor))
    doors.put(None)
    # A call to Ray may hang, so end the process in any case. Ray removes the ranks some time later.
    time.sleep(LEAVE_SECONDS_MAX)
    os._exit(EXIT_FAILED)


def _write(lines: BinaryIO, report: RanksUpdate) -> None:
    try:
        lines.write(msgspec.json.encode(report) + b"\n")
        lines.flush()
    except BrokenPipeError:
        pass  # The server has ended. Another thread notices this at the end of standard input.


if __name__ == "__main__":
    sys.exit(main())
