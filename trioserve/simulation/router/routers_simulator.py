"""Runs several router cores with the same endpoints in virtual time.

The cores and the code that computes their shares are real. Everything else is simulated.

A router gets the requests of its own clients and the reports of endpoints. If the routers share limits, a router also
finds out which other routers it can see. No router is notified when another router is gone.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Mapping
from random import Random

from trioserve.contracts.endpoint import EndpointId, EndpointLoad, RoutedRequest
from trioserve.contracts.errors import Overloaded
from trioserve.router.core import RouterCore
from trioserve.router.peer_shares import PeerShares
from trioserve.router.policies import POLICIES
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket, TicketState
from trioserve.simulation.router.routers_books import (
    Back,
    Come,
    Die,
    Figures,
    Meet,
    Part,
    RoutersBooks,
    RoutersEvent,
    RoutersWorld,
    SimulatedEndpoint,
)
from trioserve.simulation.runs import EventSimulation, Trace

__all__ = ["RoutersSimulation"]

BEGAN_AT = 1000.0
RETRY_SECONDS = 0.1  # A client whose router has died sends its request to another router after this time.
END_SECONDS_MAX = 300.0
LOOK_SECONDS = 0.5  # seconds between two checks in which a router tries to reach the other routers
FAILED_LOOKS_MAX = 3  # number of failed checks in a row after which a router counts as dead
SIGN_OF_LIFE_SECONDS = 2.0  # seconds between two questions of a router to the same endpoint
PUSH_SECONDS_MIN = 0.1  # minimum seconds between two loads that an endpoint pushes
PUSH_SECONDS_MAX = 1.0
# seconds between two questions of a router without peers to an endpoint that pushes its load
ANCHOR_SECONDS = 30.0
# error of the time that a router assigns to a pushed load, as a fraction of the time since its last question
CLOCK_DRIFT = 0.001


class _Request:
    """One request of a client."""

    def __init__(self, come: Come, came_at: float) -> None:
        self.number = come.number
        self.tenant = come.tenant
        self.seconds = come.seconds
        self.came_at = came_at
        self.router: _Router | None = None
        self.ticket: Ticket | None = None
        self.endpoint: EndpointId | None = None
        self.turn = 0  # number of attempts. Events of an earlier attempt are ignored.


class _Router:
    """One simulated router.

    Attributes:
        life: how often the router has started.
        unseen: other routers that this router cannot see.
        failed_looks: number of consecutive failed checks of each other router.
        asked_at: time at which this router last asked each endpoint.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"router {number}"
        self.life = 0
        self.is_alive = False
        self.core: RouterCore
        self.shares: PeerShares
        self.noted_shares: dict[EndpointId, int] = {}
        self.unseen: set[int] = set()
        self.failed_looks: dict[int, int] = {}
        self.asked_at: dict[EndpointId, float] = {}
        self.by_ticket: dict[int, _Request] = {}
        self.waiting_count = 0
        self.sent_at: list[float] = []  # times at which this router sent requests to endpoints, in order
        self.ticks_at = math.inf


