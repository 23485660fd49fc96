"""How many connections a listener keeps, and which one ends for a new one when there are too many.

A connection that is of no use at the moment (idle, silent, with half a request) ends first, the oldest one of the
address that has most. Connections that have shown a key have places that strangers cannot take. So whoever opens
connections and says nothing keeps nobody out.
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

__all__ = ["Place", "Places", "remote_address"]

logger = logging.getLogger(__name__)

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
# What accept(2) reports of the connection that it would have returned; the next one may be well.
_MISHAPS = frozenset(
    {errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH}
)
RETRY_SECONDS = 0.1  # a shortage ends when a connection does
ENDED_SHARE = 64  # looking for who may end costs a look at everybody, so one in 64 ends at a time
WARNING_SECONDS = 10.0  # between two log lines about the same shortage


def _in_use() -> float | None:
    return None


def _nothing() -> None:
    pass


class Place:
    """One connection's place.

    Args:
        address: of the other side; None where connections are not counted by address, such as of a Unix socket.

    is_known: it has shown a key. may_end_at: from when on it may have to end for another connection, in Trio's seconds;
    None while it is in use. end: ends it, without waiting. Both are replaced as the connection's state changes.
    """

    __slots__ = ("address", "end", "is_ending", "is_known", "may_end_at")

    def __init__(self, address: str | None) -> None:
        self.address = address
        self.is_known = False
        self.is_ending = False
        self.may_end_at: Callable[[], float | None] = _in_use
        self.end: Callable[[], None] = _nothing


class Places:
    """The places of one server, for all of its listeners.

    Args:
        places_max: connections at a time.
        strangers_max: of those, connections that have shown no key. Equal to places_max where nobody has a key.
        per_address_max: of strangers_max, connections from one address.
        on_crowded: hears of each connection that ends for another one.
        on_shortage: hears of each accept that failed for want of files or memory.
    """

    def __init__(
        self,
        *,
        places_max: int,
        strangers_max: int,
        per_address_max: int,
        on_crowded: Callable[[], None] = _nothing,
        on_shortage: Callable[[], None] = _nothing,
    ) -> None:
        self._places_max = places_max
        self._strangers_max = min(strangers_max, places_max)
        self._per_address_max = per_address_max
        self._on_crowded = on_crowded
        self._on_shortage = on_shortage
        self._places: dict[Place, None] = {}  # in the order in which they came
        self._known_count = 0
        self._accepting_count = 0
        self._strangers_of: Counter[str] = Counter()  # by address
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
        """The next connection, as soon as there is a place for it. The caller calls `enter` before it waits again.

        Raises:
            OSError: the listener is of no use any more.
        """
        while True:
            await trio.lowlevel.wait_readable(listener.socket)  # nobody has to leave before somebody has come
            while self._is_full():
                self.make_room()
                await self._somebody_left()
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
            self.make_room(however_young=True)
            await self._somebody_left()

    def enter(self, address: str | None) -> Place | None:
        """A place for a connection. An address that has as many as it may gives one of its own up.

        Returns:
            None: the address has as many as it may, and all are in use. The connection has to be closed.
        """
        if address is not None and self._strangers_of[address] >= self._per_address_max:
            own = [place for place in self._places if place.address == address and not place.is_known]
            # A connection that is ending makes room once, however many come before it has left.
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
        """As `enter`, where strangers may end at any time: when all places are taken, another one ends now."""
        if self._is_full():
            self.make_room(however_young=True)
        return self.enter(address)

    def know(self, place: Place) -> None:
        """The connection has shown a key: its place is none of the strangers' any more."""
        if not place.is_known:
            self._forget_stranger(place)
            place.is_known = True
            self._known_count += 1
            self._tell_left()

    def leave(self, place: Place) -> None:
        """The connection has ended."""
        del self._places[place]
        if place.is_known:
            self._known_count -= 1
        else:
            self._forget_stranger(place)
        self._tell_left()

    def make_room(self, *, however_young: bool = False) -> None:
        """End some of the connections that are of least use, if there are any. Never waits.

        Args:
            however_young: also those that are of no use for a moment only.
        """
        strangers = [place for place in self._places if not place.is_known]
        until = math.inf if however_young else trio.current_time()
        at_a_time = max(1, self._places_max // ENDED_SHARE)
        if not self._end_of(strangers, at_a_time, until) and len(strangers) < self._strangers_max:
            # The known have taken more than what is kept for them.
            self._end_of([place for place in self._places if place.is_known], at_a_time, until)

    def _end_of(self, places: list[Place], count: int, until: float) -> int:
        """End up to `count` of these that may end by `until`; returns how many."""
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

    async def _somebody_left(self) -> None:
        with trio.move_on_after(RETRY_SECONDS):
            await self._left.wait()

    def _tell_left(self) -> None:
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
                "connection refused: its address has as many as it may, all in use address=%s max=%d",
                address,
                self._per_address_max,
            )


def remote_address(stream: trio.SocketStream) -> str | None:
    """The host at the other end of a connection; None for a Unix socket, or when the other end has gone already.

    An IPv6 address stands for its /64, which is what one customer or one machine usually has.
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
