"""Which requests may go on at another endpoint when theirs broke off, how often and how fast.

A stream that is the cause of its endpoint's end would end the next one as well. It is told by not getting on: its
client got next to nothing between two endpoints that broke. Who got on in between was a bystander, at least once. Where
several were at both endpoints, one of them is the cause, and they have one try more.

A connection may also break, or nothing come over it, while the endpoint goes on. So before a stream is taken for the
cause it is on trial: it waits until each of its endpoints is found well and tells its clock after that. The clock of
before clears the stream, as what served it has not ended; another one confirms that it has. Of an endpoint that has
said itself that it broke, or that tells no clock, or that leaves, nothing can be learnt, and there is no trial.

A request without a token that lost its endpoints is judged in the same way, with larger bounds: nobody can see whether
it got on, and endpoints may die in a row for reasons of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, RequestPoisoned, TrioserveError
from trioserve.router.endpoint_state import DEATHS, EndpointHealth, EndpointState, Fault
from trioserve.router.retry_budget import RetryBudget
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Break, Ticket

__all__ = ["Continuations"]

ENDPOINTS_OWN = DEATHS | {Fault.FAILED}
"""Faults that a request with a token may be the cause of."""


class Continuations:
    """total: streams that got a lease to go on with. refused_total: that may not, by the reason. endpoints: those that
    there are, to be looked at."""

    def __init__(self, settings: RouterSettings, endpoints: Mapping[EndpointId, EndpointState]) -> None:
        self.total = 0
        self.refused_total: dict[str, int] = {}
        self._settings = settings
        self._endpoints = endpoints
        self._pace = RetryBudget(0.0, settings.continuations_per_second_max, burst_seconds=1.0)

    def broke_off(
        self, ticket: Ticket, fault: Fault, endpoint: EndpointState, token_count: int, *, is_certain: bool
    ) -> None:
        """Note that an endpoint has failed a request.

        Args:
            token_count: tokens that its client has by now.
            is_certain: the endpoint has said itself that it broke.
        """
        if fault in ENDPOINTS_OWN:
            has_got_on = token_count - ticket.token_count >= self._settings.progress_tokens_min
            clock = None if is_certain else endpoint.clock
            broken = Break(endpoint.id, clock, endpoint.checks_total, endpoint.suspects_seen <= 1)
            ticket.broken = (broken,) if has_got_on else (*ticket.broken, broken)
        ticket.token_count = token_count

    def refusal(self, ticket: Ticket, *, is_served: bool) -> TrioserveError | None:
        """Why it may not go on, if so; otherwise it may, or is on trial. is_served: there are endpoints for its
        model."""
        settings = self._settings
        poisoned = self.judge(ticket)
        if poisoned is not None:
            return poisoned
        if ticket.continuations >= settings.continuations_max:
            return self._refused(
                "too_many",
                EndpointLost(
                    f"the endpoint failed, and this request has gone on elsewhere {ticket.continuations} times"
                ),
            )
        if ticket.request.pinned is not None or not is_served:
            return self._refused(
                "no_endpoint", EndpointLost("the endpoint failed, and no other takes requests for its model")
            )
        return None

    def judge(self, ticket: Ticket) -> TrioserveError | None:
        """Look at what is known by now of the endpoints that broke with it, and settle whether it is on trial. Returns
        why it ends, if it is taken for the cause."""
        goes_on = {broken: self._goes_on(broken) for broken in ticket.broken}
        ticket.broken = tuple(broken for broken in ticket.broken if not goes_on[broken])
        # Nobody knows yet who of several it is that were at both.
        is_suspected = bool(ticket.broken) and len(ticket.broken) >= self._breaks_max(ticket)
        ticket.is_on_trial = is_suspected and None in goes_on.values()
        return self.poisoned(ticket) if is_suspected and not ticket.is_on_trial else None

    def _breaks_max(self, ticket: Ticket) -> int:
        is_alone = ticket.broken[-1].is_alone
        if ticket.has_token:
            return self._settings.breaks_max + (not is_alone)
        return self._settings.attempts_max * (1 if is_alone else 2)

    def _goes_on(self, broken: Break) -> bool | None:
        """Whether what served the stream has not ended; None: nobody knows yet."""
        state = self._endpoints.get(broken.endpoint)
        if broken.clock is None or state is None:
            return False
        if state.clock_checks > broken.checks:
            return state.clock == broken.clock
        return False if state.health is EndpointHealth.DRAINING else None

    def poisoned(self, ticket: Ticket) -> TrioserveError:
        """Why one ends that is taken for the cause."""
        names = ", ".join(f'"{broken.endpoint}"' for broken in ticket.broken)
        return self._refused(
            "poisoned",
            RequestPoisoned(
                f"{len(ticket.broken)} endpoints in a row broke while they served this request ({names} failed it): it "
                f"is not sent to another one"
            ),
        )

    def has_turn(self, now: float) -> bool:
        """Whether one more may go on at this moment."""
        return self._pace.has_one(now)

    def next_turn(self, now: float) -> float:
        """When one more may that may not now; math.inf if one may now."""
        return self._pace.next_at(now)

    def note(self, ticket: Ticket, now: float) -> None:
        """It has got a lease to go on with."""
        ticket.continuations += 1
        self.total += 1
        self._pace.spend(now)

    def _refused(self, reason: str, error: TrioserveError) -> TrioserveError:
        self.refused_total[reason] = self.refused_total.get(reason, 0) + 1
        return error
