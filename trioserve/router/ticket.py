"""The states of a request at the router and the table of its legal moves.

    WAITING ────► LEASED ────► RUNNING_FREE     (its lease went back at the first token)
       ▲  │         │  │            │
       └──┼─────────┘  │            │           (failed, or the prompt is computed: in the queue again)
          ▼            ▼            ▼           (from RUNNING_FREE also to LEASED: moved elsewhere on purpose)
        ENDED ◄──────────────────────           (from every state, once)

A ticket has a place in the queue while it is WAITING and a lease while it is LEASED; at no other time. ENDED is left by
no move: that is what makes giving either back happen once. One that is to leave its endpoint runs there, and beside
that waits for its next lease or has it.

One that is disaggregated goes through WAITING and LEASED twice, its stage PREFILL and then DECODE. Its stage is None,
as that of one that never was disaggregated, from the moment on in which one endpoint is to do all of it; that is for
good.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from trioserve.contracts.endpoint import EndpointId, PairOutcome, RoutedRequest, Stage
from trioserve.contracts.errors import TrioserveError

__all__ = ["Break", "Lease", "Ticket", "TicketState"]


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
    """What a ticket has at an endpoint. is_suspect: an endpoint had broken with it already when it got that. at: since
    when."""

    endpoint: EndpointId | None = None
    is_probe: bool = False
    is_suspect: bool = False
    sent_index: int | None = None
    at: float = 0.0


class Break(NamedTuple):
    """An endpoint broke with a stream. clock: of what served it there, by its reports; None: whether that goes on,
    nobody can find out. checks: that had found the endpoint well by then. is_alone: no other was there that may be the
    cause as well."""

    endpoint: EndpointId
    clock: str | None
    checks: int
    is_alone: bool


class Ticket:
    """One request at the router, from entering to leaving.

    index: of arrival. entered_at, leased_at: seconds of the router's clock; leased_at of the lease in hand. endpoint:
    where its lease is, or was when it went back at the first token. tried: the endpoints that failed it, and how many
    good health checks each had had by then. failed_by: those of them that answered it with an error before
    its first token, so that it does not go there again. refused_by: those that refused it in a way
    that another one has to confirm. is_lost: an endpoint that had it was lost before its first
    token. sent_index: of all that were sent anywhere, when it went to the endpoint of its lease; None before that.
    again_index: of all that began to wait again, when it did so last. has_token: its
    client has seen a token. is_answered: and has seen one from the endpoint of its lease. refusal: why it ended without
    having been served to its end, if so. own_deadline: of its own wait in the queue; queue_deadline: that, or the
    router's limit.
    Both move by the time that its prompt took elsewhere, since that was no wait. stage: what is to be done next; None:
    everything. is_disaggregated: it began with a stage. prefilled_by: the endpoint that computed its prompt for another
    one. prefilled_at: when. is_held: its blocks are kept there for a decode endpoint. pair_outcome: what became of its
    being split. stage_fault: what that is to be if nobody takes over the stage that an endpoint has failed.

    Of a stream that goes on elsewhere: continuations: how often it has. token_count: what its client had when it broke
    off last. broken: the endpoints that broke in a row without its having got on in between, those apart that went on
    all the same. is_on_trial: it waits until more is known of these. fingerprint: what computed its first token; None
    where that is unknown. can_go_on: another endpoint could go on from what its client has.

    Of a stream that is to leave its endpoint: is_moving: it runs there, and waits for room elsewhere. next_lease: which
    it has there then, beside the one in hand.
    """

    __slots__ = (
        "again_index",
        "broken",
        "can_go_on",
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
        self.can_go_on = False
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
        """Have this one in hand from now on; returns the one before."""
        before = Lease(self.endpoint, self.is_probe, self.is_suspect, self.sent_index, self.leased_at)
        self.endpoint, self.is_probe, self.is_suspect, self.sent_index, self.leased_at = lease
        return before

    def move(self, state: TicketState) -> None:
        assert (self.state, state) in _LEGAL_MOVES, f"ticket {self.index} cannot go from {self.state} to {state}"
        self.state = state
