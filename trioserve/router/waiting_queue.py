"""Orders the queue of one model by priority. Within a priority, tenants are served fairly in turn. The requests of one
tenant are served in order of arrival.

The method for fairness is start-time fair queueing (Goyal, Vin and Cheng, 1996). A request costs its prompt tokens plus
an amount for each sequence, as in the virtual token counter for language models (Sheng et al., "Fairness in Serving
Large Language Models", 2024). Each tenant has a turn, which is a number. The tenant with the lowest turn is served, and
its turn grows by the cost. A tenant that returns gets no credit for the time in which it was away.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from trioserve.contracts.endpoint import RoutedRequest
from trioserve.router.ticket import Ticket

__all__ = ["FairQueue"]

SEQUENCE_COST_TOKENS = 64  # Each sequence costs this much in addition to the prompt, because its response uses a slot.
SPARE_TURNS_MAX = 64
# The queue keeps the turns of this many tenants without requests. If a turn is dropped, the tenant gains at most the
# cost of one request.
ABSENT_TENANTS_MAX = 4096


class FairQueue:
    """The queue of one model.

    Cost:
        `add`, `remove` and `take` are O(log tenants). A removed ticket causes no later work.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _PriorityClass] = {}
        self.count = 0
        self.prompt_tokens = 0

    def __iter__(self) -> Iterator[Ticket]:
        """Yield all tickets in an arbitrary order."""
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
        """Remove a ticket that leaves without being served.

        Args:
            ticket: a ticket of this queue.
        """
        self._classes[ticket.request.priority].remove(ticket)
        self._note_gone(ticket)

    def head(self) -> Ticket | None:
        """Return the next ticket, or None if the queue is empty."""
        for priority in sorted(self._classes):
            return self._classes[priority].head()
        return None

    def newest_of_most(self, ticket: Ticket) -> Ticket | None:
        """Return the ticket that has to leave a full queue that a new ticket has joined.

        The newest ticket of the tenant with most waiting tickets of this priority leaves. That tenant must have more
        tickets than the new ticket's tenant, the new ticket included. So a burst of one tenant displaces only tickets
        of the same tenant (McKenney, "Stochastic Fairness Queueing", 1990).

        Args:
            ticket: the ticket that has just joined.

        Returns:
            The ticket that leaves, or None if no other ticket has to leave. Then the new ticket is refused.

        Cost:
            O(tenants).
        """
        tenants = self._classes[ticket.request.priority].tenants
        most = max(tenants.values(), key=len)
        return next(reversed(most.values())) if len(most) > len(tenants[ticket.request.tenant]) else None

    def take(self) -> Ticket:
        """Remove the next ticket and return it. The caller serves it."""
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
    """Return the cost of a request in tokens. `prompt_tokens` counts each prompt once, because the choices of a prompt
    share its blocks.
    """
    return request.prompt_tokens + request.sequences * SEQUENCE_COST_TOKENS


class _PriorityClass:
    """The tenants of one priority.

    Attributes:
        tenants: the waiting tickets of each tenant that has any.
    """

    def __init__(self) -> None:
        self.tenants: dict[str, OrderedDict[int, Ticket]] = {}
        self._turn_of: dict[str, float] = {}
        # The heap has entries (turn, index, tenant). Readers skip outdated entries.
        self._turns: list[tuple[float, int, str]] = []
        self._turns_max = SPARE_TURNS_MAX
        self._now = 0.0  # The virtual time is the turn that was served last.

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
        """Drop turns that no longer matter, so that neither `_turn_of` nor `_turns` grows forever.

        A turn of an absent tenant that virtual time has passed has no effect. A turn that virtual time has not reached
        is dropped only if there are very many tenants. With so many tenants, each tenant is served about once, so
        virtual time would never reach those turns.
        """
        present = self.tenants
        turn_of = {tenant: turn for tenant, turn in self._turn_of.items() if tenant in present or turn > self._now}
        if len(turn_of) > len(present) + ABSENT_TENANTS_MAX:
            turn_of = {tenant: turn_of[tenant] for tenant in present}
        self._turn_of = turn_of
        self._turns = [(turn_of[tenant], next(iter(tickets), 0), tenant) for tenant, tickets in present.items()]
        heapq.heapify(self._turns)
        self._turns_max = 2 * len(turn_of) + SPARE_TURNS_MAX
