"""The states of a request at the router, and the table of legal transitions.

    WAITING ────► LEASED ────► RUNNING_FREE     (its lease ended at the first token)
       ▲  │         │  │            │
       └──┼─────────┘  │            │           (an endpoint failed it, or computed its prompt: it waits again)
          ▼            ▼            ▼           (from RUNNING_FREE also to LEASED: moved elsewhere on purpose)
        ENDED ◄──────────────────────           (from every state, once)

A ticket has a position in a queue exactly while it is WAITING, and a lease exactly while it is LEASED. There is no
transition out of ENDED, so a queue position or a lease is released only once. A stream that has to leave its endpoint
keeps running at the endpoint until it has its next lease and has moved.

A disaggregated request goes through WAITING and LEASED twice, with stage PREFILL and then DECODE. If one endpoint has
to do the whole request, its stage becomes None and stays None.

The times of the next events of endpoints and of waiting requests are also here. The cost of finding the earliest event
does not depend on the number of endpoints.
"""

from __future__ import annotations

import enum
import heapq
import math
from typing import NamedTuple

from trioserve.contracts.endpoint import EndpointId, PairOutcome, RoutedRequest, Stage
from trioserve.contracts.errors import TrioserveError

__all__ = [
    "Break",
    "Lease",
    "Moments",
    "QueueDeadlines",
    "SPARE_DEADLINES_MAX",
    "Ticket",
    "TicketFollower",
    "TicketState",
]


class TicketState(enum.Enum):
    WAITING = "waiting"
    LEASED = "leased"
    RUNNING_FREE = "running_free"
    ENDED = "ended"


_LEGAL_MOVES: frozenset[tuple[TicketState, TicketState]] = frozenset(
    {
        (TicketState.WAITING, TicketState.LEASED),
        (TicketState.WAITING, TicketState.ENDED),
        (TicketState.LEASED, TicketState.WAITING),
        (TicketState.LEASED, TicketState.RUNNING_FREE),
        (TicketState.LEASED, TicketState.ENDED),
        (TicketState.RUNNING_FREE, TicketState.WAITING),
        (TicketState.RUNNING_FREE, TicketState.LEASED),
        (TicketState.RUNNING_FREE, TicketState.ENDED),
    }
)


class Lease(NamedTuple):
    """The lease of a ticket at an endpoint.

    Attributes:
        endpoint: the endpoint, or None if there is no lease.
        is_probe: True if the request probes an ejected endpoint.
        is_suspect: True if another endpoint failed while it served the request, before this lease.
        sent_index: number of this sending, counted over all requests of the router. None: not sent yet.
        at: time at which the lease was granted, in seconds of the router's clock.
    """

    endpoint: EndpointId | None = None
    is_probe: bool = False
    is_suspect: bool = False
    sent_index: int | None = None
    at: float = 0.0


class Break(NamedTuple):
    """A failure of an endpoint that served a stream.

    Attributes:
        endpoint: the endpoint.
        clock: clock name of the process that served the stream. If None, the router cannot find out whether the process
            still runs.
        checks: number of health checks that the endpoint had passed by then.
        is_alone: True if no other suspected request was at the endpoint.
    """

    endpoint: EndpointId
    clock: str | None
    checks: int
    is_alone: bool


