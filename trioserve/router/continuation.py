"""Which streams may go on at another endpoint when theirs broke off, how often and how fast.

A stream that is the cause of its endpoint's end would end the next one as well. It is told by not getting on: its
client got next to nothing between two endpoints that broke. Who got on in between was a bystander, at least once. Where
several were at both endpoints, one of them is the cause, and they have one try more.
"""

from __future__ import annotations

from trioserve.contracts.errors import EndpointLost, RequestPoisoned, TrioserveError
from trioserve.router.endpoint_state import Fault
from trioserve.router.retry_budget import RetryBudget
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket

__all__ = ["Continuations"]

ENDPOINTS_OWN = frozenset({Fault.BROKE, Fault.HUNG})
"""Faults that a request may be the cause of."""


class Continuations:
    """total: streams that got a lease to go on with. refused_total: that may not, by the reason."""

    def __init__(self, settings: RouterSettings, budget: RetryBudget) -> None:
        self.total = 0
        self.refused_total: dict[str, int] = {}
        self._settings = settings
        self._budget = budget
        self._pace = RetryBudget(0.0, settings.continuations_per_second_max, burst_seconds=1.0)

    def broke_off(self, ticket: Ticket, fault: Fault, token_count: int) -> None:
        """The stream's endpoint has failed it. token_count: what its client has by now."""
        if fault in ENDPOINTS_OWN:
            has_got_on = token_count - ticket.token_count >= self._settings.progress_tokens_min
            ticket.breaks = 1 if has_got_on else ticket.breaks + 1
        ticket.token_count = token_count

    def refusal(self, ticket: Ticket, *, is_served: bool, is_alone: bool) -> TrioserveError | None:
        """Why it may not go on, if so. is_served: there are endpoints for its model. is_alone: of those at the endpoint
        with which another one had broken before; else nobody knows yet which of them it is."""
        settings = self._settings
        if ticket.breaks >= settings.breaks_max + (not is_alone):
            names = ", ".join(f'"{id}"' for id in ticket.tried)
            return self._refused(
                "poisoned",
                RequestPoisoned(
                    f"{ticket.breaks} endpoints in a row broke while they served this request ({names} failed it): it "
                    f"is not sent to another one"
                ),
            )
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
        self._budget.spend(now)

    def _refused(self, reason: str, error: TrioserveError) -> TrioserveError:
        self.refused_total[reason] = self.refused_total.get(reason, 0) + 1
        return error
