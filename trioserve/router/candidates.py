"""Candidates: the endpoints that a policy chooses from. The router finds them without looking at every endpoint."""

from __future__ import annotations

import abc
import bisect
import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, overload

import msgspec

from trioserve.contracts.endpoint import EndpointId

__all__ = ["Candidate", "Candidates", "ListedCandidates", "Ring", "Rng", "looked_at"]


class Rng(Protocol):
    """The only source of randomness of a policy, so that a run can be repeated from its seed. `random.Random`
    implements this protocol.
    """

    def randrange(self, stop: int, /) -> int:
        """Return a random integer from 0 to `stop` - 1.

        Args:
            stop: upper bound, not included.
        """


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint as a policy sees it.

    Attributes:
        id: name of the endpoint.
        load: work at the endpoint, relative to its limit: 0 is idle, 1 is at the limit. Includes the work of other
            routers if the endpoint reports it.
        has_room: True if the endpoint has a free slot for the request.
        others: the amount of `load` that other routers cause.
    """

    id: EndpointId
    load: float
    has_room: bool
    others: float = 0.0


class Candidates(Sequence[Candidate]):
    """All healthy endpoints that serve the request's model, in the order in which they were added.

    Iterating over the sequence looks at every endpoint. The other methods look at a few endpoints, and return only
    endpoints that have a free slot for the request.
    """

    average_load: float
    """Average load of all candidates, including candidates without a free slot."""

    others_share: float
    """Share of the work at all candidates that other routers cause, according to the endpoints' reports. It is 0 for a
    single router, and 3/4 for one of four equal routers.
    """

    @abc.abstractmethod
    def sample(self, count: int) -> list[Candidate]:
        """Draw candidates at random.

        Args:
            count: number of candidates. Fewer candidates are returned if fewer exist.

        Returns:
            The drawn candidates. A later call with a smaller `count` returns the first of these candidates. A later
            call with a larger `count` returns these candidates and further candidates.
        """

    @abc.abstractmethod
    def named(self, ids: Iterable[EndpointId]) -> list[Candidate]:
        """Return the candidates that have these ids and a free slot.

        Args:
            ids: endpoint ids. Unknown ids are ignored.
        """

    @abc.abstractmethod
    def around(self, key: str) -> Iterator[Candidate]:
        """Yield candidates that have a free slot, in an order that depends only on the key and the endpoint ids.

        The order is the same on every router and after a restart. Adding or removing an endpoint does not change the
        order of the other endpoints. The iterator may stop early after many endpoints without a free slot.

        Args:
            key: text to place on the hash ring, for example a session.

        Cost:
            O(log endpoints) for each candidate.
        """

    @abc.abstractmethod
    def next_after(self, id: EndpointId | None) -> Candidate:
        """Return the next candidate that has a free slot, in the order of addition. After the last candidate comes the
        first.

        Args:
            id: the endpoint that was chosen before. If None, the search starts with the first candidate.

        Raises:
            LookupError: no candidate has a free slot.
        """


class ListedCandidates(Candidates):
    """Candidates from a plain list, for tests and for policies that another policy calls.

    Args:
        listed: the candidates, in the order of addition.
        rng: source of randomness.
    """

    def __init__(self, listed: Sequence[Candidate], rng: Rng) -> None:
        self._listed = listed
        self._open = [candidate for candidate in listed if candidate.has_room]
        self._rng = rng
        load = sum(candidate.load for candidate in listed)
        self.average_load = load / len(listed) if listed else 0.0
        self.others_share = sum(candidate.others for candidate in listed) / load if load else 0.0
        self._drawn: list[Candidate] = []

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._listed[index]

    def __len__(self) -> int:
        return len(self._listed)

    def sample(self, count: int) -> list[Candidate]:
        if count >= len(self._open):
            return list(self._open)
        while len(self._drawn) < count:
            left = [candidate for candidate in self._open if candidate not in self._drawn]
            self._drawn.append(left[self._rng.randrange(len(left))])
        return self._drawn[:count]

    def named(self, ids: Iterable[EndpointId]) -> list[Candidate]:
        by_id = {candidate.id: candidate for candidate in self._open}
        return [by_id[id] for id in ids if id in by_id]

    def around(self, key: str) -> Iterator[Candidate]:
        by_id = {candidate.id: candidate for candidate in self._open}
        ring = Ring()
        for id in by_id:
            ring.add(id)
        return (by_id[id] for id in ring.around(key))

    def next_after(self, id: EndpointId | None) -> Candidate:
        ids = [candidate.id for candidate in self._listed]
        begin = ids.index(id) + 1 if id in ids else 0
        for candidate in (*self._listed[begin:], *self._listed[:begin]):
            if candidate.has_room:
                return candidate
        raise LookupError("no candidate has room")


def looked_at(candidates: Sequence[Candidate], rng: Rng) -> Candidates:
    """Wrap the candidates so that they have the methods of `Candidates`.

    Args:
        candidates: the router's `Candidates`, returned unchanged, or a plain sequence.
        rng: source of randomness for a plain sequence.
    """
    return candidates if isinstance(candidates, Candidates) else ListedCandidates(candidates, rng)


PROBES = 21
CIRCLE = 1 << 64
PROBES_PER_DIGEST = 8  # One digest has 64 bytes, which make eight probes of 8 bytes.


class Ring:
    """Hash ring of endpoint ids. For each key, the ring gives an order of the endpoints.

    The method is multi-probe consistent hashing (Appleton and O'Reilly, 2015). An endpoint is one point on the ring,
    and a key has PROBES points, the probes. The endpoints are ordered by their distance from the nearest preceding
    probe. So the order of two endpoints depends only on their ids and the key, and is the same on every router. Adding
    or removing an endpoint does not change the order of the other endpoints. Rendezvous hashing has the same property,
    but would have to look at all endpoints. With 21 probes, the busiest of many endpoints has about 1.05 times its
    share of the keys.

    Cost:
        `add` and `remove` move the list of points: O(endpoints) of copied memory, a few microseconds for ten thousand.
    """

    def __init__(self) -> None:
        self._points: list[int] = []
        self._at: dict[int, EndpointId] = {}
        self._point_of: dict[EndpointId, int] = {}

    def __contains__(self, id: EndpointId) -> bool:
        return id in self._point_of

    def add(self, id: EndpointId) -> None:
        """Add an endpoint. Does nothing if the endpoint is on the ring already.

        Args:
            id: name of the endpoint.
        """
        if id in self._point_of:
            return
        point = int.from_bytes(_digest(f"endpoint {id}", 8), "big")
        while point in self._at:
            # Another endpoint has the same hash, so this endpoint gets the next free point.
            point = (point + 1) % CIRCLE
        self._at[point] = id
        self._point_of[id] = point
        bisect.insort(self._points, point)

    def remove(self, id: EndpointId) -> None:
        point = self._point_of.pop(id)
        del self._at[point]
        del self._points[bisect.bisect_left(self._points, point)]

    def around(self, key: str) -> Iterator[EndpointId]:
        """Yield all endpoints, the nearest to the key first. The ring must not change during the iteration.

        Args:
            key: text that is hashed to the probes.
        """
        points, count = self._points, len(self._points)
        if not count:
            return
        nearest: list[tuple[int, int, int]] = []  # Each entry has the distance, the probe and the index of the point.
        for probe in _probes(key):
            index = bisect.bisect_left(points, probe) % count
            nearest.append(((points[index] - probe) % CIRCLE, probe, index))
        heapq.heapify(nearest)
        seen: set[int] = set()
        while nearest and len(seen) < count:
            _distance, probe, index = nearest[0]
            if index not in seen:
                seen.add(index)
                yield self._at[points[index]]
            following = (index + 1) % count
            distance = (points[following] - probe) % CIRCLE
            if distance > _distance:
                heapq.heapreplace(nearest, (distance, probe, following))
            else:
                heapq.heappop(nearest)  # The probe has passed the whole ring.


def _probes(key: str) -> list[int]:
    probes: list[int] = []
    for number in range(-(-PROBES // PROBES_PER_DIGEST)):
        digest = _digest(f"key {number} {key}", 64)
        probes += (int.from_bytes(digest[at : at + 8], "big") for at in range(0, 64, 8))
    return probes[:PROBES]


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
