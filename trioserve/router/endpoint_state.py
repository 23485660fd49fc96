"""The health of an endpoint as a table of states, and the number of requests that the endpoint can run.

    STARTING ───► HEALTHY ◄──── PROBING
        │          │  ▲           ▲  │
        │          ▼  │           │  ▼
        └──────►  EJECTED ────────┘ (one probe: a request, or a health check)
                     ▲               │
                     └───────────────┘
    DRAINING: from every state. The endpoint is removed when its last request ends. If it is added again before that, it
    is STARTING.

A HEALTHY endpoint gets as many requests as its slow start allows. A PROBING endpoint gets one request at a time. The
limits of leases and of load apply in both states. If no client's request comes, a PROBING endpoint that has served a
probe of the router is HEALTHY after the next passed health check.

A request of several sequences goes to an endpoint that has a slot for each of them. If no endpoint has enough slots,
the request goes to an endpoint with one free slot. The other sequences of the request wait inside that endpoint, and
get the next free slots before later requests. So a large request takes only the slots that it uses: no endpoint is
emptied for the large request, and no request has to overtake it.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from msgspec import UNSET

from trioserve.contracts.endpoint import EndpointId, EndpointLoad
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.settings import RouterSettings

__all__ = ["DEATHS", "LOST", "EndpointHealth", "EndpointState", "Fault", "OwnShare"]

# Failed requests count as load, up to this number. A higher number would not change the choice of endpoints.
FAILED_LOADS_MAX = 256
DIVIDED_SECONDS_MIN = 0.3  # Within DIVIDED_SECONDS_MIN, an endpoint reports any change since its last report.
DIVIDED_SECONDS_MAX = 0.6


class EndpointHealth(enum.Enum):
    STARTING = "starting"  # No health check has ended yet.
    HEALTHY = "healthy"
    EJECTED = "ejected"
    PROBING = "probing"
    DRAINING = "draining"


class Fault(enum.Enum):
    """Ways in which an endpoint fails a request, before its first token or in the middle of its stream."""

    UNREACHABLE = "unreachable"  # The router could not connect, so the endpoint never got the request.
    BUSY = "busy"  # The endpoint answered 429 or 503. It is healthy, but has more load than the router assumed.
    BROKE = "broke"  # The connection closed before the response was complete. The endpoint may have died.
    FAILED = "failed"  # The endpoint answered 500, 502 or 504, or ended the stream with an error that is its own fault.
    INVALID = "invalid"  # No inference server sends this response. Another program uses the endpoint's address.
    REFUSED = "refused"  # The endpoint refused the request in a way that another endpoint has to confirm.
    # The endpoint could not fetch the blocks of a prompt. Either of the two endpoints may be at fault.
    TRANSFER = "transfer"
    HUNG = "hung"  # The endpoint sends nothing on this connection any more, or does not answer health checks.
    LEAVING = "leaving"  # The endpoint ended the stream and reported that it shuts down.


LOST = frozenset({Fault.UNREACHABLE, Fault.BROKE, Fault.HUNG, Fault.LEAVING})
"""Faults in which all work of an endpoint is lost, not only one request. The requests wait for another endpoint, or
until the same endpoint has recovered.
"""

DEATHS = frozenset({Fault.BROKE, Fault.HUNG})
"""Faults of LOST that the request itself may have caused."""


class OwnShare(NamedTuple):
    """Fraction of an endpoint's reported free slots that this router may use. All routers see the same report.

    Attributes:
        share: fraction of the free slots that this router may use.
        draw: random number, 0 <= draw < 1. The number decides which router gets the remainder of the division, and
            which router may first use slots that other routers do not use.
    """

    share: float
    draw: float


_H = EndpointHealth

_LEGAL_MOVES: frozenset[tuple[EndpointHealth, EndpointHealth]] = frozenset(
    {
        (_H.STARTING, _H.HEALTHY),
        (_H.STARTING, _H.EJECTED),
        (_H.HEALTHY, _H.EJECTED),
        (_H.EJECTED, _H.PROBING),
        (_H.PROBING, _H.HEALTHY),
        (_H.PROBING, _H.EJECTED),
        *((health, _H.DRAINING) for health in EndpointHealth if health is not _H.DRAINING),
        (_H.DRAINING, _H.STARTING),
    }
)


class EndpointState:
    """State of one endpoint at the router. Times are seconds of the router's clock.

    Args:
        id: name of the endpoint.
        models: model names that the endpoint serves.
        settings: limits.
        leases_max: number of sequences that the endpoint accepts from all routers together.
        slow_start: True if other endpoints run already, so that the load of this endpoint grows slowly.
        role: stages of disaggregated requests that the endpoint should compute. None: no stage.
        number: position of the endpoint in the order in which endpoints were added.
        checks_total: initial count of passed health checks. It is the highest count of all removed endpoints, so that
            an endpoint that is added again under its old id does not have a lower count than before.
        on_change: called with this object after each change of a value that an index may have counted.

    Attributes:
        accepts_requests: True if the endpoint's health allows requests.
        leases_own_max: number of leases that this router may grant under the endpoint's limit.
        lease_share: leases that this router may grant, if other routers grant the rest of `leases_max`. None: all of
            them.
        claims: number of sequences of the requests that have a lease at this endpoint. Sequences beyond `leases_max`
            wait for a slot.
        in_flight: sequences that were given to the endpoint and have not ended. Exceeds `claims` if leases end at the
            first token.
        sent: sequences in `in_flight` whose requests were sent, by `Lease.sent_index`.
        others: number of sequences of other routers, according to the last report.
        checks_total: health checks that the endpoint passed.
        hangs_total: how often the endpoint stopped getting requests because it did not answer.
        clock: clock name in the last report, which identifies the endpoint's process. None: not reported.
        clock_checks: `checks_total` at the time of that report.
        suspects: number of requests at this endpoint that were at another endpoint when that endpoint failed.
        suspects_seen: highest value of `suspects` since the last passed health check.
        fingerprint: identifies the computation. Endpoints with equal fingerprints compute equal tokens. None: not
            reported.
        moved_from_total: streams that left this endpoint, by a move or a failure, and resumed at another endpoint.
        moved_to_total: streams that left another endpoint and resumed at this endpoint.
        failures_total: failed requests, by reason.
        refusals_in_a_row: requests that the endpoint refused as the client's fault since it last served a request.
    """

    def __init__(
        self,
        id: EndpointId,
        models: frozenset[str],
        settings: RouterSettings,
        *,
        leases_max: int,
        slow_start: bool = False,
        role: EngineRole | None = None,
        number: int = 0,
        checks_total: int = 0,
        on_change: Callable[[EndpointState], None] = lambda state: None,
    ) -> None:
        self.id = id
        self.number = number
        self.models = models
        self.leases_max = leases_max
        self.role = role
        self.health = EndpointHealth.STARTING
        self.accepts_requests = False
        self.leases_own_max = leases_max
        self.claims = 0
        self.in_flight = 0
        self.sent: dict[int, int] = {}
        self.probe_out = False
        self.load: EndpointLoad | None = None
        self.busy_until = 0.0
        self.ejected_until = 0.0
        self.ejections_total = 0
        self.checks_total = checks_total
        self.hangs_total = 0
        self.clock: str | None = None
        self.clock_checks = 0
        self.suspects = 0
        self.suspects_seen = 0
        self.fingerprint: str | None = None
        self.moved_from_total = 0
        self.moved_to_total = 0
        self.failures_total: Counter[str] = Counter()
        self.refusals_in_a_row = 0
        self.others = 0
        self.lease_share: int | None = None
        self._on_change = on_change
        self._settings = settings
        self._load_at = 0.0
        # The number of reported free slots that this router may use. None if it may use all of them.
        self._own_room: int | None = None
        self._divided_until = 0.0
        self._known_at_load = 0  # The number of sequences in flight that the last report includes.
        self._slots_seen = 0
        self._failures_in_a_row = 0
        self._failed_checks_in_a_row = 0
        self._failed_at: deque[float] = deque(maxlen=FAILED_LOADS_MAX)
        self._has_failed_requests = False  # If True, a passed health check does not end the ejection.
        self._has_served_probe = False  # The result of the last probe request.
        self._ejections_in_a_row = 0
        self._is_ejected_by_check = False
        self._owes_slow_start = slow_start
        self._share_since: float | None = None  # The time at which the slow start began. None without a slow start.

    # --- free slots ---

    @property
    def leases(self) -> int:
        """Number of sequences that have a slot."""
        return min(self.claims, self.leases_max)

    @property
    def is_settled(self) -> bool:
        """True once the first health check has ended."""
        return self.health is not EndpointHealth.STARTING

    def share(self, now: float) -> float:
        """Return the fraction of the endpoint's limit that applies now. The fraction grows from 0 to 1 during the slow
        start.

        Args:
            now: time in seconds.
        """
        seconds = self._settings.slow_start_seconds
        if self._share_since is None or now >= self._share_since + seconds:
            return 1.0
        return (now - self._share_since) / seconds

    def waiting_depth(self, now: float, *, more: int = 0) -> int | None:
        """Return the number of sequences that wait inside the endpoint, as reported and corrected by later changes.

        Args:
            now: time in seconds.
            more: number of further sequences to assume.

        Returns:
            The number of sequences, or None if the last report is too old.
        """
        load, there = self.load, self._sequences_inside(now)
        if load is None or there is None:
            return None
        slots = load.max_num_seqs
        if slots is None:
            # If sequences wait inside the endpoint, all of its slots are in use. Otherwise, the endpoint has at least
            # as many slots as were ever in use.
            slots = load.running if load.waiting else max(load.running, self._slots_seen)
        if there == 0:
            return 0  # At an idle endpoint, the sequences of a large request do not wait for any other request.
        return max(0, there + more - slots)

    def _sequences_inside(self, now: float) -> int | None:
        """Return how many sequences of all routers run or wait inside the endpoint. None if the number is unknown."""
        load = self.load
        if load is None or now >= self._load_at + self._settings.load_seconds_max:
            return None
        return max(0, load.running + load.waiting + self.in_flight - self._known_at_load)

    def has_room(self, sequences: int, now: float) -> bool:
        """Return whether the endpoint has a free slot for each of the sequences.

        Args:
            sequences: number of sequences.
            now: time in seconds.
        """
        if not self.accepts_requests or now < self.busy_until:
            return False
        if self.health is EndpointHealth.PROBING and self.probe_out:
            return False
        share = 1.0 if self._share_since is None else self.share(now)
        if self.claims + sequences > max(1, int(self.leases_own_max * share)):
            return False
        if self.lease_share is not None:
            there = self._sequences_inside(now)
            if there is not None and there + sequences > self.leases_max:
                return False  # Sequences of other routers count, even if the other routers exceed their lease shares.
            is_divided = self._own_room is not None and now < self._divided_until
            if is_divided and self.in_flight - self._known_at_load + sequences > (self._own_room or 0):
                return False
        depth = None if self.load is None else self.waiting_depth(now, more=sequences)
        return depth is None or depth <= self._settings.waiting_depth_max

    def load_at(self, now: float) -> tuple[float, float]:
        """Return the load relative to the limit, and the amount of that load that other routers cause.

        Args:
            now: time in seconds.

        Returns:
            A pair. The first number is the larger of two loads: the load of this router relative to its share, and the
            load of all routers relative to the whole limit. The second number is the amount of the first number that
            other routers cause. It is 0 if this router's load is the larger load.
        """
        in_flight = self.in_flight + (self._failed_lately(now) if self._failed_at else 0)
        own = in_flight / self.leases_own_max
        if not self.others or now >= self._load_at + self._settings.load_seconds_max:
            return own, 0.0
        others = self.others / self.leases_max
        together = in_flight / self.leases_max + others
        return (together, others) if together > own else (own, others)

    def _failed_lately(self, now: float) -> int:
        """Return the number of recently failed requests. Failed requests count as load. Otherwise an endpoint that
        fails fast would look idle.
        """
        while self._failed_at and self._failed_at[0] + self._settings.failed_load_seconds <= now:
            self._failed_at.popleft()
        return len(self._failed_at)

    @property
    def has_ejection_end(self) -> bool:
        """True if the endpoint is ejected and the end of the ejection is known."""
        return self.health is EndpointHealth.EJECTED and not self._waits_for_probe

    def wants_probe(self, now: float) -> bool:
        """Return whether the router should send a probe request to the ejected endpoint.

        Args:
            now: time in seconds.
        """
        is_ejected = self.health is EndpointHealth.EJECTED and self._waits_for_probe
        return is_ejected and now >= self.ejected_until

    @property
    def _waits_for_probe(self) -> bool:
        return self._has_failed_requests and self._settings.sends_probes

    # --- methods for leases ---

    def take(self, sequences: int) -> bool:
        """Grant a lease to a request.

        Args:
            sequences: sequences of the request.

        Returns:
            True if the request is a probe.
        """
        is_probe = self.health is EndpointHealth.PROBING
        self.probe_out |= is_probe
        self.claims += sequences
        self.in_flight += sequences
        self._on_change(self)
        return is_probe

    def end_lease(self, sequences: int) -> None:
        """Free the slots of a request, which may still run.

        Args:
            sequences: sequences of the request.
        """
        self.claims -= sequences
        self._on_change(self)

    def end_probe(self) -> None:
        """End the current probe, so that another probe is allowed."""
        self.probe_out = False
        self._on_change(self)

    def end_flight(self, sequences: int, sent_index: int | None) -> None:
        """Forget a request that has ended or left.

        Args:
            sequences: sequences of the request.
            sent_index: `Lease.sent_index` of the request. None: the request was never sent.
        """
        if sent_index is not None:
            del self.sent[sent_index]
        self.in_flight -= sequences
        assert 0 <= self.claims <= self.in_flight
        self._on_change(self)

    # --- methods for reports ---

    def set_models(self, models: frozenset[str]) -> None:
        self.models = models
        self._on_change(self)

    def set_role(self, role: EngineRole | None) -> None:
        self.role = role
        self._on_change(self)

    def set_lease_share(self, share: int | None) -> None:
        """Set how many leases this router may grant. Existing leases beyond the share stay until they end.

        Args:
            share: number of leases. None: the whole limit.
        """
        self.lease_share = share
        self.leases_own_max = self.leases_max if share is None else share
        self._on_change(self)

    def note_load(self, load: EndpointLoad, now: float, *, sent_when_asked: int) -> None:
        """Accept a load report.

        Args:
            load: the report.
            now: time in seconds.
            sent_when_asked: index of the last request that was sent to any endpoint before this report was requested.
                Later requests may be missing in the report, so they are added to its numbers.
        """
        self.load = load
        self._load_at = now
        self.clock = None if load.clock is UNSET else load.clock
        self.clock_checks = self.checks_total
        self._known_at_load = sum(count for index, count in self.sent.items() if index <= sent_when_asked)
        self._slots_seen = load.running if load.waiting else max(self._slots_seen, load.running)
        self.others = max(0, load.running + load.waiting - self._known_at_load)
        self._own_room = None
        self._on_change(self)

    def divide_room(self, part: OwnShare, now: float) -> None:
        """Limit this router to its fraction of the free slots in the current report.

        All routers see the same free slots at once. Without a limit, each router would fill all of them. So for a short
        time, each router uses only its fraction, and the slots that its own requests free. No report shows that a
        router does not use its fraction. Therefore, after a random time, any router may use the slots that are still
        free. The free slots are not divided if the endpoint does not report them.

        Args:
            part: fraction of the free slots that this router may use.
            now: time in seconds.
        """
        load = self.load
        if load is not None and load.max_num_seqs is not None:
            room = load.max_num_seqs + self._settings.waiting_depth_max - load.running - load.waiting
            self._own_room = max(0, math.floor(room * part.share + part.draw))
            spread = DIVIDED_SECONDS_MAX - DIVIDED_SECONDS_MIN
            self._divided_until = now + DIVIDED_SECONDS_MIN + spread * part.draw

    def note_check(self, is_well: bool, now: float) -> None:
        """Record the result of a health check.

        If the endpoint was ejected because of failed checks, a passed check makes the endpoint healthy again. If the
        endpoint was ejected because of failed requests, it stays ejected until a probe is allowed. If the endpoint
        served a probe and runs no request of a client, a passed check makes the endpoint healthy.

        Args:
            is_well: True if the endpoint passed.
            now: time in seconds.
        """
        if not is_well:
            self._failed_checks_in_a_row += 1
            self._eject_if(self._failed_checks_in_a_row >= self._settings.failures_max, now)
            self._is_ejected_by_check = self.health is EndpointHealth.EJECTED and not self._has_failed_requests
            return
        self.checks_total += 1
        self.suspects_seen = self.suspects
        self._failed_checks_in_a_row = 0
        if self.health is EndpointHealth.EJECTED and self._is_ejected_by_check:
            self._move(EndpointHealth.PROBING)
        if self.health is EndpointHealth.PROBING and self._has_served_probe and not self.probe_out:
            self._has_failed_requests = False
        if not self._has_failed_requests:
            self._begin(now)

    def note_success(self, now: float) -> None:
        """Record that a request got its first token from this endpoint.

        Args:
            now: time in seconds.
        """
        self._failures_in_a_row = self._failed_checks_in_a_row = self.refusals_in_a_row = 0
        if self.health is not EndpointHealth.EJECTED:
            # If the endpoint is ejected, the request was sent before the failures.
            self._has_failed_requests = False
        self._begin(now)

    def note_probe(self, is_well: bool | None, now: float) -> None:
        """Record the result of a probe request. Does nothing if the endpoint no longer needs a probe.

        Args:
            is_well: True if the endpoint served the probe. None if the endpoint is alive but refused the probe. Then
                only a client's request can show that the endpoint serves requests.
            now: time in seconds.
        """
        if not self.wants_probe(now):
            return
        if is_well is False:
            self._eject(now, is_again=True)
        else:
            self._move(EndpointHealth.PROBING)
            self._has_served_probe = is_well is True

    def _begin(self, now: float) -> None:
        """Make a starting or probed endpoint healthy, so that it gets requests."""
        if self.health is EndpointHealth.STARTING or self.health is EndpointHealth.PROBING:
            if self._owes_slow_start:
                self._share_since = now
            self._ejections_in_a_row = 0
            self._move(EndpointHealth.HEALTHY)

    def note_failure(self, now: float) -> None:
        """Record that a request failed, and that the endpoint caused the failure.

        Args:
            now: time in seconds.
        """
        self._failures_in_a_row += 1
        self._failed_at.append(now)
        has_failed_enough = self._failures_in_a_row >= self._settings.failures_max
        self._has_failed_requests |= self._should_eject(has_failed_enough)
        self._eject_if(has_failed_enough, now)

    def _should_eject(self, has_failed_enough: bool) -> bool:
        is_begun = self.health in (EndpointHealth.STARTING, EndpointHealth.HEALTHY)
        return self.health is EndpointHealth.PROBING or (is_begun and has_failed_enough)

    def _eject_if(self, has_failed_enough: bool, now: float) -> None:
        if self._should_eject(has_failed_enough):
            self._eject(now)

    def note_lost(self, now: float) -> None:
        """Eject the endpoint at once because it is unreachable. Earlier failures do not count against the endpoint's
        next process.

        Args:
            now: time in seconds.
        """
        if self.health in (EndpointHealth.STARTING, EndpointHealth.HEALTHY, EndpointHealth.PROBING):
            self._failures_in_a_row = 0
            self._has_failed_requests = False
            self._eject(now)

    def note_suspect(self, count: int) -> None:
        """Change the number of suspects. A suspect is a request at this endpoint that was at another endpoint when that
        endpoint failed.

        Args:
            count: 1 if a suspected request arrives, -1 if it leaves, 0 if the request is not suspected.
        """
        self.suspects += count
        self.suspects_seen = max(self.suspects_seen, self.suspects)

    def note_hung(self, now: float) -> None:
        """Eject the endpoint because it does not answer, or reports that its step hangs. The next passed check ends the
        ejection.

        Args:
            now: time in seconds.
        """
        if self.accepts_requests:
            self.hangs_total += 1
        self.note_leaving(now)

    def note_leaving(self, now: float) -> None:
        """Eject the endpoint because it shuts down. The next passed check ends the ejection.

        Args:
            now: time in seconds.
        """
        self.note_lost(now)
        self._failures_in_a_row = 0
        self._has_failed_requests = False
        self._is_ejected_by_check = True
        self.ejected_until = math.inf
        self._on_change(self)

    def note_busy(self, now: float, seconds: float) -> None:
        """Send no requests for some time, because the endpoint refused a request and reported that it is full.

        Args:
            now: time in seconds.
            seconds: time during which the endpoint gets no requests.
        """
        self.busy_until = max(self.busy_until, now + seconds)
        self._on_change(self)

    def tick(self, now: float) -> None:
        """Start probing if the ejection time has passed.

        Args:
            now: time in seconds.
        """
        if self.health is EndpointHealth.EJECTED and now >= self.ejected_until and not self._waits_for_probe:
            self._move(EndpointHealth.PROBING)

    def opens_at(self, now: float) -> float:
        """Return when the endpoint may take more requests although no other event occurs.

        Args:
            now: time in seconds.

        Returns:
            The time in seconds, or math.inf if time alone frees no slot.
        """
        moments = [self.busy_until, self._load_at + self._settings.load_seconds_max if self.load is not None else 0.0]
        if self._own_room is not None:
            moments.append(self._divided_until)
        if self._share_since is not None and self.share(now) < 1:
            next_limit = int(self.leases_own_max * self.share(now)) + 1
            moment = self._share_since + self._settings.slow_start_seconds * next_limit / self.leases_own_max
            # Without nextafter, a rounding error might leave the share slightly below the next limit at that time.
            moments.append(max(moment, math.nextafter(now, math.inf)))
        return min((moment for moment in moments if moment > now), default=math.inf)

    def drain(self) -> None:
        if self.health is not EndpointHealth.DRAINING:
            self._move(EndpointHealth.DRAINING)

    def come_back(self, models: frozenset[str], *, leases_max: int, role: EngineRole | None = None) -> None:
        """Restart an endpoint that is added again while it drains.

        Args:
            models: model names that the endpoint serves.
            leases_max: sequences that the endpoint accepts.
            role: stages of disaggregated requests that the endpoint should compute. None: no stage.
        """
        self.models = models
        self.leases_max = leases_max
        self.leases_own_max = leases_max if self.lease_share is None else self.lease_share
        self.role = role
        self.fingerprint = None
        self._owes_slow_start = True
        self._has_failed_requests = False
        self._move(EndpointHealth.STARTING)

    def _eject(self, now: float, *, is_again: bool = False) -> None:
        settings = self._settings
        seconds = min(settings.ejection_seconds_max, settings.ejection_seconds * 2.0**self._ejections_in_a_row)
        self._ejections_in_a_row = min(self._ejections_in_a_row + 1, 32)
        self.ejected_until = now + seconds
        self.ejections_total += not is_again
        self._is_ejected_by_check = False
        self._owes_slow_start = True
        self.load = None
        self.others = 0
        if is_again:
            self._on_change(self)
        else:
            self._move(EndpointHealth.EJECTED)

    def _move(self, health: EndpointHealth) -> None:
        assert (self.health, health) in _LEGAL_MOVES, f"{self.id} cannot go from {self.health} to {health}"
        self.health = health
        self.accepts_requests = health is EndpointHealth.HEALTHY or health is EndpointHealth.PROBING
        self._on_change(self)
