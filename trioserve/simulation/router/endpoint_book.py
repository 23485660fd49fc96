"""Records of one endpoint of a simulated router: its real state, the router's knowledge, and the resulting limits.

The records are computed from the events of the history, not from the router's state. `EndpointBook.objection` returns
why the router must not send a request to the endpoint. `EndpointBook.must_take` returns True if the router must not let
a request wait. If rounding errors decide whether a limit is reached, the router may decide either way.

Some connections go silent without being closed. Rules for connections:

- The router does not give up a response on a working connection. If the server sends no heartbeats, a stalled response
  may count as lost.
- The router gives up a response on a silent connection within a time limit. Only time in which the router checks its
  connections counts.
- When the router learns that another process has the address, it soon gives up the responses of the former process.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
from msgspec import UNSET

from trioserve.contracts.endpoint import EndpointLoad, Stage
from trioserve.router.settings import SilenceSettings
from trioserve.router.silence import LOOK_SECONDS, SETTLE_SECONDS, AwaitedResponse, SilenceWatch
from trioserve.simulation.router.history import Add, RouterWorld

__all__ = ["EndpointBook", "EndpointConnections"]

# The router counts at most this much of the time between two checks as silence.
LOOKED_SECONDS_MAX = 2 * LOOK_SECONDS
CLOSE_SECONDS = 1e-6  # Two times count as equal if their difference is smaller.
STEP_SECONDS = 1e-9  # Two events that are never simultaneous in reality are this far apart.


class _Connection:
    """The connection of one response that the router reads.

    Attributes:
        awaited: the router's record of the response.
        process: number of the endpoint's process that computes the response.
        has_told: True if the router has learned the name of the process from this response.
        is_silent: True if no more bytes will arrive.
        heard_at: time at which the last bytes arrived.
        quiet_seconds: time without bytes, as the router counts it in its checks.
        replaced_at: time at which the router learned that another process has the address, or None.
    """

    def __init__(self, sent_at: float, process: int) -> None:
        self.awaited = AwaitedResponse(sent_at, computes=True)
        self.awaited.is_waiting = True
        self.process = process
        self.has_told = False
        self.is_silent = False
        self.heard_at = sent_at
        self.quiet_seconds = 0.0
        self.replaced_at: float | None = None


class EndpointConnections:
    """All connections of one endpoint, and the router's SilenceWatch for them.

    Args:
        id: the endpoint.
        settings: limits for silent connections. None: the router does not check connections, and no connection goes
            silent.
        sends_beats: True if the endpoint sends heartbeats and the name of its process, as trioserve does.
        count: counts occurrences.

    Attributes:
        process: number of the current process.
    """

    def __init__(
        self, id: str, settings: SilenceSettings | None, *, sends_beats: bool, count: Callable[[str], None]
    ) -> None:
        self.process = 0
        self._id = id
        self._settings = SilenceSettings() if settings is None else settings
        self._is_watched = settings is not None
        self._sends_beats = sends_beats
        self._count = count
        self._watch = SilenceWatch(self._settings)
        self._watch.sends_beats = sends_beats
        self._open: dict[str, _Connection] = {}
        self._known_process = 0  # number of the newest process that the router knows
        self._looked_at = 0.0
        self._moment = 0.0

    @property
    def is_any_read(self) -> bool:
        return self._is_watched and bool(self._open)

    def is_silent(self, name: str) -> bool:
        connection = self._open.get(name)
        return connection is not None and connection.is_silent

    def former(self) -> set[str]:
        """Return the requests whose connections belong to a former process."""
        return {name for name, connection in self._open.items() if connection.process != self.process}

    def instance(self) -> str:
        """Return the name of the current process."""
        return f"{self._id} {self.process}"

    def moment(self, now: float) -> float:
        """Return `now`, or a slightly later time, so that each result is later than the result before.

        Args:
            now: the time.
        """
        self._moment = max(now, self._moment + STEP_SECONDS)
        return self._moment

    # --- Events ---

    def open(self, name: str, now: float) -> None:
        """Record that a request is sent.

        Args:
            name: the request.
            now: the time.
        """
        self._open[name] = _Connection(self.moment(now), self.process)

    def close(self, name: str) -> None:
        """Stop reading a response. Unknown names are ignored.

        Args:
            name: the request.
        """
        connection = self._open.pop(name, None)
        if connection is not None:
            self._watch.forget(connection.awaited)

    def hear(self, name: str, now: float) -> None:
        """Record that bytes of a response arrive.

        Args:
            name: the request.
            now: the time.
        """
        connection = self._open[name]
        connection.awaited.has_body = True
        connection.awaited.beats = self._sends_beats
        self._hear(connection, now)

    def silence(self, name: str) -> None:
        """Make a connection silent. The call does nothing if the router could never notice the silence.

        Args:
            name: the request.
        """
        connection = self._open.get(name)
        if not self._is_watched or connection is None or connection.is_silent:
            return
        if self._sends_beats or connection.awaited.has_body:
            connection.is_silent = True
            self._count("connections: silent")

    def replace(self) -> None:
        """Let a new process take over the address. All connections to the former process go silent."""
        if self._is_watched and self._sends_beats:
            for connection in self._open.values():
                connection.is_silent = True
            self.process += 1
            self._count("addresses taken by another process")

    def note_load(self, load: EndpointLoad, asked_at: float, now: float) -> None:
        """Record that a load report arrives at the router.

        Args:
            load: the report.
            asked_at: time at which the router sent its question.
            now: the time.
        """
        if self._is_watched:
            self._watch.note_load(load, self._awaited(), asked_at, now)
            if load.instance is not UNSET:
                self._note_process(int(load.instance.rpartition(" ")[2]), now)

    def look(self, now: float) -> list[str]:
        """Let the router check all connections. Return the requests whose responses it gives up.

        Args:
            now: the time.
        """
        passed = min(now - self._looked_at, LOOKED_SECONDS_MAX)
        self._looked_at = now
        for connection in self._open.values():
            connection.quiet_seconds += passed
        by_response = {connection.awaited: name for name, connection in self._open.items()}
        lost: list[str] = []
        for loss in self._watch.find_lost(self._awaited(), now):
            name = by_response[loss.response]
            self._check_lost(name, self._open[name], loss.reason)
            self._count(f"connections treated as lost: {loss.reason}")
            lost.append(name)
        assert not self._watch.is_shared, f"{self._id} counts as several processes at one address"
        for name, connection in self._open.items():
            if name not in lost:
                self._check_kept(name, connection, now)
                if self._sends_beats and now >= connection.heard_at + self._settings.beat_seconds:
                    self._hear(connection, now)
        return lost

    def _awaited(self) -> list[AwaitedResponse]:
        return [connection.awaited for connection in self._open.values()]

    def _hear(self, connection: _Connection, now: float) -> None:
        if connection.is_silent:
            return
        awaited = connection.awaited
        awaited.pieces += 1
        connection.heard_at, connection.quiet_seconds = now, 0.0
        if self._sends_beats and self._is_watched and not connection.has_told:
            connection.has_told = True
            awaited.instance = self.instance()
            self._watch.note_instance(awaited.instance, self._awaited(), awaited.sent_at, now)
            self._note_process(connection.process, now)

    def _note_process(self, process: int, now: float) -> None:
        """Record that the router learns which process has the address."""
        if process > self._known_process:
            self._known_process = process
            for connection in self._open.values():
                if connection.process < process and connection.has_told:
                    connection.replaced_at = now

    # --- Rules for connections ---

    def _check_lost(self, name: str, connection: _Connection, reason: str) -> None:
        has_stalled = connection.quiet_seconds >= self._settings.stalled_seconds_max - CLOSE_SECONDS
        may_end = connection.is_silent or (not self._sends_beats and connection.awaited.has_body and has_stalled)
        assert may_end, f"{name} is given up at {self._id}, but its connection works: {reason}"

    def _check_kept(self, name: str, connection: _Connection, now: float) -> None:
        if not connection.is_silent:
            return
        settings = self._settings
        seconds_max = settings.silent_seconds_max if self._sends_beats else settings.stalled_seconds_max
        # The router begins to count at the first check after the last byte, and may check just before the limit is
        # reached.
        seconds_max += 2 * LOOKED_SECONDS_MAX
        seconds = connection.quiet_seconds
        assert seconds <= seconds_max, (
            f"{name} has received nothing from {self._id} for {seconds:.2f} s, but still waits"
        )
        replaced_at = connection.replaced_at
        assert replaced_at is None or now < replaced_at + SETTLE_SECONDS + CLOSE_SECONDS, (
            f"{name} waits at {self._id} for a process that was replaced"
        )


FAILED_LOADS_MAX = 256
GIVEN = ("healthy", "probing")


class Question(msgspec.Struct):
    """A request of the router for the load of an endpoint.

    Attributes:
        there: requests that were at the endpoint when the router asked.
        sent_total: the router's count of sent requests when it asked.
        asked_at: time at which the router asked.
        response: the endpoint's report. None: the endpoint has not answered.
        is_lie: True if the report is false.
    """

    there: frozenset[str]
    sent_total: int
    asked_at: float
    response: EndpointLoad | None = None
    is_lie: bool = False


class Report(msgspec.Struct, frozen=True):
    """A load report that the router has received.

    Attributes:
        load: the report.
        noted_at: time at which the report arrived.
        known: number of sequences that were in flight at that time and that the report certainly includes.
        in_flight: number of all sequences that were in flight at that time.
        is_lie: True if the report is false.
    """

    load: EndpointLoad
    noted_at: float
    known: int
    in_flight: int
    is_lie: bool


class EndpointBook:
    """Records of one endpoint.

    Args:
        event: the event that added the endpoint.
        world: the router's settings.
        starts_slowly: True if the number of leases may only grow slowly at first.
        checks: number of successful health checks before the endpoint was added.
        count: counts occurrences.

    Attributes:
        leased: number of sequences of each request with a lease at this endpoint.
        running: number of sequences of each request that still runs after its lease was returned.
        there: number of sequences of each request that was sent to this endpoint and has not ended.
        claims: total number of sequences with a lease.
        probe: request that the router uses as a probe, or None.
        checks: number of successful health checks.
        health: name of the endpoint's EndpointHealth.
        suspects: requests at this endpoint that broke another endpoint before.
        suspects_seen: maximum number of suspects since the last successful health check.
        clock: process name in the endpoint's last report, or None.
        clock_checks: number of successful health checks before that report.
        moved_from: number of streams that were moved from this endpoint to another one.
        moved_to: number of streams that were moved to this endpoint.
        question: the router's open question, or None.
    """

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
        """Return the fraction of the leases that this router uses. Recent failures count as used leases.

        Args:
            now: the time.
        """
        failed = sum(at + self._world.failed_load_seconds > now for at in self._failed_at[-FAILED_LOADS_MAX:])
        return (self.in_flight + failed) / self.leases_max

    @property
    def waits_for_probe(self) -> bool:
        return self.health == "ejected" and self._fails_requests and self._world.sends_probes

    @property
    def others(self) -> int:
        """Number of sequences from other routers, according to the endpoint's last report."""
        report = self._report
        return 0 if report is None else max(0, report.load.running + report.load.waiting - report.known)

    def load_most(self, now: float) -> float:
        """Return the highest load that the router may assume. It includes the sequences of other routers.

        Args:
            now: the time.
        """
        return self.load(now) + self.others / self.leases_max

    @property
    def is_given(self) -> bool:
        return self.health in GIVEN

    @property
    def ejection_ends_at(self) -> float | None:
        """Time at which the ejection ends. None: not ejected, or a check or a probe must succeed first."""
        if self.health != "ejected" or self.waits_for_probe or self._ejected_until == math.inf:
            return None
        return self._ejected_until

    def serves(self, model: str) -> bool:
        return model in self.models and self.health != "draining"

    def is_meant_for(self, stage: Stage | None) -> bool:
        return stage is None or self.role in ("both", stage.value)

    # --- Capacity ---

    def objection(self, sequences: int, now: float) -> str | None:
        """Return the reason why the router must not send more sequences to this endpoint. None: it may.

        Args:
            sequences: number of sequences that the router sends. These records do not include them yet.
            now: the time.
        """
        if not self.is_given:
            return f"{self.id} is {self.health}"
        if self.probe is not None and self.health == "probing":
            return f"{self.id} already has the probe {self.probe}"
        if now < self._busy_until - CLOSE_SECONDS:
            return f"{self.id} is busy until {self._busy_until}"
        limit = self._limit(now + CLOSE_SECONDS)
        if self.claims + sequences > limit:
            return f"{self.id} has leases for {self.claims} of {limit} sequences, but gets {sequences} more"
        report = self._report
        if report is None or now > report.noted_at + self._world.load_seconds_max - CLOSE_SECONDS:
            return None
        depth_max = self._world.waiting_depth_max
        truth = self._strangers + self.in_flight
        is_trusted = not report.is_lie and (self._tells_seats or not self._has_lied)
        if is_trusted and truth and truth + sequences - self._seats > depth_max:
            return f"{self.id} has {self._seats} slots for {truth} sequences, but {sequences} more are sent there"
        load = report.load
        reported_count = (
            load.running + load.waiting + self.in_flight - report.in_flight
        )  # The endpoint certainly has this many sequences.
        seats = load.max_num_seqs if load.max_num_seqs is not None else load.running
        if (
            (load.max_num_seqs is not None or load.waiting)
            and reported_count > 0
            and reported_count + sequences - seats > depth_max
        ):
            return f"{self.id} reported {load.running} running and {load.waiting} waiting, but gets {sequences} more"
        return None

    def must_take(self, sequences: int, now: float) -> bool:
        """Return True if the router must send sequences to this endpoint when requests wait.

        Args:
            sequences: number of sequences.
            now: the time.
        """
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

    # --- Requests ---

    def grant(self, name: str, sequences: int, *, is_suspect: bool) -> None:
        if is_suspect:
            self.suspects.add(name)
            self.suspects_seen = max(self.suspects_seen, len(self.suspects))
        if self.health == "probing":
            self.probe = name
        self.leased[name] = sequences

    def release(self, name: str) -> None:
        """Remove a request.

        Args:
            name: the request.
        """
        self.leased.pop(name, None)
        self.running.pop(name, None)
        self.there.pop(name, None)
        self.connections.close(name)
        self.suspects.discard(name)
        if self.question is not None:
            # If the same name is sent again before the report comes, it counts as a new request.
            self.question.there -= {name}
        if self.probe == name:
            self.probe = None

    def record_token(self, name: str, now: float, *, is_lease_over: bool) -> None:
        """Record the first token of a request.

        Args:
            name: the request.
            now: the time.
            is_lease_over: True if the lease ends with the first token.
        """
        self.note_success(now)
        if self.probe == name:
            self.probe = None
        if is_lease_over:
            self.running[name] = self.leased.pop(name)

    # --- Reports and health checks ---

    def ask(self, sent_total: int, now: float) -> None:
        self.question = Question(frozenset(self.there), sent_total, self.connections.moment(now))

    def response(self, lie: tuple[int, int] | None) -> None:
        if self.question is None:
            return
        # A new process does not have the former requests, so its report is lower than the number in flight.
        former = self.connections.former()
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
        """Record that a load report has arrived at the router.

        Args:
            now: the time.
        """
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
        """Record that a new process has replaced the former one."""
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
        """Record that the endpoint hangs or will stop. Only a successful health check makes it available again.

        Args:
            now: the time.
        """
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
