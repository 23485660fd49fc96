"""Streams that leave an endpoint on purpose, so that it can be stopped: who is to go, and who is on its way.

Such a stream gets a lease elsewhere first, and is told only then: until there is room it runs where it is. Only so many
are on their way at a time, since each costs the other endpoint its prompt. What is still there at the deadline, and has
another endpoint for its model, is told to leave without a lease, as if its endpoint had failed it.
"""

from __future__ import annotations

import math

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.queues import Queues
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket, TicketState

__all__ = ["Moving"]


class Moving:
    """total: streams that got a lease elsewhere to move to."""

    def __init__(self, settings: RouterSettings, queues: Queues) -> None:
        self.total = 0
        self._settings = settings
        self._queues = queues
        self._deadlines: dict[EndpointId, float] = {}  # of endpoints that are emptied; math.inf once it has passed
        self._on_the_way: set[int] = set()

    @property
    def has_room(self) -> bool:
        """Whether one more may be on its way."""
        return len(self._on_the_way) < self._settings.moves_at_once_max

    def begin(self, id: EndpointId, deadline: float) -> None:
        """The endpoint is emptied. Those that are there are the caller's to `join`."""
        self._deadlines[id] = deadline

    def is_emptied(self, id: EndpointId) -> bool:
        return id in self._deadlines

    def end(self, id: EndpointId) -> None:
        """It is gone, or back. Who has a lease elsewhere already still goes."""
        if self._deadlines.pop(id, None) is not None:
            for model in self._queues.models.values():
                for ticket in [ticket for ticket in model.moving if ticket.endpoint == id]:
                    self.leave(ticket)

    def join(self, ticket: Ticket) -> None:
        """It waits for room elsewhere, if it is to go and can. To be called whenever that may have become so."""
        if (
            ticket.endpoint in self._deadlines
            and ticket.can_go_on
            and ticket.is_answered
            and ticket.state in (TicketState.LEASED, TicketState.RUNNING_FREE)
            and not ticket.is_moving
            and ticket.next_lease is None
            and ticket.request.pinned is None
        ):
            ticket.is_moving = True
            ticket.stage = None  # whoever goes on does all of the rest
            self._queues.wait_to_move(ticket)

    def leave(self, ticket: Ticket) -> None:
        """It waits for that no longer. Nothing to do when it did not."""
        if ticket.is_moving:
            ticket.is_moving = False
            self._queues.end_wait_to_move(ticket)

    def note_leased(self, ticket: Ticket) -> None:
        """It has a lease elsewhere."""
        self.leave(ticket)
        self._on_the_way.add(ticket.index)
        self.total += 1

    def note_arrived(self, ticket: Ticket) -> None:
        """It goes on there, or not at all any more."""
        self._on_the_way.discard(ticket.index)

    def next_deadline(self) -> float:
        return min(self._deadlines.values(), default=math.inf)

    def take_over(self, now: float) -> list[EndpointId]:
        """Endpoints whose deadline has come by now; each is told once."""
        over = [id for id, deadline in self._deadlines.items() if deadline <= now]
        for id in over:
            self._deadlines[id] = math.inf
        return over
