"""The queues of each model. There is one queue for each stage that a request may wait for. This module does not decide
whether a request may be served, and does not know which endpoints have free slots.

FairQueue orders the queue of one model by priority. Within a priority, tenants are served fairly in turn. The requests
of one tenant are served in order of arrival.

The method for fairness is start-time fair queueing (Goyal, Vin and Cheng, 1996). A request costs its prompt tokens plus
an amount for each sequence, as in the virtual token counter for language models (Sheng et al., "Fairness in Serving
Large Language Models", 2024). Each tenant has a turn, which is a number. The tenant with the lowest turn is served, and
its turn grows by the cost. A tenant that returns gets no credit for the time in which it was away.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator

from trioserve.contracts.endpoint import EndpointId, RoutedRequest, Stage
from trioserve.router.ticket import Ticket

__all__ = ["ContinuedQueue", "DrainRate", "ModelQueues", "Queue", "Queues"]


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


Line = tuple[bool, int, EndpointId | None, frozenset[EndpointId], tuple[tuple[EndpointId, int], ...]]


class ContinuedQueue:
    """The requests of one model that had an endpoint and wait for another endpoint.

    Requests that failed at the same endpoints can go to the same other endpoints. So these requests share a line, and
    the router looks for an endpoint only for the first request of each line. If an endpoint with hundreds of requests
    fails, a single search shows that no other endpoint has a free slot. A request on trial waits until its failed
    endpoints were checked (continuation.py). Such requests have lines of their own, and the router searches no endpoint
    for them.

    Attributes:
        line_of: the line of each request, by the index of its ticket.

    Cost:
        `add` and `remove` are O(1), except for a request that waited in another queue before.
    """

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self._lines: dict[Line, OrderedDict[int, Ticket]] = {}
        self.line_of: dict[int, Line] = {}

    def __len__(self) -> int:
        return len(self.line_of)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket.index in self.line_of

    def __iter__(self) -> Iterator[Ticket]:
        """Yield all requests in an arbitrary order."""
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
        self.line_of[ticket.index] = line
        tickets = self._lines.setdefault(line, OrderedDict())
        is_early = bool(tickets) and next(reversed(tickets.values())).again_index > ticket.again_index
        tickets[ticket.index] = ticket
        if is_early:  # The ticket waited in another queue before, so the line has to be sorted.
            ordered = sorted(tickets.values(), key=lambda ticket: ticket.again_index)
            self._lines[line] = OrderedDict((ticket.index, ticket) for ticket in ordered)
        self.prompt_tokens += ticket.request.prompt_tokens

    def remove(self, ticket: Ticket) -> None:
        line = self.line_of.pop(ticket.index)
        tickets = self._lines[line]
        del tickets[ticket.index]
        if not tickets:
            del self._lines[line]
        self.prompt_tokens -= ticket.request.prompt_tokens

    def heads(self) -> list[Ticket]:
        """Return the first request of each line whose requests need no check of a failed endpoint. The order is
        arbitrary.
        """
        return [next(iter(tickets.values())) for line, tickets in self._lines.items() if not line[0]]

    def lines(self) -> list[list[Ticket]]:
        """Return the lines. In each line, the requests are in the order in which they are served."""
        return [list(tickets.values()) for tickets in self._lines.values()]

    def on_trial(self) -> list[Ticket]:
        """Return the requests that wait for checks of their failed endpoints, in the order of the failures."""
        found = [ticket for line, tickets in self._lines.items() if line[0] for ticket in tickets.values()]
        return sorted(found, key=lambda ticket: ticket.again_index)


ENDINGS_MAX = 64  # 64 ended requests are enough for a steady estimate, and few enough to follow a change of load.
RETRY_SECONDS_MIN = 1.0
RETRY_SECONDS_MAX = 60.0  # An estimate beyond a minute is too inaccurate to be useful.
RETRY_SECONDS_UNKNOWN = 5.0  # The router sends this retry time if no request has ended yet.


class DrainRate:
    """The rate at which requests end, not counting the time in which no request runs. Used for `Retry-After`.

    Times are seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        # The times at which requests ended, in seconds of busy time.
        self._ended_at: deque[float] = deque(maxlen=ENDINGS_MAX)
        self._idle_seconds = 0.0
        self._idle_since: float | None = None

    def note(self, now: float) -> None:
        """Record that a request ended.

        Args:
            now: time in seconds.
        """
        self._ended_at.append(now - self._idle_seconds)

    def note_idle(self, now: float) -> None:
        """Record that no request runs any more.

        Args:
            now: time in seconds.
        """
        self._idle_since = now

    def note_begin(self, now: float) -> None:
        """Record that a request starts.

        Args:
            now: time in seconds.
        """
        if self._idle_since is not None:
            self._idle_seconds += now - self._idle_since
            self._idle_since = None

    def seconds_for(self, count: int, now: float) -> float:
        """Estimate the seconds until more requests have ended, at the rate of the last requests.

        Args:
            count: number of requests that have to end.
            now: time in seconds.

        Returns:
            1 to 60 seconds. 5 seconds if fewer than two requests have ended.
        """
        if len(self._ended_at) < 2:
            return RETRY_SECONDS_UNKNOWN
        seconds_each = (now - self._idle_seconds - self._ended_at[0]) / len(self._ended_at)
        return min(RETRY_SECONDS_MAX, max(RETRY_SECONDS_MIN, count * seconds_each))


