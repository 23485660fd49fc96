"""`python -m trioserve.commands.ray_place`: has Ray place the ranks of one model, for as long as its standard input is
open. `serve --distributed-executor-backend ray` starts it so; trioserve/ranks/placed.py has the lines that go in and
come out.
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
from trioserve.ranks.placed import LEAVE_SECONDS_MAX, RankDoor, RankNode, RanksUpdate, RanksWanted

__all__ = ["RankPlaces", "keep_placed", "main"]

LOOK_SECONDS = 0.2  # in a call of Ray's, before it is looked whether the server still wants its ranks

LOOKS_UNTOLD = 10  # for room, which also takes a moment where there is enough


class RankPlaces(Protocol):
    """What is asked of Ray. Each that takes seconds_max returns sooner if there is something to say, and raises
    StartupError with Ray's reason if a rank is gone."""

    def reserve(self) -> None:
        """Ask for room for all ranks."""

    def has_room(self, seconds_max: float) -> bool: ...

    def shortage(self) -> str:
        """What there is no room for, in words."""

    def start(self) -> None:
        """Where there is room."""

    def nodes(self, seconds_max: float) -> Sequence[RankNode] | None:
        """None: not all have been started yet."""

    def send(self, door: RankDoor) -> None:
        """All ranks to their server."""

    def watch(self, seconds_max: float) -> None: ...

    def remove(self) -> None:
        """The ranks, and their room."""


def keep_placed(
    places: RankPlaces, doors: queue.SimpleQueue[RankDoor | None], tell: Callable[[RanksUpdate], None]
) -> None:
    """Until there is None among the doors. Nothing is left in the cluster then, whatever happened."""
    server = _Server(doors)
    try:
        try:
            _keep_placed(places, server, tell)
        except StartupError as error:
            tell(RanksUpdate(failure=str(error)))
            server.wait_for_end()  # who takes the others away before its end seems to be the cause
    finally:
        places.remove()


def _keep_placed(places: RankPlaces, server: _Server, tell: Callable[[RanksUpdate], None]) -> None:
    places.reserve()
    look_count = 0
    while not places.has_room(LOOK_SECONDS):
        look_count += 1
        if look_count == LOOKS_UNTOLD:
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
    """What it has said."""

    def __init__(self, doors: queue.SimpleQueue[RankDoor | None]) -> None:
        self._doors = doors
        self._is_over = False

    def is_over(self) -> bool:
        if not self._doors.empty():
            self.wait_for_door()
        return self._is_over

    def wait_for_door(self) -> RankDoor | None:
        """None: it is over."""
        door = self._doors.get()
        self._is_over = door is None
        return door

    def wait_for_end(self) -> None:
        while not self._is_over:
            self.wait_for_door()


def main() -> int:
    """Until the standard input ends. Returns an exit code if Ray cannot be asked."""
    wanted = msgspec.json.decode(sys.stdin.buffer.readline(), type=RanksWanted)
    doors: queue.SimpleQueue[RankDoor | None] = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(doors,), name="server", daemon=True).start()
    from trioserve.ray_engines import connected
    from trioserve.ray_ranks import RayPlaces

    lines = sys.stdout.buffer
    try:
        with connected(wanted.address):
            keep_placed(RayPlaces(wanted), doors, lambda told: _write(lines, told))
    except StartupError as error:
        _write(lines, RanksUpdate(failure=str(error)))
        return EXIT_FAILED
    return 0


def _hear(doors: queue.SimpleQueue[RankDoor | None]) -> None:
    for line in sys.stdin.buffer:
        doors.put(msgspec.json.decode(line, type=RankDoor))
    doors.put(None)
    # A call of Ray's that hangs is to end, too. What this process has in the cluster goes with it then, later.
    time.sleep(LEAVE_SECONDS_MAX)
    os._exit(EXIT_FAILED)


def _write(lines: BinaryIO, told: RanksUpdate) -> None:
    try:
        lines.write(msgspec.json.encode(told) + b"\n")
        lines.flush()
    except BrokenPipeError:
        pass  # the server is gone, as the standard input says


if __name__ == "__main__":
    sys.exit(main())
