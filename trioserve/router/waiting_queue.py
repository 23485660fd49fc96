"""Who is next in the queue for one model: by priority, then fair between tenants, then first come first served.

Fairness is start-time fair queueing (Goyal, Vin and Cheng, 1996) with a request's cost in prompt tokens and sequences,
as the virtual token counter does it for language models (Sheng et al., "Fairness in Serving Large Language Models",
2024): each tenant has a turn, the one with the earliest turn is served, and that moves its turn by what it was served.
A tenant that comes back does not get the turns it was away for.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from trioserve.contracts.endpoint import RoutedRequest
from trioserve.router.ticket import Ticket

__all__ = ["FairQueue"]

SEQUENCE_COST_TOKENS = 64  # what each sequence of a request costs beside the prompt: about the slot of its response
SPARE_TURNS_MAX = 64
ABSENT_TENANTS_MAX = 4096  # whose turns are remembered; what one forgets is at most the cost of its last request


class FairQueue:
    """Joining, leaving and being taken are O(log tenants). Leaving costs nothing later."""

    def __init__(self) -> None:
        self._classes: dict[int, _PriorityClass] = {}
        self.count = 0
        self.prompt_tokens = 0

    def __iter__(self) -> Iterator[Ticket]:
        """Everybody, in no order."""
        for priority_class in self._classes.values():
            for tickets in priority_class.tenants.values():
                yield from tickets.values()

    def add(self, ticket: Ticket) -> None:
        request = ticket.request
        priority_class = self._classes.get(request.priority)
        if priority_class is None:
            priority_class = self._classes[request.priority] = _PriorityClass()
        priority_class.add(ticket)
        self.count += 1
        self.prompt_tokens += request.prompt_tokens

    def remove(self, ticket: Ticket) -> None:
        """It leaves the queue without having been served."""
        self._classes[ticket.request.priority].remove(ticket)
        self._note_gone(ticket)

    def head(self) -> Ticket | None:
        """Who is next."""
        for priority in sorted(self._classes):
            return self._classes[priority].head()
        return None

    def newest_of_most(self, ticket: Ticket) -> Ticket | None:
        """Who has to make room when the queue has one too many, since `ticket` has come: the newest waiter, of the same
        priority, of the tenant with most of them, if it has more without that one than the tenant of `ticket` has now.
        So a burst takes places from itself (McKenney, "Stochastic Fairness Queueing", 1990). O(tenants)."""
        tenants = self._classes[ticket.request.priority].tenants
        most = max(tenants.values(), key=len)
        return next(reversed(most.values())) if len(most) > len(tenants[ticket.request.tenant]) else None

    def take(self) -> Ticket:
        """Take the head out, to be served."""
        priority_class = self._classes[min(self._classes)]
        ticket = priority_class.head()
        priority_class.serve(ticket)
        self._note_gone(ticket)
        return ticket

    def _note_gone(self, ticket: Ticket) -> None:
        if not self._classes[ticket.request.priority].tenants:
            del self._classes[ticket.request.priority]
        self.count -= 1
        self.prompt_tokens -= ticket.request.prompt_tokens


def _cost(request: RoutedRequest) -> int:
    """Of all its sequences. The prompt counts once: the choices of one prompt share its blocks, and prompt_tokens are
    those of all prompts already."""
    return request.prompt_tokens + request.sequences * SEQUENCE_COST_TOKENS


class _PriorityClass:
    """One priority's tenants. `tenants` holds those with somebody in the queue; `_turns` a heap of (turn, index,
    tenant) in which entries that are out of date are skipped when they come up."""

    def __init__(self) -> None:
        self.tenants: dict[str, OrderedDict[int, Ticket]] = {}
        self._turn_of: dict[str, float] = {}
        self._turns: list[tuple[float, int, str]] = []
        self._turns_max = SPARE_TURNS_MAX
        self._now = 0.0  # virtual time: the turn that was served last

    def add(self, ticket: Ticket) -> None:
        tenant = ticket.request.tenant
        tickets = self.tenants.get(tenant)
        if tickets is None:
            tickets = self.tenants[tenant] = OrderedDict()
            turn = self._turn_of[tenant] = max(self._turn_of.get(tenant, 0.0), self._now)
            heapq.heappush(self._turns, (turn, ticket.index, tenant))
            if len(self._turns) > self._turns_max or len(self._turn_of) > self._turns_max:
                self._forget_turns()
        tickets[ticket.index] = ticket

    def head(self) -> Ticket:
        while True:
            turn, _, tenant = self._turns[0]
            tickets = self.tenants.get(tenant)
            if tickets is not None and self._turn_of[tenant] == turn:
                return next(iter(tickets.values()))
            heapq.heappop(self._turns)

    def remove(self, ticket: Ticket) -> None:
        tenant = ticket.request.tenant
        tickets = self.tenants[tenant]
        del tickets[ticket.index]
        if not tickets:
            del self.tenants[tenant]

    def serve(self, ticket: Ticket) -> None:
        tenant = ticket.request.tenant
        turn = self._turn_of[tenant]
        self._now = turn
        self._turn_of[tenant] = turn + _cost(ticket.request)
        heapq.heappop(self._turns)
        self.remove(ticket)
        if tenant in self.tenants:
            heapq.heappush(self._turns, (self._turn_of[tenant], ticket.index, tenant))

    def _forget_turns(self) -> None:
        """A turn that has passed says nothing of a tenant that is away, and coming and leaving again leaves entries
        behind; without this both would stay for ever. One that is still to come is forgotten only where there are so
        many tenants that each is served once: then it never passes."""
        present = self.tenants
        turn_of = {tenant: turn for tenant, turn in self._turn_of.items() if tenant in present or turn > self._now}
        if len(turn_of) > len(present) + ABSENT_TENANTS_MAX:
            turn_of = {tenant: turn_of[tenant] for tenant in present}
        self._turn_of = turn_of
        self._turns = [(turn_of[tenant], next(iter(tickets), 0), tenant) for tenant, tickets in present.items()]
        heapq.heapify(self._turns)
        self._turns_max = 2 * len(turn_of) + SPARE_TURNS_MAX
