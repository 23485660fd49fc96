"""Limits the number of open connections. If too many connections are open, it chooses a connection to end for a new
connection. A `Place` represents one admitted connection.

Connections without a running request (idle, silent, or with an incomplete request) end first. Among these, the oldest
connection of the address with the most connections ends. Some places are reserved for connections that have shown an
API key. So a client that only opens connections cannot keep other clients out.
"""

from __future__ import annotations

import errno
import heapq
import logging
import math
import socket
from collections import Counter
from collections.abc import Callable

import trio

__all__ = ["Place", "ConnectionLimit", "remote_address"]

logger = logging.getLogger(__name__)

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
# accept(2) reports these errors if the connection that it would have returned has failed. The next connection may work.
_MISHAPS = frozenset(
    {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH}
)
RETRY_SECONDS = 0.1  # wait after a shortage of files or memory; another connection may end in this time
# One in 64 connections ends at a time. A search reads the state of all connections, so fewer searches are better.
ENDED_SHARE = 64
WARNING_SECONDS = 10.0  # minimum time between two log lines about the same shortage


def _in_use() -> float | None:
    return None


def _nothing() -> None:
    pass


class Place:
    """One admitted connection, which counts towards the limit.

    Args:
        address: Address of the other end, or None if the connection is not counted by address, for example on a Unix
            socket.

    Attributes:
        is_known: True once the connection has shown an API key.
        is_ending: True once `end` was called.
        may_end_at: Returns the time from which the connection may be ended for another connection, or None while it is
            in use. The owner of the connection sets this function.
        end: Ends the connection without waiting. The owner of the connection sets this function.
    """

    __slots__ = ("address", "end", "is_ending", "is_known", "may_end_at")

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.is_known = False
        self.is_ending = False
        self.may_end_at: Callable[[], float | None] = _in_use
        self.end: Callable[[], None] = _nothing


