"""The health of an endpoint as a table of states, and what it may be given.

    STARTING ───► HEALTHY ◄──── PROBING
        │          │  ▲           ▲  │
        │          ▼  │           │  ▼
        └──────►  EJECTED ────────┘ (one probe: a request, or a health check)
                     ▲               │
                     └───────────────┘
    DRAINING: from every state; it goes when its last request does, or is STARTING again when it is added before that.

An endpoint gets requests while it is HEALTHY, as much as its slow start allows, and one at a time while it is PROBING;
the limits of leases and of its load hold for both.

A request of several sequences goes where all of them find a slot, if there is such an endpoint, and otherwise where one
of them does: the others wait there, and the slots that come free are theirs before anybody else's. So a large request
costs the slots that it uses, and no others: nothing is emptied for it, and nobody has to be let past it.
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

__all__ = ["DEATHS", "LOST", "EndpointHealth", "EndpointState", "Fault", "OwnPart"]

FAILED_LOADS_MAX = 256  # of failed requests that are counted as load; more change nothing
DIVIDED_SECONDS_MIN = 0.3  # in which an endpoint tells what has changed since its last report, asked or by itself
DIVIDED_SECONDS_MAX = 0.6


class EndpointHealth(enum.Enum):
    STARTING = "starting"  # nobody has asked it yet
    HEALTHY = "healthy"
    EJECTED = "ejected"
    PROBING = "probing"
    DRAINING = "draining"


class Fault(enum.Enum):
    """How an endpoint failed a request, before its first token or in the middle of its stream."""

    UNREACHABLE = "unreachable"  # no connection: the request never got there
    BUSY = "busy"  # it said so itself (429, 503): its load is other than we thought; it is not ill
    BROKE = "broke"  # its connection ended before the response did: the endpoint may have died
    FAILED = "failed"  # it answered 500, 502 or 504, or ended the stream with an error of its own
    INVALID = "invalid"  # it sent what no inference server sends: something else is at its address
    REFUSED = "refused"  # it refused the request in a way that another endpoint has to confirm
    TRANSFER = "transfer"  # it could not get at the blocks of a prompt: whose fault that is, nobody knows
    HUNG = "hung"  # nothing comes from it any more: over this connection, or it answers no checks either
    LEAVING = "leaving"  # it ended the stream because it stops, and said so


LOST = frozenset({Fault.UNREACHABLE, Fault.BROKE, Fault.HUNG, Fault.LEAVING})
"""Faults that lose what an endpoint had begun, whichever request it was. Such a request waits for another endpoint, or
for the same one to come back."""

DEATHS = frozenset({Fault.BROKE, Fault.HUNG})
"""Of those, the faults that the request itself may have caused."""


class OwnPart(NamedTuple):
    """Of the room that a report shows, which all routers see at the same time. share: what is this one's to give.
    draw: at random, from 0 to less than 1; who gets what is left over by the division, and who may take it first if
    nobody does."""

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
    """What the router knows of one endpoint. Times are seconds of the router's clock.

    number: in the order of addition. on_change: told after each change of what others may count. models: the names
    under which it may be asked. leases_max: sequences that it takes. lease_share: what of that this router may give,
    where others give the rest; None: all. claims: sequences of the requests that have a lease here; all but the
    leases_max first of them wait for their slot.
    in_flight: sequences that were given to it and have not ended; more than the claims once these go back at the first
    token. sent: those of them that are on their way or there, by the index of their request's sending.
    others: sequences that others had there by its last report. slow_start: it comes to others that run, and is to get
    its share little by little. checks_total: health checks that found it well; counted on from others that are gone, so
    that one which comes back under its id has no fewer than before. hangs_total: how often it was left out since it did
    not answer. clock: what names its process in its last report; None: nothing does. clock_checks: checks_total at that
    time. suspects: requests here with which another endpoint broke; suspects_seen: the most since a check found it
    well. fingerprint: of what computes there; None: it does not tell. moved_from_total, moved_to_total: streams that
    left it, on purpose or since it broke off, and went on elsewhere; that others have left and that went on here.
    role: which stages it is meant for; None: of disaggregated requests none. failures_total: of requests, by the
    reason. refusals_in_a_row: of requests that it refused as their clients' fault, since it served one.
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
        self._own_room: int | None = None  # of what it showed, for more than is known to be in it; None: all
        self._divided_until = 0.0
        self._known_at_load = 0  # of those in flight; what is more by now, the report may not know
        self._slots_seen = 0
        self._failures_in_a_row = 0
        self._failed_checks_in_a_row = 0
        self._failed_at: deque[float] = deque(maxlen=FAILED_LOADS_MAX)
        self._has_failed_requests = False  # and was ejected for that, so that no check brings it back
        self._ejections_in_a_row = 0
        self._is_ejected_by_check = False
        self._owes_slow_start = slow_start
        self._share_since: float | None = None  # None: the whole share at once

    # --- what it may be given ---

    @property
    def is_given(self) -> bool:
        """Whether it gets requests at all."""
        return self.health in (EndpointHealth.HEALTHY, EndpointHealth.PROBING)

    @property
    def leases_own_max(self) -> int:
        """Of its limit, what is this router's."""
        return self.leases_max if self.lease_share is None else self.lease_share

    @property
    def leases(self) -> int:
        """Sequences that have a slot."""
        return min(self.claims, self.leases_max)

    @property
    def is_settled(self) -> bool:
        """Whether anybody has asked it yet how it is."""
        return self.health is not EndpointHealth.STARTING

    def share(self, now: float) -> float:
        """How much of its limit it gets by now: grows from little to 1 in the slow start."""
        seconds = self._settings.slow_start_seconds
        if self._share_since is None or now >= self._share_since + seconds:
            return 1.0
        return (now - self._share_since) / seconds

    def waiting_depth(self, now: float, *, more: int = 0) -> int | None:
        """Sequences that wait inside it, and would if `more` went there: as reported, moved by what was given to it and
        has ended since. None: not known, since the last report is too old."""
        load, there = self.load, self._there(now)
        if load is None or there is None:
            return None
        slots = load.max_num_seqs
        if slots is None:
            # If somebody waits, all slots are taken; if nobody does, there are at least as many as were ever taken.
            slots = load.running if load.waiting else max(load.running, self._slots_seen)
        if there == 0:
            return 0  # whoever comes to an idle endpoint does not wait for others, however large it is
        return max(0, there + more - slots)

    def _there(self, now: float) -> int | None:
        """Sequences that run or wait inside it, whoever has sent them. None: not known."""
        load = self.load
        if load is None or now >= self._load_at + self._settings.load_seconds_max:
            return None
        return max(0, load.running + load.waiting + self.in_flight - self._known_at_load)

    def has_room(self, sequences: int, now: float) -> bool:
        """Whether so many more sequences find a slot there at once."""
        if not self.is_given or now < self.busy_until or (self.health is EndpointHealth.PROBING and self.probe_out):
            return False
        leases_max = max(1, int(self.leases_own_max * self.share(now)))
        if self.claims + sequences > leases_max:
            return False
        if self.lease_share is not None:
            there = self._there(now)
            if there is not None and there + sequences > self.leases_max:
                return False  # what other routers have there is in the way, also beyond their shares
            is_divided = self._own_room is not None and now < self._divided_until
            if is_divided and self.in_flight - self._known_at_load + sequences > (self._own_room or 0):
                return False
        depth = self.waiting_depth(now, more=sequences)
        return depth is None or depth <= self._settings.waiting_depth_max

    def load_at(self, now: float) -> tuple[float, float]:
        """What it has, of this router and of all, relative to its limit, whichever is more; and the others' part."""
        in_flight = self.in_flight + self._failed_lately(now)
        own = in_flight / self.leases_own_max
        if not self.others or now >= self._load_at + self._settings.load_seconds_max:
            return own, 0.0
        others = self.others / self.leases_max
        together = in_flight / self.leases_max + others
        return (together, others) if together > own else (own, others)

    def _failed_lately(self, now: float) -> int:
        """Count the requests that failed here of late. Each is load still: or who fails fast would look idle."""
        while self._failed_at and self._failed_at[0] + self._settings.failed_load_seconds <= now:
            self._failed_at.popleft()
        return len(self._failed_at)

    @property
    def is_back_by_itself(self) -> bool:
        """Whether it is ejected until a moment that is known."""
        return self.health is EndpointHealth.EJECTED and not self._waits_for_probe

    def wants_probe(self, now: float) -> bool:
        """Whether a request of the router's own has to show that it serves requests again."""
        is_ejected = self.health is EndpointHealth.EJECTED and self._waits_for_probe
        return is_ejected and now >= self.ejected_until

    @property
    def _waits_for_probe(self) -> bool:
        return self._has_failed_requests and self._settings.sends_probes

    # --- what it is given ---

    def take(self, sequences: int) -> bool:
        """A request of so many gets a lease here. Returns whether it is a probe."""
        is_probe = self.health is EndpointHealth.PROBING
        self.probe_out |= is_probe
        self.claims += sequences
        self.in_flight += sequences
        self._on_change(self)
        return is_probe

    def end_lease(self, sequences: int) -> None:
        """Its slots are another's, and it may still run."""
        self.claims -= sequences
        self._on_change(self)

    def end_probe(self) -> None:
        """Another may probe."""
        self.probe_out = False
        self._on_change(self)

    def end_flight(self, sequences: int, sent_index: int | None) -> None:
        """Nothing of the request is here any more."""
        if sent_index is not None:
            del self.sent[sent_index]
        self.in_flight -= sequences
        assert 0 <= self.claims <= self.in_flight
        self._on_change(self)

    # --- what it tells ---

    def set_models(self, models: frozenset[str]) -> None:
        self.models = models
        self._on_change(self)

    def set_role(self, role: EngineRole | None) -> None:
        self.role = role
        self._on_change(self)

    def set_lease_share(self, share: int | None) -> None:
        """Who has a lease beyond it keeps it."""
        self.lease_share = share
        self._on_change(self)

    def note_load(self, load: EndpointLoad, now: float, *, sent_when_asked: int) -> None:
        """sent_when_asked: the index of the last request that was sent anywhere when the endpoint was asked. Those sent
        later may be in the report or not, and are taken for ones that are not."""
        self.load = load
        self._load_at = now
        self.clock = None if load.clock is UNSET else load.clock
        self.clock_checks = self.checks_total
        self._known_at_load = sum(count for index, count in self.sent.items() if index <= sent_when_asked)
        self._slots_seen = load.running if load.waiting else max(self._slots_seen, load.running)
        self.others = max(0, load.running + load.waiting - self._known_at_load)
        self._own_room = None
        self._on_change(self)

    def divide_room(self, part: OwnPart, now: float) -> None:
        """Of the room that the report of this moment shows, others give the rest.

        All routers see it at once, and what each gave of it would be given by each. So for a moment every one gives its
        part, and what ends of its own. If nobody takes the rest, there is no report of that; then it is whoever's comes
        first, and the moment is another one for each. Of an endpoint that does not tell its slots nothing is divided.
        """
        load = self.load
        if load is not None and load.max_num_seqs is not None:
            room = load.max_num_seqs + self._settings.waiting_depth_max - load.running - load.waiting
            self._own_room = max(0, math.floor(room * part.share + part.draw))
            spread = DIVIDED_SECONDS_MAX - DIVIDED_SECONDS_MIN
            self._divided_until = now + DIVIDED_SECONDS_MIN + spread * part.draw

    def note_check(self, is_well: bool, now: float) -> None:
        """A health check ended. Who was ejected by checks is back with the first good one; who failed requests while it
        answered its checks has to wait until it may be probed."""
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
        if not self._has_failed_requests:
            self._begin(now)

    def note_success(self, now: float) -> None:
        """Note that a request got its first token here."""
        self._failures_in_a_row = self._failed_checks_in_a_row = self.refusals_in_a_row = 0
        if self.health is not EndpointHealth.EJECTED:  # or it was sent before the others failed
            self._has_failed_requests = False
        self._begin(now)

    def note_probe(self, is_well: bool, now: float) -> None:
        """Note the answer to a request of the router's own; see wants_probe."""
        if not self.wants_probe(now):
            return
        if is_well:
            self._move(EndpointHealth.PROBING)
        else:
            self._eject(now, is_again=True)

    def _begin(self, now: float) -> None:
        """It is found well, and gets requests, if it did not."""
        if self.health is EndpointHealth.STARTING or self.health is EndpointHealth.PROBING:
            if self._owes_slow_start:
                self._share_since = now
            self._ejections_in_a_row = 0
            self._move(EndpointHealth.HEALTHY)

    def note_failure(self, now: float) -> None:
        """Note that a request failed here in a way that is the endpoint's own fault."""
        self._failures_in_a_row += 1
        self._failed_at.append(now)
        has_failed_enough = self._failures_in_a_row >= self._settings.failures_max
        self._has_failed_requests |= self._is_to_be_ejected(has_failed_enough)
        self._eject_if(has_failed_enough, now)

    def _is_to_be_ejected(self, has_failed_enough: bool) -> bool:
        is_begun = self.health in (EndpointHealth.STARTING, EndpointHealth.HEALTHY)
        return self.health is EndpointHealth.PROBING or (is_begun and has_failed_enough)

    def _eject_if(self, has_failed_enough: bool, now: float) -> None:
        if self._is_to_be_ejected(has_failed_enough):
            self._eject(now)

    def note_lost(self, now: float) -> None:
        """It cannot even be reached: one such failure is enough. What serves there next has failed nothing yet."""
        if self.health in (EndpointHealth.STARTING, EndpointHealth.HEALTHY, EndpointHealth.PROBING):
            self._failures_in_a_row = 0
            self._has_failed_requests = False
            self._eject(now)

    def note_suspect(self, count: int) -> None:
        """A request with which another endpoint broke comes (1) or has gone (-1)."""
        self.suspects += count
        self.suspects_seen = max(self.suspects_seen, self.suspects)

    def note_hung(self, now: float) -> None:
        """It does not answer any more, or says that it computes nothing: one such check is enough. It is back with the
        first good one, and not before."""
        if self.is_given:
            self.hangs_total += 1
        self.note_leaving(now)

    def note_leaving(self, now: float) -> None:
        """It takes nothing new, and will stop. It is back with the first good check, and not before."""
        self.note_lost(now)
        self._failures_in_a_row = 0
        self._has_failed_requests = False
        self._is_ejected_by_check = True
        self.ejected_until = math.inf
        self._on_change(self)

    def note_busy(self, now: float, seconds: float) -> None:
        """It refused a request for want of room: it gets nothing for so long."""
        self.busy_until = max(self.busy_until, now + seconds)
        self._on_change(self)

    def tick(self, now: float) -> None:
        """An ejection that is over by now ends; it may be probed."""
        if self.health is EndpointHealth.EJECTED and now >= self.ejected_until and not self._waits_for_probe:
            self._move(EndpointHealth.PROBING)

    def opens_at(self, now: float) -> float:
        """When there may be room here without anything else happening; math.inf if only time does not bring it."""
        moments = [self.busy_until, self._load_at + self._settings.load_seconds_max if self.load is not None else 0.0]
        if self._own_room is not None:
            moments.append(self._divided_until)
        if self._share_since is not None and self.share(now) < 1:
            next_limit = int(self.leases_own_max * self.share(now)) + 1
            moment = self._share_since + self._settings.slow_start_seconds * next_limit / self.leases_own_max
            # Rounding may leave the share a trace below the next limit when the moment has come.
            moments.append(max(moment, math.nextafter(now, math.inf)))
        return min((moment for moment in moments if moment > now), default=math.inf)

    def drain(self) -> None:
        if self.health is not EndpointHealth.DRAINING:
            self._move(EndpointHealth.DRAINING)

    def come_back(self, models: frozenset[str], *, leases_max: int, role: EngineRole | None = None) -> None:
        """It was added again while it was drained."""
        self.models = models
        self.leases_max = leases_max
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
        self._on_change(self)
