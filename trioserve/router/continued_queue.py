"""Orders the requests that had an endpoint and wait for another endpoint. Does not know which endpoints have free
slots.

Requests that failed at the same endpoints can go to the same other endpoints. So these requests share a line, and the
router looks for an endpoint only for the first request of each line. If an endpoint with hundreds of requests fails, a
single search shows that no other endpoint has a free slot. Requests on trial have lines of their own, and the router
searches no endpoint for them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.ticket import Ticket

__all__ = ["ContinuedQueue"]

Line = tuple[bool, int, EndpointId | None, frozenset[EndpointId], tuple[tuple[EndpointId, int], ...]]


class ContinuedQueue:
    """The requests of one model that wait for another endpoint.

    Cost:
        `add` and `remove` are O(1), except for a request that waited in another queue before.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self._lines: dict[Line, OrderedDict[int, Ticket]] = {}
        self._line_of: dict[int, Line] = {}

    def __len__(self) -> int:
        return len(self._line_of)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket.index in self._line_of

    def __iter__(self) -> Iterator[Ticket]:
        """Yield all requests, in no order."""
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
        if is_early:  # the ticket waited in another queue before
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
        """Return the first request of each line, in no order, without requests on trial."""
        return [next(iter(tickets.values())) for line, tickets in self._lines.items() if not line[0]]

    def lines(self) -> list[list[Ticket]]:
        """Return the lines. In each line, the requests are in the order in which they are served."""
        return [list(tickets.values()) for tickets in self._lines.values()]

    def on_trial(self) -> list[Ticket]:
        """Return the requests on trial, in the order in which their trials began."""
        found = [ticket for line, tickets in self._lines.items() if line[0] for ticket in tickets.values()]
        return sorted(found, key=lambda ticket: ticket.again_index)
