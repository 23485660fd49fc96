"""Requests that had an endpoint and wait for another one: which of them is next. Room at endpoints is not asked here.

Requests that failed at the same endpoints may all go to the same others. So they share a line, and only the first of a
line is tried: when an endpoint dies under hundreds of requests, one look tells that none of them has room. Requests on
trial have lines of their own, and are not tried.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.ticket import Ticket

__all__ = ["ContinuedQueue"]

Line = tuple[bool, int, EndpointId | None, frozenset[EndpointId], tuple[tuple[EndpointId, int], ...]]


class ContinuedQueue:
    """One model's. Joining and leaving cost the same however many there are."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self._lines: dict[Line, OrderedDict[int, Ticket]] = {}
        self._line_of: dict[int, Line] = {}

    def __len__(self) -> int:
        return len(self._line_of)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket.index in self._line_of

    def __iter__(self) -> Iterator[Ticket]:
        """Everybody, in no order."""
        for tickets in self._lines.values():
            yield from tickets.values()

    def add(self, ticket: Ticket) -> None:
        line = (
            ticket.is_on_trial,
            ticket.request.priority,
            ticket.prefilled_by,
            ticket.failed_by,
            tuple(ticket.tried.items()),
        )
        self._line_of[ticket.index] = line
        tickets = self._lines.setdefault(line, OrderedDict())
        is_early = bool(tickets) and next(reversed(tickets.values())).again_index > ticket.again_index
        tickets[ticket.index] = ticket
        if is_early:  # it has waited in another queue until now
            ordered = sorted(tickets.values(), key=lambda ticket: ticket.again_index)
            self._lines[line] = OrderedDict((ticket.index, ticket) for ticket in ordered)
        self.prompt_tokens += ticket.request.prompt_tokens

    def remove(self, ticket: Ticket) -> None:
        line = self._line_of.pop(ticket.index)
        tickets = self._lines[line]
        del tickets[ticket.index]
        if not tickets:
            del self._lines[line]
        self.prompt_tokens -= ticket.request.prompt_tokens

    def heads(self) -> list[Ticket]:
        """The first of each line, in no order. Nobody who is on trial."""
        return [next(iter(tickets.values())) for line, tickets in self._lines.items() if not line[0]]

    def lines(self) -> list[list[Ticket]]:
        """The requests of each line, in their order."""
        return [list(tickets.values()) for tickets in self._lines.values()]

    def on_trial(self) -> list[Ticket]:
        """Who is on trial, in the order in which that began."""
        found = [ticket for line, tickets in self._lines.items() if line[0] for ticket in tickets.values()]
        return sorted(found, key=lambda ticket: ticket.again_index)
