"""Rules of the queue: which request may get a lease before which, with independent records.

Within a model and a priority, streams that broke off, requests that lost an endpoint, and requests whose prompt is
computed come before newcomers, but only a limited number in a row while newcomers wait. Requests whose prompt is
computed separately and whole requests have separate queues. In each queue, a better priority comes first. Within a
priority, tenants take turns. Within a tenant, requests go in order of arrival.

Turns are fair as in start-time fair queueing (Goyal, Vin and Cheng, 1996): over any time in which a tenant has a
request in the queue, every other tenant gets at most as much service as this tenant, plus the largest cost of either.

The number of a request's sequences does not matter: it gets its lease in its turn if one of its sequences finds a slot.
So no request blocks others because it does not fit, and none must be overtaken.
"""

from __future__ import annotations

from collections.abc import Iterable

from trioserve.contracts.endpoint import PairOutcome, RoutedRequest, Stage
from trioserve.router.ticket import Break, Ticket
from trioserve.router.waiting_queue import SEQUENCE_COST_TOKENS
from trioserve.simulation.router.streams import SimulatedStream

__all__ = ["Fairness", "ExpectedRequest", "check_turn"]


class ExpectedRequest:
    """One request of a simulated router, with all that was requested and reported.

    The attributes stage, is_disaggregated, prefilled_by, is_held, outcome, stage_fault, is_answered, broken,
    is_on_trial, continuations, fingerprint, can_resume and is_moving are as in Ticket.

    Args:
        name: name of the request.
        request: the request.
        index: number of the arrival.
        wait_ends_at: the router's deadline for its wait.

    Attributes:
        own_deadline: its own deadline for its wait.
        leased_at: time of its last lease.
        queue_index: its number in the order of joining a queue.
        state: name of its TicketState.
        failed_index: number of the failure, or of the end of its prefill, after which it waits again. None: it waits
            for the first time.
        endpoint: endpoint of its lease, or None.
        left: endpoint before it waited again.
        tried: endpoints at which it failed, each with the number of successful health checks before.
        failed_by: endpoints that answered it with an error, before its first token.
        refused_by: those of them whose refusal another endpoint has to confirm.
        is_lost: True if it lost an endpoint before its first token.
        is_sent: True if it is at its endpoint.
        has_token: True after its first token.
        is_behind: True if its queue was not empty when it arrived.
        tokens: tokens that its client has.
        stream: its stream, or None.
        tokens_at_break: tokens at the last break of its stream.
        is_condemned: True if its trial is over and it must be ended.
        moving_index: its number in the order of requests that must move.
        next: endpoint of its next lease, or None.
    """

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
        self.can_resume = False
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
        """True if its stream broke off and waits to be resumed."""
        return self.state == "waiting" and self.has_token

    @property
    def is_again(self) -> bool:
        """True if it lost an endpoint before its first token. It then goes before newcomers."""
        return self.state == "waiting" and self.failed_index is not None and not self.has_token

    @property
    def moment(self) -> str:
        """Name of its progress, for the counts."""
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
    """Fairness among the tenants of one model and priority."""

    def __init__(self) -> None:
        self._waiting: dict[str, int] = {}
        self._cost_max: dict[str, int] = {}
        # For each tenant with a request in the queue and each other tenant: how much more service the other has had
        # since then, and the lowest value of that difference.
        self._ahead: dict[str, dict[str, tuple[int, int]]] = {}

    def join(self, entry: ExpectedRequest) -> None:
        tenant = entry.request.tenant
        self._cost_max[tenant] = max(self._cost_max.get(tenant, 0), entry.cost)
        if tenant not in self._waiting:
            self._waiting[tenant] = 0
            self._ahead[tenant] = {}
        self._waiting[tenant] += 1

    def serve(self, entry: ExpectedRequest) -> None:
        """Note that a request gets a lease. Call it before the request leaves the queue.

        Args:
            entry: the request.
        """
        tenant, cost = entry.request.tenant, entry.cost
        for waiting, others in self._ahead.items():
            if waiting == tenant:
                continue
            ahead, least = others.get(tenant, (0, 0))
            others[tenant] = (ahead + cost, least)
            bound = self._cost_max[tenant] + self._cost_max[waiting]
            assert ahead + cost - least <= bound, (
                f"{tenant!r} was served {ahead + cost - least} more than {waiting!r}, which waits; allowed are {bound}"
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
    """Assert that a request that gets a lease from the queue has no request before it.

    Args:
        entry: the request.
        live: all requests that have not ended.
    """
    for other in live:
        if other.is_queued and other.is_beside(entry):
            mine, theirs = entry.request, other.request
            assert theirs.priority >= mine.priority, f"{entry.name} overtakes {other.name}, whose priority is better"
            is_peer = (theirs.priority, theirs.tenant) == (mine.priority, mine.tenant)
            assert not is_peer or other.queue_index > entry.queue_index, (
                f"{entry.name} overtakes {other.name}, which came before"
            )