class ConnectionLimit:
    """The limit on the connections of one server, for all of its listeners together.

    Args:
        connections_max: Maximum number of open connections.
        strangers_max: Maximum number of connections that have shown no API key. Equal to connections_max if the server
            has no keys.
        per_address_max: Maximum number of connections without a key from one address.
        on_crowded: Called for each connection that is ended for another connection.
        on_shortage: Called for each accept that failed for lack of files or memory.
    """

    def __init__(
        self,
        *,
        connections_max: int,
        strangers_max: int,
        per_address_max: int,
        on_crowded: Callable[[], None] = _nothing,
        on_shortage: Callable[[], None] = _nothing,
    ) -> None:
        self._places_max = connections_max
        self._strangers_max = min(strangers_max, connections_max)
        self._per_address_max = per_address_max
        self._on_crowded = on_crowded
        self._on_shortage = on_shortage
        self._places: dict[Place, None] = {}  # places in the order in which the connections arrived
        self._known_count = 0
        self._accepting_count = 0
        self._strangers_of: Counter[str] = Counter()  # number of connections without a key, by address
        self._left = trio.Event()
        self._shortage_logged_at = -math.inf
        self._address_logged_at = -math.inf

    @property
    def count(self) -> int:
        return len(self._places)

    @property
    def known_count(self) -> int:
        return self._known_count

    async def accept(self, listener: trio.SocketListener) -> trio.SocketStream:
        """Wait for the next connection and for a free place. The caller must call `enter` before its next checkpoint.

        Args:
            listener: Listener that accepts the connection.

        Raises:
            OSError: the listener is unusable.
        """
        while True:
            # Wait until a connection arrives, so that no connection ends before its place is needed.
            await trio.lowlevel.wait_readable(listener.socket)
            while self._is_full():
                self.make_room()
                await self._wait_for_leave()
            self._accepting_count += 1
            try:
                return await listener.accept()
            except OSError as error:
                if error.errno in _MISHAPS:
                    logger.debug("client gone before accept error=%s", errno.errorcode[error.errno])
                    continue
                if error.errno not in _SHORTAGES:
                    raise
                self._note_shortage(error.errno)
            finally:
                self._accepting_count -= 1
            self.make_room(including_young=True)
            await self._wait_for_leave()

    def enter(self, address: str | None) -> Place | None:
        """Give a place to a connection. If the address is at its limit, another connection of the same address ends
        first.

        Args:
            address: Address of the other end.

        Returns:
            The place, or None if the address is at its limit and all of its connections are in use. Then the caller
            must close the connection.
        """
        if address is not None and self._strangers_of[address] >= self._per_address_max:
            own = [place for place in self._places if place.address == address and not place.is_known]
            # A connection that is ending frees its place for only one new connection.
            is_full = sum(not place.is_ending for place in own) >= self._per_address_max
            if is_full and not self._end_of(own, 1, math.inf):
                self._note_address(address)
                return None
        place = Place(address)
        self._places[place] = None
        if address is not None:
            self._strangers_of[address] += 1
        return place

    def crowd_in(self, address: str | None) -> Place | None:
        """Give a place to a connection, as `enter` does. If all places are taken, another connection ends at once.

        Use this only in servers where every connection without an API key may be ended at any time.

        Args:
            address: Address of the other end.
        """
        if self._is_full():
            self.make_room(including_young=True)
        return self.enter(address)

    def know(self, place: Place) -> None:
        """Record that a connection has shown an API key. It no longer counts as a connection without a key.

        Args:
            place: The connection's place.
        """
        if not place.is_known:
            self._forget_stranger(place)
            place.is_known = True
            self._known_count += 1
            self._notify_left()

    def leave(self, place: Place) -> None:
        """Free the place of a connection that has ended.

        Args:
            place: The connection's place.
        """
        del self._places[place]
        if place.is_known:
            self._known_count -= 1
        else:
            self._forget_stranger(place)
        self._notify_left()

    def make_room(self, *, including_young: bool = False) -> None:
        """End some of the least useful connections. Never waits.

        Args:
            including_young: True to also end connections that became unused only a moment ago.
        """
        strangers = [place for place in self._places if not place.is_known]
        until = math.inf if including_young else trio.current_time()
        at_a_time = max(1, self._places_max // ENDED_SHARE)
        if not self._end_of(strangers, at_a_time, until) and len(strangers) < self._strangers_max:
            # Connections with a key use more places than are reserved for them, so some of them must end.
            self._end_of([place for place in self._places if place.is_known], at_a_time, until)

    def _end_of(self, places: list[Place], count: int, until: float) -> int:
        """End up to `count` of the connections that may be ended at time `until`. Return how many were ended."""
        candidates = []
        for number, place in enumerate(places):
            if not place.is_ending and (since := place.may_end_at()) is not None and since <= until:
                of_address = 0 if place.address is None else self._strangers_of[place.address]
                candidates.append((-of_address, since, number, place))
        ended = heapq.nsmallest(count, candidates)
        for *_, place in ended:
            place.is_ending = True
            self._on_crowded()
            place.end()
        return len(ended)

    def _is_full(self) -> bool:
        strangers = len(self._places) - self._known_count + self._accepting_count
        return strangers >= self._strangers_max or strangers + self._known_count >= self._places_max

    async def _wait_for_leave(self) -> None:
        with trio.move_on_after(RETRY_SECONDS):
            await self._left.wait()

    def _notify_left(self) -> None:
        self._left.set()
        self._left = trio.Event()

    def _forget_stranger(self, place: Place) -> None:
        if place.address is not None:
            self._strangers_of[place.address] -= 1
            if not self._strangers_of[place.address]:
                del self._strangers_of[place.address]

    def _note_shortage(self, number: int) -> None:
        self._on_shortage()
        now = trio.current_time()
        if now - self._shortage_logged_at >= WARNING_SECONDS:
            self._shortage_logged_at = now
            logger.error(
                "accept failed, idle connections end error=%s connections_open=%d", errno.errorcode[number], self.count
            )

    def _note_address(self, address: str) -> None:
        now = trio.current_time()
        if now - self._address_logged_at >= WARNING_SECONDS:
            self._address_logged_at = now
            logger.warning(
                "connection refused: its address is at its limit, all connections in use address=%s max=%d",
                address,
                self._per_address_max,
            )


def remote_address(stream: trio.SocketStream) -> str | None:
    """Return the address of the other end of a connection.

    For IPv6, the /64 network is returned, which usually belongs to one customer or one machine.

    Args:
        stream: The connection.

    Returns:
        The address, or None for a Unix socket or if the other end has already closed the connection.
    """
    if stream.socket.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        host = str(stream.socket.getpeername()[0])
    except OSError:
        return None
    if ":" not in host or host.startswith("::ffff:"):
        return host
    return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8] + bytes(8))
