"""Who may get a lease before whom: the rules of the queue, with books of their own.

Within a model, requests and streams that lost an endpoint, or whose prompt was computed at one, come before the
newcomers of their priority, but not more than some in a row while those wait. There are queues of those whose prompt is
computed apart, and of those that go whole. In each it is priority first; within a priority tenants take turns, and
within a tenant it is first come first served. Turns are fair as start-time fair queueing promises (Goyal, Vin and
Cheng, 1996): over any time in which a tenant has somebody in the queue, any other, there or coming and going, is served
at most as much as that one, plus the largest cost of either.

How many sequences a request has changes nothing of this: it gets its lease in its turn, where one of them finds a seat.
So nobody is held up by one that does not fit, since whoever is next fits wherever any other would, and nobody has to be
overtaken for it, once or for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from trioserve.contracts.endpoint import PairOutcome, RoutedRequest, Stage
from trioserve.router.ticket import Break, Ticket
from trioserve.router.waiting_queue import SEQUENCE_COST_TOKENS
from trioserve.simulation.router.streams import SimulatedStream

__all__ = ["Fairness", "ExpectedRequest", "check_turn"]


class ExpectedRequest:
    """One request of a simulated router, as it was asked and told. state: by the names of TicketState. failed_index: of
    the failure, or the end of its prompt, after which it waits again; None while it waits for the first time. deadline:
    the end of its wait, its own or wait_ends_at, which is the router's. queue_index: in the order of joining a queue.
    stage, is_disaggregated, prefilled_by, is_held, outcome, stage_fault, is_answered, broken, is_on_trial,
    continuations, fingerprint, can_go_on, is_moving: as those of a Ticket. is_condemned: its trial is over, and it has
    to be told. moving_index: in the order of becoming one that is to move. next: where it has its next lease. left:
    where it was before it waited again. tried: where it failed, and how often that endpoint had been found well
    before; failed_by: which endpoints answered it with an error, without a token; refused_by:
    those of them that refused it in a way that another one has to confirm. is_lost: an endpoint was lost that had it,
    without a token. tokens: its client has; tokens_at_break: had when it broke off last.
    is_behind: somebody was in its queue when it came."""

    def __init__(self, name: str, request: RoutedRequest, index: int, *, wait_ends_at: float) -> None:
        self.name = name
        self.request = request
        self.index = index
        self.wait_ends_at = wait_ends_at
        self.own_deadline = request.queue_deadline
        self.leased_at = 0.0
        self.queue_index = 0
        self.ticket: Ticket | None = None
        self.state = "waiting"
        self.failed_index: int | None = None
        self.endpoint: str | None = None
        self.left: str | None = None
        self.tried: dict[str, int] = {}
        self.failed_by: set[str] = set()
        self.refused_by: set[str] = set()
        self.is_lost = False
        self.is_sent = False
        self.has_token = False
        self.is_answered = False
        self.is_behind = False
        self.tokens = 0
        self.stream: SimulatedStream | None = None
        self.tokens_at_break = 0
        self.broken: list[Break] = []
        self.is_on_trial = False
        self.is_condemned = False
        self.continuations = 0
        self.fingerprint: str | None = None
        self.can_go_on = False
        self.is_moving = False
        self.moving_index = 0
        self.next: str | None = None
        self.stage: Stage | None = None
        self.is_disaggregated = False
        self.prefilled_by: str | None = None
        self.is_held = False
        self.outcome: PairOutcome | None = None
        self.stage_fault: PairOutcome | None = None

    @property
    def deadline(self) -> float:
        return min(self.wait_ends_at, self.own_deadline)

    @property
    def cost(self) -> int:
        return self.request.prompt_tokens + self.request.sequences * SEQUENCE_COST_TOKENS

    @property
    def is_queued(self) -> bool:
        return self.state == "waiting" and self.failed_index is None

    @property
    def is_continuing(self) -> bool:
        """Its stream broke off, and it waits to go on."""
        return self.state == "waiting" and self.has_token

    @property
    def is_again(self) -> bool:
        """It had an endpoint, has no token, and takes its turn before newcomers."""
        return self.state == "waiting" and self.failed_index is not None and not self.has_token

    @property
    def moment(self) -> str:
        """How far it is, for the counts."""
        if self.stage is not None and self.state != "ended":
            where = "in the queue for" if self.state == "waiting" else "leased for" if not self.is_sent else "at"
            return f"{where} {self.stage.value}{', with a token' if self.has_token else ''}"
        if self.state == "waiting":
            if self.has_token:
                return "on trial" if self.is_on_trial else "in the queue to go on"
            return "in the queue" if self.failed_index is None else "in the queue again"
        if self.state == "ended":
            return "ended"
        if not self.is_sent:
            return "leased to go on, not sent" if self.has_token else "leased, not sent"
        if self.has_token and not self.is_answered:
            return "before it goes on"
        if self.is_moving or self.next is not None:
            return "where it is to leave" if self.next is None else "where it is to leave, with a next lease"
        return "after the first token" if self.has_token else "before the first token"

    def is_beside(self, other: ExpectedRequest) -> bool:
        return self.request.model == other.request.model and self.stage is other.stage and self is not other


class Fairness:
    """Of the tenants of one model and priority."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._cost_max: dict[str, int] = {}
        # By a tenant that has somebody in the queue, and any other: how much more the other was served since the first
        # has, and the least that this ever was.
        self._ahead: dict[str, dict[str, tuple[int, int]]] = {}

    def join(self, entry: ExpectedRequest) -> None:
        tenant = entry.request.tenant
        self._cost_max[tenant] = max(self._cost_max.get(tenant, 0), entry.cost)
        if tenant not in self._waiting:
            self._waiting[tenant] = 0
            self._ahead[tenant] = {}
        self._waiting[tenant] += 1

    def serve(self, entry: ExpectedRequest) -> None:
        """Called before it leaves the queue."""
        tenant, cost = entry.request.tenant, entry.cost
        for waiting, others in self._ahead.items():
            if waiting == tenant:
                continue
            ahead, least = others.get(tenant, (0, 0))
            others[tenant] = (ahead + cost, least)
            bound = self._cost_max[tenant] + self._cost_max[waiting]
            assert ahead + cost - least <= bound, (
                f"{tenant!r} was served {ahead + cost - least} more than {waiting!r}, which waits; {bound} are fair"
            )
        mine = self._ahead[tenant]
        for other in self._cost_max:
            ahead, least = mine.get(other, (0, 0))
            mine[other] = (ahead - cost, min(least, ahead - cost))

    def leave(self, entry: ExpectedRequest) -> None:
        tenant = entry.request.tenant
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant], self._ahead[tenant]


def check_turn(entry: ExpectedRequest, live: Iterable[ExpectedRequest]) -> None:
    """It gets a lease out of the queue: those before it have to be out of it."""
    for other in live:
        if other.is_queued and other.is_beside(entry):
            mine, theirs = entry.request, other.request
            assert theirs.priority >= mine.priority, f"{entry.name} overtakes {other.name}, whose priority is better"
            is_peer = (theirs.priority, theirs.tenant) == (mine.priority, mine.tenant)
            assert not is_peer or other.queue_index > entry.queue_index, (
                f"{entry.name} overtakes {other.name}, which came before"
            )
