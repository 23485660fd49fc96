"""Checks the leases of several routers that share no state.

The books record when a router grants and releases each lease. The leases that a router may have follow from the
routers that are alive and from the routers that can know it. The rules:

- A router grants no lease beyond its share. It keeps the leases that it granted before its share became smaller.
- If no router has begun, died or become invisible for long enough, the shares of an endpoint add up to its limit, or to
  one lease per router if that is more. Every live router counts, even if other routers cannot see it. No dead router
  counts, so the live routers get the share of a dead router.
- A router that has just begun grants one lease at a time, as long as another router exists that may not know it.
- A router grants no lease at an endpoint where, by its last report, other routers use the rest of the limit. And no
  request waits at a router whose last report shows free slots. For a short time after the report, the router may use
  only its part of the free slots, and later all of them.
- Every request is served or refused exactly once. At the end, no lease is left, and no request is at an endpoint.
- Routers that see the same idle endpoints at the same time do not all choose the same endpoint. The exception is
  round_robin, where each router begins with the first endpoint.

A history of several routers is data: its settings, then what clients do, and the faults of routers.

    routers endpoints=2 leases_max=4 shares=true
    come number=1 at=3.0 router=0 seconds=1.5
    die at=3.5 router=0

Times are seconds since the routers began. A history stays valid when events are removed or moved. If an event has an
earlier time than the event before it, it happens at once. An event that does not apply does nothing.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Literal

import msgspec

from trioserve.contracts.endpoint import EndpointId, EndpointLoad
from trioserve.contracts.errors import StartupError

__all__ = [
    "BEGIN_SECONDS",
    "GONE_SECONDS",
    "Back",
    "Come",
    "Die",
    "Figures",
    "Meet",
    "Part",
    "RoutersBooks",
    "RoutersEvent",
    "RoutersHistory",
    "RoutersRow",
    "RoutersWorld",
    "SimulatedEndpoint",
    "rows_as_table",
]


class RoutersWorld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="routers"):
    """Settings of a history.

    Attributes:
        routers: number of routers.
        endpoints: number of endpoints.
        seats: number of sequences that can run at an endpoint. Further sequences wait inside the endpoint.
        leases_max: maximum number of leases at an endpoint. The limit holds for all routers together if `shares` is
            True, and otherwise for each router.
        shares: True if the routers know each other and share the limits.
        reports: "asked": each router asks for the load every `report_seconds`. "pushed": an endpoint sends its load
            when the load has changed, as often as a real endpoint does.
        wire_seconds: network latency in one direction.
        queue_requests_max: maximum number of requests that wait at one router.
    """

    policy: str = "least_loaded"
    routers: int = 2
    endpoints: int = 1
    seats: int = 1
    leases_max: int = 1
    waiting_depth_max: int = 0
    shares: bool = False
    reports: Literal["asked", "pushed"] = "asked"
    report_seconds: float = 0.25
    wire_seconds: float = 0.001
    queue_requests_max: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("routers", 1, 64), ("endpoints", 1, 10_000), ("seats", 1, 1024)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise StartupError(f"--{name} is {value}, it must be {low} to {high}")


class Come(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="come"):
    """A request arrives at a router, or at another router if the first one is gone.

    Attributes:
        number: the request's number. A second request with the same number is ignored.
        seconds: how long the request runs at its endpoint.
        patience: seconds until the client disconnects. None: it stays until the end.
    """

    number: int
    at: float = 0.0
    router: int = 0
    seconds: float = 1.0
    tenant: str = "much"
    patience: float | None = None


class Die(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="die"):
    """A router dies. Its requests at endpoints end, and its clients send their requests to another router."""

    at: float = 0.0
    router: int = 0


class Back(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="back"):
    """A dead router starts again."""

    at: float = 0.0
    router: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="part"):
    """Two routers can no longer see each other."""

    at: float = 0.0
    router: int = 0
    peer: int = 0


class Meet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="meet"):
    """Two routers can see each other again."""

    at: float = 0.0
    router: int = 0
    peer: int = 0


RoutersEvent = Come | Die | Back | Part | Meet


class RoutersHistory(msgspec.Struct, frozen=True):
    world: RoutersWorld
    events: tuple[RoutersEvent, ...]


# seconds in which a new router grants few leases. After that, all other routers know the new router.
BEGIN_SECONDS = 3.0
# seconds after a router's death until the other routers have its share. By then, other routers have failed to reach it,
# and no endpoint has heard from it recently.
GONE_SECONDS = 7.0
LITTLE_SECONDS = 2.0
REPORT_SECONDS_MAX = 3.0  # A router ignores a report that is older.
# seconds after a report during which each router uses at most its part of the free slots that the report shows
DIVIDED_SECONDS = 0.61


class _Report:
    """Load report of an endpoint, as one router uses it.

    Attributes:
        others: number of requests at the endpoint beyond this router's leases. The number is negative if some leased
            requests had ended.
        known: number of this router's leases that the report includes.
        part: number of free slots in the report that this router may use at least. None: all free slots.
        at: time at which the router got the report.
    """

    def __init__(self, others: int, known: int, part: int | None, at: float) -> None:
        self.others = others
        self.known = known
        self.part = part
        self.at = at


class RoutersBooks:
    """Checks the leases and shares of all routers.

    Args:
        world: the settings.
        now: the current time.

    Attributes:
        settled_at: time from which the shares must add up, if no router begins, dies or becomes invisible before.
        overshoot_most: maximum number of leases at one endpoint beyond its limit.
    """

    def __init__(self, world: RoutersWorld, now: float) -> None:
        self.world = world
        self.settled_at = now + BEGIN_SECONDS
        self.overshoot_most = 0
        self._began_at = dict.fromkeys(range(world.routers), now)  # start times of the live routers
        self._has_changed = False
        self._leases: dict[tuple[int, str], dict[int, float]] = {}  # times of the leases, by the request's number
        self._at_endpoint: Counter[str] = Counter()
        self._reports: dict[tuple[int, str], _Report] = {}
        self._shares: dict[tuple[int, str], int] = {}
        self._ended: set[int] = set()
        self._first_choices: dict[int, str] = {}

    # --- Routers ---

    def note_begins(self, router: int, now: float) -> None:
        self._began_at[router] = now
        self._change(now + BEGIN_SECONDS)

    def note_gone(self, router: int, now: float) -> None:
        """Record that a router is gone, after its leases were taken back.

        Args:
            now: the current time.
        """
        del self._began_at[router]
        for table in (self._shares, self._reports):
            for key in [key for key in table if key[0] == router]:
                del table[key]
        self._change(now + GONE_SECONDS)

    def note_sight(self, now: float) -> None:
        """Record that two routers can see each other again, or can no longer see each other.

        Args:
            now: the current time.
        """
        self._change(now + BEGIN_SECONDS)

    def _change(self, settled_at: float) -> None:
        self._has_changed = True
        self.settled_at = max(self.settled_at, settled_at)

    # --- Shares ---

    def set_share(self, router: int, endpoint: str, share: int, now: float) -> None:
        """Record a share that a router has computed.

        Args:
            endpoint: id of the endpoint whose limit is divided.
            share: number of leases that the router may grant at this endpoint.
            now: the current time.
        """
        assert share >= 1, f"router {router} may grant no lease at {endpoint}"
        others = len(self._began_at) - 1
        is_new = now < self._began_at[router] + LITTLE_SECONDS
        # A new router that finds no other running router may grant all leases at once.
        is_little = share == 1 or share == self.world.leases_max
        assert not (is_new and others) or is_little, (
            f"router {router} has just begun, but its share of {endpoint} is {share}"
        )
        self._shares[router, endpoint] = share

    def check_shares(self, endpoint: str, now: float) -> None:
        """Check that the shares of an endpoint add up to its limit, once the routers are settled.

        Args:
            now: the current time.
        """
        if now < self.settled_at or not self._began_at:
            return
        shares = {router: self._shares.get((router, endpoint), self.world.leases_max) for router in self._began_at}
        promised, total = max(self.world.leases_max, len(shares)), sum(shares.values())
        assert total == promised, f"the shares of {endpoint} are {shares}, {total} of {promised}"
        assert max(shares.values()) - min(shares.values()) <= 1, f"the shares of {endpoint} are {shares}"

    # --- Leases ---

    def note_report(self, router: int, endpoint: str, count: int, *, sent_before: float, now: float) -> None:
        """Record a load report that a router got.

        Args:
            endpoint: id of the endpoint that sent the report.
            count: number of requests at the endpoint.
            sent_before: time up to which the requests that this router sent are included in `count`.
            now: the current time.
        """
        mine = self._leases.get((router, endpoint), {})
        known = sum(sent_at <= sent_before for sent_at in mine.values())
        share, limit = self._shares.get((router, endpoint), self.world.leases_max), self.world.leases_max
        room = self.world.seats + self.world.waiting_depth_max - count
        part = room * share // limit if share < limit else None
        self._reports[router, endpoint] = _Report(count - known, known, part, now)

    def grant(self, router: int, endpoint: str, number: int, now: float) -> None:
        """Record a lease that a router grants.

        Args:
            endpoint: id of the endpoint that will compute the request.
            number: the request.
            now: the current time.
        """
        leases = self._leases.setdefault((router, endpoint), {})
        leases[number] = now
        self._at_endpoint[endpoint] += 1
        share = self._shares.get((router, endpoint), self.world.leases_max)
        assert len(leases) <= share, f"router {router} has {len(leases)} leases at {endpoint}, but its share is {share}"
        if self.world.shares:
            self._check_limit(router, endpoint, len(leases), now)

    def _check_limit(self, router: int, endpoint: str, mine: int, now: float) -> None:
        promised = max(self.world.leases_max, len(self._began_at))
        here = self._at_endpoint[endpoint]
        self.overshoot_most = max(self.overshoot_most, here - promised)
        assert here <= promised or self._has_changed, f"{here} leases at {endpoint}, but its limit is {promised}"
        report = self._reports.get((router, endpoint))
        if report is not None and now < report.at + REPORT_SECONDS_MAX:
            is_room = report.others + mine <= self.world.leases_max
            assert is_room, (
                f"others have {report.others} leases at {endpoint} by its report, and router {router} has {mine}"
            )

    def check_waits(self, router: int, endpoint: str, now: float) -> None:
        """Check that a request has a reason to wait at a router that has just got news of an endpoint.

        Args:
            now: the current time.
        """
        mine = len(self._leases.get((router, endpoint), ()))
        report = self._reports.get((router, endpoint))
        is_known = report is not None and now < report.at + REPORT_SECONDS_MAX
        if mine >= self._shares.get((router, endpoint), self.world.leases_max) or not is_known:
            return
        assert report is not None
        there = max(0, report.others + mine)
        is_taken = self.world.shares and there >= self.world.leases_max
        is_full = there > 0 and there + 1 - self.world.seats > self.world.waiting_depth_max
        is_divided = report.part is not None and now < report.at + DIVIDED_SECONDS
        has_its_part = is_divided and mine - report.known >= (report.part or 0)
        assert is_taken or is_full or has_its_part, (
            f"{endpoint} has free slots for router {router}, but a request waits there"
        )

    def return_lease(self, router: int, endpoint: str, number: int) -> None:
        leases = self._leases[router, endpoint]
        assert number in leases, f"router {router} releases a lease at {endpoint} twice"
        del leases[number]
        self._at_endpoint[endpoint] -= 1

    def end(self, number: int) -> None:
        assert number not in self._ended, f"request {number} ends twice"
        self._ended.add(number)

    def note_first_choice(self, router: int, endpoint: str) -> None:
        """Record the endpoint of a router's first request.

        The first requests of all routers arrive at the same time, while all endpoints are idle.

        Args:
            endpoint: the chosen endpoint.
        """
        self._first_choices.setdefault(router, endpoint)
        count, routers = Counter(self._first_choices.values()).most_common(1)[0][1], self.world.routers
        if routers >= 8 and self.world.endpoints >= routers and self.world.policy != "round_robin":
            assert count <= routers / 2, f"{count} of {routers} routers choose {endpoint} at the same moment"

    def check_end(self, request_count: int) -> None:
        left = {key: len(leases) for key, leases in self._leases.items() if leases}
        assert not left, f"leases are left: {left}"
        assert len(self._ended) == request_count, f"of {request_count} requests {len(self._ended)} have ended"


class SimulatedEndpoint:
    """A simulated endpoint. It identifies requests by their numbers.

    Args:
        id: the endpoint's id.
        seats: number of requests that can run at the same time.

    Attributes:
        running: requests with a seat.
        waiting: requests without a seat, in order of arrival.
        most: maximum number of requests that were at the endpoint at the same time.
        heard_at: time at which each router last asked for a report.
        reported_at: time at which the endpoint last reported its load.
        reports_at: time at which the endpoint will report its load next.
    """

    def __init__(self, id: EndpointId, seats: int) -> None:
        self.id = id
        self.running: set[int] = set()
        self.waiting: OrderedDict[int, None] = OrderedDict()
        self.most = 0
        self.heard_at: dict[str, float] = {}
        self.reported_at = -math.inf
        self.reports_at = math.inf
        self._seats = seats

    @property
    def count(self) -> int:
        return len(self.running) + len(self.waiting)

    def come(self, number: int) -> bool:
        """Add a request.

        Args:
            number: the request.

        Returns:
            True if the request runs at once.
        """
        if len(self.running) < self._seats:
            self.running.add(number)
        else:
            self.waiting[number] = None
        self.most = max(self.most, self.count)
        return number in self.running

    def go(self, number: int) -> int | None:
        """Remove a request that was served, whose router has stopped, or whose client has left.

        The request may not have arrived yet.

        Args:
            number: the request.

        Returns:
            The request that gets the free seat, or None.
        """
        self.waiting.pop(number, None)
        if number not in self.running:
            return None
        self.running.discard(number)
        if not self.waiting:
            return None
        following = self.waiting.popitem(last=False)[0]
        self.running.add(following)
        return following

    def load(self) -> EndpointLoad:
        return EndpointLoad(running=len(self.running), waiting=len(self.waiting), max_num_seqs=self._seats)

    def routers_heard(self, now: float) -> dict[str, float]:
        """Return the seconds since each router last asked for a report.

        Args:
            now: the current time.
        """
        return {name: now - heard_at for name, heard_at in self.heard_at.items()}


class RoutersRow(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one history, as a row of a table.

    Attributes:
        dies: True if one router dies and comes back.
        requests: number of requests that got a seat.
        wait_p50: median seconds from arrival at a router to a seat at an endpoint.
        wait_p99: 99th percentile of the seconds from arrival to a seat.
        router_p99: highest `wait_p99` of a single router.
        little_p99: `wait_p99` of the tenant that sends a fifth of the requests.
        beyond: maximum number of sequences at one endpoint beyond its seats and its allowed queue.
        beyond_share: fraction of the requests that arrived at an endpoint whose seats and allowed queue were full.
        idle_share: fraction of all seats that were empty while requests waited at a router.
        refused: number of refused requests.
        little_refused: number of refused requests of the tenant that sends a fifth of the requests.
    """

    world: RoutersWorld
    dies: bool
    requests: int
    wait_p50: float
    wait_p99: float
    router_p99: float
    little_p99: float
    beyond: int
    beyond_share: float
    idle_share: float
    refused: int
    little_refused: int