class Queue:
    """The queue of one model for one stage."""

    def __init__(self) -> None:
        self.newcomers = FairQueue()
        # The queue `again` has requests that wait again after an endpoint failed them or computed their prompt.
        self.again = ContinuedQueue()
        self.drain_rate = DrainRate()

    @property
    def count(self) -> int:
        return self.newcomers.count + len(self.again.line_of)

    @property
    def prompt_tokens(self) -> int:
        return self.newcomers.prompt_tokens + self.again.prompt_tokens

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket that was not served.

        Args:
            ticket: a ticket of this queue.
        """
        if ticket in self.again:
            self.again.remove(ticket)
        else:
            self.newcomers.remove(ticket)


class ModelQueues:
    """The queues of one model.

    Attributes:
        queues: the queues, by stage.
        live_count: requests that have entered and not ended, in any state.
        preparing: requests that are read before they enter.
        continued: number of streams that broke off and wait to resume at another endpoint. These streams had a lease
            before, so they do not count against the limit for newcomers.
        moving: streams that still run and wait for a lease at another endpoint.
        streams_in_a_row: leases granted in a row to streams or to requests that wait again, while newcomers waited.
    """

    def __init__(self) -> None:
        self.queues: dict[Stage | None, Queue] = {stage: Queue() for stage in (Stage.DECODE, Stage.PREFILL, None)}
        self.live_count = 0
        self.preparing = 0
        self.continued = ContinuedQueue()
        self.moving = ContinuedQueue()
        self.streams_in_a_row = 0

    @property
    def count(self) -> int:
        return len(self.continued) + sum(queue.count for queue in self.queues.values())

    @property
    def prompt_tokens(self) -> int:
        return self.continued.prompt_tokens + sum(queue.prompt_tokens for queue in self.queues.values())

    @property
    def has_waiting(self) -> bool:
        """True if a request waits for a lease. This check is fast, because the router makes it at every event."""
        decode, prefill, whole = self.queues.values()
        return bool(
            whole.newcomers.count
            or whole.again.line_of
            or prefill.newcomers.count
            or prefill.again.line_of
            or decode.newcomers.count
            or decode.again.line_of
            or self.continued.line_of
            or self.moving.line_of
        )

    def note_stream(self, *, are_newcomers_waiting: bool) -> None:
        """Record that a stream, or a request that waits again, got a lease.

        Args:
            are_newcomers_waiting: True if newcomers wait for a lease.
        """
        self.streams_in_a_row = self.streams_in_a_row + 1 if are_newcomers_waiting else 0

    def waiting_again(self) -> list[tuple[Queue, Ticket]]:
        """Return the first request of each line of requests that wait again. Requests that wait for checks of their
        failed endpoints are left out. The order is arbitrary.
        """
        return [(queue, ticket) for queue in self.queues.values() if queue.again for ticket in queue.again.heads()]

    def on_trial(self) -> list[Ticket]:
        """Return the requests that wait for checks of their failed endpoints, in the order of the failures."""
        queues = (self.continued, *(queue.again for queue in self.queues.values()))
        found = [ticket for queue in queues if queue for ticket in queue.on_trial()]
        return sorted(found, key=lambda ticket: ticket.again_index)

    def heads(self) -> list[tuple[Queue, Ticket]]:
        """Return the next newcomer of each queue, by priority and then in order of arrival."""
        heads = [(queue, head) for queue in self.queues.values() if (head := queue.newcomers.head()) is not None]
        return sorted(heads, key=lambda entry: (entry[1].request.priority, entry[1].index))


class Queues:
    """The queues of all models.

    Attributes:
        models: the queues by model name.
    """

    def __init__(self) -> None:
        self.models: dict[str, ModelQueues] = {}
        self._again_total = 0

    def of_model(self, name: str) -> ModelQueues:
        model = self.models.get(name)
        if model is None:
            model = self.models[name] = ModelQueues()
        return model

    def of(self, ticket: Ticket) -> Queue:
        """Return the queue of a ticket. A ticket with a lease also has a queue."""
        return self.of_model(ticket.request.model).queues[ticket.stage]

    def forget_unused(self, name: str) -> None:
        """Delete the queues of a model that has no requests left.

        Call this when no endpoint serves the model. Otherwise the names of loaded and unloaded adapters would
        accumulate, and every event looks at all queues.

        Args:
            name: model name.
        """
        model = self.models.get(name)
        if model is not None and not model.live_count and not model.preparing:
            del self.models[name]

    def wait_again(self, ticket: Ticket) -> None:
        """Add a ticket that left an endpoint, after the tickets that already wait again."""
        self._note_again(ticket)
        if ticket.has_token:
            self.of_model(ticket.request.model).continued.add(ticket)
        else:
            self.of(ticket).again.add(ticket)

    def wait_to_move(self, ticket: Ticket) -> None:
        """Add a running stream that has to move, after the streams that already wait to move.

        Args:
            ticket: the stream's ticket.
        """
        self._note_again(ticket)
        self.of_model(ticket.request.model).moving.add(ticket)

    def end_wait_to_move(self, ticket: Ticket) -> None:
        self.of_model(ticket.request.model).moving.remove(ticket)

    def _note_again(self, ticket: Ticket) -> None:
        self._again_total += 1
        ticket.again_index = self._again_total

    def end_trial(self, ticket: Ticket) -> None:
        """Let a request that was cleared by the checks of its failed endpoints wait for an endpoint, as the last of its
        line.

        Args:
            ticket: the request.
        """
        self.leave(ticket)
        self.wait_again(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket that was not served.

        Args:
            ticket: a waiting ticket.
        """
        if ticket.has_token:
            self.of_model(ticket.request.model).continued.remove(ticket)
        else:
            self.of(ticket).leave(ticket)

    def all_waiting(self) -> list[Ticket]:
        """Return all waiting tickets, except running streams that wait to move. The order is arbitrary."""
        queues = [queue for model in self.models.values() for queue in model.queues.values()]
        continued = [ticket for model in self.models.values() for ticket in model.continued]
        return continued + [ticket for queue in queues for ticket in (*queue.again, *queue.newcomers)]