class Ticket:
    """One request at the router, from `enter` to `leave`. Times are seconds of the router's clock.

    Args:
        index: number in the order of arrival.
        entered_at: when the request entered.
        queue_deadline: when its wait in the queue ends, by its own deadline or the router's limit.

    Attributes:
        endpoint: the endpoint of the current lease, or of the lease that ended at the first token.
        leased_at: time at which the current lease was granted.
        is_probe, is_suspect: see Lease.
        sent_index: see Lease.
        again_index: number of the last time that the request began to wait again, counted over all requests.
        has_token: True once the client has received a token.
        is_answered: True once the client has received a token from the current endpoint.
        tried: the endpoints that failed the request, each with the number of health checks that the endpoint had passed
            by then.
        failed_by: endpoints that answered with an error before the first token. The request is not sent to these
            endpoints again before its client has a token.
        refused_by: endpoints that refused the request in a way that another endpoint has to confirm.
        is_lost: True if an endpoint was lost while it served the request, before the first token.
        refusal: why the request ended without being fully served. None: it was served, or has not ended.
        own_deadline: end of the wait in the queue by the request's own deadline. `queue_deadline` is this time or the
            router's limit, whichever is earlier. Both are moved later by the time for which the request was served,
            because that time was no wait.
        stage: the next stage, or None if one endpoint does the whole request.
        is_disaggregated: True if the request entered with a stage.
        prefilled_by: the endpoint that computed the prompt for a decode endpoint.
        prefilled_at: when the prompt was computed.
        is_held: True while the prefill endpoint holds the blocks of the prompt for a decode endpoint.
        pair_outcome: outcome of splitting the request, once known.
        stage_fault: the outcome to count if no endpoint takes over the failed stage.
        continuations: how many times the stream resumed at another endpoint.
        token_count: tokens that the client had at the last failure.
        broken: failures of endpoints in a row, without progress of the stream between them. Failures are left out if
            the endpoint's process still runs.
        is_on_trial: True while the request waits until its failed endpoints have been checked, see continuation.
        fingerprint: fingerprint of the endpoint that computed the first token. None: unknown.
        can_resume: True if another endpoint could resume the stream from the tokens that the client has.
        is_moving: True while the stream runs and waits for a slot at another endpoint, because it has to leave its own.
        next_lease: the lease at the endpoint to which the stream moves, in addition to the current lease. None: no such
            lease.
    """

    __slots__ = (
        "again_index",
        "broken",
        "can_resume",
        "continuations",
        "endpoint",
        "entered_at",
        "failed_by",
        "fingerprint",
        "has_token",
        "index",
        "is_answered",
        "is_disaggregated",
        "is_held",
        "is_lost",
        "is_moving",
        "is_on_trial",
        "is_probe",
        "is_suspect",
        "leased_at",
        "next_lease",
        "own_deadline",
        "pair_outcome",
        "prefilled_at",
        "prefilled_by",
        "queue_deadline",
        "refusal",
        "refused_by",
        "request",
        "sent_index",
        "stage",
        "stage_fault",
        "state",
        "token_count",
        "tried",
    )

    def __init__(self, request: RoutedRequest, index: int, entered_at: float, queue_deadline: float) -> None:
        self.request = request
        self.index = index
        self.entered_at = entered_at
        self.queue_deadline = queue_deadline
        self.state = TicketState.WAITING
        self.endpoint: EndpointId | None = None
        self.leased_at = 0.0
        self.is_probe = False
        self.is_suspect = False
        self.sent_index: int | None = None
        self.again_index = 0
        self.has_token = False
        self.is_answered = False
        self.continuations = 0
        self.token_count = 0
        self.broken: tuple[Break, ...] = ()
        self.is_on_trial = False
        self.fingerprint: str | None = None
        self.can_resume = False
        self.is_moving = False
        self.next_lease: Lease | None = None
        self.tried: dict[EndpointId, int] = {}
        self.failed_by: frozenset[EndpointId] = frozenset()
        self.is_lost = False
        self.refused_by: frozenset[EndpointId] = frozenset()
        self.refusal: TrioserveError | None = None
        self.own_deadline = request.queue_deadline
        self.stage: Stage | None = None
        self.is_disaggregated = False
        self.prefilled_by: EndpointId | None = None
        self.prefilled_at = 0.0
        self.is_held = False
        self.pair_outcome: PairOutcome | None = None
        self.stage_fault: PairOutcome | None = None

    @property
    def is_sent(self) -> bool:
        return self.sent_index is not None

    def exchange(self, lease: Lease) -> Lease:
        """Replace the current lease.

        Args:
            lease: the new lease.

        Returns:
            The previous lease.
        """
        before = Lease(self.endpoint, self.is_probe, self.is_suspect, self.sent_index, self.leased_at)
        self.endpoint, self.is_probe, self.is_suspect, self.sent_index, self.leased_at = lease
        return before

    def move(self, state: TicketState) -> None:
        assert (self.state, state) in _LEGAL_MOVES, f"ticket {self.index} cannot go from {self.state} to {state}"
        self.state = state


class TicketFollower:
    """Follows the tickets of a router. Models that are loaded on demand do so: a ticket that waits loads its model, and
    a ticket with a lease keeps its model loaded.

    The router calls these methods inside of its own calls, so they must not call the router. Here they do nothing.
    """

    def check(self, request: RoutedRequest) -> None:
        """Check a request before it enters.

        Raises:
            TrioserveError: the router refuses the request for this reason.
        """

    def waits(self, ticket: Ticket) -> None:
        """Note that a ticket begins to wait: it entered, or lost its lease.

        Args:
            ticket: the ticket, which is WAITING.
        """

    def leased(self, ticket: Ticket) -> None:
        """Note that a ticket got a lease, after a wait or as it entered. A stream that moves gets no further call.

        Args:
            ticket: the ticket, which is LEASED.
        """

    def ended(self, ticket: Ticket) -> None:
        """Note that a ticket ended. This is the last call for the ticket.

        Args:
            ticket: the ticket, which is ENDED.
        """


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
