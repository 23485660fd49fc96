"""The time of the next event at each endpoint. The cost of finding the earliest event does not depend on the number of
endpoints.
"""

from __future__ import annotations

import heapq
import math

from trioserve.contracts.endpoint import EndpointId

__all__ = ["Moments"]


class Moments:
    """At most one event time for each endpoint. Times are seconds of the router's clock."""

    def __init__(self) -> None:
        self._at: dict[EndpointId, float] = {}
        self._entries: list[tuple[float, EndpointId]] = []  # outdated entries are skipped

    def set(self, id: EndpointId, at: float) -> None:
        """Set the event time of an endpoint, replacing the previous one.

        Args:
            id: name of the endpoint.
            at: time in seconds. math.inf: never.
        """
        if at == math.inf:
            self.clear(id)
        elif self._at.get(id) != at:
            self._at[id] = at
            heapq.heappush(self._entries, (at, id))
            if len(self._entries) > 2 * len(self._at) + 64:
                self._entries = [(moment, id) for id, moment in self._at.items()]
                heapq.heapify(self._entries)

    def clear(self, id: EndpointId) -> None:
        self._at.pop(id, None)

    def first(self) -> float:
        """Return the earliest event time, or math.inf if there is none."""
        entries = self._entries
        while entries and self._at.get(entries[0][1]) != entries[0][0]:
            heapq.heappop(entries)
        return entries[0][0] if entries else math.inf

    def pop_passed(self, now: float) -> list[EndpointId]:
        """Remove and return the endpoints whose event time has passed.

        Args:
            now: time in seconds.
        """
        passed = []
        while self.first() <= now:
            id = heapq.heappop(self._entries)[1]
            del self._at[id]
            passed.append(id)
        return passed
