"""Times of the next events of endpoints and of requests that wait in a queue.

The cost of finding the earliest event does not depend on the number of endpoints.
"""

from __future__ import annotations

import heapq
import math

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.ticket import Ticket, TicketState

__all__ = ["SPARE_DEADLINES_MAX", "Moments", "QueueDeadlines"]


class Moments:
    """At most one event time for each endpoint. Times are seconds of the router's clock.

    Attributes:
        at: the event time of each endpoint that has an event.
    """

    def __init__(self) -> None:
        self.at: dict[EndpointId, float] = {}
        self._entries: list[tuple[float, EndpointId]] = []  # Outdated entries stay in this heap, and readers skip them.

    def set(self, id: EndpointId, at: float) -> None:
        """Set the event time of an endpoint, replacing the previous one.

        Args:
            id: name of the endpoint.
            at: time in seconds. math.inf: never.
        """
        if at == math.inf:
            self.clear(id)
        elif self.at.get(id) != at:
            self.at[id] = at
            heapq.heappush(self._entries, (at, id))
            if len(self._entries) > 2 * len(self.at) + 64:
                self._entries = [(moment, id) for id, moment in self.at.items()]
                heapq.heapify(self._entries)

    def clear(self, id: EndpointId) -> None:
        self.at.pop(id, None)

    def first(self) -> float:
        """Return the earliest event time, or math.inf if there is none."""
        entries = self._entries
        while entries and self.at.get(entries[0][1]) != entries[0][0]:
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
            del self.at[id]
            passed.append(id)
        return passed


SPARE_DEADLINES_MAX = 64


class QueueDeadlines:
    """The queue deadlines of waiting tickets. Entries of tickets that no longer wait are dropped later, in bulk."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Ticket]] = []

    def __len__(self) -> int:
        """Return the number of entries, including entries of tickets that no longer wait."""
        return len(self._entries)

    def add(self, ticket: Ticket, *, live_count: int) -> None:
        """Add the deadline of a ticket that begins to wait, for the first time or again.

        Args:
            ticket: the ticket.
            live_count: number of tickets that have not ended.
        """
        heapq.heappush(self._entries, (ticket.queue_deadline, ticket.index, ticket))
        if len(self._entries) > 2 * live_count + SPARE_DEADLINES_MAX:
            # Drop the tickets that have left. Otherwise they would stay in memory until their deadline.
            self._entries = [entry for entry in self._entries if entry[2].state is TicketState.WAITING]
            heapq.heapify(self._entries)

    def first(self) -> float | None:
        """Return the earliest deadline, or None if no ticket waits."""
        while self._entries and self._entries[0][2].state is not TicketState.WAITING:
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None

    def pop_passed(self, now: float) -> Ticket | None:
        """Remove and return one ticket whose deadline has passed, or return None. Call this until it returns None.

        Args:
            now: time in seconds.
        """
        while self._entries and self._entries[0][0] <= now:
            ticket = heapq.heappop(self._entries)[2]
            if ticket.state is TicketState.WAITING and ticket.queue_deadline <= now:
                return ticket
        return None
