"""Decides which requests may resume at another endpoint after their endpoint failed, how often and how fast.

A request that crashes its endpoint would crash the next endpoint as well. Such a request is recognised by its lack of
progress: its client got almost no tokens between two endpoint failures. A request that made progress between two
failures did not cause at least one of the failures. If several requests were at both endpoints, only one of these
requests is the cause, so each request gets one more try.

A connection can also break, or go silent, while the endpoint keeps running. So a suspected request is first put on
trial: the request waits until each of its endpoints passes a health check and reports the name of its clock, which
identifies the process. The same name as before clears the request of suspicion, because the process that served the
request still runs. A different name confirms that the process ended. There is no trial if the endpoint reported the
failure itself, reports no clock, or is draining.

A request whose endpoints failed before its first token is judged in the same way, with higher limits: the progress of
such a request cannot be measured, and several endpoints may fail in a row for other reasons.

Retries of requests without output are limited to a share of the requests, plus a minimum rate (RetryBudget).
"""

from __future__ import annotations

import math

from trioserve.contracts.errors import EndpointLost, RequestPoisoned, TrioserveError
from trioserve.router.endpoint_state import DEATHS, LOST, EndpointHealth, EndpointState, Fault
from trioserve.router.endpoints import Endpoints
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Break, Ticket

__all__ = ["Continuations", "RetryBudget"]

BURST_SECONDS = 10.0  # The budget saves the unused retries of this many seconds.
# Float sums need this tolerance. Without it, no retry might be available at the time that `next_at` returned.
ROUNDING = 1e-9


