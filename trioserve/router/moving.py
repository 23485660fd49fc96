"""Moves streams away from an endpoint on purpose, so that the endpoint can be stopped.

A stream first gets a lease at another endpoint, and only then is asked to move. Until then, the stream runs at its old
endpoint. The number of streams that move at a time is limited, since the new endpoint has to compute the prompt of each
stream again. At the deadline, the remaining streams are asked to leave without a lease, if another endpoint serves
their model. Such a stream resumes as if its endpoint had failed.
"""

from __future__ import annotations

import math

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.queues import Queues
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket, TicketState

__all__ = ["Moving"]


class Moving:
    """The endpoints that are being emptied, and the streams that move.

    Args:
        settings: limits.
        queues: the queues of all models.

    Attributes:
        total: streams that got a lease at another endpoint, in order to move there.
    """

    def __init__(self, settings: RouterSettings, queues: Queues) -> None:
        self.total = 0
        self._settings = settings
        self._queues = queues
        # The deadline of each endpoint that is being emptied. math.inf after the deadline has passed.
        self._deadlines: dict[EndpointId, float] = {}
        self._on_the_way: set[int] = set()

    @property
    def has_room(self) -> bool:
        """True if one more stream may move now."""
        return len(self._on_the_way) < self._settings.moves_at_once_max

    def begin(self, id: EndpointId, deadline: float) -> None:
        """Start emptying an endpoint. The caller then calls `join` for each request at this endpoint.

        Args:
            id: name of the endpoint.
            deadline: time in seconds after which all requests must leave.
        """
        self._deadlines[id] = deadline

    def is_emptied(self, id: EndpointId) -> bool:
        return id in self._deadlines

    def end(self, id: EndpointId) -> None:
        """Stop emptying an endpoint, because it was removed or accepts requests again. Streams that already have a
        lease at another endpoint still move.

        Args:
            id: name of the endpoint.
        """
        if self._deadlines.pop(id, None) is not None:
            for model in self._queues.models.values():
                for ticket in [ticket for ticket in model.moving if ticket.endpoint == id]:
                    self.leave(ticket)

    def join(self, ticket: Ticket) -> None:
        """Let a stream wait for a slot at another endpoint, if the stream has to move and can. Call this whenever the
        condition may have become true.

        Args:
            ticket: the request. Does nothing if the request need not or cannot move.
        """
        if (
            ticket.endpoint in self._deadlines
            and ticket.can_resume
            and ticket.is_answered
            and ticket.state in (TicketState.LEASED, TicketState.RUNNING_FREE)
            and not ticket.is_moving
            and ticket.next_lease is None
            and ticket.request.pinned is None
        ):
            ticket.is_moving = True
            ticket.stage = None  # The next endpoint computes the whole rest of the response.
            self._queues.wait_to_move(ticket)

    def leave(self, ticket: Ticket) -> None:
        """End a stream's wait for a slot at another endpoint. Does nothing if the stream does not wait for one.

        Args:
            ticket: the stream's request.
        """
        if ticket.is_moving:
            ticket.is_moving = False
            self._queues.end_wait_to_move(ticket)

    def note_leased(self, ticket: Ticket) -> None:
        """Record that a stream got a lease at another endpoint.

        Args:
            ticket: the stream's request.
        """
        self.leave(ticket)
        self._on_the_way.add(ticket.index)
        self.total += 1

    def note_arrived(self, ticket: Ticket) -> None:
        """Record that a stream resumed at its new endpoint, or ended.

        Args:
            ticket: the stream's request.
        """
        self._on_the_way.discard(ticket.index)

    def next_deadline(self) -> float:
        return min(self._deadlines.values(), default=math.inf)

    def pop_passed(self, now: float) -> list[EndpointId]:
        """Return the endpoints whose deadline has passed. Each endpoint is returned once.

        Args:
            now: time in seconds.
        """
        over = [id for id, deadline in self._deadlines.items() if deadline <= now]
        for id in over:
            self._deadlines[id] = math.inf
        return over
