"""A network with explicit messages: they stay on connections until they are delivered, lost or repeated.

A connection keeps the order of the messages of each direction. A dead connection delivers nothing, and neither end
knows: an end that waits for a message gives up at a moment that it has set. Messages to a stopped host wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

__all__ = ["Connection", "End", "Network", "Timers"]


class End(Protocol):
    """One end of a connection. It is not called after the connection was closed or has broken."""

    def take(self, connection: Connection, message: msgspec.Struct) -> None: ...

    def broke(self, connection: Connection, why: str) -> None: ...


class Connection:
    """A connection between two parties.

    Args:
        ends: the two ends, by the names of their parties, which differ.

    Attributes:
        ways: messages of each direction, by the party that gets them.
        patience: moment at which an end gives up, by its party.
        is_open: whether no party has left.
        is_dead: whether its messages are lost without notice.
    """

    def __init__(self, ends: dict[str, End]) -> None:
        self.ends = ends
        self.ways: dict[str, deque[msgspec.Struct]] = {party: deque() for party in ends}
        self.patience: dict[str, float] = {}
        self.is_open = True
        self.is_dead = False

    def send(self, party: str, message: msgspec.Struct) -> None:
        """Send a message to the other party. Over a closed or dead connection it is lost.

        Args:
            party: the sender.
            message: the message.
        """
        if self.is_open and not self.is_dead:
            self.ways[self.other(party)].append(message)

    def other(self, party: str) -> str:
        return next(name for name in self.ends if name != party)


class Network:
    """All connections.

    Args:
        runs: returns whether a party can take a message now.
        exists: returns whether a party can take a message now or later.

    Attributes:
        broken_count: how many connections have broken.
    """

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
        """Directions over which a message could arrive.

        Returns:
            Pairs of the connection and the receiving party.
        """
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
        """Close a connection. The other party sees it after the messages sent before, unless the connection is dead.

        Args:
            connection: the connection.
            party: the party that leaves.
        """
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
        """Break a connection. Parties that have not left see it, and a stopped party sees it when it continues.

        Args:
            connection: the connection.
            why: the reason.
        """
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
        """End a connection on which a party has waited for too long.

        Args:
            connection: the connection.
            party: the party that gives up.
        """
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
    """Calls of one party at given moments. The calls of a stopped party wait for it."""

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
        """Do the first call that is due.

        Args:
            now: the current time.

        Returns:
            False if none was due.
        """
        if not self._due or self._due[0][0] > now:
            return False
        self._due.pop(0)[2]()
        return True