class RetryBudget:
    """A token bucket of retries.

    Args:
        share_max: retries that each request adds to the budget, for example 0.1.
        per_second_min: retries that each second adds to the budget.
        burst_seconds: capacity of the budget, in seconds of `per_second_min`. At least one retry fits.
    """

    def __init__(self, share_max: float, per_second_min: float, *, burst_seconds: float = BURST_SECONDS) -> None:
        self._share_max = share_max
        self._per_second = per_second_min
        self._tries_max = max(1.0, per_second_min * burst_seconds) if share_max or per_second_min else 0.0
        self._tries = self._tries_max
        self._filled_at: float | None = None

    def note_request(self) -> None:
        self._tries = min(self._tries_max, self._tries + self._share_max)

    def take(self, now: float) -> bool:
        """Use one retry of the budget if the budget has a retry.

        Args:
            now: time in seconds.

        Returns:
            True if the retry is allowed.
        """
        if not self.has_one(now):
            return False
        self._tries = max(0.0, self._tries - 1)
        return True

    def spend(self, now: float) -> None:
        """Use one retry of the budget even if the budget is empty. The budget does not become negative.

        Args:
            now: time in seconds.
        """
        self.has_one(now)
        self._tries = max(0.0, self._tries - 1)

    def has_one(self, now: float) -> bool:
        """Return True if the budget has a retry.

        Args:
            now: time in seconds.
        """
        if self._filled_at is not None:
            self._tries = min(self._tries_max, self._tries + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        return self._tries >= 1 - ROUNDING

    def next_at(self, now: float) -> float:
        """Return when the next retry is available.

        Args:
            now: time in seconds.

        Returns:
            The time in seconds, or math.inf if a retry is available now or if time alone adds none.
        """
        if self.has_one(now) or not self._per_second:
            return math.inf
        return max(now + (1 - self._tries) / self._per_second, math.nextafter(now, math.inf))


ENDPOINTS_OWN = DEATHS | {Fault.FAILED}
"""Faults that a request may cause after its first token."""


class Continuations:
    """Decides whether requests may try again or resume, and counts the requests that resume or must not.

    Args:
        settings: limits.
        fleet: all endpoints. This class does not modify them.

    Attributes:
        budget: retries that requests may still use. Each new request adds to it.
        total: streams that got a lease to resume with.
        refused_total: streams that were not allowed to resume, by reason.
        budget: retries before the first token.
    """

    def __init__(self, settings: RouterSettings, fleet: Endpoints) -> None:
        self.total = 0
        self.refused_total: dict[str, int] = {}
        self._settings = settings
        self._fleet = fleet
        self.budget = RetryBudget(settings.retry_share_max, settings.retries_per_second_min)
        self._pace = RetryBudget(0.0, settings.continuations_per_second_max, burst_seconds=1.0)

    def note_break(
        self, ticket: Ticket, fault: Fault, endpoint: EndpointState, token_count: int, *, is_certain: bool
    ) -> None:
        """Record that an endpoint failed while it served a request.

        Args:
            ticket: the request.
            fault: how the endpoint failed.
            token_count: tokens that the client has received so far.
            is_certain: True if the endpoint reported the failure itself.
        """
        if fault in ENDPOINTS_OWN:
            has_progress = token_count - ticket.token_count >= self._settings.progress_tokens_min
            clock = None if is_certain else endpoint.clock
            broken = Break(endpoint.id, clock, endpoint.checks_total, endpoint.suspects_seen <= 1)
            ticket.broken = (broken,) if has_progress else (*ticket.broken, broken)
        ticket.token_count = token_count

    def note_failed(
        self, ticket: Ticket, fault: Fault, endpoint: EndpointState, now: float, *, is_certain: bool
    ) -> None:
        """Record that an endpoint failed a request without output. The time at the endpoint is no waiting time.

        Args:
            ticket: the request.
            fault: how the endpoint failed.
            now: time in seconds.
            is_certain: True if the endpoint reported the failure itself.
        """
        served_seconds = now - ticket.leased_at
        ticket.own_deadline += served_seconds
        ticket.queue_deadline += served_seconds
        if fault in DEATHS:
            self.note_break(ticket, fault, endpoint, 0, is_certain=is_certain)
        if fault in LOST:
            # The request may wait for an endpoint as long as a stream may, unless its own deadline is earlier.
            ticket.is_lost = True
            patience = now + self._settings.continuation_seconds_max
            ticket.queue_deadline = min(ticket.own_deadline, max(ticket.queue_deadline, patience))
        elif fault is not Fault.BUSY:
            ticket.failed_by |= {endpoint.id}
            if fault is Fault.REFUSED:
                ticket.refused_by |= {endpoint.id}

    def may_try_again(self, ticket: Ticket, fault: Fault, now: float, *, is_draining: bool) -> bool:
        """Return True if a request without output may wait for another endpoint.

        A request whose endpoint was lost may always wait, even if all endpoints are ejected, because an endpoint may
        recover in time. The retry budget limits retries after error responses and full endpoints. If all healthy
        endpoints are full, the client gets the refusal at once.

        Args:
            ticket: the request.
            fault: how the endpoint failed.
            now: time in seconds.
            is_draining: True if the router accepts no new requests.
        """
        if ticket.request.pinned is not None:
            return False
        if fault in LOST:  # If the deadline has passed, the queue refuses the request with a Retry-After.
            return self._fleet.is_any_left(ticket)
        if now >= ticket.queue_deadline:
            return False
        if fault is Fault.INVALID and not is_draining:
            # An invalid response is never the request's fault, so the retry does not need the budget.
            return self._fleet.is_any_left(ticket)
        if fault is Fault.REFUSED and not is_draining:
            return self._fleet.is_any_left(ticket, unejected=True)
        if is_draining or len(ticket.failed_by) >= self._settings.attempts_max:
            return False
        if fault is Fault.BUSY:
            return self._fleet.is_any_left(ticket, has_not_refused=True) and self.budget.take(now)
        return self._fleet.is_any_left(ticket, unejected=True) and self.budget.take(now)

    def refusal(self, ticket: Ticket, *, is_served: bool) -> TrioserveError | None:
        """Return the error that ends the request. None if the request may resume, or must first wait for the checks of
        its failed endpoints.

        Args:
            ticket: the request whose endpoint failed.
            is_served: True if an endpoint serves the request's model.
        """
        settings = self._settings
        poisoned = self.judge(ticket)
        if poisoned is not None:
            return poisoned
        if ticket.continuations >= settings.continuations_max:
            return self._refused(
                "too_many",
                EndpointLost(
                    f"the endpoint failed, and this request was already resumed elsewhere {ticket.continuations} times"
                ),
            )
        if ticket.request.pinned is not None or not is_served:
            return self._refused(
                "no_endpoint", EndpointLost("the endpoint failed, and no other endpoint serves its model")
            )
        return None

    def judge(self, ticket: Ticket) -> TrioserveError | None:
        """Decide from the checks and reports of a request's failed endpoints: must the request wait for more of them?

        Args:
            ticket: the request. `ticket.broken` and `ticket.is_on_trial` are updated.

        Returns:
            The error that ends the request if the request is considered the cause of the failures, otherwise None.
        """
        still_running = {broken: self._is_still_running(broken) for broken in ticket.broken}
        ticket.broken = tuple(broken for broken in ticket.broken if not still_running[broken])
        # If several requests were at both endpoints, it is unknown which request is the cause.
        is_suspected = bool(ticket.broken) and len(ticket.broken) >= self._breaks_max(ticket)
        ticket.is_on_trial = is_suspected and None in still_running.values()
        return self.poisoned(ticket) if is_suspected and not ticket.is_on_trial else None

    def _breaks_max(self, ticket: Ticket) -> int:
        is_alone = ticket.broken[-1].is_alone
        if ticket.has_token:
            return self._settings.breaks_max + (not is_alone)
        return self._settings.attempts_max * (1 if is_alone else 2)

    def _is_still_running(self, broken: Break) -> bool | None:
        """Return True if the process that served the stream still runs. None if this is not known yet."""
        state = self._fleet.by_id.get(broken.endpoint)
        if broken.clock is None or state is None:
            return False
        if state.clock_checks > broken.checks:
            return state.clock == broken.clock
        return False if state.health is EndpointHealth.DRAINING else None

    def poisoned(self, ticket: Ticket) -> TrioserveError:
        """Return the error for a request that is considered the cause of its endpoints' failures.

        Args:
            ticket: the request, with the endpoints that failed.
        """
        names = ", ".join(f'"{broken.endpoint}"' for broken in ticket.broken)
        return self._refused(
            "poisoned",
            RequestPoisoned(
                f"{len(ticket.broken)} endpoints in a row broke while they served this request ({names}): it is not "
                f"sent to another endpoint"
            ),
        )

    def has_turn(self, now: float) -> bool:
        """Return whether the rate limit allows one more request to resume.

        Args:
            now: time in seconds.
        """
        return self._pace.has_one(now)

    def next_turn(self, now: float) -> float:
        """Return when the rate limit allows the next request to resume, or math.inf if a request may resume now.

        Args:
            now: time in seconds.
        """
        return self._pace.next_at(now)

    def note(self, ticket: Ticket, now: float) -> None:
        """Count a stream that got a lease to resume with.

        Args:
            ticket: the stream's request.
            now: time in seconds.
        """
        ticket.continuations += 1
        self.total += 1
        self._pace.spend(now)

    def _refused(self, reason: str, error: TrioserveError) -> TrioserveError:
        self.refused_total[reason] = self.refused_total.get(reason, 0) + 1
        return error
