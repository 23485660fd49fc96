"""When the wait of those in a queue is over. Those who wait no longer are forgotten in time."""

from __future__ import annotations

import heapq

from trioserve.router.ticket import Ticket, TicketState

__all__ = ["SPARE_DEADLINES_MAX", "QueueDeadlines"]

SPARE_DEADLINES_MAX = 64


class QueueDeadlines:
    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Ticket]] = []

    def __len__(self) -> int:
        """How many are remembered, those who wait no longer counted."""
        return len(self._entries)

    def add(self, ticket: Ticket, *, live_count: int) -> None:
        """It waits, from now on or again. live_count: of tickets that have not ended."""
        heapq.heappush(self._entries, (ticket.queue_deadline, ticket.index, ticket))
        if len(self._entries) > 2 * live_count + SPARE_DEADLINES_MAX:
            # Those who left must not be remembered for as long as they might have waited.
            self._entries = [entry for entry in self._entries if entry[2].state is TicketState.WAITING]
            heapq.heapify(self._entries)

    def first(self) -> float | None:
        """When the first wait is over; None if nobody waits."""
        while self._entries and self._entries[0][2].state is not TicketState.WAITING:
            heapq.heappop(self._entries)
        return self._entries[0][0] if self._entries else None

    def take_over(self, now: float) -> Ticket | None:
        """One whose wait is over by now. Ask until there is none."""
        while self._entries and self._entries[0][0] <= now:
            ticket = heapq.heappop(self._entries)[2]
            if ticket.state is TicketState.WAITING and ticket.queue_deadline <= now:
                return ticket
        return None