class Figures:
    def __init__(self, world: RoutersWorld) -> None:
        self._world = world
        self._waits: list[float] = []
        self._by_router: dict[int, list[float]] = {}
        self._by_tenant: dict[str, list[float]] = {}
        self._refused: Counter[str] = Counter()
        self._came = 0
        self._came_beyond = 0
        self._running = 0
        self._waiting = 0
        self._waiting_seconds = 0.0
        self._idle_seat_seconds = 0.0
        self._most = 0

    def pass_time(self, seconds: float) -> None:
        """Add a period without changes to the averages.

        Args:
            seconds: length of the period.
        """
        if self._waiting:
            self._waiting_seconds += seconds
            self._idle_seat_seconds += seconds * (self._world.endpoints * self._world.seats - self._running)

    def note_waiting(self, by: int) -> None:
        self._waiting += by

    def note_came(self, count: int) -> None:
        """Record the arrival of a request at an endpoint.

        Args:
            count: number of requests at the endpoint, including the new one.
        """
        self._came += 1
        self._came_beyond += count > self._world.seats + self._world.waiting_depth_max

    def note_began(self, router: int, tenant: str, wait: float) -> None:
        """Record a request that got a seat.

        Args:
            router: router of the request.
            tenant: tenant of the request.
            wait: seconds for which the request waited.
        """
        self._running += 1
        self._waits.append(wait)
        self._by_router.setdefault(router, []).append(wait)
        self._by_tenant.setdefault(tenant, []).append(wait)

    def note_left_seat(self) -> None:
        self._running -= 1

    def note_refused(self, tenant: str) -> None:
        self._refused[tenant] += 1

    def end(self, endpoints: Iterable[SimulatedEndpoint]) -> None:
        self._most = max(endpoint.most for endpoint in endpoints)

    def row(self, *, dies: bool = False) -> RoutersRow:
        world = self._world
        seat_seconds = self._waiting_seconds * world.endpoints * world.seats
        return RoutersRow(
            world=world,
            dies=dies,
            requests=len(self._waits),
            wait_p50=_percentile(self._waits, 50),
            wait_p99=_percentile(self._waits, 99),
            router_p99=max((_percentile(waits, 99) for waits in self._by_router.values()), default=0.0),
            little_p99=_percentile(self._by_tenant.get("little", []), 99),
            beyond=max(0, self._most - world.seats - world.waiting_depth_max),
            beyond_share=self._came_beyond / self._came if self._came else 0.0,
            idle_share=self._idle_seat_seconds / seat_seconds if seat_seconds else 0.0,
            refused=self._refused.total(),
            little_refused=self._refused["little"],
        )


def _percentile(values: list[float], percent: int) -> float:
    """Return a percentile of values, or 0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0.0


def rows_as_table(rows: Iterable[RoutersRow]) -> list[str]:
    """Format results as a Markdown table.

    Args:
        rows: the results.

    Returns:
        The lines of the table.
    """
    heads = (
        "routers, endpoints",
        "shares",
        "wait p50, p99",
        "worst router, small tenant p99",
        "beyond the limit",
        "seats idle while some wait",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        world = row.world
        shares = ("yes, one dies" if row.dies else "yes") if world.shares else "no"
        cells = (
            f"{world.routers}, {world.endpoints:,}",
            shares,
            f"{row.wait_p50:.2f}, {row.wait_p99:.2f} s",
            f"{row.router_p99:.2f}, {row.little_p99:.2f} s",
            f"{row.beyond}",
            f"{row.idle_share:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines
