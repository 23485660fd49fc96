"""A hash ring. It gives an order of the endpoints for each key, which is the same on every router. Finding the first
endpoints of this order does not need a look at every endpoint.

Multi-probe consistent hashing (Appleton and O'Reilly, 2015). An endpoint is one point on a ring, and a key has PROBES
points, the probes. The endpoints are ordered by their distance from the nearest preceding probe. So the order of two
endpoints depends only on their ids and the key. Adding or removing an endpoint does not change the order of the other
endpoints. Rendezvous hashing has the same property, but would have to look at all endpoints. With 21 probes, the
busiest of many endpoints has about 1.05 times its share of the keys.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
from collections.abc import Iterator

from trioserve.contracts.endpoint import EndpointId

__all__ = ["Ring"]

PROBES = 21
CIRCLE = 1 << 64
PROBES_PER_DIGEST = 8  # 64 bytes are eight points


class Ring:
    """Endpoint ids on a hash ring.

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
            point = (point + 1) % CIRCLE  # another endpoint has the same hash
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
        nearest: list[tuple[int, int, int]] = []  # distance, probe, index of the point
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
                heapq.heappop(nearest)  # the probe has passed the whole ring


def _probes(key: str) -> list[int]:
    probes: list[int] = []
    for number in range(-(-PROBES // PROBES_PER_DIGEST)):
        digest = _digest(f"key {number} {key}", 64)
        probes += (int.from_bytes(digest[at : at + 8], "big") for at in range(0, 64, 8))
    return probes[:PROBES]


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