class RoutersSimulation(EventSimulation[RoutersWorld]):
    """One run of several routers.

    Args:
        world: the settings.
        trace: called with a line for each effect.
        core_of: creates the core of a router. A benchmark passes a function whose cores measure their own time.

    Attributes:
        figures: results.
        books: checks of leases and shares.

    Raises:
        AssertionError: a contract is broken.
    """

    def __init__(
        self,
        world: RoutersWorld,
        *,
        trace: Trace | None = None,
        core_of: Callable[..., RouterCore] = RouterCore,
    ) -> None:
        super().__init__(world, trace)
        self._core_of = core_of
        self.figures = Figures(world)
        self.books = RoutersBooks(world, BEGAN_AT)
        self.now = BEGAN_AT
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_count = 0
        self._numbers: set[int] = set()
        self._requests: dict[int, _Request] = {}  # requests that have not ended, by number
        self._undecided: set[int] = set()  # numbers of requests that are at no endpoint and are not being sent to one
        self._is_ending = False
        self._first_at: float | None = None  # time at which the first requests arrived
        self._endpoints = {
            EndpointId(f"e{index}"): SimulatedEndpoint(EndpointId(f"e{index}"), world.seats)
            for index in range(world.endpoints)
        }
        self._routers = [_Router(number) for number in range(world.routers)]
        for router in self._routers:
            self._at(0.0, lambda router=router: self._begin(router))  # type: ignore[misc]
        for endpoint in self._endpoints.values():
            # The first reports have random times, so that not all endpoints report at the same time.
            self._report_at(endpoint, self.now + self._rng(endpoint.id).random() * self._report_seconds_max)
        if world.shares:
            self._at(1.0, self._check_shares)

    def apply(self, event: RoutersEvent) -> None:
        self._pass_to(max(self.now, BEGAN_AT + event.at))
        match event:
            case Come():
                self._come(event)
            case Die():
                self._die(self._routers[event.router % len(self._routers)])
            case Back():
                self._come_back(self._routers[event.router % len(self._routers)])
            case Part() | Meet():
                self._part(event)

    def run_to_end(self) -> None:
        """Run until every request has ended and all routers must know the final state."""
        self._pass_to(self.now)
        if not any(router.is_alive for router in self._routers):
            self._come_back(self._routers[0])
        self._is_ending = True
        end = self.now + END_SECONDS_MAX
        while self._events:
            is_over = not self._requests  # Without requests, the remaining events are only periodic checks.
            assert is_over or self._events[0][0] < end, f"{len(self._requests)} requests did not end"
            self._next()
        self.books.check_end(len(self._numbers))
        for endpoint in self._endpoints.values():
            assert not endpoint.count, f"{endpoint.count} requests are left at {endpoint.id}"
        for router in self._routers:
            if router.is_alive:
                stats = router.core.stats()
                assert not stats.waiting, f"{stats.waiting} requests are left in the queue of {router.name}"
                assert not any(stats.leases.values()), f"{router.name} has leases without a request"
                assert not any(state.in_flight for state in router.core.endpoints.values()), (
                    f"{router.name} still counts requests in flight"
                )
        self.figures.end(self._endpoints.values())

    # --- Clients ---

    def _come(self, come: Come) -> None:
        if come.number in self._numbers:
            return
        self._numbers.add(come.number)
        self._count("requests")
        request = self._requests[come.number] = _Request(come, self.now)
        self._undecided.add(request.number)
        if come.patience is not None:
            self._at(come.patience, lambda: self._leave(request))
        router = self._routers[come.router % len(self._routers)]
        self._first_at = self.now if self._first_at is None else self._first_at
        is_first = self.now == self._first_at and not router.by_ticket and router.is_alive
        self._ask(request, router)
        if is_first and request.router is router:
            assert request.endpoint is not None, f"{router.name} has idle endpoints, but a request waits"
            self.books.note_first_choice(router.number, request.endpoint)

    def _ask(self, request: _Request, router: _Router) -> None:
        """Send a request to a router, or to another router if that router has stopped. If none runs, retry later."""
        if request.number not in self._requests:
            return  # The client of the request has disconnected.
        alive = [other for other in self._routers if other.is_alive]
        if not alive:
            self._at(RETRY_SECONDS, lambda: self._ask(request, router))
            return
        self._enter(request, router if router.is_alive else alive[request.number % len(alive)])

    def _enter(self, request: _Request, router: _Router) -> None:
        request.router = router
        request.turn += 1
        try:
            ticket = router.core.enter(RoutedRequest(model="m", tenant=request.tenant), self.now)
        except Overloaded:
            self._note_refused(request)
            return
        request.ticket = ticket
        router.by_ticket[ticket.index] = request
        if ticket.state is TicketState.LEASED:
            self._send(router, request)
        else:
            self._note_waiting(router, 1)
        self._retime(router)

    def _leave(self, request: _Request) -> None:
        """Let the client of a request disconnect."""
        if self._requests.get(request.number) is not request:
            return
        self._count("clients that left")
        router, ticket = request.router, request.ticket
        request.turn += 1
        if router is None or ticket is None:
            self._end(request)
            return
        if ticket.state is TicketState.WAITING:
            self._note_waiting(router, -1)
        else:
            self._take_from_endpoint(router, request)
        self._end(request)
        del router.by_ticket[ticket.index]
        router.core.leave(ticket, self.now)
        if request.endpoint is not None:
            self._check_waits(router, request.endpoint)
        self._retime(router)

    def _note_waiting(self, router: _Router, count: int) -> None:
        router.waiting_count += count
        self.figures.note_waiting(count)

    def _note_refused(self, request: _Request) -> None:
        self._count("refused")
        self.figures.note_refused(request.tenant)
        self._end(request)

    def _end(self, request: _Request) -> None:
        self.books.end(request.number)
        del self._requests[request.number]
        self._undecided.discard(request.number)

    # --- Routers ---

    def _begin(self, router: _Router) -> None:
        """Start a router. At first, it knows only its own name and the names of the other routers."""
        world = self.world
        router.life += 1
        router.is_alive = True
        settings = RouterSettings(
            leases_max=world.leases_max,
            waiting_depth_max=world.waiting_depth_max,
            slow_start_seconds=0,
            queue_requests_max=world.queue_requests_max,
            queue_seconds_max=END_SECONDS_MAX,
        )
        router.core = self._core_of(
            settings,
            POLICIES[world.policy],
            on_change=lambda ticket: self._changed(router, ticket),
            rng=self._rng(f"{router.name}, life {router.life}"),
        )
        router.by_ticket, router.sent_at, router.ticks_at = {}, [], math.inf
        router.noted_shares, router.failed_looks, router.asked_at = {}, {}, {}
        for id in self._endpoints:
            router.core.add_endpoint(id, ["m"], self.now)
            router.core.note_health(id, True, self.now)
        if world.shares:
            router.shares = PeerShares(router.name)
            router.shares.set_peers(other.name for other in self._routers)
            self._divide_shares(router)
            self._at(LOOK_SECONDS, lambda core=router.core: self._look(router, core))  # type: ignore[misc]

    def _changed(self, router: _Router, ticket: Ticket) -> None:
        request = router.by_ticket[ticket.index]
        self._note_waiting(router, -1)
        if ticket.state is TicketState.LEASED:
            self._send(router, request)
        else:
            del router.by_ticket[ticket.index]
            self._note_refused(request)

    def _send(self, router: _Router, request: _Request) -> None:
        assert request.ticket is not None
        assert request.ticket.endpoint is not None
        endpoint = request.endpoint = request.ticket.endpoint
        self._undecided.discard(request.number)
        self._count("grants")
        self._log_line(f"  {request.number}: {router.name} -> {endpoint}")
        self.books.grant(router.number, endpoint, request.number, self.now)
        router.core.sent(request.ticket)
        router.sent_at.append(self.now)
        turn = request.turn
        self._at(self.world.wire_seconds, lambda: self._arrive(request, turn))

    def _served(self, request: _Request, turn: int) -> None:
        """Handle the end of a response at its router."""
        router, ticket = request.router, request.ticket
        if request.turn != turn or router is None or ticket is None:
            return
        assert request.endpoint is not None
        self.books.return_lease(router.number, request.endpoint, request.number)
        del router.by_ticket[ticket.index]
        self._end(request)
        router.core.first_token(ticket, self.now)
        router.core.leave(ticket, self.now)
        self._check_waits(router, request.endpoint)
        self._retime(router)

    def _retime(self, router: _Router) -> None:
        moment = router.core.next_tick(self.now)
        if moment < router.ticks_at:
            router.ticks_at = moment
            core = router.core
            self._at(max(0.0, moment - self.now), lambda: self._tick(router, core))

    def _tick(self, router: _Router, core: RouterCore) -> None:
        if router.core is core and router.is_alive:
            router.ticks_at = math.inf
            core.tick(self.now)
            if self._requests:
                self._retime(router)

    # --- Faults of routers ---

    def _die(self, router: _Router) -> None:
        """Stop a router. Its requests at endpoints end, and its clients send their requests to other routers."""
        if not router.is_alive:
            return
        self._count("routers that died")
        router.is_alive = False
        for request in router.by_ticket.values():
            assert request.ticket is not None
            if request.ticket.state is TicketState.WAITING:
                self._note_waiting(router, -1)
            else:
                self._take_from_endpoint(router, request)
            self._undecided.add(request.number)
            request.turn += 1
            request.router = request.ticket = request.endpoint = None
            self._at(RETRY_SECONDS, lambda request=request: self._ask(request, router))  # type: ignore[misc]
        router.by_ticket = {}
        self.books.note_gone(router.number, self.now)

    def _come_back(self, router: _Router) -> None:
        if not router.is_alive:
            self._count("routers that came back")
            self.books.note_begins(router.number, self.now)
            self._begin(router)

    def _part(self, event: Part | Meet) -> None:
        first, second = (self._routers[number % len(self._routers)] for number in (event.router, event.peer))
        if first is second:
            return
        self._count("routers that lost sight of each other" if isinstance(event, Part) else "routers that met")
        for one, other in ((first, second), (second, first)):
            if isinstance(event, Part):
                one.unseen.add(other.number)
            else:
                one.unseen.discard(other.number)
        self.books.note_sight(self.now)

    def _look(self, router: _Router, core: RouterCore) -> None:
        """Let a router check which other routers it can see, as a router does periodically."""
        if router.core is not core or not router.is_alive:
            return
        for other in self._routers:
            if other is not router:
                is_seen = other.is_alive and other.number not in router.unseen
                failed_count = router.failed_looks[other.number] = (
                    0 if is_seen else router.failed_looks.get(other.number, 0) + 1
                )
                if not 0 < failed_count < FAILED_LOOKS_MAX:
                    router.shares.note_alive(other.name, is_seen)
        self._divide_shares(router)
        if self._needs_reports:
            self._at(LOOK_SECONDS, lambda: self._look(router, core))

    def _divide_shares(self, router: _Router) -> None:
        for id in self._endpoints:
            self._divide_shares_at(router, id)

    def _divide_shares_at(self, router: _Router, id: EndpointId) -> None:
        share = router.shares.share(id, self.world.leases_max, self.now)
        if share != router.noted_shares.get(id):
            router.noted_shares[id] = share
            self._log_line(f"  {router.name} may give {share} at {id}")
            self.books.set_share(router.number, id, share, self.now)
            router.core.set_lease_share(id, share, self.now)
            self._check_waits(router, id)

    def _check_waits(self, router: _Router, id: EndpointId) -> None:
        if router.waiting_count:
            self.books.check_waits(router.number, id, self.now)

    def _check_shares(self) -> None:
        for id in self._endpoints:
            self.books.check_shares(id, self.now)
        if self._needs_reports:
            self._at(1.0, self._check_shares)

    # --- Endpoints ---

    def _arrive(self, request: _Request, turn: int) -> None:
        if request.turn != turn:
            return
        assert request.endpoint is not None
        endpoint = self._endpoints[request.endpoint]
        runs = endpoint.come(request.number)
        self.figures.note_came(endpoint.count)
        if runs:
            self._run(request)
        self._note_changed(endpoint)

    def _run(self, request: _Request) -> None:
        assert request.router is not None
        self.figures.note_began(request.router.number, request.tenant, self.now - request.came_at)
        turn = request.turn
        self._at(request.seconds, lambda: self._finish(request, turn))

    def _finish(self, request: _Request, turn: int) -> None:
        if request.turn != turn:
            return
        assert request.endpoint is not None
        self._leave_endpoint(self._endpoints[request.endpoint], request.number)
        self._at(self.world.wire_seconds, lambda: self._served(request, turn))

    def _take_from_endpoint(self, router: _Router, request: _Request) -> None:
        """Remove a request from its endpoint before it is served."""
        assert request.endpoint is not None
        self.books.return_lease(router.number, request.endpoint, request.number)
        self._leave_endpoint(self._endpoints[request.endpoint], request.number)

    def _leave_endpoint(self, endpoint: SimulatedEndpoint, number: int) -> None:
        if number in endpoint.running:
            self.figures.note_left_seat()
        following = endpoint.go(number)
        if following is not None:
            self._run(self._requests[following])
        self._note_changed(endpoint)

    @property
    def _report_seconds_max(self) -> float:
        return self.world.report_seconds if self.world.reports == "asked" else PUSH_SECONDS_MAX

    def _note_changed(self, endpoint: SimulatedEndpoint) -> None:
        """Let an endpoint that pushes its load report a changed number of requests soon."""
        if self.world.reports == "pushed":
            self._report_at(endpoint, max(self.now, endpoint.reported_at + PUSH_SECONDS_MIN))

    def _report_at(self, endpoint: SimulatedEndpoint, moment: float) -> None:
        """Schedule a load report of an endpoint, unless it reports earlier anyway."""
        if moment < endpoint.reports_at:
            endpoint.reports_at = moment
            self._at(moment - self.now, lambda: self._report_in_time(endpoint, moment))

    def _report_in_time(self, endpoint: SimulatedEndpoint, moment: float) -> None:
        if endpoint.reports_at == moment:
            self._report(endpoint)

    def _report(self, endpoint: SimulatedEndpoint) -> None:
        """Report the load of an endpoint to every router.

        The report does not include requests that are still on the network. From time to time, a router asks for the
        report, and then also learns from which routers the endpoint has heard.
        """
        asking = [router for router in self._routers if self.world.shares and self._is_asking(router, endpoint.id)]
        for router in asking:
            router.asked_at[endpoint.id] = endpoint.heard_at[router.name] = self.now
        heard = endpoint.routers_heard(self.now) if asking else {}
        heard_by_router = {router.number: heard for router in asking}
        load, reported_at = endpoint.load(), self.now
        endpoint.reported_at, endpoint.reports_at = self.now, math.inf
        self._at(self.world.wire_seconds, lambda: self._noted(endpoint.id, load, reported_at, heard_by_router))
        if self._needs_reports:
            self._report_at(endpoint, self.now + self._report_seconds_max)

    def _is_asking(self, router: _Router, id: EndpointId) -> bool:
        return router.is_alive and self.now >= router.asked_at.get(id, -math.inf) + SIGN_OF_LIFE_SECONDS

    def _noted(
        self, id: EndpointId, load: EndpointLoad, reported_at: float, heard: Mapping[int, Mapping[str, float]]
    ) -> None:
        sent_before = reported_at - self.world.wire_seconds - self._doubt_seconds
        for router in self._routers:
            if not router.is_alive:
                continue
            if self.world.shares:
                router.shares.note_report(id, heard.get(router.number, {}), self.now)
                self._divide_shares_at(router, id)
            self.books.note_report(
                router.number, id, load.running + load.waiting, sent_before=sent_before, now=self.now
            )
            known = bisect.bisect_right(router.sent_at, sent_before)
            router.core.note_load(id, load, self.now, sent_when_asked=known)
            self._check_waits(router, id)
            self._retime(router)

    @property
    def _doubt_seconds(self) -> float:
        """Maximum seconds by which the time that a router assigns to a pushed load is too early."""
        if self.world.reports == "asked":
            return 0.0
        return CLOCK_DRIFT * (SIGN_OF_LIFE_SECONDS if self.world.shares else ANCHOR_SECONDS)

    # --- Time ---

    @property
    def _needs_reports(self) -> bool:
        """True while endpoints and routers need more reports.

        Running requests end without reports. Once every request has its endpoint, a report has no effect.
        """
        return not self._is_ending or bool(self._undecided) or self._is_unsettled

    @property
    def _is_unsettled(self) -> bool:
        return self.world.shares and self.now < self.books.settled_at + 1.0

    def _pass_to(self, moment: float) -> None:
        while self._events and self._events[0][0] <= moment:
            self._next()
        self.figures.pass_time(moment - self.now)
        self.now = moment

    def _next(self) -> None:
        moment, _, happens = heapq.heappop(self._events)
        self.figures.pass_time(moment - self.now)
        self.now = moment
        happens()

    def _at(self, seconds: float, happens: Callable[[], None]) -> None:
        self._event_count += 1
        heapq.heappush(self._events, (self.now + seconds, self._event_count, happens))

    def _rng(self, name: str) -> Random:
        """Return the source of randomness of one router or endpoint. It does not depend on the number of others."""
        return Random(f"{self.world.seed} {name}")

    def _log_line(self, line: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.now - BEGAN_AT:.3f}{line}")
