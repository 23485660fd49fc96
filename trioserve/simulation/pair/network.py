"""A network that is explicit: messages lie on connections until somebody delivers them, loses them or repeats them.

A connection keeps the order of what is sent one way. One that is dead delivers nothing, and neither end knows; an end
that waits for something has a moment at which it gives up. What goes to a host that is stopped waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

__all__ = ["Connection", "End", "Network", "Timers"]


class End(Protocol):
    """Who has one end of a connection. Nothing is called after it was closed or has broken."""

    def take(self, connection: Connection, message: msgspec.Struct) -> None: ...

    def broke(self, connection: Connection, why: str) -> None: ...


class Connection:
    """ends: by the names of both parties, which differ. patience: when an end gives up, by its party."""

    def __init__(self, ends: dict[str, End]) -> None:
        self.ends = ends
        self.ways: dict[str, deque[msgspec.Struct]] = {party: deque() for party in ends}
        self.patience: dict[str, float] = {}
        self.is_open = True
        self.is_dead = False

    def send(self, party: str, message: msgspec.Struct) -> None:
        """From this party to the other one; over one that is closed it is lost."""
        if self.is_open and not self.is_dead:
            self.ways[self.other(party)].append(message)

    def other(self, party: str) -> str:
        return next(name for name in self.ends if name != party)


class Network:
    """runs: whether a party can take something now; exists: whether it could later. broken_count: of connections."""

    def __init__(self, runs: Callable[[str], bool], exists: Callable[[str], bool]) -> None:
        self._runs = runs
        self._exists = exists
        self.connections: list[Connection] = []
        self.broken_count = 0

    def open(self, ends: dict[str, End]) -> Connection:
        connection = Connection(ends)
        self.connections.append(connection)
        return connection

    def deliverable(self) -> list[tuple[Connection, str]]:
        """Ways over which a message could arrive, and to whom."""
        return [
            (connection, party)
            for connection in self.connections
            for party, way in connection.ways.items()
            if way and not connection.is_dead and self._runs(party)
        ]

    def deliver(self, connection: Connection, party: str) -> None:
        message = connection.ways[party].popleft()
        if isinstance(message, Closed):
            self._forget(connection)
            connection.ends[party].broke(connection, "the other side has left")
        else:
            connection.ends[party].take(connection, message)

    def close(self, connection: Connection, party: str) -> None:
        """This party leaves; the other one sees it when it has taken what was sent before, unless it is dead."""
        if not connection.is_open:
            return
        connection.is_open = False
        other = connection.other(party)
        connection.ways[party].clear()
        connection.patience.clear()
        if connection.is_dead or not self._exists(other):
            self._forget(connection)
        else:
            connection.ways[other].append(Closed())

    def cut(self, connection: Connection, why: str) -> None:
        """Both ends see it, unless they have left; one that is stopped, when it goes on."""
        was_open, connection.is_open = connection.is_open, False
        self._forget(connection)
        if not was_open:
            return
        self.broken_count += 1
        for party, end in connection.ends.items():
            if self._runs(party):
                end.broke(connection, why)
            elif self._exists(party):
                connection.ways[party].append(Closed())
                self.connections.append(connection)

    def give_up(self, connection: Connection, party: str) -> None:
        """This party has waited for too long."""
        self.broken_count += 1
        self.close(connection, party)
        connection.ends[party].broke(connection, "nothing came for too long")

    def impatient(self, now: float) -> tuple[Connection, str] | None:
        due = [
            (moment, index, party)
            for index, connection in enumerate(self.connections)
            for party, moment in connection.patience.items()
            if moment <= now and self._runs(party)
        ]
        if not due:
            return None
        _moment, index, party = min(due)
        return self.connections[index], party

    def next_impatience(self) -> float | None:
        moments = [
            moment
            for connection in self.connections
            for party, moment in connection.patience.items()
            if self._runs(party)
        ]
        return min(moments, default=None)

    def _forget(self, connection: Connection) -> None:
        connection.patience.clear()
        for way in connection.ways.values():
            way.clear()
        if connection in self.connections:
            self.connections.remove(connection)


class Closed(msgspec.Struct, frozen=True):
    """The other end has left."""


class Timers:
    """What a party does at a moment of its own; of one that is stopped it waits."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], Any]]] = []
        self._count = 0

    def at(self, moment: float, call: Callable[[], Any]) -> None:
        self._count += 1
        self._due.append((moment, self._count, call))
        self._due.sort(key=lambda entry: entry[:2])

    @property
    def next_moment(self) -> float | None:
        return self._due[0][0] if self._due else None

    def ring(self, now: float) -> bool:
        """Do the first thing that is due. Returns whether there was one."""
        if not self._due or self._due[0][0] > now:
            return False
        self._due.pop(0)[2]()
        return True
