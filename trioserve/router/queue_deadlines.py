"""The times at which requests have waited too long in a queue."""

from __future__ import annotations

import heapq

from trioserve.router.ticket import Ticket, TicketState

__all__ = ["SPARE_DEADLINES_MAX", "QueueDeadlines"]

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
            # Drop tickets that left. Otherwise they would stay in memory until their deadline.
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
