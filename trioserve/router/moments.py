"""When something comes to pass at which endpoint. Asking for the first costs the same for any number of them."""

from __future__ import annotations

import heapq
import math

from trioserve.contracts.endpoint import EndpointId

__all__ = ["Moments"]


class Moments:
    """One moment for each endpoint, at most. Times are seconds of the router's clock."""

    def __init__(self) -> None:
        self._at: dict[EndpointId, float] = {}
        self._entries: list[tuple[float, EndpointId]] = []  # those that are out of date are skipped

    def set(self, id: EndpointId, at: float) -> None:
        """In the place of its moment before, if there was one. math.inf is never."""
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
        """math.inf for never."""
        entries = self._entries
        while entries and self._at.get(entries[0][1]) != entries[0][0]:
            heapq.heappop(entries)
        return entries[0][0] if entries else math.inf

    def take_passed(self, now: float) -> list[EndpointId]:
        """Whose moment has come by now; each is told once."""
        passed = []
        while self.first() <= now:
            id = heapq.heappop(self._entries)[1]
            del self._at[id]
            passed.append(id)
        return passed
