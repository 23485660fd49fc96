"""One endpoint of a simulated router: what is true of it, and what the router has been told and may therefore do.

Kept from the events alone. Where a moment or a share is a rounding error away, both responses are taken: `may_take` is
what the router must not go beyond, `must_take` what it must not leave lying.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
from msgspec import UNSET

from trioserve.contracts.endpoint import EndpointLoad, Stage
from trioserve.simulation.router.connections import EndpointConnections
from trioserve.simulation.router.history import Add, RouterWorld

__all__ = ["EndpointBook"]

CLOSE_SECONDS = 1e-6  # two moments that are nearer than this are one, for all that is judged here
FAILED_LOADS_MAX = 256
GIVEN = ("healthy", "probing")


class Question(msgspec.Struct):
    """there: the requests that were at the endpoint when it was asked, at asked_at. sent_total: the router's at that
    time. response: None until it has looked at itself."""

    there: frozenset[str]
    sent_total: int
    asked_at: float
    response: EndpointLoad | None = None
    is_lie: bool = False


class Report(msgspec.Struct, frozen=True):
    """known: sequences that are certainly in the report, of those that were in flight when it arrived.
    in_flight: all that were then."""

    load: EndpointLoad
    noted_at: float
    known: int
    in_flight: int
    is_lie: bool


class EndpointBook:
    """leased, running: the sequences of the requests that hold a lease here, with a seat or waiting for one
    (claims, in all); of those whose lease is back, but which run. there: those of both that were sent. health: by
    the names of EndpointHealth. probe: who is out as one. checks: that found it well. suspects: with
    which another endpoint broke before; suspects_seen: the most of them since a check found it well. clock: what it
    told last that its process is called; clock_checks: the checks by then. moved_from, moved_to: streams that left it
    and went on elsewhere; that came from elsewhere."""

    def __init__(
        self, event: Add, world: RouterWorld, *, starts_slowly: bool, checks: int, count: Callable[[str], None]
    ) -> None:
        self.id = event.id
        self.connections = EndpointConnections(event.id, world.silence, sends_beats=event.tells_clock, count=count)
        self.models = frozenset(event.models)
        self.leases_max = event.leases_max or world.leases_max
        self.leased: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.there: dict[str, int] = {}
        self.probe: str | None = None
        self.role = event.role
        self.fingerprint = event.fingerprint
        self.checks = checks
        self.clock: str | None = None
        self.clock_checks = 0
        self.suspects: set[str] = set()
        self.suspects_seen = 0
        self.moved_from = 0
        self.moved_to = 0
        self.health = "starting"
        self.question: Question | None = None
        self._world = world
        self._seats = event.seats
        self._strangers = event.strangers
        self._tells_seats = event.tells_seats
        self._tells_clock = event.tells_clock
        self._has_lied = False
        self._report: Report | None = None
        self._busy_until = 0.0
        self._ejected_until = 0.0
        self._failures = 0
        self._ejections = 0
        self._failed_checks = 0
        self._failed_at: list[float] = []
        self._fails_checks = False
        self._served_probe = False
        self._fails_requests = False
        self._starts_slowly = starts_slowly
        self._slow_since: float | None = None

    @property
    def claims(self) -> int:
        return sum(self.leased.values())

    @property
    def leases(self) -> int:
        return min(self.claims, self.leases_max)

    @property
    def in_flight(self) -> int:
        return self.claims + sum(self.running.values())

    def load(self, now: float) -> float:
        """Of this router, with the requests that failed here of late."""
        failed = sum(at + self._world.failed_load_seconds > now for at in self._failed_at[-FAILED_LOADS_MAX:])
        return (self.in_flight + failed) / self.leases_max

    @property
    def waits_for_probe(self) -> bool:
        return self.health == "ejected" and self._fails_requests and self._world.sends_probes

    @property
    def others(self) -> int:
        """Sequences of others that it told of last."""
        report = self._report
        return 0 if report is None else max(0, report.load.running + report.load.waiting - report.known)

    def load_most(self, now: float) -> float:
        """The same, with what it told of others, if that is still believed."""
        return self.load(now) + self.others / self.leases_max

    @property
    def is_given(self) -> bool:
        return self.health in GIVEN

    @property
    def ejection_ends_at(self) -> float | None:
        """None: it is not ejected, or until a check or a probe finds it well."""
        if self.health != "ejected" or self.waits_for_probe or self._ejected_until == math.inf:
            return None
        return self._ejected_until

    def serves(self, model: str) -> bool:
        return model in self.models and self.health != "draining"

    def is_meant_for(self, stage: Stage | None) -> bool:
        return stage is None or self.role in ("both", stage.value)

    # --- what it may be given, and has to be ---

    def objection(self, sequences: int, now: float) -> str | None:
        """Why so many sequences that the router has just given it find no seat here. The books do not have them yet."""
        if not self.is_given:
            return f"{self.id} is {self.health}"
        if self.probe is not None and self.health == "probing":
            return f"{self.id} is probed by {self.probe} already"
        if now < self._busy_until - CLOSE_SECONDS:
            return f"{self.id} is busy until {self._busy_until}"
        limit = self._limit(now + CLOSE_SECONDS)
        if self.claims + sequences > limit:
            return f"{self.id} has leases for {self.claims} of {limit} sequences, and gets {sequences} more"
        report = self._report
        if report is None or now > report.noted_at + self._world.load_seconds_max - CLOSE_SECONDS:
            return None
        depth_max = self._world.waiting_depth_max
        truth = self._strangers + self.in_flight
        is_trusted = not report.is_lie and (self._tells_seats or not self._has_lied)
        if is_trusted and truth and truth + sequences - self._seats > depth_max:
            return (
                f"{truth} are at or on their way to the {self._seats} seats of {self.id}, and {sequences} more go there"
            )
        load = report.load
        told = load.running + load.waiting + self.in_flight - report.in_flight  # at least so many are there
        seats = load.max_num_seqs if load.max_num_seqs is not None else load.running
        if (load.max_num_seqs is not None or load.waiting) and told > 0 and told + sequences - seats > depth_max:
            return f"{self.id} told of {load.running} and {load.waiting}, and gets {sequences} more"
        return None

    def must_take(self, sequences: int, now: float) -> bool:
        """Whether nothing at all speaks against giving it so many sequences."""
        if not self.is_given or (self.probe is not None and self.health == "probing"):
            return False
        if now < self._busy_until + CLOSE_SECONDS:
            return False
        if self.claims + sequences > self._limit(now - CLOSE_SECONDS):
            return False
        report = self._report
        if report is None or now > report.noted_at + self._world.load_seconds_max + CLOSE_SECONDS:
            return True
        load = report.load
        there = max(0, load.running + load.waiting + self.in_flight - report.known)
        seats = load.max_num_seqs if load.max_num_seqs is not None else load.running
        return there == 0 or there + sequences - seats <= self._world.waiting_depth_max

    def _limit(self, now: float) -> int:
        seconds = self._world.slow_start_seconds
        if self._slow_since is None or not seconds or now >= self._slow_since + seconds:
            return self.leases_max
        return max(1, int(self.leases_max * max(0.0, now - self._slow_since) / seconds))

    # --- what it is given ---

    def give(self, name: str, sequences: int, *, is_suspect: bool) -> None:
        if is_suspect:
            self.suspects.add(name)
            self.suspects_seen = max(self.suspects_seen, len(self.suspects))
        if self.health == "probing":
            self.probe = name
        self.leased[name] = sequences

    def let_go(self, name: str) -> None:
        """Nothing of the request is here any more."""
        self.leased.pop(name, None)
        self.running.pop(name, None)
        self.there.pop(name, None)
        self.connections.close(name)
        self.suspects.discard(name)
        if self.question is not None:
            self.question.there -= {name}  # should it come back before the response, that is another sending
        if self.probe == name:
            self.probe = None

    def take_token(self, name: str, now: float, *, is_lease_over: bool) -> None:
        """It begins to answer the request."""
        self.note_success(now)
        if self.probe == name:
            self.probe = None
        if is_lease_over:
            self.running[name] = self.leased.pop(name)

    # --- what it tells ---

    def ask(self, sent_total: int, now: float) -> None:
        self.question = Question(frozenset(self.there), sent_total, self.connections.moment(now))

    def response(self, lie: tuple[int, int] | None) -> None:
        if self.question is None:
            return
        former = self.connections.former()  # a new process knows nothing of them, so it tells less than is in flight
        count = self._strangers + sum(count for name, count in self.there.items() if name not in former)
        if former and lie is None:
            lie = (min(count, self._seats), max(0, count - self._seats))
        running, waiting = lie or (min(count, self._seats), max(0, count - self._seats))
        self.question.response = EndpointLoad(
            running=running,
            waiting=waiting,
            max_num_seqs=self._seats if self._tells_seats else None,
            clock=self.connections.instance() if self._tells_clock else UNSET,
            instance=self.connections.instance() if self._tells_clock else UNSET,
        )
        self.question.is_lie = lie is not None

    def note(self, now: float) -> None:
        """The router has the response now."""
        question = self.question
        assert question is not None
        assert question.response is not None
        self.question = None
        self._has_lied |= question.is_lie
        self.connections.note_load(question.response, question.asked_at, now)
        clock = question.response.clock
        self.clock, self.clock_checks = None if clock is UNSET else clock, self.checks
        known = sum(count for name, count in self.there.items() if name in question.there)
        self._report = Report(question.response, now, known, self.in_flight, question.is_lie)

    def begin_process(self) -> None:
        """The one before has ended."""
        self.connections.process += 1

    def note_check(self, is_well: bool, now: float) -> None:
        if not is_well:
            self._failed_checks += 1
            if self._is_ejected_by(self._failed_checks):
                self._eject(now)
            self._fails_checks = self.health == "ejected" and not self._fails_requests
            return
        self.checks += 1
        self.suspects_seen = len(self.suspects)
        self._failed_checks = 0
        if self.health == "ejected" and self._fails_checks:
            self.health = "probing"
        if self.health == "probing" and self._served_probe and self.probe is None:
            self._fails_requests = False
        if not self._fails_requests:
            self._begin(now)

    def note_success(self, now: float) -> None:
        self._failures = self._failed_checks = 0
        self._fails_requests = self._fails_requests and self.health == "ejected"
        self._begin(now)

    def note_probe(self, is_well: bool | None, now: float) -> None:
        if not self.waits_for_probe or now < self._ejected_until:
            return
        if is_well is False:
            self._eject(now)
        else:
            self.health = "probing"
            self._served_probe = is_well is True

    def _begin(self, now: float) -> None:
        if self.health in ("starting", "probing"):
            self.health = "healthy"
            self._ejections = 0
            if self._starts_slowly:
                self._slow_since = now

    def note_broke(self, now: float) -> None:
        self._failures += 1
        self._failed_at.append(now)
        if self._is_ejected_by(self._failures):
            self._eject(now)
            self._fails_requests = True

    def _is_ejected_by(self, failures: int) -> bool:
        is_enough = failures >= self._world.failures_max
        return self.health == "probing" or (self.health in ("starting", "healthy") and is_enough)

    def note_lost(self, now: float) -> None:
        if self.health not in ("ejected", "draining"):
            self._failures = 0
            self._fails_requests = False
            self._eject(now)

    def note_left(self, now: float) -> None:
        """It hangs, or will stop: a good check brings it back, and no time."""
        if self.health != "draining":
            self.note_lost(now)
            self._failures = 0
            self._fails_requests = False
            self._fails_checks = True
            self._ejected_until = math.inf

    def note_busy(self, now: float, seconds: float) -> None:
        self._busy_until = max(self._busy_until, now + seconds)

    def tick(self, now: float) -> None:
        if self.health == "ejected" and now >= self._ejected_until and not self.waits_for_probe:
            self.health = "probing"

    def drain(self) -> None:
        self.health = "draining"

    def come_back(self, event: Add) -> None:
        self.models = frozenset(event.models)
        self.leases_max = event.leases_max or self._world.leases_max
        self.role = event.role
        self.fingerprint = event.fingerprint
        self._starts_slowly = True
        self._fails_requests = False
        self.health = "starting"

    def _eject(self, now: float) -> None:
        world = self._world
        self.health = "ejected"
        self._ejected_until = now + min(world.ejection_seconds_max, world.ejection_seconds * 2**self._ejections)
        self._ejections += 1
        self._fails_checks = False
        self._starts_slowly = True
        self._report = None
